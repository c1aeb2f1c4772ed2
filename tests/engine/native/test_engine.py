"""The built-in engine on real tiny models: right tokens, right log-probs, one sample whatever happens around it."""

import copy

import numpy as np
import pytest
import torch

from tests.engine.native.tiny import VOCAB, requests, rescore, tiny
from verl.core.errors import CapacityError, ConfigError, DataError, ModelError, WeightsError
from verl.core.types import Finish, Request, Sampling
from verl.core.weights import Weights
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine

ARCHITECTURES = ["Llama", "Qwen2", "Gemma2", "GptOss", "GPT2"]
FREE = Sampling(max_tokens=16, ignore_eos=True)
CRAMPED = NativeConfig(kv_tokens=48, page_size=4, max_sequences=5, prefill_tokens=6)


@pytest.fixture(scope="module")
def llama():
    return tiny("Llama")


def flat(answers):
    return [s for answer in answers for s in answer]


def same(a, b) -> bool:
    return all(len(x) == len(y) and (x.ids_L == y.ids_L).all() and np.allclose(x.logprobs_L, y.logprobs_L, atol=1e-5)
               and x.finish == y.finish for x, y in zip(flat(a), flat(b), strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_transformers_greedy(architecture):
    lm = tiny(architecture)
    asked = requests([1, 7, 12])
    got = NativeEngine(lm, CRAMPED).generate(asked, Sampling(temperature=0, max_tokens=16, ignore_eos=True))
    stock = copy.deepcopy(lm.module)
    stock.set_attn_implementation("eager")
    for request, (sample,) in zip(asked, got):
        prompt = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        want = stock.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16,
                              eos_token_id=None, pad_token_id=0)[0, prompt.shape[1]:]
        assert sample.ids_L.tolist() == want.tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_training_forwards(architecture, temperature):
    lm = tiny(architecture)
    asked = requests([1, 3, 17, 30, 8], n=3)
    answers = NativeEngine(lm).generate(asked, Sampling(temperature=temperature, max_tokens=24))
    error = np.abs(np.concatenate(rescore(lm, asked, answers, temperature)) - np.concatenate([s.logprobs_L for s in flat(answers)]))
    assert error.mean() <= 1e-5 and error.max() <= 1e-4


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2", "GptOss"])
def test_a_sample_depends_on_its_seed_alone(architecture):
    """Batch size, neighbours, order, prefill chunks, page size and preemption change nothing."""
    lm = tiny(architecture)
    asked = requests([9, 1, 14], n=3)
    want = NativeEngine(lm).generate(asked, FREE)
    cramped = NativeEngine(lm, CRAMPED)
    assert same(want, cramped.generate(asked, FREE)) and cramped.preemptions > 0
    assert same(want[::-1], cramped.generate(asked[::-1], FREE))
    single = NativeEngine(lm)
    alone = [single.generate([Request("x", r.prompt_ids, (seed,))], FREE)[0] for r in asked[:2] for seed in r.seeds]
    assert same(want[:2], alone)


def test_engines_take_turns_on_one_module(llama):
    small, large = NativeEngine(llama, CRAMPED), NativeEngine(llama)
    want = small.generate(requests([9], n=2), FREE)
    assert same(want, large.generate(requests([9], n=2), FREE)) and same(want, small.generate(requests([9], n=2), FREE))


def test_every_prompt_length_up_to_the_limit(llama):
    engine = NativeEngine(llama, NativeConfig(page_size=4, max_total_tokens=24))
    lengths = range(1, 25 - 4)
    asked = requests(lengths)
    answers = engine.generate(asked, Sampling(max_tokens=4, ignore_eos=True))
    assert [len(s) for s in flat(answers)] == [4] * len(lengths)
    assert max(np.abs(a - s.logprobs_L).max() for a, s in zip(rescore(llama, asked, answers), flat(answers))) < 1e-4


def test_what_cannot_fit_is_refused_before_anything_runs(llama):
    engine = NativeEngine(llama, NativeConfig(kv_tokens=64, page_size=4))
    seen = []
    with pytest.raises(CapacityError, match=r"r1.*60 prompt tokens \+ max_tokens 16.*56.*kv_tokens"):
        engine.generate(requests([3, 60]), FREE, on_sample=lambda *a: seen.append(a))
    assert not seen and engine.max_total_tokens == 56
    with pytest.raises(CapacityError, match="128"):
        NativeEngine(llama).generate(requests([120]), FREE)
    with pytest.raises(DataError, match="'r0' is empty"):
        engine.generate(requests([0]), FREE)
    for bad in (VOCAB, -1):
        with pytest.raises(DataError, match=f"id {bad};"):
            engine.generate([Request("r0", np.array([3, bad], np.int32), (1,))], FREE)


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"temperature": float("nan")}, {"max_tokens": 0}, {"top_p": 0.0},
                                     {"min_tokens": 17}, {"top_k": -1}, {"stop": ("",)}])
def test_impossible_sampling_settings_are_named(llama, setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        NativeEngine(llama).generate(requests([3]), Sampling(**{"max_tokens": 16, **setting}))


def test_several_end_ids_and_reasons(llama):
    """Field case D057: any of several end ids finishes a sample, and the reason says which; a cut sample is LENGTH."""
    free = flat(NativeEngine(llama).generate(requests([5], n=8), FREE))
    ends = (int(free[0].ids_L[3]), int(free[1].ids_L[5]))
    answers = flat(NativeEngine(llama).generate(requests([5], n=8), Sampling(max_tokens=16, stop_ids=ends)))
    assert {s.finish for s in answers} == {Finish.STOP, Finish.LENGTH}
    for unbounded, s in zip(free, answers):
        hits = np.flatnonzero(np.isin(unbounded.ids_L, ends))
        assert len(s) == (hits[0] + 1 if len(hits) else 16) and (s.ids_L == unbounded.ids_L[:len(s)]).all()
        assert (s.finish, s.stop_reason) == ((Finish.STOP, s.ids_L[-1]) if len(hits) else (Finish.LENGTH, None))


def test_the_models_own_end_ids_serve_when_none_are_named(llama):
    """Field case D073: the files' end ids are used, nothing else of theirs is."""
    lm = tiny("Llama")
    free = NativeEngine(lm).generate(requests([5], n=4), FREE)
    first = flat(free)[0].ids_L.tolist()
    third = next(i for i in range(2, 16) if first[i] not in first[:i])
    lm.stop_ids = (first[third],)
    lm.module.generation_config.update(temperature=0.1, top_k=1, top_p=0.5, repetition_penalty=1.5, do_sample=True)
    assert same(free, NativeEngine(lm).generate(requests([5], n=4), FREE))
    ended = flat(NativeEngine(lm).generate(requests([5], n=4), Sampling(max_tokens=16)))[0]
    assert (len(ended), ended.finish) == (third + 1, Finish.STOP)


def test_min_tokens_bans_the_ends_until_then_and_scores_what_was_drawn(llama):
    ends = tuple(range(0, VOCAB, 2))
    answers = flat(NativeEngine(llama).generate(requests([5], n=16), Sampling(max_tokens=12, min_tokens=6, stop_ids=ends)))
    for s in answers:
        assert not np.isin(s.ids_L[:6], ends).any() and len(s) >= 7 or s.finish is Finish.LENGTH
    prompt = requests([5])[0].prompt_ids
    logits = stock_logits(llama, np.concatenate([prompt, answers[0].ids_L[:2]]))
    logits[list(ends)] = float("-inf")
    assert answers[0].logprobs_L[2] == pytest.approx(float(logits.log_softmax(-1)[answers[0].ids_L[2]]), abs=1e-4)


def stock_logits(lm, ids):
    stock = copy.deepcopy(lm.module)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        return stock(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1].float()


def test_samples_arrive_as_they_finish_and_cancelling_aborts_the_rest(llama):
    ends = tuple(range(0, VOCAB, 9))
    arrived = []
    engine = NativeEngine(llama, NativeConfig(max_sequences=3))
    answers = engine.generate(requests([5, 6], n=4), Sampling(max_tokens=16, stop_ids=ends),
                              on_sample=lambda key, i, s: arrived.append((key, i, s)))
    assert len(arrived) == 8 and {(k, i) for k, i, _ in arrived} == {(f"r{a}", b) for a in range(2) for b in range(4)}
    assert all(answers[int(k[1])][i] is s for k, i, s in arrived)

    arrived.clear()
    answers = engine.generate(requests([5, 6], n=4), Sampling(max_tokens=60, stop_ids=ends),
                              on_sample=lambda *a: arrived.append(a), cancelled=lambda: len(arrived) >= 2)
    finishes = [s.finish for s in flat(answers)]
    assert finishes.count(Finish.ABORT) >= 4 and len(arrived) == 8 and all(s is not None for s in flat(answers))


def test_the_mode_of_the_module_is_restored_and_dropout_is_off():
    lm = tiny("Llama", attention_dropout=0.5)
    want = NativeEngine(lm).generate(requests([5]), FREE)
    lm.module.train()
    assert same(want, NativeEngine(lm).generate(requests([5]), FREE)) and lm.module.training
    with pytest.raises(RuntimeError, match="scorer broke"):
        NativeEngine(lm).generate(requests([5]), FREE, on_sample=lambda *a: (_ for _ in ()).throw(RuntimeError("scorer broke")))
    assert lm.module.training


def test_seeds_make_the_samples_and_repeat_them(llama):
    """Field case D065: different seeds give different samples on equal engines, the same seed the same one."""
    prompt = requests([5])[0].prompt_ids
    engines = [NativeEngine(llama) for _ in range(4)]
    ask = [[Request("p", prompt, (42 + 2 * e, 43 + 2 * e))] for e in range(4)]
    texts = [tuple(s.ids_L) for e, a in zip(engines, ask) for s in flat(e.generate(a, FREE))]
    again = [tuple(s.ids_L) for e, a in zip(engines, ask) for s in flat(e.generate(a, FREE))]
    assert texts == again and len(set(texts)) >= 7


# -- weights -----------------------------------------------------------------------------------------------------------

def stream(module, version):
    return Weights(version, lambda: ((n, p.detach()) for n, p in module.named_parameters()), owner=module)


def test_shared_storage_new_values_are_in_force_at_once():
    lm = tiny("Llama")
    engine = NativeEngine(lm)
    before = engine.generate(requests([9], n=2), FREE)
    with torch.no_grad():
        for parameter in lm.module.parameters():
            parameter.mul_(1.1)
    assert engine.load_weights(stream(lm.module, 3)).count == 0 and engine.version == 3
    after = engine.generate(requests([9], n=2), FREE)
    assert not same(before, after) and same(after, NativeEngine(lm).generate(requests([9], n=2), FREE))
    assert all((s.versions_L == 3).all() for s in flat(after))
    for stale in (3, 2):
        with pytest.raises(WeightsError, match="version 3 is in force"):
            engine.load_weights(stream(lm.module, stale))
    with pytest.raises(WeightsError, match="shared=False"):
        engine.load_weights(stream(tiny("Llama").module, 4))


def test_own_copy_takes_whole_loads_only():
    trainer, lm = tiny("Qwen2", seed=1), tiny("Qwen2", seed=2)
    engine = NativeEngine(lm, shared=False)
    weights = stream(trainer.module, 0)
    weights.receipt().expect(engine.load_weights(weights), "the engine")
    assert same(NativeEngine(trainer).generate(requests([9], n=2), FREE), engine.generate(requests([9], n=2), FREE))

    tensors = {n: p.detach().clone() for n, p in trainer.module.named_parameters()}
    name = next(iter(tensors))
    for broken, message in (({n: t for n, t in tensors.items() if n != name}, f"lack 1 tensors, the first {name!r}"),
                            ({**tensors, "model.extra": tensors[name]}, "'model.extra', which this engine's model has not"),
                            ({**tensors, name: tensors[name][:-1]}, "has shape")):
        with pytest.raises(WeightsError, match=message):
            engine.load_weights(Weights(1, lambda b=broken: b.items()))
        with pytest.raises(WeightsError, match="nothing can be sampled"):
            engine.generate(requests([9]), FREE)
    engine.load_weights(Weights(1, lambda: tensors.items()))
    assert engine.generate(requests([9]), FREE)[0][0].versions_L[0] == 1


def test_lora_is_active_without_merging():
    from verl.models.load import LoraConfig, add_lora
    lm = tiny("Llama")
    plain = NativeEngine(lm).generate(requests([9], n=2), FREE)
    add_lora(lm, LoraConfig(rank=4))
    engine = NativeEngine(lm)
    assert same(plain, engine.generate(requests([9], n=2), FREE))
    with torch.no_grad():
        for name, parameter in lm.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    asked = requests([9], n=2)
    answers = engine.generate(asked, FREE)
    assert not same(plain, answers)
    assert max(np.abs(a - s.logprobs_L).max() for a, s in zip(rescore(lm, asked, answers), flat(answers))) < 1e-4


def test_sleep_drops_the_cache_and_the_next_call_takes_it_again(llama):
    engine = NativeEngine(llama)
    want = engine.generate(requests([9], n=2), FREE)
    engine.sleep()
    engine.sleep()
    assert all(layer.module.verl_kv is None for layer in llama.layers)
    assert same(want, engine.generate(requests([9], n=2), FREE))
    assert copy.deepcopy(llama.module).model.layers[0].self_attn.verl_kv is None


# -- what the engine refuses -------------------------------------------------------------------------------------------

def test_refusals_name_the_way_out(llama):
    unproven = tiny("Llama")
    unproven.native, unproven.why_not = False, "ALiBi position biases"
    with pytest.raises(ModelError, match="ALiBi.*trainer.rollout.engine: hf"):
        NativeEngine(unproven)
    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        NativeEngine(llama, NativeConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="power of two"):
        NativeConfig(page_size=12)
    with pytest.raises(ConfigError, match="kv_tokens is 0"):
        NativeConfig(kv_tokens=0)
