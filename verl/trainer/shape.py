"""Sizes and exact parameter counts of a model, from its config alone: the module is built without memory, no weight is read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from verl.engine.memory import blocks
from verl.models.load import _check_directory


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's widths, and its parameters by kind. Tied embeddings count once, as embedding."""

    hidden: int
    inner: int  # width of the gated product one token computes: of all experts it is routed to
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    embedding: int  # parameters
    blocks: int  # of all layers
    head: int  # of the output layer; 0 when it is tied, or there is none
    rest: int  # final norm, learned positions
    active: int  # of `blocks`, what one token uses
    adapter: int  # of LoRA adapters, for each rank

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks + self.head + self.rest

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        return self.blocks // self.layers

    @property
    def matrix(self) -> int:
        """Elements of the output layer's matrix, tied or not."""
        return self.vocabulary * self.hidden

    def lora(self, rank: int) -> int:
        """Parameters of adapters of this rank."""
        return self.adapter * rank

    def kv_bytes(self, width: int) -> int:
        """Bytes one cached token takes in all layers, its numbers `width` bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def read_shape(path: str | os.PathLike, trust_remote_code: bool = False, target: str = "all-linear",
               headless: bool = False) -> Shape:
    """The shape of a model directory; its config.json is all that is needed. `headless`: a reward model's trunk.

    Raises ModelError when there is none.
    """
    return shape_of(_check_directory(path, trust_remote_code), target, headless, trust_remote_code)


def shape_of(config: PreTrainedConfig, target: str = "all-linear", headless: bool = False,
             trust_remote_code: bool = False) -> Shape:
    """The shape a transformers config describes. `target`: the linear layers that adapters go on (see models.load.LoraConfig)."""
    family = AutoModel if headless else AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        module = family.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()

    def size(*names: str, default: int = 0) -> int:
        return int(next((value for name in names if (value := getattr(text, name, None))), default))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    stack = blocks(module)
    inside = [(name, p.numel()) for layer in stack for name, p in layer.named_parameters()]
    experts, used = size("num_local_experts", "num_experts", "n_routed_experts", default=1), size("num_experts_per_tok", default=1)
    routed = sum(n for name, n in inside if ".experts." in name)
    embedding, output = module.get_input_embeddings().weight, None if headless else module.get_output_embeddings()
    head = 0 if output is None or output.weight is embedding else sum(p.numel() for p in output.parameters())
    inner = size("intermediate_size", "ffn_dim", "d_ff", default=4 * hidden)
    head_dim = size("head_dim", default=hidden // heads)
    if (value_dim := size("v_head_dim")):  # latent attention: keys and values of different widths
        head_dim = (size("qk_nope_head_dim") + size("qk_rope_head_dim") + value_dim) // 2
    layers, total = sum(n for _, n in inside), sum(p.numel() for p in module.parameters())
    return Shape(
        hidden=hidden, inner=size("moe_intermediate_size", default=inner) * used if experts > 1 else inner,
        layers=len(stack), heads=heads, kv_heads=size("num_key_value_heads", default=heads), head_dim=head_dim,
        vocabulary=embedding.shape[0], context=size("max_position_embeddings", default=1 << 20), embedding=embedding.numel(),
        blocks=layers, head=head, rest=total - layers - embedding.numel() - head,
        active=layers - routed + routed * used // experts,
        adapter=sum(sum(m.weight.shape) for name, m in module.named_modules()
                    if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not output
                    and (target == "all-linear" or re.fullmatch(target, name))))
