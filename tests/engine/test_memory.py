"""Memory options: recomputed activations and optimizer state in main memory change no result."""

import pytest
import torch

from tests.engine.test_train import engine, everything, regress, same, update, weighted
from tests.models.small_lms import gradients, worst
from verl.core.errors import ConfigError
from verl.engine import memory
from verl.engine.memory import HostAdamW
from verl.engine.optimizer import MasterAdamW, OptimConfig


def kept(e, batch):
    """Bytes that autograd holds from forward to backward, beside the parameters."""
    own, total = {p.data_ptr() for p in e.lm.module.parameters()}, 0

    def hold(tensor):
        nonlocal total
        total += 0 if tensor.data_ptr() in own else tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        e.forward_backward(batch, regress, entropy_grad=True)
    return total


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral", "lfm2"])
def test_recomputed_layers_give_the_same_gradient_for_less(kind):
    batch, plain = weighted(), engine(kind, torch.float64, budget=20, values=True)
    lean = engine(kind, torch.float64, budget=20, values=True, memory=("checkpoint",))
    assert len(lean.recomputed) == 2 and kept(lean, batch) < 0.5 * kept(plain, batch)
    assert worst(gradients(lean.lm.module), gradients(plain.lm.module)) == 0
    assert worst(gradients(lean.lm.value_head), gradients(plain.lm.value_head)) == 0


def test_layers_are_recomputed_while_training_only_and_keep_what_they_call():
    calls = []
    e = engine(memory=("checkpoint",))
    for layer in e.recomputed:  # as compile_for_training leaves them
        layer._compiled_call_impl = lambda *args, own=layer._call_impl, **kwargs: calls.append(1) or own(*args, **kwargs)
    mine = [layer._compiled_call_impl for layer in e.recomputed]
    e.logprobs(weighted())
    assert len(calls) == 2
    e.forward_backward(weighted(), regress)
    assert len(calls) == 6  # forward, and again for backward
    assert [layer._compiled_call_impl for layer in e.recomputed] == mine


def test_compiled_layers_are_recomputed():
    """As compile_for_training does it, with a backend that needs no compiler."""
    small = dict(dtype=torch.float64, settings=dict(num_hidden_layers=1))
    plain, lean = engine(**small), engine(**small, memory=("checkpoint",))
    for layer in lean.recomputed:
        layer._compiled_call_impl = torch.compile(layer._call_impl, dynamic=True, backend="aot_eager")
    for e in (plain, lean):
        for seed in (1, 2):
            e.forward_backward(weighted(seed), regress)
    assert worst(gradients(lean.lm.module), gradients(plain.lm.module)) < 1e-12


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket", [1 << 24, 1024])  # all at once; tensors over several buckets and several in one
def test_moments_in_main_memory_give_the_same_bits(monkeypatch, dtype, bucket, device):
    monkeypatch.setattr(memory, "BUCKET", bucket)
    settings = dict(device=device, dtype=dtype, values=True, settings=dict(tie_word_embeddings=True), weight_decay=0.1,
                    max_grad_norm=0.5, schedule="linear", warmup_steps=2)
    plain, lean, other, third = (engine(**settings, memory=m) for m in ((), ("offload",), ("offload",), ()))
    for seed in range(3):
        assert update(lean, weighted(seed)) == update(plain, weighted(seed))
    assert same(everything(lean), everything(plain)) and lean.state()[1] == plain.state()[1]
    tensors, numbers = plain.state()
    tensors = {n: t.clone() for n, t in tensors.items()}
    update(other, weighted(9))
    other.load_state(tensors, numbers)  # the one's state goes into the other
    assert same(everything(other), tensors)
    assert update(other, weighted(7)) == update(plain, weighted(7)) and same(everything(other), everything(plain))
    third.load_state(*other.state())
    assert same(everything(third), everything(other))


def test_a_tensor_without_gradient_is_left_alone():
    def run(make):
        torch.manual_seed(0)
        named = [(n, torch.nn.Parameter(torch.randn(3, 2).bfloat16())) for n in "ab"]
        optimizer = make(named, OptimConfig(lr=0.1, weight_decay=0.1))
        for used in ((0,), (0, 1), (1,)):
            sum(named[i][1].float().square().sum() for i in used).backward()
            optimizer.step(0.1, float(optimizer.grad_norm()))
            if used == (0,):
                assert "exp_avg.b" not in optimizer.state()
        return optimizer.state()

    assert same(run(HostAdamW), run(MasterAdamW))
    assert float(run(HostAdamW)["step.a"]) == 2


def test_weights_that_arrive_reach_the_masters():
    source, target = engine(), engine(dtype=torch.bfloat16, memory=("offload",))
    update(source, weighted())
    target.load_weights(source.weights())
    own = dict(source.lm.module.named_parameters())
    assert all(torch.equal(m, own[n]) for n, m in zip(target.optimizer.names, target.optimizer.masters))
    assert not update(target, weighted())[1].skipped


def test_unknown_words():
    with pytest.raises(ConfigError, match="memory 'checkpoints' is not known; allowed: checkpoint, offload"):
        engine(memory=("checkpoints",))
