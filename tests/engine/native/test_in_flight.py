"""Weights that arrive, and requests that are added, while the built-in engine samples."""

import numpy as np
import pytest

from tests.engine.native.tiny import requests, rescore, tiny
from verl.core.errors import CapacityError, WeightsError
from verl.core.types import Request, Sampling
from verl.core.weights import Weights
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine

FREE = Sampling(max_tokens=20, ignore_eos=True)
ASKED = requests([5, 9, 4, 1], n=3)
LATE = [Request("late", requests([6], seed=7)[0].prompt_ids, (70, 71))]


def weights(lm, version):
    return Weights(version, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), owner=lm.module)


def run(engine, new, polls=(10,), late=12):
    """Sample ASKED, load `new` at these polls and add LATE at another; samples by request, and the tokens of each version."""
    got, count, version = {}, 0, engine.version

    def between():
        nonlocal count, version
        count += 1
        if count in polls:
            version += 4
            engine.load_weights(weights(new, version))
        return LATE if count == late else []

    assert engine.generate(ASKED, FREE, lambda key, i, s: got.__setitem__((key, i), s), between=between) == []
    return [[got[r.key, i] for i in range(r.n)] for r in ASKED + LATE]


def flat(answers):
    return [s for answer in answers for s in answer]


@pytest.fixture(scope="module")
def models():
    return tiny("Llama"), tiny("Llama", seed=5)


ROOMY = NativeConfig(kv_tokens=600, page_size=4, max_sequences=7)
CRAMPED = NativeConfig(kv_tokens=88, page_size=4, max_sequences=5, prefill_tokens=6)


@pytest.mark.parametrize("config", [ROOMY, CRAMPED], ids=["roomy", "cramped"])
@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_tokens_carry_the_version_that_made_them_and_the_logprobs_of_its_training_forward(architecture, config):
    old, new = tiny(architecture), tiny(architecture, seed=5)
    engine = NativeEngine(old, config).apart()
    engine.load_weights(weights(old, 3))
    answers = run(engine, new)
    a, b = (rescore(lm, ASKED + LATE, answers) for lm in (old, new))
    both = 0
    for before, after, sample in zip(a, b, flat(answers), strict=True):
        first = sample.versions_L == 3
        assert set(sample.versions_L) <= {3, 7} and (np.diff(sample.versions_L) >= 0).all() and len(sample) == 20
        assert np.abs(before - sample.logprobs_L)[first].max(initial=0) <= 1e-4
        assert np.abs(after - sample.logprobs_L)[~first].max(initial=0) <= 1e-4
        both += first.any() and not first.all()
    assert both and any((s.versions_L == 7).all() for s in flat(answers))
    assert all((s.versions_L == 7).all() for s in answers[-1])


def test_the_same_weights_under_a_new_version_change_no_token(models):
    lm, _ = models
    want = NativeEngine(lm).generate(ASKED + LATE, FREE)
    engine = NativeEngine(lm, NativeConfig(max_sequences=6)).apart()
    engine.load_weights(weights(lm, 0))
    for got, sample in zip(flat(run(engine, lm, polls=(3, 4, 11))), flat(want), strict=True):
        assert got.ids_L.tolist() == sample.ids_L.tolist() and np.allclose(got.logprobs_L, sample.logprobs_L, atol=1e-5)


def test_kept_keys_are_those_of_older_weights(models):
    """With keep_kv nothing is computed again but a prompt's last token: log-probs are near those of the new weights, not theirs."""
    old, new = models
    engine = NativeEngine(old, NativeConfig(max_sequences=6)).apart(keep_kv=True)
    engine.load_weights(weights(old, 3))
    answers = run(engine, new)
    mixed = [i for i, s in enumerate(flat(answers)) if 3 in s.versions_L and 7 in s.versions_L]
    errors = [np.abs(after - s.logprobs_L)[s.versions_L == 7].max()
              for i, (after, s) in enumerate(zip(rescore(new, ASKED + LATE, answers), flat(answers))) if i in mixed]
    assert len(mixed) == 6 and min(errors) > 1e-3
    assert np.abs(rescore(new, LATE, answers[-1:])[0] - answers[-1][0].logprobs_L).max() <= 1e-4  # begun under the new weights


def test_an_added_request_that_cannot_fit_is_refused_by_name(models):
    engine = NativeEngine(models[0]).apart()
    big = [Request("big", np.ones(500, np.int32), (1,))]
    with pytest.raises(CapacityError, match="'big'"):
        engine.generate(ASKED, FREE, between=lambda: big)


def test_a_copy_is_apart_from_the_module_that_trains(models):
    lm, other = models
    engine = NativeEngine(lm).apart()
    assert all(layer.module is not own.module for layer, own in zip(lm.layers, engine.lm.layers, strict=True))
    before = lm.module.get_input_embeddings().weight.clone()
    engine.load_weights(weights(other, 1))
    assert (lm.module.get_input_embeddings().weight == before).all()
    with pytest.raises(WeightsError, match="versions only go up"):
        engine.load_weights(weights(lm, 1))
