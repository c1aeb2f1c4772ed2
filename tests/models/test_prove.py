"""Which architectures are native is found out at load, and those that are not are refused with a reason."""

import pytest
import torch

from tests.models.small_lms import VOCAB, ragged, small
from verl.core.errors import ModelError
from verl.models import Packed, bind
from verl.models.prove import foreign

NATIVE = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi", "gpt2", "olmo2", "mixtral", "gpt_oss", "deepseek_v3",
          "cohere", "granite"]
REFUSED = {"llama4": "chunked_attention", "mamba2": "linear_attention", "bloom": "ALiBi", "falcon": "attention interface",
           "qwen3_next": "linear_attention", "lfm2": "conv", "phi3": "longrope"}


@pytest.mark.parametrize("kind", NATIVE)
def test_supported_architectures_are_native(kind):
    lm = bind(small(kind), None)
    assert lm.native and lm.why_not == "" and len(lm.layers) == 2
    assert lm.module.config._attn_implementation == "verl"


@pytest.mark.parametrize("kind,words", REFUSED.items())
def test_other_architectures_are_refused_by_name(kind, words):
    module = small(kind)
    lm = bind(module, None, path=f"models/{kind}")
    assert not lm.native and words in lm.why_not and lm.module.config._attn_implementation != "verl"
    with pytest.raises(ModelError, match=f"{module.config.model_type} .*{kind}.* is refused: .*{words}.*rollout.engine: hf"):
        bind(module, None, path=f"models/{kind}", strict_native=True)


def test_what_a_layer_stores_for_a_token():
    seen = [(k.heads, k.key_dim, k.value_dim, k.window) for k in bind(small("gpt_oss"), None).layers]
    assert seen == [(2, 8, 8, 4), (2, 8, 8, None)]
    assert [(k.key_dim, k.value_dim) for k in bind(small("deepseek_v3"), None).layers] == [(16, 8)] * 2


def test_a_module_that_attends_otherwise_is_found_out():
    """The same architecture name, another computation: nothing is believed from the config alone."""
    module = small("llama")
    layer = module.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda hidden_states, **k: (plain(hidden_states, **k)[0] + hidden_states.mean(1, keepdim=True), None)
    lm = bind(module, None)
    assert not lm.native and "differ from transformers' own attention" in lm.why_not
    assert module.config._attn_implementation == "eager"


def test_a_module_whose_head_does_more_is_found_out():
    module = small("llama")
    module.lm_head.register_forward_hook(lambda m, x, y: y + torch.arange(VOCAB) / 10)
    assert "packed rows differ" in bind(module, None).why_not


@pytest.mark.parametrize("window", [3, 64])
def test_a_window_must_reach_the_attention_call(window):
    """One longer than the probe changes none of its logits, so it must have been seen as an argument."""
    module = small("mistral", sliding_window=window)
    assert [k.window for k in bind(module, None).layers] == [window] * 2
    module = small("llama")
    module.config.sliding_window = window
    assert f"declares a window of {window}, but the attention call was given None" in bind(module, None).why_not


def test_an_unknown_layer_type_is_refused():
    config = small("qwen3").config
    assert foreign(config) is None
    config.layer_types = ["full_attention", "qwen_sparse_attention"]
    assert foreign(config) == "layers of type qwen_sparse_attention"


def test_proof_in_bfloat16():
    lm = bind(small("llama", torch.bfloat16), None)
    assert lm.native and lm.dtype is torch.bfloat16


def test_verl_attention_needs_its_layout():
    lm = bind(small("llama"), None)
    with pytest.raises(RuntimeError, match="without verl_meta"):
        lm.module(input_ids=torch.ones(1, 4, dtype=torch.int64))
    packed = Packed(ragged(), "cpu")
    assert lm.hidden(packed.ids_N, packed.positions_N, packed).shape == (len(packed), 32)
