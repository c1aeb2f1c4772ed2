"""Load, adapt and save model directories."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from verl.core.errors import ModelError
from verl.models import routing, seq2seq
from verl.models.head import HeadSpec
from verl.models.lm import LM
from verl.models.prove import prove

logging.disable_progress_bar()  # a bar for each load drowns the run's own progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) through peft; rank 0 means full fine-tuning."""

    rank: int = field(default=0, metadata={"help": "rank of the adapters; 0 trains all weights"})
    alpha: float = field(default=16.0, metadata={"help": "the adapter's output is scaled by alpha / rank"})
    target: str = field(default="all-linear", metadata={"help": "'all-linear', or a regular expression over module names"})


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on a GPU and float32 on a CPU (bf16 there is 7-40 times slower)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load_tokenizer(path: str | os.PathLike, trust_remote_code: bool = False):
    """The model directory's own tokenizer. Raises ModelError naming the directory when there is none."""
    _check_directory(path, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"no usable tokenizer in {str(path)!r}: {error}") from error


def context_length(path: str | os.PathLike, trust_remote_code: bool = False) -> int:
    """Longest sequence the model's positions allow, read from its config alone."""
    config = _check_decoder(path, trust_remote_code).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def load_lm(path: str | os.PathLike, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu",
            lora: LoraConfig | None = None, tokenizer=None, trust_remote_code: bool = False, strict_native: bool = False) -> LM:
    """Load a causal language model directory (or hub name when online) and prove its layouts.

    The module stays in eval mode: dropout in the config has no effect. Raises ModelError for a missing directory or
    tensor, remote code that was not allowed, a tokenizer with more ids than the model has rows, or (with strict_native)
    an architecture whose packed and paged attention is not exact.
    """
    device = torch.device(device)
    config = _check_decoder(path, trust_remote_code)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        module, found = family.from_pretrained(
            path, dtype=resolve_dtype(dtype, device), trust_remote_code=trust_remote_code, attn_implementation="eager",
            output_loading_info=True)
    except Exception as error:
        raise ModelError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{str(path)!r} lacks {len(missing)} tensors of {config.model_type}, the first is {missing[0]}; they "
                         "would have random values. Was it saved by another kind of model, or with tied embeddings?")
    return bind(module.to(device), tokenizer or load_tokenizer(path, trust_remote_code), str(path), lora, strict_native)


def bind(module, tokenizer, path: str = "", lora: LoraConfig | None = None, strict_native: bool = False) -> LM:
    """Wrap a loaded transformers model (in place) as an LM: head, stop ids, adapters, proof."""
    config = module.config.get_text_config()
    used = token_rows(tokenizer, module.get_output_embeddings().weight.shape[0], path)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = HeadSpec(rows=used, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    lm = LM(module=module, tokenizer=tokenizer, path=path, head=head, stop_ids=stop_ids(module, tokenizer))
    lm.mixture = routing.prepare(module)
    if module.config.is_encoder_decoder:
        seq2seq.prove(lm)
    else:
        prove(lm)
    if strict_native and not lm.native:
        raise ModelError(f"{config.model_type} ({path!r}) is refused: {lm.why_not}; use trainer.rollout.engine: hf")
    if lora is not None and lora.rank > 0:
        add_lora(lm, lora)
    module.eval()
    return lm


def token_rows(tokenizer, rows: int, path: str = "") -> int:
    """Rows of an output layer that stand for a token. Raises ModelError when the tokenizer has more ids than there are rows."""
    if tokenizer is None:
        return rows
    used = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # a tokenizer may leave gaps between its ids
    if used > rows:
        raise ModelError(f"{path!r}: the tokenizer has {used} ids but the model's output layer only {rows} rows; "
                         "resize the embeddings and train the new rows first")
    return used


def add_lora(lm: LM, lora: LoraConfig) -> None:
    """Inject adapters in place (B starts at zero, so the policy starts unchanged) and freeze everything else.

    "all-linear" is every linear layer but the output layer; routers and stacked experts are no linear layers. Raises
    ModelError for a target that fits nothing, or something that is no linear layer.
    """
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer
    linear = {n: m for n, m in lm.module.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D))}
    target = [n for n, m in linear.items() if m is not lm.module.get_output_embeddings()]
    peft_config = PeftLora(r=lora.rank, lora_alpha=lora.alpha,
                           target_modules=target if lora.target == "all-linear" else lora.target,
                           fan_in_fan_out=any(isinstance(m, Conv1D) for m in linear.values()), task_type="CAUSAL_LM")
    try:
        inject_adapter_in_model(peft_config, lm.module)
    except ValueError as error:
        raise ModelError(f"lora.target {lora.target!r} fits no module of {lm.path!r}: {error}") from error
    for name, layer in lm.module.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(layer, Linear):
            raise ModelError(f"lora.target {lora.target!r} fits {name}, which is no linear layer; adapters go on linear layers")
    lm.module.verl_lora = peft_config
    for name, parameter in lm.module.named_parameters():
        parameter.requires_grad_("lora_" in name)


def stop_ids(module, tokenizer) -> tuple[int, ...]:
    """Every id that ends a response: generation_config's and the tokenizer's. The only thing read from that file."""
    found: list[int] = []
    for source in (getattr(module, "generation_config", None), tokenizer, module.config):
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(int(i) for i in found))


def _check_directory(path: str | os.PathLike, trust_remote_code: bool):
    """The config of a model directory; refuses remote code unless allowed."""
    text = str(path)
    looks_local = text.startswith((".", "/", "~")) or Path(text).exists()
    if looks_local and not (Path(text) / "config.json").is_file():
        raise ModelError(f"{text!r} is not a model directory: no config.json there"
                         + ("" if Path(text).exists() else " (the path does not exist)"))
    try:
        own_code = looks_local and "auto_map" in json.loads((Path(text) / "config.json").read_text("utf-8"))
        if own_code and not trust_remote_code:
            raise ModelError(f"{text!r} carries its own Python code (auto_map); set trust_remote_code: true for this model "
                             "to run it")
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot read a model config from {text!r}: {error}") from error


def _check_decoder(path: str | os.PathLike, trust_remote_code: bool):
    """The config of a model that writes text; refuses the others by name."""
    config = _check_directory(path, trust_remote_code)
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if masked and not any("Causal" in str(a) or "LMHead" in str(a) for a in config.architectures or ()):
        raise ModelError(f"{str(path)!r} is an encoder ({config.model_type}); it can judge as a reward model; only decoders "
                         "are trained")
    return config


def export(lm: LM, directory: str | os.PathLike, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Save a model directory that transformers loads to identical logits; adapters are merged into a copy.

    `tensors` (name -> tensor) replaces the module's own values, e.g. an optimizer's float32 masters.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state, module = merged_state(lm, tensors), lm.module
    embedding = next(n for n, p in module.named_parameters() if p is module.get_input_embeddings().weight)
    dtype = state[embedding].dtype  # float32 masters may be written for a bfloat16 module; saving empties `state`
    own, module.generation_config = module.generation_config, _writable(module.generation_config, lm.stop_ids)
    try:
        module.save_pretrained(directory, state_dict=state)
    finally:
        module.generation_config = own
    _write_config(directory / "config.json", module, dtype)
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(directory)
    return directory


def _writable(own: GenerationConfig, stop_ids: tuple[int, ...]) -> GenerationConfig:
    """The checkpoint's generation defaults, or only its end ids: transformers reads files that it refuses to write."""
    try:
        own.validate(strict=True)
        return own
    except ValueError:
        return GenerationConfig(eos_token_id=list(stop_ids) or None, bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id)


def _write_config(path: Path, module, dtype: torch.dtype) -> None:
    """Say in config.json what was written: the tensors' own dtype, and whether the embeddings are really tied."""
    written = json.loads(path.read_text("utf-8"))
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["tie_word_embeddings"] = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", "utf-8")


@torch.no_grad()
def merged_state(lm: LM, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The plain transformers state dict: adapters merged into copies, names as in the original checkpoint, a tied tensor
    once; a head's tensors are no part of it. Raises KeyError for any other name that the module does not have."""
    tied = {n for n, _ in lm.module.named_parameters(remove_duplicate=False)} - {n for n, _ in lm.module.named_parameters()}
    own = {n: t for n, t in lm.module.state_dict().items() if n not in tied}
    for name, tensor in (tensors or {}).items():
        if name.startswith(("value_head.", "score_head.")):
            continue
        if name not in own:
            raise KeyError(f"{name} is no tensor of {lm.path!r}")
        own[name] = tensor.to(own[name].device)
    return {n.replace(".base_layer.", "."): _merged(lm, n, own) for n in own if "lora_" not in n}


def _merged(lm: LM, name: str, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """W + scaling * B A in float32 or wider, back in W's dtype: a copy, since low precision does not come back from a merge."""
    weight, layer = own[name], name.removesuffix(".base_layer.weight")
    if layer == name:
        return weight
    module, wide = lm.module.get_submodule(layer), torch.promote_types(weight.dtype, torch.float32)
    a, b = (own[f"{layer}.lora_{x}.default.weight"].to(wide) for x in "AB")
    delta = (b @ a) * module.scaling["default"]  # alpha / r, or alpha / sqrt(r) when the adapter says so
    return (weight.to(wide) + (delta.T if module.fan_in_fan_out else delta)).to(weight.dtype)


def get_actor_critic_from_hf(model_name: str, use_flash_attention_2: bool = False, torch_dtype: torch.dtype | str = "auto",
                             device: str | torch.device | None = None) -> tuple[LM, LM]:
    """Actor and critic of a model directory: the critic is a value head on the actor's trunk (the same LM object).

    `use_flash_attention_2` asks for a fused attention; verl's packed attention is fused on a GPU anyway and exact
    without it on a CPU, so the flag changes no result. On a CPU, half precision falls back to float32 with a line.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and torch_dtype in (torch.bfloat16, torch.float16, "bfloat16", "float16"):
        print(f"verl: {torch_dtype} is slow on a CPU; using float32 instead")
        torch_dtype = torch.float32
    if use_flash_attention_2 and device.type == "cpu":
        print("verl: flash attention needs a GPU; using the exact CPU attention instead")
    actor = load_lm(model_name, torch_dtype, device)
    actor.add_value_head()
    return actor, actor
