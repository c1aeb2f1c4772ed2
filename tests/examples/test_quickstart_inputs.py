"""The quick start's prompts and rewards (its model needs a download and is made by `make quickstart`)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.config import load_config

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def _module(name: str):
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _operands(row) -> frozenset[int]:
    return frozenset(int(n) for n in row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" + "))


def test_prompts_are_disjoint_in_both_orders_and_answered_rightly():
    train, held_out = _module("prepare").prompts()
    assert not {_operands(r) for r in train} & {_operands(r) for r in held_out}
    assert len(train) + len(held_out) == 11 * 11
    for row in train + held_out:
        question = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
        assert int(row["answer"]) == sum(int(n) for n in question.split(" + "))


def test_prompts_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        _module("prepare").prepare_data(tmp_path / name)
    for file in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert all(json.loads(line)["answer"] for line in (tmp_path / "a" / file).read_text().split("\n")[:-1])


def test_rewards():
    reward = _module("reward")
    said = ["12", " 12\n", "12.", "The answer is 12", "13", ""]
    assert reward.exact(completions=said, answer=["12"] * 6, prompts=None) == [1, 1, 0, 0, 0, 0]
    assert reward.number(completions=said, prompts=None) == [1, 1, 0, 0, 1, 0]
    assert reward.exact(completions=[[{"role": "assistant", "content": "7"}]], answer=["7"]) == [1]


def test_config_loads_and_names_the_made_files():
    config = load_config(QUICKSTART / "config.yaml")
    assert [source.function for source in config.trainer.rewards] == [str(QUICKSTART / f"reward.py:{name}")
                                                                      for name in ("exact", "number")]
    assert config.data.train == str(QUICKSTART / "data" / "train.jsonl")


@pytest.mark.parametrize("content, says", [(None, "no such file"), (b"GGUF", "SHA-256")])
def test_prepare_refuses_a_missing_or_broken_model_file_and_leaves_nothing(tmp_path, content, says):
    gguf = tmp_path / "model.gguf"
    if content is not None:
        (tmp_path / "model.gguf.part0").write_bytes(content)
        (tmp_path / "model.gguf.part1").write_bytes(content)
    result = subprocess.run([sys.executable, QUICKSTART / "prepare.py", "--gguf", gguf, "--model", tmp_path / "model"],
                            capture_output=True, text=True)
    assert result.returncode == 1 and says in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "model").exists()
