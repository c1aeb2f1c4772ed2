"""torch.compile of decoder layers, one callable for training and another for decoding (engine/native/graphs.py)."""

from __future__ import annotations

import torch

from verl.models.lm import LM


def decoder_layers(lm: LM) -> list[torch.nn.Module]:
    """The module around each attention module, in order."""
    attention = {id(layer.module) for layer in lm.layers}
    return [m for m in lm.module.modules() if any(id(child) in attention for child in m.children())]


def compile_for_training(lm: LM) -> None:
    """Compile each layer's forward for any number of tokens; attention itself stays outside the compiled parts.

    Fuses norms, rotary embedding and gated activations; compilation happens at the first forward (cached on disk by
    torch between runs). Layers of one shape share their code.
    """
    torch._dynamo.config.recompile_limit = 64  # layers of several kinds, train and eval, with and without gradient
    for layer in decoder_layers(lm):
        layer._compiled_call_impl = torch.compile(layer._call_impl, dynamic=True)
