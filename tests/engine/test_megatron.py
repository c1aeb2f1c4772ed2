"""Megatron-Core's grids against one process: the same losses, gradients and weights, in real processes over gloo."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="the package megatron-core is not installed")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.engine.megatron_cpu import on_cpu  # noqa: E402
from tests.engine.tiny import IDS, model_dir  # noqa: E402
from tests.flow.layouts import block, empty_arrays, same_bits  # noqa: E402
from tests.flow.worlds import CONTEXT, run_world  # noqa: E402
from tests.models.small_lms import ragged  # noqa: E402
from verl.algorithms.base import LossOutputs  # noqa: E402
from verl.algorithms.grpo import GRPO  # noqa: E402
from verl.algorithms.reduce import coefficients  # noqa: E402
from verl.core.errors import ConfigError, ModelError  # noqa: E402
from verl.core.weights import Weights  # noqa: E402
from verl.engine import MegatronEngine  # noqa: E402
from verl.engine.megatron import outline  # noqa: E402
from verl.engine.optimizer import OptimConfig  # noqa: E402
from verl.engine.train import TrainEngine  # noqa: E402
from verl.flow.layout import Split, merge, tensor_parallel, whole  # noqa: E402
from verl.flow.reshard import plan  # noqa: E402
from verl.flow.transfer import Target, transfer  # noqa: E402
from verl.flow.transport import TorchTransport  # noqa: E402
from verl.models import load_lm  # noqa: E402

CONTEXT.set_forkserver_preload(["tests.engine.test_megatron"])
SHAPE = dict(num_attention_heads=4, num_key_value_heads=2)
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01, max_grad_norm=0.5)
STEPS = 3
LOSS, MOVED = 2e-5, 1e-2  # float32 on both sides, sums in another order: nats; distance, relative to the way a tensor went


def near(got, want, start):
    """Updates went the same way. AdamW's first steps have size lr even where a gradient is rounding: single entries may differ."""
    assert got.keys() == want.keys() == start.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).norm() < MOVED * (tensor - start[name]).norm(), name


def grpo_batch(seed):
    """Three groups of four ragged answers, scored at random, with GRPO's advantages and its coefficients."""
    batch = ragged(seed, vocab=IDS, prompts=(6, 3, 11), answers=((5, 1, 8, 2), (4, 9, 3, 3), (7, 1, 6, 2)))
    batch.rewards_S = np.random.default_rng(seed).normal(size=len(batch))
    batch.advantages_T = GRPO().credit(batch).advantages_T
    batch.weights_T, batch.weights_S = coefficients(GRPO().reduction, batch)
    return batch


def train(engine, steps):
    """(metrics, StepInfo) of these updates."""
    return [(engine.forward_backward(grpo_batch(seed), GRPO().loss), engine.step()) for seed in steps]


def alone(path):
    return TrainEngine(load_lm(path), 0.8, OPTIM, 10, 10_000)


def on_grid(rank, path, sizes, memory, loaded):
    """Three updates, scores before and after, an export, and the third update again from the state after the second."""
    on_cpu()
    def make():
        return MegatronEngine(load_lm(path) if loaded else outline(path), 0.8, OPTIM, 10, 24, memory=memory, sizes=sizes)

    engine = make()
    first = engine.logprobs(grpo_batch(0))
    done = train(engine, range(STEPS - 1))
    kept = [engine.state()]
    dist.broadcast_object_list(kept, 0)
    done += train(engine, [STEPS - 1])
    engine.export(f"{path}-out")
    resumed = make()
    resumed.load_state(*kept[0])
    again = train(resumed, [STEPS - 1])
    assert again == done[-1:] and resumed.version == engine.version == STEPS
    for (name, a), (_, b) in zip(engine.weights(), resumed.weights()):
        assert same_bits(a, b), name
    newer = Weights(9, lambda: [(n, t + 1) for n, t in tensors.items()])
    tensors = dict(engine.weights())
    assert engine.load_weights(newer) == newer.receipt() == engine.weights().receipt() and engine.version == 9
    return first, resumed.logprobs(grpo_batch(0)), done, kept[0] if rank == 0 else None, resumed.exported()


@pytest.mark.parametrize("kind, ranks, sizes, settings, memory, loaded", [
    ("llama", 2, {"tensor": 2}, dict(vocab_size=265), (), False),
    ("qwen2", 2, {"pipeline": 2}, dict(tie_word_embeddings=True), (), False),
    ("qwen3", 4, {"tensor": 2}, dict(head_dim=8, tie_word_embeddings=True), ("checkpoint", "offload"), True),
    ("mistral", 3, {"pipeline": 3}, dict(sliding_window=6, num_hidden_layers=3), (), True)])
def test_a_grid_trains_like_one_process(tmp_path, kind, ranks, sizes, settings, memory, loaded):
    path = str(model_dir(tmp_path / "model", kind, **{**SHAPE, **settings}))
    results = run_world(ranks, on_grid, path, sizes, memory, loaded, limit_s=280)
    assert not [error for _, error in results if error], results
    first, last, done, (tensors, numbers), exported = results[0][0]
    assert all(r[2] == done and np.array_equal(r[0], first) and np.array_equal(r[1], last) for r, _ in results)

    want, start = alone(path), alone(path).exported()
    mask_T = grpo_batch(0).mask_T
    assert np.abs(first - want.logprobs(grpo_batch(0)))[mask_T].max() < LOSS
    wanted = train(want, range(STEPS - 1))
    state, own_numbers = want.state()
    assert numbers == own_numbers and tensors.keys() == state.keys()
    assert all((tensors[n] - t).norm() <= MOVED * t.norm() for n, t in state.items())
    wanted += train(want, [STEPS - 1])
    for (metrics, info), (own_metrics, own_info) in zip(wanted, done):
        assert own_metrics == pytest.approx(metrics, rel=1e-4, abs=LOSS)
        assert own_info.grad_norm == pytest.approx(info.grad_norm, rel=1e-4) and own_info.lr == info.lr and not own_info.skipped
    assert np.abs(last - want.logprobs(grpo_batch(0)))[mask_T].max() < 10 * LOSS
    near(exported, want.exported(), start)

    other = alone(path)  # the state of a grid goes on alone
    other.load_state(tensors, numbers)
    (metrics, info), = train(other, [STEPS - 1])
    assert info.grad_norm == pytest.approx(wanted[-1][1].grad_norm, rel=1e-4)

    module = AutoModelForCausalLM.from_pretrained(f"{path}-out", dtype=torch.float32)
    saved = dict(module.named_parameters())
    assert saved.keys() == exported.keys() and all(same_bits(saved[n].detach(), t) for n, t in exported.items())
    ids = torch.arange(20)[None]
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    untrained = stock(ids).logits
    stock.load_state_dict(exported, strict=False)
    assert torch.equal(module(ids).logits, stock(ids).logits) and not torch.equal(module(ids).logits, untrained)
    own = load_lm(f"{path}-out")
    assert own.stop_ids == want.lm.stop_ids and own.head == want.lm.head


def odd_ends(rank, path):
    """Two replicas of two stages in bfloat16: a batch of one row, batches without signal and without a gradient, a resume."""
    on_cpu()
    engine, batch = MegatronEngine(outline(path, torch.bfloat16), 0.8, OPTIM, 10, 24, sizes={"pipeline": 2}), grpo_batch(0)
    one = batch.select([1])
    one.weights_T[:] = 1
    seen = [engine.forward_backward(one, GRPO().loss)["loss"], engine.step()]
    before, version = dict(engine.weights()), engine.version
    batch.weights_T[:] = 0
    engine.forward_backward(batch, GRPO().loss)
    seen.append(engine.step().skipped)
    engine.forward_backward(grpo_batch(0), lambda x: LossOutputs(torch.ones_like(x.logprobs_T), True))
    seen.append(engine.step().skipped)
    engine.forward_backward(grpo_batch(0), lambda x: LossOutputs(x.logprobs_T * float("nan"), True))
    seen.append(engine.step().skipped)
    assert engine.version == version == 1 and all(same_bits(t, before[n]) for n, t in engine.weights())
    kept = [engine.state()]
    dist.broadcast_object_list(kept, 0)
    resumed = MegatronEngine(outline(path, torch.bfloat16), 0.8, OPTIM, 10, 24, sizes={"pipeline": 2})
    resumed.load_state(*kept[0])
    tensors, numbers = resumed.state()
    assert numbers == kept[0][1] and (rank or all(same_bits(t, kept[0][0][n]) for n, t in tensors.items()))
    assert train(resumed, [1]) == train(engine, [1])
    return seen, {n: t.dtype for n, t in kept[0][0].items()}


def test_odd_ends_in_bfloat16(tmp_path):
    path = str(model_dir(tmp_path / "model", "qwen2", **SHAPE))
    results = run_world(4, odd_ends, path, limit_s=280)
    assert not [error for _, error in results if error], results
    (loss, info, *skipped), dtypes = results[0][0]
    assert all(r == results[0][0] for r, _ in results) and skipped == ["no signal", "no signal", "non-finite"]
    want = TrainEngine(load_lm(path, "bfloat16"), 0.8, OPTIM, 10, 10_000)
    one = grpo_batch(0).select([1])
    one.weights_T[:] = 1
    assert loss == pytest.approx(want.forward_backward(one, GRPO().loss)["loss"], rel=0.02)
    assert info.grad_norm == pytest.approx(want.step().grad_norm, rel=0.02)
    assert dtypes == {n: t.dtype for n, t in want.state()[0].items()}


# -- weights to samplers -------------------------------------------------------------------------------------------------

SAMPLER = [*(Split(f"*.{n}_proj.*", 0, units, (f"{n}_proj", "qkv_proj")) for n, units in (("q", 4), ("k", 2), ("v", 2))),
           *(Split(f"*.{n}_proj.*", 0, None, (f"{n}_proj", "gate_up_proj")) for n in ("gate", "up")),
           Split("*.o_proj.*", 1, 4), Split("*.down_proj.*", 1), Split("*embed_tokens*", 0)]


def to_samplers(rank, path):
    """A state made alone goes on, on a grid of 2 x 2; its weights by plan to a tensor-parallel pair, and whole to rank 3."""
    on_cpu()
    engine, other = MegatronEngine(outline(path), 0.8, OPTIM, 10, 24, sizes={"tensor": 2, "pipeline": 2}), alone(path)
    train(other, [0])
    engine.load_state(*other.state())
    tensors, numbers = engine.state()
    assert numbers == other.state()[1] and (rank or all(same_bits(tensors[n], t) for n, t in other.state()[0].items()))
    assert dict(engine.weights()).keys() == other.exported().keys()
    assert all(same_bits(t, other.exported()[n]) for n, t in engine.weights())
    source, full = engine.layout(), dict(engine.weights())
    destination = merge(tensor_parallel(source.table, SAMPLER, [1, 2]), whole(source.table, [3]))
    made = plan(source, destination)
    target = Target(empty_arrays(destination, rank)) if rank else None
    report = transfer(made, TorchTransport("policy"), version=1, arrays=engine.arrays(), target=target)
    for p in destination.pieces.get(rank, ()):
        assert same_bits(p.view(target.arrays, p.box), block(full[p.tensor], p.box)), p
    whole_receipt = engine.weights().receipt()
    assert report.receipts.keys() == {1, 2, 3} and report.receipts[3] == whole_receipt
    assert not rank or target.require() == engine.version == 1
    return report.sent_bytes, made.wire_bytes, sum(made.lacking.values()), sorted(full)


def test_a_grid_sends_its_weights_to_samplers_by_plan(tmp_path):
    path = str(model_dir(tmp_path / "model", "qwen2", **SHAPE, tie_word_embeddings=True, num_hidden_layers=4))
    results = run_world(4, to_samplers, path, limit_s=280)
    assert not [error for _, error in results if error], results
    assert sum(r[0] for r, _ in results) == results[0][0][1] == results[0][0][2] > 0
    assert results[0][0][3] == sorted(alone(path).exported())


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    llama = outline(model_dir(tmp_path / "llama"))
    for sizes, words in (({"tensor": 2}, "num_key_value_heads of 1 is no multiple of 2"), ({"tensor": 0}, "1 or more"),
                         ({"pipeline": 3}, "num_hidden_layers of 2"), ({"tensor": 1}, "there is none"),
                         ({"tensors": 2}, "'tensors' is not known; did you mean 'tensor'")):
        with pytest.raises(ConfigError, match=words):
            MegatronEngine(llama, sizes=sizes)
    with pytest.raises(ConfigError, match="a critic is not trained"):
        MegatronEngine(llama, train_values=True)
    with pytest.raises(ModelError, match="gemma .* supported: llama, mistral, qwen2, qwen3"):
        MegatronEngine(outline(model_dir(tmp_path / "gemma", "gemma", head_dim=32)))
    yarn = model_dir(tmp_path / "yarn", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ModelError, match="rope_type 'yarn'"):
        MegatronEngine(outline(yarn))


def biased(rank, path):
    on_cpu()
    with pytest.raises(ModelError) as caught:
        MegatronEngine(outline(path))
    return str(caught.value)


def test_a_llama_with_other_biases_is_refused(tmp_path):
    (message, error), = run_world(1, biased, str(model_dir(tmp_path / "model", attention_bias=True)), limit_s=280)
    assert error is None and "self_attn.linear_qkv.bias is in the model and not in its counterpart" in message


def without_gpu(rank, path):
    with pytest.raises(ConfigError) as caught:
        MegatronEngine(outline(path))
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_trains_there(tmp_path):
    (message, error), = run_world(1, without_gpu, str(model_dir(tmp_path / "model")), limit_s=280)
    assert error is None and "this rank has none" in message and "FSDP trains on CPUs" in message
