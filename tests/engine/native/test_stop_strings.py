"""Stop strings over a real byte-level tokenizer, multi-byte characters included."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.native.tiny import requests, tiny
from verl.core.errors import ConfigError
from verl.core.types import Finish, Sampling
from verl.engine.native.engine import NativeEngine


@pytest.fixture(scope="module")
def lm():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tiny("Llama", tokenizer=PreTrainedTokenizerFast(tokenizer_object=core), vocab_size=256, eos_token_id=None)


def test_the_tokens_that_complete_a_stop_string_are_kept_and_nothing_after(lm):
    tokenizer, engine = lm.tokenizer, NativeEngine(lm)
    free = engine.generate(requests([6], n=6), Sampling(max_tokens=40, ignore_eos=True))[0]
    stop = tokenizer.decode(free[0].ids_L)[10:12]
    answers = engine.generate(requests([6], n=6), Sampling(max_tokens=40, stop=(stop, "never there")))[0]
    for whole, s in zip(free, answers):
        assert (whole.ids_L[:len(s)] == s.ids_L).all()
        assert stop not in tokenizer.decode(s.ids_L[:-1])
        if stop in tokenizer.decode(whole.ids_L):
            assert (s.finish, s.stop_reason) == (Finish.STOP, stop) and stop in tokenizer.decode(s.ids_L)
        else:
            assert s.finish is Finish.LENGTH
    assert answers[0].finish is Finish.STOP


def test_a_stop_string_counts_from_min_tokens_on(lm):
    engine = NativeEngine(lm)
    free = engine.generate(requests([6]), Sampling(max_tokens=40, ignore_eos=True))[0][0]
    stop = lm.tokenizer.decode(free.ids_L[3:5])
    answer = engine.generate(requests([6]), Sampling(max_tokens=40, min_tokens=20, stop=(stop,)))[0][0]
    assert len(answer) >= 20


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match="use stop_ids"):
        NativeEngine(tiny("Llama")).generate(requests([6]), Sampling(max_tokens=4, stop=("x",)))
