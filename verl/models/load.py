"""Load, adapt and save model directories."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from verl.core.errors import ModelError
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
    config = _check_directory(path, trust_remote_code).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def load_lm(path: str | os.PathLike, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu",
            lora: LoraConfig | None = None, tokenizer=None, trust_remote_code: bool = False, strict_native: bool = False) -> LM:
    """Load a causal language model directory (or hub name when online) and prove its layouts.

    Dropout is left as the config says but the engines run in eval mode unless told otherwise. Raises ModelError for a
    missing directory, remote code that was not allowed, a tokenizer with more ids than the model has rows, or (with
    strict_native) an architecture whose packed and paged attention is not exact.
    """
    device = torch.device(device)
    config = _check_directory(path, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{str(path)!r} is an encoder-decoder ({config.model_type}); decoder-only models are supported")
    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=resolve_dtype(dtype, device), trust_remote_code=trust_remote_code,
                                                      attn_implementation="eager")
    except Exception as error:
        raise ModelError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    return bind(module.to(device), tokenizer or load_tokenizer(path, trust_remote_code), str(path), lora, strict_native)


def bind(module, tokenizer, path: str = "", lora: LoraConfig | None = None, strict_native: bool = False) -> LM:
    """Wrap a loaded transformers model (in place) as an LM: head, stop ids, adapters, proof."""
    config = module.config.get_text_config()
    rows = module.get_output_embeddings().weight.shape[0]
    used = len(tokenizer) if tokenizer is not None else rows
    if used > rows:
        raise ModelError(f"{path!r}: the tokenizer has {used} ids but the model's output layer only {rows} rows; "
                         "resize the embeddings and train the new rows first")
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = HeadSpec(rows=used, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    lm = LM(module=module, tokenizer=tokenizer, path=path, head=head, stop_ids=stop_ids(module, tokenizer))
    prove(lm)
    if strict_native and not lm.native:
        raise ModelError(f"{config.model_type} ({path!r}) is refused: {lm.why_not}; use trainer.rollout: hf")
    if lora is not None and lora.rank > 0:
        add_lora(lm, lora)
    module.eval()
    return lm


def add_lora(lm: LM, lora: LoraConfig) -> None:
    """Inject adapters in place (B starts at zero, so the policy starts unchanged) and freeze everything else."""
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model
    target = lora.target
    if target == "all-linear":
        head = lm.module.get_output_embeddings()
        target = [n for n, m in lm.module.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
        target = sorted({n.rsplit(".", 1)[-1] for n in target}) or "all-linear"
    peft_config = PeftLora(r=lora.rank, lora_alpha=lora.alpha, target_modules=target, task_type="CAUSAL_LM")
    inject_adapter_in_model(peft_config, lm.module)
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
    if looks_local and not trust_remote_code and "auto_map" in json.loads((Path(text) / "config.json").read_text()):
        raise ModelError(f"{text!r} carries its own Python code (auto_map); set trust_remote_code: true for this model to run it")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"cannot read a model config from {text!r}: {error}") from error


def export(lm: LM, directory: str | os.PathLike, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Save a model directory that transformers loads to identical logits; adapters are merged into a copy.

    `tensors` (name -> tensor) replaces the module's own values, e.g. an optimizer's float32 masters.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = merged_state(lm, tensors)
    config, module = lm.module.config, lm.module
    saved, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        module.save_pretrained(directory, state_dict=state)
    finally:
        config._attn_implementation = saved
    if lm.tokenizer is not None:
        lm.tokenizer.save_pretrained(directory)
    if lm.stop_ids and not (directory / "generation_config.json").is_file():
        GenerationConfig(eos_token_id=list(lm.stop_ids)).save_pretrained(directory)
    return directory


@torch.no_grad()
def merged_state(lm: LM, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The plain transformers state dict: adapters merged into copies, names as in the original checkpoint."""
    from peft.tuners.lora import LoraLayer
    own = dict(lm.module.state_dict(keep_vars=False))
    if tensors:
        own.update({n: t for n, t in tensors.items() if n in own})
    layers = {n: m for n, m in lm.module.named_modules() if isinstance(m, LoraLayer)}
    if not layers:
        return own
    out = {}
    for name, tensor in own.items():
        if "lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if ".base_layer.weight" in name:
            layer = layers[name.split(".base_layer.")[0]]
            tensor = (tensor.float() + layer.get_delta_weight("default").float()).to(tensor.dtype)
        out[plain] = tensor
    return out


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
