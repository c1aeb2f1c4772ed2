"""What holds of MegatronEngine whether Megatron-Core is installed or not."""

import subprocess
import sys

import pytest
import torch

from tests.engine.tiny import model_dir
from tests.flow.layouts import empty_arrays, filled, stored
from verl.core.errors import ConfigError, ModelError
from verl.engine import BaseEngine, MegatronEngine
from verl.engine.megatron import outline
from verl.engine.megatron_layout import HEAD, Place, directory, megatron_layout
from verl.engine.train import TrainEngine
from verl.flow.layout import Box, table_of
from verl.models import load_lm


def test_the_name_resolves_without_the_package_and_imports_none_of_it():
    code = ("import sys, verl.engine; before = 'verl.engine.train' in sys.modules; from verl.engine import MegatronEngine; "
            "print(before, [m for m in sys.modules if m.split('.')[0] == 'megatron'])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False []"
    assert issubclass(MegatronEngine, TrainEngine) and issubclass(MegatronEngine, BaseEngine)
    with pytest.raises(ImportError, match="NoEngine"):
        from verl.engine import NoEngine  # noqa: F401


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "megatron", None)  # Python's own way to make an import fail
    with pytest.raises(ConfigError, match=r"pip install 'verl\[megatron\]', or leave model.actor.megatron out"):
        MegatronEngine(outline(model_dir(tmp_path / "model")), sizes={"tensor": 2, "pipeline": 2})


def grid(tensor, data, pipeline):
    """Megatron's order of ranks: tensor fastest, pipeline slowest."""
    return [Place(t, d, p) for p in range(pipeline) for d in range(data) for t in range(tensor)]


def test_fused_arrays_lie_as_megatron_reads_them():
    """Against reshapes written out: linear_qkv has [KV heads, queries + key + value, head] rows, linear_fc1 gate, then up."""
    heads, groups, size, hidden, inner, rows = 8, 4, 6, 10, 12, 9
    layer = {"self_attn.q_proj": heads * size, "self_attn.k_proj": groups * size, "self_attn.v_proj": groups * size,
             "mlp.gate_proj": inner, "mlp.up_proj": inner}
    shapes = {f"model.layers.{i}.{n}.weight": (r, hidden) for i in range(2) for n, r in layer.items()}
    shapes |= {f"model.layers.{i}.self_attn.{n}_proj.bias": (layer[f"self_attn.{n}_proj"],) for i in range(2) for n in "qkv"}
    shapes |= {f"model.layers.{i}.self_attn.o_proj.weight": (hidden, heads * size) for i in range(2)}
    shapes |= {f"model.layers.{i}.mlp.down_proj.weight": (hidden, inner) for i in range(2)}
    shapes |= {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    table = table_of((n, torch.empty(s)) for n, s in shapes.items())
    full, places = filled(table, 0), grid(2, 2, 2)
    layout = megatron_layout(table, heads, groups, 2, places, range(8))
    assert HEAD not in table
    for rank, place in enumerate(places):
        got, base = stored(layout, rank, full), f"model.layers.{place.pipeline}"
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            q, k, v = (full[f"{base}.self_attn.{n}_proj.{kind}"].view(groups, -1, size, *tail) for n in "qkv")
            fused = torch.cat([q, k, v], 1).reshape(2, -1, *tail)[place.tensor]
            assert torch.equal(bits(got.pop(f"{base}.self_attn.linear_qkv.{kind}")), bits(fused))
        gate, up = (full[f"{base}.mlp.{n}_proj.weight"].view(2, -1, hidden)[place.tensor] for n in ("gate", "up"))
        assert torch.equal(bits(got.pop(f"{base}.mlp.linear_fc1.weight")), bits(torch.cat([gate, up])))
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            cut = full[f"{base}.{name}.weight"].view(hidden, 2, -1)[:, place.tensor]
            assert torch.equal(bits(got.pop(f"{base}.{name}.weight")), bits(cut))
        embedding = full["model.embed_tokens.weight"][place.tensor * 5:][:5]  # tied: both stages; 9 rows are 5 and 4
        assert torch.equal(bits(got.pop("model.embed_tokens.weight")), bits(embedding))
        assert got.keys() == ({"model.norm.weight"} if place.pipeline else set())


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def test_a_directory_is_read_box_by_box(tmp_path):
    lm = load_lm(model_dir(tmp_path / "model"))
    lm.module.save_pretrained(tmp_path / "sharded", max_shard_size="100kB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for folder in ("model", "sharded"):
        with directory(tmp_path / folder) as source:
            for name, p in lm.module.named_parameters():
                box = Box.of(p.shape).with_axis(0, 1, p.shape[0] - 1)
                assert torch.equal(source(name, box), p.detach()[1:-1])
            with pytest.raises(ModelError, match="model.extra cannot be read"):
                source("model.extra", Box((0,), (1,)))
    with pytest.raises(ModelError, match="holds no model.safetensors"), directory(tmp_path):
        pass


def test_an_outline_is_the_model_without_its_tensors(tmp_path):
    path = model_dir(tmp_path / "model", tie_word_embeddings=True)
    lm, want = outline(path), load_lm(path)
    assert lm.device == want.device and lm.dtype == want.dtype and lm.head == want.head and lm.stop_ids == want.stop_ids
    assert {n: p.shape for n, p in lm.module.named_parameters()} == {n: p.shape for n, p in want.module.named_parameters()}
    assert all(p.is_meta for p in lm.module.parameters()) and lm.context == want.context
    layout = megatron_layout(table_of(lm.module.named_parameters()), 2, 1, 2, grid(1, 1, 2), range(2))
    assert sum(a.numel() for r in (0, 1) for a in empty_arrays(layout, r).values()) > sum(
        p.numel() for p in want.module.parameters())  # the tied embedding is on both stages
