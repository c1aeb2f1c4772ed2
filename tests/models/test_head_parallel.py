"""The output layer over several ranks: log-probs, entropies and gradients of the whole one."""

import pytest
import torch
import torch.distributed as dist

from tests.flow.worlds import run_world
from verl.models.head import HeadSpec, token_logprobs
from verl.models.head_parallel import parallel_logprobs


def inputs(rows, width=5, tokens=13):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64, requires_grad=True) for n in (tokens, 12))
    targets, grads = torch.randint(0, rows, (tokens,), generator=generator), torch.randn(2, tokens, generator=generator)
    return hidden, weight, targets, grads.double()


def on_ranks(rank, rows, chunk_bytes, with_entropy):
    hidden, weight, targets, (a, b) = inputs(rows)
    size = len(weight) // dist.get_world_size()
    own = weight.detach()[rank * size:(rank + 1) * size].clone().requires_grad_()
    logprobs, entropy = parallel_logprobs(hidden, own, targets, rows, 0.7, dist.group.WORLD, chunk_bytes)
    ((logprobs * a).sum() + ((entropy * b).sum() if with_entropy else 0)).backward()
    dist.all_reduce(hidden.grad)
    return logprobs.detach(), entropy.detach(), hidden.grad, own.grad


@pytest.mark.parametrize("ranks, rows, chunk_bytes, with_entropy",
                         [(3, 10, 4 * 4 * 5, True), (3, 4, None, True), (2, 12, None, False)])
def test_ranks_give_what_the_whole_layer_gives(ranks, rows, chunk_bytes, with_entropy):
    """With 4 rows of 12 standing for tokens, two ranks of three hold none."""
    results = run_world(ranks, on_ranks, rows, chunk_bytes, with_entropy, limit_s=240)
    assert not [error for _, error in results if error], results
    hidden, weight, targets, (a, b) = inputs(rows)
    logprobs, entropy = token_logprobs(hidden, weight, None, targets, HeadSpec(rows), 0.7)
    ((logprobs * a).sum() + ((entropy * b).sum() if with_entropy else 0)).backward()
    for (own_logprobs, own_entropy, grad_hidden, _), _ in results:
        for got, want in ((own_logprobs, logprobs), (own_entropy, entropy), (grad_hidden, hidden.grad)):
            assert (got - want).abs().max() < 1e-12
    assert (torch.cat([r[3] for r, _ in results]) - weight.grad).abs().max() < 1e-12
