"""What only the transformers engine promises: every decoder-only architecture, and a module left as it was found."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.engine import tiny
from tests.engine.conformance import flat, ids, requests
from verl.core.errors import ConfigError, WeightsError
from verl.core.types import Finish, Sampling
from verl.core.weights import Weights
from verl.engine.hf_engine import HFEngine
from verl.engine.requests import StopRule, ignored_defaults, sampling_line
from verl.models.load import bind, load_lm

FOREIGN = {
    "falcon": {"num_kv_heads": 1, "new_decoder_architecture": False},
    "bloom": {"n_layer": 2, "n_head": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_lm(tiny.model_dir(tmp_path_factory.mktemp("model")), "float32")


def bound(kind, **settings):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**tiny.BASE, **settings}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.2)
    return bind(module, tiny.tokenizer())


@pytest.mark.parametrize("kind", FOREIGN)
def test_architectures_that_are_not_native_are_sampled_exactly(kind):
    lm = bound(kind, **FOREIGN[kind])
    assert not lm.native
    asked, sampling = requests([5, 2, 9, 5], n=2), Sampling(temperature=0.8, max_tokens=10)
    results = HFEngine(lm).generate(asked, sampling)
    for request, samples in zip(asked, results):
        for sample in samples:
            whole = np.concatenate([request.prompt_ids, sample.ids_L]).astype(np.int64)
            with torch.no_grad():
                logits = lm.module(torch.from_numpy(whole)[None], use_cache=False).logits[0] / 0.8
            logits[:, lm.head.rows:] = float("-inf")
            start = len(request.prompt_ids)
            want = logits.log_softmax(-1)[np.arange(start - 1, len(whole) - 1), whole[start:]].numpy()
            assert np.abs(want - sample.logprobs_L).max() <= 1e-4
    assert [ids(HFEngine(lm).generate([r], sampling)) for r in asked] == [ids([s]) for s in results]


def test_the_size_of_a_batch_changes_nothing(lm):
    asked, sampling = requests([4, 1, 33, 9], n=2), Sampling(max_tokens=12)
    assert ids(HFEngine(lm, batch_size=3).generate(asked, sampling)) == ids(HFEngine(lm).generate(asked, sampling))


def test_cancelling_between_batches_starts_no_other(lm):
    seen = []
    results = HFEngine(lm, batch_size=2).generate(requests([3], n=6), Sampling(max_tokens=4, ignore_eos=True),
                                                  on_sample=lambda *a: seen.append(a[1]), cancelled=lambda: len(seen) >= 2)
    assert [(s.finish, len(s)) for s in flat(results)] == [(Finish.LENGTH, 4)] * 2 + [(Finish.ABORT, 0)] * 4


def test_the_module_is_left_as_it_was_found(lm):
    module, defaults = lm.module, lm.module.generation_config
    module.train()
    attention = module.config._attn_implementation
    want = ids(HFEngine(lm).generate(requests([4]), Sampling(max_tokens=4)))
    assert module.training and module.generation_config is defaults and defaults.top_k == 20
    assert module.config._attn_implementation == attention == "verl"
    module.eval()
    assert ids(HFEngine(lm).generate(requests([4]), Sampling(max_tokens=4))) == want
    with pytest.raises(ZeroDivisionError):
        HFEngine(lm).generate(requests([4]), Sampling(max_tokens=4), on_sample=lambda *_: 1 / 0)
    assert not module.training and module.generation_config is defaults and module.config._attn_implementation == "verl"


def test_a_copy_takes_whole_loads_only(lm, tmp_path):
    own = load_lm(tiny.model_dir(tmp_path), "float32")
    engine, named = HFEngine(own), dict(lm.module.named_parameters())
    sent = {n: (p.detach() * 1.25) for n, p in named.items()}
    asked, sampling = requests([4]), Sampling(max_tokens=4)
    before = ids(engine.generate(asked, sampling))
    for broken, words in [({n: t for n, t in sent.items() if n != "model.norm.weight"}, "did not arrive.*model.norm.weight"),
                          ({**sent, "extra": torch.zeros(1)}, "extra"),
                          ({**sent, "model.norm.weight": torch.zeros(3)}, r"model.norm.weight.*\(3,\)")]:
        with pytest.raises(WeightsError, match=words):
            engine.load_weights(Weights(1, lambda broken=broken: broken.items()))
        with pytest.raises(WeightsError, match="nothing can be sampled"):
            engine.generate(asked, sampling)
    weights = Weights(1, lambda: sent.items())
    assert engine.load_weights(weights) == weights.receipt()
    assert engine.version == 1 and ids(engine.generate(asked, sampling)) != before
    with pytest.raises(WeightsError, match="version 1"):
        engine.load_weights(weights)


def test_shared_storage_moves_nothing(lm):
    receipt = HFEngine(lm).load_weights(Weights(3, lambda: iter(()), owner=lm.module))
    assert (receipt.version, receipt.count) == (3, 0)


def test_d073_one_line_says_what_is_in_force_and_what_was_ignored(lm, caplog):
    with caplog.at_level("INFO", "verl"):
        engine = HFEngine(lm)
        for _ in range(2):
            engine.generate(requests([3]), Sampling(max_tokens=1))
    (line,) = caplog.messages
    assert line == ("sampling: temperature 1, top_p 1, top_k off, repetition_penalty 1, end ids [7, 9, 256]; ignored from "
                    "generation_config: {'temperature': 0.7, 'top_p': 0.8, 'top_k': 20, 'repetition_penalty': 1.05}")
    assert ignored_defaults(GenerationConfig()) == ignored_defaults(None) == {}
    assert sampling_line(Sampling(top_k=5, ignore_eos=True), {}).endswith("top_k 5, repetition_penalty 1, end ids [] (ignored)")


def test_stop_strings_across_tokens_bytes_and_min_tokens():
    tokenizer = tiny.tokenizer()

    def first(text, **settings):
        rule, encoded = StopRule(Sampling(max_tokens=100, **settings), tokenizer), tokenizer.encode(text)
        return next(((i + 1, *end) for i in range(len(encoded)) if (end := rule(encoded[:i + 1]))), None)

    assert first("one two three", stop=("two",)) == (7, Finish.STOP, "two")
    assert first("grüße!", stop=("ß",)) == (6, Finish.STOP, "ß")  # two bytes each: the second completes it
    assert first("ab ab", stop=("ab",), min_tokens=3) == (5, Finish.STOP, "ab")  # what came before min_tokens does not count
    assert first("a b c", stop=("x",)) is None
    assert first("a<end>b", stop=("<end>",)) == (2, Finish.STOP, "<end>")
    with pytest.raises(ConfigError, match="tokenizer"):
        StopRule(Sampling(stop=("x",)))
