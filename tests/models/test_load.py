"""Model directories: what loads, what is refused, what is saved and comes back."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.models.small_lms import small
from tests.models.tiny_models import tokenizer
from verl.core.errors import ModelError
from verl.models import LoraConfig, bind, context_length, export, get_actor_critic_from_hf, load_lm, load_tokenizer
from verl.models.load import merged_state

ROWS = 400  # the tokenizer has fewer ids
IDS = torch.tensor([[5, 9, 3, 77, 60]])


@pytest.fixture
def directory(tmp_path):
    small("llama", vocab_size=ROWS).save_pretrained(tmp_path / "m")
    tokenizer("llama", tmp_path / "m")
    return tmp_path / "m"


def logits(module):
    with torch.no_grad():
        return module(input_ids=IDS, use_cache=False).logits


def reloaded(path, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def stock_logits(lm):
    lm.module.set_attn_implementation("eager")
    return logits(lm.module)


@pytest.mark.parametrize("kind,tied", [("llama", True), ("llama", False), ("gemma2", True), ("mixtral", False), ("gpt2", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_reloads_to_identical_logits(tmp_path, kind, tied, dtype):
    """Field case D058: a tied tensor is written once and comes back tied."""
    small(kind, tie_word_embeddings=tied, vocab_size=ROWS).save_pretrained(tmp_path / "m")
    lm = load_lm(tmp_path / "m", dtype, tokenizer=tokenizer("llama", tmp_path / "m"))
    assert lm.native and lm.head.rows < ROWS
    with torch.no_grad():
        for _, parameter in lm.parameters():
            parameter.mul_(1.25)
    path = export(lm, tmp_path / "out")
    back = reloaded(path)
    assert torch.equal(logits(back), stock_logits(lm)) and str(back.dtype) == f"torch.{dtype}"
    assert (back.get_input_embeddings().weight is back.get_output_embeddings().weight) == tied
    written = load_file(path / "model.safetensors")
    assert any("lm_head" in n for n in written) != tied and back.get_output_embeddings().weight.shape[0] == ROWS
    config = json.loads((path / "config.json").read_text())
    assert "verl" not in json.dumps(config) and config["tie_word_embeddings"] == tied
    assert AutoTokenizer.from_pretrained(path)("two plus two")["input_ids"] == lm.tokenizer("two plus two")["input_ids"]
    assert load_lm(path).native


def test_embeddings_that_came_apart_are_both_kept(tmp_path):
    """Field case D058: the config says tied, the file holds two different tensors."""
    small("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 3
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    lm = bind(reloaded(tmp_path / "m"), None)
    back = reloaded(export(lm, tmp_path / "out"))
    assert torch.equal(back.lm_head.weight, 3 * back.model.embed_tokens.weight) and not back.config.tie_word_embeddings


def test_a_missing_tensor_is_never_random(directory):
    """Field case D058: untied, saved without its output layer."""
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 tensors of llama, the first is lm_head.weight"):
        load_lm(directory)


def test_float32_masters_can_be_exported(tmp_path):
    lm = bind(small("llama", torch.bfloat16, tie_word_embeddings=True), None)
    masters = {n: p.detach().float() + 1e-4 for n, p in lm.module.named_parameters()}
    path = export(lm, tmp_path / "out", masters)
    back = reloaded(path)
    assert back.dtype is torch.float32 and back.lm_head.weight is back.model.embed_tokens.weight
    assert all(torch.equal(p, masters[n]) for n, p in back.named_parameters())
    assert lm.dtype is torch.bfloat16
    with pytest.raises(KeyError, match="model.nothing"):
        merged_state(lm, {"model.nothing": torch.zeros(1)})
    assert "value_head.weight" not in merged_state(lm, {"value_head.weight": torch.zeros(1, 32)})


def digest(module):
    return hashlib.sha256(b"".join(p.detach().view(torch.uint8).numpy().tobytes() for n, p in module.named_parameters()
                                   if "lora_" not in n)).hexdigest()


def with_adapters(kind, dtype=torch.float32, **lora):
    lm = bind(small(kind, dtype), None, lora=LoraConfig(rank=4, alpha=8, **lora))
    torch.manual_seed(1)
    for name, parameter in lm.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return lm


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rslora", [False, True])
def test_merged_adapters_equal_unmerged_ones(tmp_path, kind, rslora):
    """Field case D006: the merge uses the adapter's own scale, alpha / r or alpha / sqrt(r)."""
    lm = with_adapters(kind)
    for layer in (m for m in lm.module.modules() if isinstance(m, LoraLayer)):
        if rslora:
            layer.update_layer("default", 4, 8, config=replace(lm.module.verl_lora, use_rslora=True))
            torch.nn.init.normal_(layer.lora_B.default.weight, std=0.1)
        assert layer.scaling["default"] == (8 / 4 ** 0.5 if rslora else 8 / 4)
    back = reloaded(export(lm, tmp_path / "out"))
    assert (logits(back) - stock_logits(lm)).abs().max() < 1e-3
    assert set(back.state_dict()) == set(small(kind).state_dict())
    assert (logits(back) - logits(small(kind))).abs().max() > 0.1


def test_a_merge_of_one_by_one_weights():
    """Field case D006: W 0, B A 1, alpha 8, r 4 gives 2."""
    lm = with_adapters("llama", target=".*q_proj")
    q = lm.module.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        q.base_layer.weight.zero_()
        q.lora_A.default.weight.fill_(0.5)
        q.lora_B.default.weight.fill_(0.5)
    assert merged_state(lm)["model.layers.0.self_attn.q_proj.weight"].eq(2.0).all()
    masters = {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones_like(q.lora_A.default.weight)}
    assert merged_state(lm, masters)["model.layers.0.self_attn.q_proj.weight"].eq(4.0).all()


@pytest.mark.parametrize("cycles", [1, 100])
def test_exports_leave_the_base_as_it_was(cycles):
    """Field case D011: bfloat16 does not come back from an in-place merge."""
    lm = with_adapters("llama", torch.bfloat16)
    before = digest(lm.module)
    for _ in range(cycles):
        merged = merged_state(lm)
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(merged[f"{name}.weight"], lm.module.get_submodule(name).base_layer.weight)
    assert digest(lm.module) == before


def test_adapters_where_they_do_not_fit():
    with pytest.raises(ModelError, match="lora.target 'nothing_here' fits no module"):
        bind(small("llama"), None, "m", lora=LoraConfig(rank=2, target="nothing_here"))
    with pytest.raises(ModelError, match="no linear layer"):
        bind(small("llama"), None, "m", lora=LoraConfig(rank=2, target=".*embed_tokens"))


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_remote_code_is_refused(directory, tmp_path):
    """Field case D067: nothing of the directory's code runs unless this very model was allowed to."""
    marker = tmp_path / "ran"
    (directory / "modeling_x.py").write_text(f"from transformers import LlamaConfig\nopen({str(marker)!r}, 'w').close()\n"
                                             "class XConfig(LlamaConfig):\n    model_type = 'x'\n")
    config = json.loads((directory / "config.json").read_text())
    config.update(auto_map={"AutoConfig": "modeling_x.XConfig"}, model_type="x")
    (directory / "config.json").write_text(json.dumps(config))
    for load in (load_lm, load_tokenizer, context_length):
        with pytest.raises(ModelError, match="trust_remote_code: true for this model"):
            load(directory)
    assert not marker.exists()
    assert context_length(directory, trust_remote_code=True) == 128 and marker.exists()


def test_a_tokenizers_remote_code_is_refused(directory, tmp_path):
    """Field case D067, in the tokenizer's config alone."""
    marker = tmp_path / "ran"
    (directory / "tok_x.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.update(auto_map={"AutoTokenizer": ["tok_x.X", None]}, tokenizer_class="X")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_tokenizer(directory)
    assert not marker.exists()


def test_directories_that_are_none(directory, tmp_path):
    with pytest.raises(ModelError, match="no config.json there .the path does not exist"):
        load_lm(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="is not a model directory: no config.json there$"):
        load_lm(tmp_path / "empty")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).unlink()
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_lm(directory)
    (directory / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load_lm(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config"):
        load_lm(directory)



def test_a_tokenizer_with_more_ids_than_rows(directory):
    made = load_tokenizer(directory)
    made.add_tokens([f"<new{i}>" for i in range(ROWS)])
    with pytest.raises(ModelError, match=f"tokenizer has {len(made)} ids but the model's output layer only {ROWS} rows"):
        load_lm(directory, tokenizer=made)
    assert load_lm(directory).head.rows == len(load_tokenizer(directory))


def test_a_gap_between_a_tokenizers_ids_hides_none_of_them():
    from tokenizers import Tokenizer, models
    gap = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert len(gap) == 2 and bind(small("llama"), gap).head.rows == 8


def test_an_unknown_dtype(directory):
    with pytest.raises(ModelError, match="dtype 'fp8' is not known; allowed: auto, float32"):
        load_lm(directory, "fp8")


# -- generation defaults -------------------------------------------------------------------------------------------------


def test_only_end_ids_are_read_from_generation_defaults(directory, tmp_path):
    """Several end ids, from the file and the tokenizer; a file that transformers would not write again is no obstacle."""
    (directory / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [7, 9], "do_sample": False, "temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.3}))
    lm = load_lm(directory)
    assert lm.stop_ids == (7, 9, lm.tokenizer.eos_token_id, 2)[:len(lm.stop_ids)] and lm.stop_ids[:2] == (7, 9)
    path = export(lm, tmp_path / "out")
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == list(lm.stop_ids)
    assert load_lm(path).stop_ids == lm.stop_ids
    assert lm.module.generation_config.temperature == 0.3


def test_actor_and_critic_share_a_trunk(directory, capsys):
    actor, critic = get_actor_critic_from_hf(str(directory), use_flash_attention_2=True, torch_dtype=torch.bfloat16, device="cpu")
    assert actor is critic and actor.value_head is not None and actor.dtype is torch.float32
    assert "float32 instead" in capsys.readouterr().out
