"""LM: a transformers causal language model with one root forward. Nothing else touches its output layer."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from verl.models import routing
from verl.models.attention import AttentionMeta
from verl.models.head import HeadSpec, shape_logits, token_logprobs
from verl.models.packed import Packed


@dataclass(slots=True)
class Outputs:
    """Float32 columns over the packed batch's T targets; None when not asked for."""

    logprobs_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None
    values_T: torch.Tensor | None = None
    scores_S: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores for a token; `module` is the layer that owns its pool."""

    module: nn.Module
    heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(slots=True, eq=False)
class LM:
    """The working weights and how to read them. `module` is the plain transformers model: no wrapper renames anything."""

    module: nn.Module  # ...ForCausalLM
    tokenizer: object
    path: str
    head: HeadSpec
    native: bool = False  # True once prove.py has shown packed and paged attention exact for this architecture
    why_not: str = ""  # the reason when it is not
    layers: list[LayerKV] = field(default_factory=list)
    value_head: nn.Linear | None = None  # float32, on the last hidden state
    score_head: nn.Linear | None = None  # the same for a reward model; no bias, as in transformers' sequence classifiers
    stop_ids: tuple[int, ...] = ()
    mixture: bool = False  # of experts: its routers obey routing.py
    replays: bool = False  # a policy whose training chooses the experts that sampled

    @property
    def config(self):
        return self.module.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.module.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.get_input_embeddings().weight.dtype

    @property
    def context(self) -> int:
        """Longest sequence the positions allow."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    def copy(self) -> LM:
        """The same model with weights of its own, without the heads of training."""
        module = copy.deepcopy(self.module)
        names = {m: name for name, m in self.module.named_modules()}
        layers = [replace(layer, module=module.get_submodule(names[layer.module])) for layer in self.layers]
        return replace(self, module=module, layers=layers, value_head=None, score_head=None, replays=False)

    def hidden(self, ids_N: torch.Tensor, positions_N: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Last hidden states [N, D] of N tokens in any layout `meta` understands."""
        out = self.module.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False, verl_meta=meta)
        return out.last_hidden_state[0]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V] at temperature 1; rows without a token are -inf. For samplers: N is small there."""
        weight, bias = self.output_layer
        return shape_logits(nn.functional.linear(hidden_ND, weight, bias), self.head)

    @property
    def output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self.module.get_output_embeddings()
        return layer.weight, getattr(layer, "bias", None)

    def forward(self, packed: Packed, temperature: float, logprobs: bool = True, values: bool = False,
                scores: bool = False) -> Outputs:
        """The root forward: log-probs (nats, at `temperature`), entropies and values of the T targets of a batch.

        values_T[t] is the value of the state *before* target t was chosen. scores_S is the score head's output on the
        last token of each sequence (a batch packed with keep_last); nothing else is computed then.
        """
        hidden_ND = self._states(packed)
        out = Outputs()
        if scores:
            if self.score_head is None:
                raise ValueError("scores were asked of a model without a score head; add_score_head() first")
            out.scores_S = _read(self.score_head, hidden_ND[packed.last_S])
            return out
        hidden_TD = hidden_ND[packed.source_T]
        if logprobs:
            weight, bias = self.output_layer
            out.logprobs_T, out.entropy_T = token_logprobs(hidden_TD, weight, bias, packed.targets_T, self.head, temperature)
        if values:
            if self.value_head is None:
                raise ValueError("values were asked of a model without a value head; add_value_head() first")
            out.values_T = _read(self.value_head, hidden_TD)
        return out

    def _states(self, packed: Packed) -> torch.Tensor:
        if self.mixture:
            routing.replay(self.module, packed.experts_NLK if self.replays else None)
        if self.native:
            return self.hidden(packed.ids_N, packed.positions_N, packed)
        if self.module.config.is_encoder_decoder:
            from verl.models import seq2seq
            return seq2seq.hidden(self, packed)
        return self._unpacked(packed)

    def _unpacked(self, packed: Packed) -> torch.Tensor:
        """Hidden states [N, D] for an architecture that cannot be packed: each sequence alone, behind its own prompt."""
        places, pieces, seen = [], [], set()
        for s in np.argsort(-packed.lengths, kind="stable"):  # sequences without own tokens last: mostly nothing to add
            parent, index = int(packed.parent[s]), packed.key_range(s)
            skip = int(packed.before[s]) if parent in seen else 0  # a shared prompt's states are taken from one sequence
            if parent < 0 or skip == len(index):
                continue
            seen.add(parent)
            place = torch.from_numpy(index).to(self.device)
            if self.replays and packed.experts_NLK is not None:
                routing.replay(self.module, packed.experts_NLK[place])
            hidden = self.module.base_model(input_ids=packed.ids_N[place][None], use_cache=False).last_hidden_state[0]
            places.append(place[skip:])
            pieces.append(hidden[skip:])
        out = pieces[0].new_zeros(len(packed), pieces[0].shape[1])
        return out.index_copy(0, torch.cat(places), torch.cat(pieces))

    def add_value_head(self, seed: int = 0) -> nn.Linear:
        """A linear head on the trunk (float32, or wider like the trunk), zero bias, small seeded weights: values start near 0."""
        self.value_head = self._fresh_head(seed, bias=True)
        return self.value_head

    def add_score_head(self, seed: int = 0) -> nn.Linear:
        """The same without a bias, which a comparison of two scores could not learn."""
        self.score_head = self._fresh_head(seed, bias=False)
        return self.score_head

    def _fresh_head(self, seed: int, bias: bool) -> nn.Linear:
        width = self.module.get_output_embeddings().weight.shape[1]
        generator = torch.Generator().manual_seed(seed)
        head = nn.Linear(width, 1, bias, dtype=torch.promote_types(self.dtype, torch.float32))
        with torch.no_grad():
            head.weight.copy_(torch.randn(1, width, generator=generator) / width / 10)
            if bias:
                head.bias.zero_()
        return head.to(self.device)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters of trunk and heads, tied ones once, in a stable order."""
        named = list(self.module.named_parameters())
        for name, head in (("value_head", self.value_head), ("score_head", self.score_head)):
            named += [(f"{name}.{n}", p) for n, p in head.named_parameters()] if head is not None else []
        return named

    @contextmanager
    def adapters_off(self):
        """The model without its LoRA adapters: the starting policy, at no memory. Raises when there are none."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        layers = [m for m in self.module.modules() if isinstance(m, BaseTunerLayer)]
        if not layers:
            raise ValueError("the model carries no adapters; its starting weights are not recoverable from it")
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield self
        finally:
            for layer in layers:
                layer.enable_adapters(True)


def _read(head: nn.Linear, hidden_ND: torch.Tensor) -> torch.Tensor:
    """A head's output [N], in its own precision."""
    return head(hidden_ND.to(head.weight.dtype)).squeeze(-1)
