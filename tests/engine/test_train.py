"""The training engine: exact under any cut, careful with what it cannot use, exact on resume."""

import gc
import resource
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from tests.models.small_lms import gradients, ragged, small, stock, worst
from verl.algorithms.base import LossOutputs
from verl.algorithms.reduce import coefficients
from verl.algorithms.sft import SFT
from verl.core.errors import TrainingError, WeightsError
from verl.core.weights import Weights
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine, host_memory, plan_token_budget
from verl.models import LoraConfig, bind


def weighted(seed=0, **sizes):
    batch = ragged(seed, **sizes)
    batch.weights_T, batch.weights_S = coefficients("sequence_mean", batch)
    return batch


def engine(kind="llama", dtype=torch.float32, budget=10_000, lora=None, values=False, settings=None, memory=(),
           device="cpu", **optim):
    lm = bind(small(kind, dtype, **(settings or {})).to(device), None, lora=lora)
    if values:
        lm.add_value_head()
    return TrainEngine(lm, 0.9, OptimConfig(**{"lr": 0.01, **optim}), 10, budget, values, memory)


def regress(x):
    """Log-probs, entropies and values pulled to constants: everything the forward gives carries gradient."""
    values_T = (x.logprobs_T + 1).square() + 0.1 * x.entropy_T
    values_T = values_T if x.values_T is None else values_T + (x.values_T - 2).square()
    values_T = torch.where(x.mask_T, values_T, 0.0)
    every, short = x.mask_T, x.mask_T & (x.logprobs_T < -6)
    lengths_S = torch.bincount(x.sequence_T, minlength=x.sequences)
    return LossOutputs(values_T, True, {
        "mean": (x.logprobs_T.detach(), every), "some": (x.logprobs_T.detach(), short),
        "low/min": (x.logprobs_T.detach(), every), "high/max": (x.logprobs_T.detach(), short),
        "length/max": (lengths_S, lengths_S > 0), "never": (x.logprobs_T.detach(), every & False),
        "never/min": (x.logprobs_T.detach(), every & False)})


def update(e, batch, loss=regress):
    metrics = e.forward_backward(batch, loss, entropy_grad=True)
    return metrics, e.step()


def everything(e):
    return {n: t.clone() for n, t in e.state()[0].items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# -- one batch, any cut --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,dtype,tolerance", [("gpt2", torch.float64, 1e-12), ("llama", torch.float32, 1e-5)])
def test_any_cut_gives_the_gradient_and_the_metrics_of_one_piece(kind, dtype, tolerance):
    batch, whole = weighted(), engine(kind, dtype, values=True)
    want = whole.forward_backward(batch, regress, entropy_grad=True)
    for budget in (1, 12, 20):
        cut = engine(kind, dtype, budget, values=True)
        got = cut.forward_backward(batch.select(np.random.default_rng(budget).permutation(len(batch))), regress, entropy_grad=True)
        assert got == pytest.approx(want, rel=max(tolerance, 1e-7))
        assert worst(gradients(cut.lm.module), gradients(whole.lm.module)) <= tolerance
        assert worst(gradients(cut.lm.value_head), gradients(whole.lm.value_head)) <= max(tolerance, 1e-6)


def test_metrics_are_means_and_extremes_over_the_whole_batch():
    batch = weighted()
    got = engine(budget=1).forward_backward(batch, regress)
    logp = stock(small("llama"), batch, 0.9)[0].detach().numpy()[batch.mask_T]
    assert got["mean"] == pytest.approx(logp.mean(), abs=1e-5) and got["low/min"] == pytest.approx(logp.min(), abs=1e-5)
    assert 0 < (logp < -6).sum() < len(logp)
    assert got["some"] == pytest.approx(logp[logp < -6].mean(), abs=1e-5)
    assert got["high/max"] == pytest.approx(logp[logp < -6].max(), abs=1e-5)
    assert got["length/max"] == 9 and "never" not in got and "never/min" not in got
    assert all(type(v) is float for v in got.values())


def test_scores_come_back_in_the_order_of_the_rows():
    batch, e = weighted(), engine(budget=12, values=True)
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = batch.select(order)
    want, _, values = stock(small("llama"), shuffled, 0.9, value_head=e.lm.value_head)
    assert np.abs(e.logprobs(shuffled) - want.detach().numpy())[shuffled.mask_T].max() < 1e-5
    assert np.abs(e.values(shuffled) - values.detach().numpy())[shuffled.mask_T].max() < 1e-5
    assert e.logprobs(shuffled).dtype == np.float32 and (shuffled.row_S == order).all()
    assert e.logprobs(ragged(prompts=(3,), answers=((0, 0),))).shape == (0,)


def test_whole_groups_stay_together_and_sequence_losses_are_weighted_once():
    batch, sizes = weighted(), []

    def loss(x):
        sizes.append(sorted(set(x.group_S.tolist())))
        sums_S = torch.zeros(x.sequences).index_add(0, x.sequence_T, torch.where(x.mask_T, x.logprobs_T, 0.0))
        return LossOutputs(sums_S, False)

    e = engine(budget=1)
    got = e.forward_backward(batch, loss, unit="group")["loss"]
    assert sizes == [[0], [1], [2], [3]]
    logp = torch.where(torch.from_numpy(batch.mask_T), stock(small("llama"), batch, 0.9)[0], 0.0).detach().numpy()
    sums = np.add.reduceat(np.append(logp, 0), np.minimum(batch.offsets[:-1], len(logp))) * (batch.lengths_S > 0)
    assert got == pytest.approx(float((sums * batch.weights_S).sum()), abs=1e-4)


def test_a_reward_model_scores_last_tokens():
    lm, batch = bind(small("llama"), None), weighted()
    with pytest.raises(ValueError, match="add_score_head"):
        TrainEngine(lm, 0.9).forward_backward(batch, regress, scores=True)
    lm.add_score_head()
    e = TrainEngine(lm, 0.9, OptimConfig(lr=0.01))
    e.forward_backward(batch, lambda x: LossOutputs((x.scores_S - 1).square(), False), scores=True)
    assert e.lm.module.lm_head.weight.grad is None and e.lm.score_head.weight.grad.any()
    assert not e.step().skipped


def test_dropout_in_the_config_changes_nothing():
    """Field case D042: log-probs of a scoring pass and of the first update agree; a config without the key has none."""
    e = engine("gpt2", settings=dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    batch, seen = weighted(), []
    batch.old_logprobs_T = e.logprobs(batch)

    def loss(x):
        seen.append((x.logprobs_T - x.old_logprobs_T)[x.mask_T].abs().max())
        return regress(x)

    e.forward_backward(batch, loss)
    assert seen[0] < 1e-4
    assert np.array_equal(batch.old_logprobs_T, engine("gpt2").logprobs(batch))


# -- updates -------------------------------------------------------------------------------------------------------------


def test_it_learns_what_it_is_taught():
    e, batch = engine(), weighted(prompts=(4,), answers=((5, 5),))
    first = e.forward_backward(batch, SFT().loss)["nll"]
    for _ in range(30):
        e.step()
        last = e.forward_backward(batch, SFT().loss)["nll"]
    assert last < 0.2 * first


def test_bfloat16_masters_move_when_the_weights_cannot():
    e = engine(dtype=torch.bfloat16, lr=1e-6)
    before = everything(e)
    for _ in range(3):
        update(e, weighted())
    after = everything(e)
    name = "model.layers.0.self_attn.q_proj.weight"
    stayed = after[f"working.{name}"] == before[f"working.{name}"]  # all but a few entries close to zero
    moved = (after[f"master.{name}"] - before[f"master.{name}"])[stayed].abs()
    assert stayed.float().mean() > 0.95 and (moved > 0).float().mean() > 0.95 and moved.max() < 1e-5
    assert after[f"master.{name}"].dtype is after[f"exp_avg.{name}"].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resume_continues_bit_for_bit(dtype):
    straight, batches = engine(dtype=dtype, values=True, schedule="linear", warmup_steps=2), [weighted(i) for i in range(4)]
    infos = [update(straight, b) for b in batches[:2]]
    tensors, numbers = straight.state()
    tensors = {n: t.clone() for n, t in tensors.items()}
    infos = [update(straight, b) for b in batches[2:]]
    resumed = engine(dtype=dtype, values=True, schedule="linear", warmup_steps=2)
    update(resumed, weighted(9))
    resumed.load_state(tensors, numbers)
    assert resumed.version == 2 and [update(resumed, b) for b in batches[2:]] == infos
    assert same(everything(resumed), everything(straight)) and resumed.state()[1] == straight.state()[1]
    del tensors["working.model.norm.weight"]
    with pytest.raises(KeyError, match="working.model.norm.weight: expected a tensor of shape"):
        resumed.load_state(tensors, numbers)


def poisoned(x):
    out = regress(x)
    return replace(out, values=out.values * torch.where(torch.arange(len(out.values)) == 0, float("nan"), 1.0))


def test_updates_that_are_not_finite_leave_everything_as_it_was(monkeypatch):
    """Field case D061: skipped, counted, pending gradients dropped; a streak ends the run."""
    monkeypatch.setattr("verl.engine.train.MAX_SKIPPED", 3)
    e, batch = engine(values=True), weighted()
    update(e, batch)
    before = everything(e)
    metrics, info = update(e, batch, poisoned)
    assert info.skipped == "non-finite" and np.isnan(info.grad_norm) and np.isnan(metrics["loss"])
    assert same(everything(e), before) and e.version == 1 and not gradients(e.lm.module)
    assert e.state()[1] == {"version": 1, "attempts": 2, "skipped_total": 1, "skipped_in_a_row": 1, "updates": 1}
    assert update(e, batch)[1].skipped == "" and e.skipped_in_a_row == 0
    before = everything(e)
    assert [update(e, batch, poisoned)[1].skipped for _ in range(2)] == ["non-finite"] * 2
    with pytest.raises(TrainingError, match="3 updates in a row"):
        update(e, batch, poisoned)
    assert same(everything(e), before) and e.skipped_total == 4


def test_one_bad_micro_batch_spoils_its_update_only():
    e, batch = engine(budget=1), weighted()
    calls = iter(range(100))
    before = everything(e)
    assert update(e, batch, lambda x: poisoned(x) if next(calls) == 1 else regress(x))[1].skipped == "non-finite"
    assert same(everything(e), before)


def test_no_signal_moves_nothing():
    """A gradient of exactly zero: neither momentum nor decay may act on it; the schedule goes on, so that it ends with the run."""
    e, batch = engine(weight_decay=0.1), weighted()
    update(e, batch)
    before, numbers = everything(e), e.state()[1]
    info = update(e, batch, lambda x: LossOutputs(0 * x.logprobs_T, True))[1]
    assert info.skipped == "no signal" and info.grad_norm == 0 and same(everything(e), before)
    assert e.state()[1] == numbers | {"attempts": numbers["attempts"] + 1}
    assert e.step().skipped == "no signal"  # nothing was accumulated at all
    batch.weights_T[:] = 0
    assert update(e, batch)[1].skipped == "no signal" and same(everything(e), before)


def test_adapters_train_and_the_base_does_not():
    e, batch = engine(dtype=torch.bfloat16, lora=LoraConfig(rank=2)), weighted()
    base = {n: p.detach().clone() for n, p in e.lm.module.named_parameters() if "lora_" not in n}
    for _ in range(2):
        assert not update(e, batch)[1].skipped
    own = dict(e.lm.module.named_parameters())
    assert all(torch.equal(own[n], p) and p.grad is None for n, p in base.items())
    assert e.optimizer.names and all("lora_" in n for n in e.state()[0]) and all("lora_" in n for n in e.exported())


# -- weights -------------------------------------------------------------------------------------------------------------


def test_weights_go_from_one_engine_to_another():
    source, target = engine(), engine(dtype=torch.bfloat16)
    update(source, weighted())
    receipt = target.load_weights(source.weights())
    assert target.version == 1 and receipt == target.weights().receipt()
    own, masters = dict(source.lm.module.named_parameters()), dict(zip(target.optimizer.names, target.optimizer.masters))
    assert all(torch.equal(m, own[n]) for n, m in masters.items())  # not rounded on the way
    assert all(torch.equal(p, own[n].bfloat16()) for n, p in target.lm.module.named_parameters())
    third = engine()
    source.weights().receipt().expect(third.load_weights(source.weights()), "the third engine")
    assert source.weights().owner is source.lm.module


FAULTS = {
    "missing": (lambda t: t[:-1], "1 of 21 tensors did not arrive, the first is 'lm_head.weight'"),
    "unknown": (lambda t: [*t, ("model.extra", torch.zeros(2))], r"'model.extra' of shape \(2,\) .* no such tensor"),
    "transposed": (lambda t: [(n, x.T if "down_proj" in n else x) for n, x in t], r"shape \(64, 32\) .* has shape \(32, 64\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_change_nothing(fault):
    change, words = FAULTS[fault]
    source, target = engine(), engine()
    update(source, weighted())
    before = everything(target)
    tensors = change([(n, t.clone()) for n, t in source.weights()])
    with pytest.raises(WeightsError, match=words):
        target.load_weights(Weights(1, lambda: iter(tensors)))
    assert same(everything(target), before) and target.version == 0


def test_weights_only_get_newer_and_receipts_tell_what_arrived():
    source, target = engine(), engine()
    update(source, weighted())
    target.load_weights(source.weights())
    with pytest.raises(WeightsError, match="version 1 were sent, version 1 is in force"):
        target.load_weights(source.weights())
    square = "model.layers.0.self_attn.q_proj.weight"
    turned = [(n, t.T.clone() if n == square else t) for n, t in source.weights()]
    with pytest.raises(WeightsError, match="checksum"):
        source.weights().receipt().expect(replace(target.load_weights(Weights(2, lambda: turned)), version=1), "the target")


# -- memory --------------------------------------------------------------------------------------------------------------


def test_out_of_memory_says_what_to_set():
    """A real allocation that cannot succeed: attention over one sequence of 40,000 tokens under a tight limit."""
    e, batch = engine(budget=512), weighted()
    e.forward_backward(batch, regress)
    long = weighted(prompts=(2,), answers=((40_000,),))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), hard))
    try:
        for call in (lambda: e.forward_backward(long, regress), lambda: e.logprobs(long)):
            with pytest.raises(TrainingError, match="micro-batches of 512 tokens; set trainer.micro_batch_tokens to 256 or less"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not gradients(e.lm.module)  # what had been accumulated is gone as well
    assert not update(e, batch)[1].skipped


def test_a_gpus_out_of_memory_says_the_same():
    e = engine(budget=512)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = e.lm.module.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(TrainingError, match="256 or less"):
        e.forward_backward(weighted(), regress)
    hook.remove()

    def broken(*_):
        raise RuntimeError("another error")

    e.lm.module.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="another error"):
        e.forward_backward(weighted(), regress)


def test_a_long_run_keeps_nothing():
    """Field case D048: no tensor lives longer than its step, memory stays flat, metrics are plain numbers."""
    e, batch = engine(settings=dict(num_hidden_layers=1), budget=30), weighted(prompts=(3,), answers=((4, 4, 4),))

    def measure():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), psutil.Process().memory_info().rss

    kept = []
    for i in range(200):
        kept.append(update(e, batch))
        if i == 49:
            tensors, rss = measure()
    after, end = measure()
    assert after == tensors and end - rss < 20 << 20
    assert all(type(v) is float for metrics, _ in kept for v in metrics.values()) and type(kept[-1][1].grad_norm) is float


def test_the_token_budget_follows_the_model():
    lm = bind(small("llama"), None)
    assert plan_token_budget(lm, True) == 16384 and 1 << 28 < host_memory() <= psutil.virtual_memory().total
    lm.config.update(dict(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672))  # a shape no host trains at 16384
    assert 512 <= plan_token_budget(lm, True) < plan_token_budget(lm, False) <= 16384
