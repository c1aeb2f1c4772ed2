"""AdamW with float32 masters, and schedules as functions of the step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.core.errors import ConfigError
from verl.engine.optimizer import MasterAdamW, OptimConfig, learning_rate


def one(value=1.0, dtype=torch.float32, **settings):
    parameter = torch.nn.Parameter(torch.tensor([value], dtype=dtype))
    return parameter, MasterAdamW([("w", parameter)], OptimConfig(**{"lr": 0.1, "max_grad_norm": 1e9, **settings}))


def push(optimizer, parameter, gradient, rate=0.1):
    (parameter * torch.tensor([gradient], dtype=parameter.dtype)).sum().backward()
    optimizer.step(rate, float(optimizer.grad_norm()))


@pytest.mark.parametrize("resume", [False, True])
def test_two_updates_with_a_stop_between(resume):
    """Field case D027: 1.0 -> 0.9 -> 0.803482; a cold optimizer would give 0.8."""
    parameter, optimizer = one()
    push(optimizer, parameter, 1.0)
    assert parameter.item() == pytest.approx(0.9, abs=1e-5)
    if resume:
        state, updates = {k: v.clone() for k, v in optimizer.state().items()}, optimizer.updates
        parameter, optimizer = one(parameter.item())
        optimizer.load_state(state, updates)
        assert optimizer.updates == 1
    push(optimizer, parameter, 2.0)
    assert parameter.item() == pytest.approx(0.803482, abs=1e-5)


def test_masters_move_where_bfloat16_cannot():
    """Steps of 1e-4 on 1.0 vanish in bfloat16 (spacing 2^-8 there) and add up in the master."""
    parameter, optimizer = one(dtype=torch.bfloat16)
    for i in range(50):
        push(optimizer, parameter, 1.0, rate=1e-4)
        assert parameter.item() == 1.0 or i > 15
    assert float(optimizer.masters[0]) == pytest.approx(1 - 50e-4, abs=1e-5)
    assert parameter.item() == float(optimizer.masters[0].bfloat16()) < 1.0


def test_gradients_add_up_in_float32():
    """256 + 1 is 256 in bfloat16."""
    parameter, optimizer = one(dtype=torch.bfloat16)
    for gradient in (256.0, 1.0, 1.0, 1.0):
        (parameter * gradient).sum().backward()
        assert parameter.grad is None
    assert optimizer.masters[0].grad.dtype is torch.float32 and float(optimizer.masters[0].grad) == 259
    optimizer.clear()
    assert optimizer.masters[0].grad is None and float(optimizer.grad_norm()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_is_bit_equal(dtype):
    def make():
        torch.manual_seed(0)
        named = [("a", torch.nn.Parameter(torch.randn(4, 3).to(dtype))), ("b", torch.nn.Parameter(torch.randn(3)))]
        return named, MasterAdamW(named, OptimConfig(lr=0.1, weight_decay=0.1))

    def push(named, optimizer, i):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(i)).to(dtype)
        ((x @ named[0][1]).float() @ named[1][1]).square().sum().backward()
        optimizer.step(0.01, float(optimizer.grad_norm()))

    named, straight = make()
    for i in range(6):
        push(named, straight, i)
        if i == 2:
            saved = {k: v.clone() for k, v in straight.state().items()}
            parameters = [p.detach().clone() for _, p in named]
    again, resumed = make()
    push(again, resumed, 9)  # moments of another history are dropped by the load
    for (_, p), v in zip(again, parameters):
        p.data.copy_(v)
    resumed.load_state(saved, 3)
    for i in range(3, 6):
        push(again, resumed, i)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named, again))
    want = straight.state()
    assert {k: torch.equal(v, want[k]) for k, v in resumed.state().items()} == dict.fromkeys(want, True)
    assert ("master.a" in want) == (dtype is torch.bfloat16) and "master.b" not in want


def test_a_state_from_before_the_first_update_has_no_moments():
    """Loaded into an optimizer that has some, it leaves none of them."""
    _, fresh = one()
    parameter, used = one()
    push(used, parameter, -5.0)
    parameter.data.fill_(1.0)
    used.load_state(fresh.state(), 0)
    assert used.state() == {}
    push(used, parameter, 1.0)
    assert parameter.item() == pytest.approx(0.9, abs=1e-5)


def test_a_state_that_does_not_fit_changes_nothing():
    parameter, optimizer = one(dtype=torch.bfloat16)
    push(optimizer, parameter, 1.0)
    state = {k: v.clone() for k, v in optimizer.state().items()}
    before = {k: v.clone() for k, v in state.items()}
    state["master.w"] += 5
    for name, wrong, words in [("exp_avg_sq.w", None, "has nothing"), ("exp_avg_sq.w", torch.zeros(2), r"has \(2,\)"),
                               ("master.w", torch.zeros(1, 1), r"has \(1, 1\)")]:
        bad = {k: v for k, v in state.items() if k != name} | ({} if wrong is None else {name: wrong})
        with pytest.raises(KeyError, match=f"{name}: expected a tensor of shape .*{words}"):
            optimizer.load_state(bad, 7)
    assert optimizer.updates == 1 and all(torch.equal(v, before[k]) for k, v in optimizer.state().items())


def test_frozen_parameters_have_no_state():
    frozen, trained = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([("frozen", frozen), ("trained", trained)], OptimConfig(lr=0.1))
    (frozen * trained).sum().backward()
    optimizer.step(0.1, float(optimizer.grad_norm()))
    assert optimizer.names == ["trained"] and all(k.endswith(".trained") for k in optimizer.state()) and frozen.eq(1).all()
    with pytest.raises(ConfigError, match="nothing would be trained"):
        MasterAdamW([("frozen", frozen)], OptimConfig())


def test_clipping_is_by_the_global_norm():
    """AdamW hides a gradient's scale on its first step, so the moments are looked at."""
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, 1))
    optimizer = MasterAdamW([("a", a), ("b", b)], OptimConfig(lr=0.1, max_grad_norm=1.0))
    (3 * a.sum() + 4 * b.sum()).backward()
    assert float(optimizer.grad_norm()) == 5
    optimizer.step(0.1, 5.0)
    state = optimizer.state()
    assert float(state["exp_avg.a"]) == pytest.approx(0.1 * 3 / 5, rel=1e-5)
    assert float(state["exp_avg.b"]) == pytest.approx(0.1 * 4 / 5, rel=1e-5)


def test_only_matrices_decay():
    vector, matrix = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = MasterAdamW([("v", vector), ("m", matrix)], OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=1e9))
    (0 * vector.sum() + 0 * matrix.sum()).backward()
    optimizer.step(0.1, 0.0)
    assert vector.eq(1).all() and torch.allclose(matrix, torch.full((2, 2), 0.95))


def test_the_rate_after_a_resume_is_the_rate_of_that_update():
    """Field case D053: warm-up of 10 to 1e-3, linear to 0 at 100; update number 40 (0-based). A longer total recomputes it."""
    config = OptimConfig(lr=1e-3, schedule="linear", warmup_steps=10)
    assert learning_rate(config, 40, 100) == pytest.approx(0.000666667, abs=1e-9)
    assert learning_rate(config, 40, 200) == pytest.approx(1e-3 * (1 - 30 / 190), abs=1e-12)
    assert learning_rate(config, 0, 100) == pytest.approx(1e-4) and learning_rate(config, 9, 100) == pytest.approx(1e-3)
    assert learning_rate(config, 100, 100) == 0 == learning_rate(config, 500, 100)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 100), st.integers(0, 200))
def test_rates_stay_between_zero_and_the_peak(schedule, warmup, total, update):
    rate = learning_rate(OptimConfig(lr=0.5, schedule=schedule, warmup_steps=warmup), update, total)
    assert 0 <= rate <= 0.5
    if schedule == "constant" and update >= warmup:
        assert rate == 0.5
    if schedule == "cosine" and warmup <= update < total:
        assert rate == pytest.approx(0.25 * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))))


@pytest.mark.parametrize("settings,words", [(dict(schedule="step"), "schedule 'step'"), (dict(lr=-1.0), "lr -1"),
                                            (dict(max_grad_norm=0.0), "max_grad_norm 0"),
                                            (dict(warmup_steps=-1), "warmup_steps -1"), (dict(lr=math.nan), "lr nan")])
def test_settings_out_of_range(settings, words):
    with pytest.raises(ConfigError, match=words):
        OptimConfig(**settings)
