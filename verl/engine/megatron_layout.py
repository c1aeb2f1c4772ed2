"""Where Megatron-Core keeps each tensor of a Hugging Face model: one description for loading, saving and sending weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open

from verl.core.errors import ModelError
from verl.flow.layout import Box, Layout, Piece, Split, Table, fsdp, merge, only, tensor_parallel

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Megatron's name -> the array's name in a layout: its tensor's own, or the name that fused members share
_OUTSIDE = {"embedding.word_embeddings.weight": EMBEDDING, "decoder.final_layernorm.weight": NORM, "output_layer.weight": HEAD}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": "self_attn.linear_qkv.weight",
    "self_attention.linear_qkv.bias": "self_attn.linear_qkv.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}

Source = Callable[[str, Box], torch.Tensor]  # (tensor, box) -> the box's content


class Place(NamedTuple):
    """A rank's coordinates in the grid."""

    tensor: int
    data: int
    pipeline: int


def rules(heads: int, kv_heads: int) -> tuple[Split, ...]:
    """How a layer's tensors lie on tensor-parallel ranks.

    linear_qkv holds, for each key-value head, its queries, its key and its value; linear_fc1 the gate's rows and then the
    up projection's. Norms are on every rank.
    """
    return (*(Split(f"*.{n}_proj.*", 0, kv_heads, (f"{n}_proj", "linear_qkv"), interleaved=True) for n in "qkv"),
            Split("*.o_proj.weight", 1, heads),
            *(Split(f"*.{n}_proj.weight", 0, None, (f"{n}_proj", "linear_fc1")) for n in ("gate", "up")),
            Split("*.down_proj.weight", 1))


def megatron_layout(table: Table, heads: int, kv_heads: int, layers: int, places: Sequence[Place],
                    ranks: Sequence[int]) -> Layout:
    """The layout of all ranks, in the coordinates of the model directory's tensors; rank `ranks[i]` is at `places[i]`.

    Embedding and output layer are cut into equal rows, the last rank's padded. Tied and in a pipeline, the embedding is on the
    first and the last stage.
    """
    stages = 1 + max(p.pipeline for p in places)
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, rank in zip(places, ranks):
        groups.setdefault((place.pipeline, place.data), []).append((place.tensor, rank))
    parts = []
    for (stage, _), members in groups.items():
        own = [f"model.layers.{i}.*" for i in range(layers * stage // stages, layers * (stage + 1) // stages)]
        rows = [EMBEDDING] if stage == 0 or (stage == stages - 1 and HEAD not in table) else []
        if stage == stages - 1:
            own, rows = [*own, NORM], [*rows, HEAD]
        row = [rank for _, rank in sorted(members)]
        parts += [tensor_parallel(only(table, *own), rules(heads, kv_heads), row), fsdp(only(table, *rows), row)]
    return merge(*parts)


def array_name(megatron: str, first_layer: int, tied: bool) -> str:
    """The layout's name for a stage's parameter. Raises ModelError for one that no tensor of a model directory fills."""
    inside = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", megatron)
    name = _IN_LAYER.get(inside[2]) if inside else _OUTSIDE.get(megatron)
    if name is None:
        raise ModelError(f"Megatron-Core's parameter {megatron} has no counterpart in a Hugging Face model directory")
    if inside:
        return f"model.layers.{first_layer + int(inside[1])}.{name}"
    return EMBEDDING if name == HEAD and tied else name


class Shards:
    """One rank's arrays between the whole tensors of the model and what it stores of them.

    Arrays of one layout are any that lie like the parameters: working weights, masters, moments.
    """

    def __init__(self, layout: Layout, rank: int, group: dist.ProcessGroup, device: torch.device):
        self.layout, self.rank, self.group, self.device = layout, rank, group, device
        self.pieces: tuple[Piece, ...] = layout.pieces[rank]
        before = {(p.tensor, p.box) for lower in range(rank) for p in layout.pieces[lower]}
        self._sole: dict[str, list[Piece]] = {}  # what only this rank, or the first of several, brings
        for p in self.pieces:
            if (p.tensor, p.box) not in before:
                self._sole.setdefault(p.tensor, []).append(p)

    def fill(self, arrays: Mapping[str, torch.Tensor], source: Source) -> None:
        """Copy this rank's part of the model into its arrays."""
        for p in self.pieces:
            p.view(arrays, p.box).copy_(source(p.tensor, p.box))

    def whole(self, arrays: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, put together on every rank one by one; all ranks iterate."""
        for name, spec in self.layout.table.items():
            out = torch.zeros(spec.shape, dtype=dtype, device=self.device)
            for p in self._sole.get(name, ()):
                out[_slices(p.box)] = p.view(arrays, p.box)
            dist.all_reduce(out.view(-1).view(torch.uint8), group=self.group)  # zeros elsewhere: the bits themselves
            yield name, out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop))


def held(tensors: Iterable[tuple[str, torch.Tensor]]) -> Source:
    """Tensors in memory as a source."""
    named = dict(tensors)
    return lambda name, box: named[name][_slices(box)]


@contextmanager
def directory(path: str | Path) -> Iterator[Source]:
    """A model directory's safetensors files as a source: a rank reads its own boxes and nothing else. Raises ModelError."""
    path = Path(path)
    index = path / "model.safetensors.index.json"
    files = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
    if not files and not (path / "model.safetensors").is_file():
        raise ModelError(f"{str(path)!r} holds no model.safetensors; save the model with save_pretrained of transformers 5")
    with ExitStack() as stack:
        opened: dict[str, object] = {}

        def read(name: str, box: Box) -> torch.Tensor:
            file = files.get(name, "model.safetensors")
            try:
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(path / file, framework="pt"))
                return opened[file].get_slice(name)[_slices(box)]
            except Exception as error:
                raise ModelError(f"{str(path)!r}: {name} cannot be read from {file}: {error}") from error

        yield read
