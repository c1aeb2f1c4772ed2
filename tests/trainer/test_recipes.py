"""The recipes as a user would run them, on tiny models: their own text, other sizes."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_objects import EXAMPLES
from tiny_runs import curve, tiny_model, verl, workspace, write_jsonl
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from verl.data import RLDataLoader, as_tasks
from verl.models import load_lm
from verl.models.reward_model import RewardModel
from verl.rewards.function import load_function
from verl.trainer import RLTrainer
from verl.trainer.config import load_run
from verl.trainer.sampler import from_record, to_record

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ["trainer.rollout_batch_size=8", "trainer.optim.lr=3e-3", "trainer.report_to=[]"]


@pytest.fixture
def model(tmp_path):
    return str(tiny_model(tmp_path / "base"))


def run(monkeypatch, folder: Path, script: str, *args: object) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
    runpy.run_path(str(EXAMPLES / script))


def ultrafeedback(n: int) -> list[dict]:
    """Rows in the shape of UltraFeedback: `prompt` as text, both sides as whole conversations, scores, an id."""
    rows = []
    for i in range(n):
        user = {"role": "user", "content": f"{i}+1="}
        answers = {"chosen": str(i + 1), "rejected": "no idea"}
        sides = {side: [user, {"role": "assistant", "content": text}] for side, text in answers.items()}
        rows.append({"prompt": user["content"], "prompt_id": f"{i:08x}", **sides, "messages": sides["chosen"], "score_chosen": 8.5,
                     "score_rejected": 3.0})
    return rows


def openassistant(n: int) -> list[dict]:
    """Message rows in the shape of OpenAssistant: trees by parent_id, ranked replies, a second turn, a reply without rank."""
    rows = []
    for i in range(n):
        rows += [{"message_id": f"q{i}", "parent_id": None, "text": f"{i}+1=", "role": "prompter", "lang": "en", "rank": None},
                 *({"message_id": f"a{i}{r}", "parent_id": f"q{i}", "text": t, "role": "assistant", "lang": "en", "rank": r}
                   for r, t in ((1, "maybe"), (0, str(i + 1)), (2, "no idea")))]
    rows += [{"message_id": "f", "parent_id": "a00", "text": "sure?", "role": "prompter", "rank": None},
             {"message_id": "g0", "parent_id": "f", "text": "yes", "role": "assistant", "rank": 0},
             {"message_id": "g1", "parent_id": "f", "text": "no", "role": "assistant", "rank": 1}]
    return [*rows, {"message_id": "x", "parent_id": "q1", "text": "spam", "role": "assistant", "rank": None}]


def test_sft_then_reward_model_then_ppo_on_one_file_of_preferences(tmp_path, model, monkeypatch, capsys):
    pairs = write_jsonl(tmp_path / "pairs.jsonl", ultrafeedback(48))
    args = [*SMALL, "trainer.sampling.max_tokens=6", "data.eval_size=8", "trainer.steps=5"]
    run(monkeypatch, tmp_path, "sft_rm_ppo.py", model, pairs, "out", *args)
    out = capsys.readouterr().out
    for line in ("sft learns offline from 40 preference rows", "reward_model learns offline from 40", "ppo samples answers to 40"):
        assert line in out
    nll = curve(tmp_path / "out" / "sft", "eval_nll")
    assert nll[-1][1] < nll[0][1]
    assert curve(tmp_path / "out" / "reward_model", "eval_rewards/accuracies")[-1][1] == 1.0
    reward = [v for _, v in curve(tmp_path / "out" / "ppo")]
    assert len(reward) == 5 and np.isfinite(reward).all() and curve(tmp_path / "out" / "ppo", "rewards/model/mean")
    assert load_lm(tmp_path / "out" / "ppo" / "model").native
    run(monkeypatch, tmp_path, "sft_rm_ppo.py", model, pairs, "out", *args)  # finished stages are not trained again
    assert len(curve(tmp_path / "out" / "ppo")) == 5


def test_openassistant_trees_become_pairs(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "messages.jsonl", openassistant(3))
    run(monkeypatch, tmp_path, "openassistant_pairs.py", source, "pairs.jsonl")
    tasks = as_tasks(str(tmp_path / "pairs.jsonl"))
    answers = [(t.chosen[0]["content"], t.rejected[0]["content"]) for t in tasks]
    assert answers == [("1", "no idea"), ("2", "no idea"), ("3", "no idea"), ("yes", "no")]
    assert [m["content"] for m in tasks[3].prompt] == ["0+1=", "1", "sure?"]


def test_ppo_reward_model_and_grpo_in_fifty_lines(tmp_path, model, monkeypatch):
    text = (EXAMPLES / "mixture.py").read_text()
    assert len(text.splitlines()) <= 50
    lm = load_lm(model)
    lm.add_score_head()
    from verl.trainer.reward_training import export_reward_model
    judge = export_reward_model(lm, tmp_path / "judge")
    helpful = write_jsonl(tmp_path / "helpful.jsonl", [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(16)])
    maths = write_jsonl(tmp_path / "maths.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(16)])
    pairs = write_jsonl(tmp_path / "pairs.jsonl", ultrafeedback(16))
    run(monkeypatch, tmp_path, "mixture.py", model, judge, helpful, pairs, maths, *SMALL, "trainer.sampling.max_tokens=6",
        "trainer.steps=3", "trainer.save.every=0")
    row = [json.loads(line) for line in (tmp_path / "runs" / "mixture" / "metrics.jsonl").read_text().splitlines()][-1]
    assert {"ppo/rewards/judge/mean", "reward_model/rewards/accuracies", "grpo/rewards/math/mean"} <= row.keys()
    assert row["loss"] == pytest.approx(0.4 * row["ppo/loss"] + 0.2 * row["reward_model/loss"] + 0.4 * row["grpo/loss"], abs=1e-6)
    assert not RewardModel.from_pretrained(str(tmp_path / "runs" / "mixture" / "model-reward")).fresh_head


# ------------------------------------------------------------------------------------------------- other architectures

SIZE = dict(vocab_size=264, hidden_size=32, num_hidden_layers=2, eos_token_id=256, pad_token_id=256, bos_token_id=None)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, num_experts_per_tok=2)
OTHERS = {
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**SIZE, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZE, **HEADS, intermediate_size=48, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **HEADS, intermediate_size=48, moe_intermediate_size=16,
                                                            num_experts=4, head_dim=8)),
}


def replaced(folder: Path, module) -> None:
    """The workspace's model with other weights under the same tokenizer."""
    (folder / "model" / "model.safetensors").unlink()
    module.save_pretrained(folder / "model")


@pytest.mark.parametrize("kind, engine", [("mamba2", "hf"), ("mixtral", "native"), ("qwen3_moe", "native")])
def test_other_architectures_run_grpo(tmp_path, kind, engine):
    """State-space models run unpacked behind transformers' generate; mixtures of experts run packed in the built-in engine."""
    config = str(workspace(tmp_path))
    torch.manual_seed(0)
    replaced(tmp_path, OTHERS[kind]())
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out", "trainer.steps=3", "data.eval=null")
    assert done.returncode == 0, done.stderr
    assert (f"{kind} runs unpacked and is sampled by transformers' generate" in done.stdout) is (engine == "hf"), done.stdout
    assert len(curve(tmp_path / "out")) == 3
    gaps = [v for _, v in curve(tmp_path / "out", "sampling/sampling_logp_difference/max")]
    assert len(gaps) == 3 and max(gaps) < 1e-3, gaps


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_experts_that_sampled_are_trained_and_survive_the_journal(tmp_path, engine):
    """Three GRPO steps of a tiny mixture; what the journal keeps of a sample brings its experts back."""
    (tmp_path / "look.py").write_text("SEEN = []\n\n\nclass Look:\n    def on_samples(self, step, groups):\n"
                                      "        SEEN.extend(s for g in groups for s in g.samples)\n")
    config = load_run(str(workspace(tmp_path)), [f"trainer.output_dir={tmp_path}/out", "trainer.steps=3", "data.eval=null",
                                                 f"trainer.rollout.engine={engine}", "trainer.callbacks=[look.py:Look]"]).config
    torch.manual_seed(0)
    replaced(tmp_path, OTHERS["mixtral"]())
    RLTrainer(config.trainer, RLDataLoader(config.data), config.model).train()
    look = load_function(config.trainer.callbacks[0], config.trainer.base_dir, "trainer.callbacks")
    seen = sys.modules[look.__module__].SEEN
    assert seen and all(s.experts is not None and (s.experts[:-1] >= 0).all() for s in seen)
    again = from_record(to_record("", 0, 0, seen[0]))
    assert (again.experts == seen[0].experts).all() and again.experts.dtype == np.int16


def test_an_encoder_decoder_runs_three_steps_unpacked(tmp_path):
    config = str(workspace(tmp_path))
    replaced(tmp_path, T5ForConditionalGeneration(T5Config(vocab_size=264, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                                           decoder_start_token_id=0, eos_token_id=256)))
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out", "trainer.steps=3")
    assert done.returncode == 0, done.stderr
    gaps = [v for _, v in curve(tmp_path / "out", "sampling/sampling_logp_difference/max")]
    assert len(gaps) == 3 and max(gaps) < 1e-3, gaps


# --------------------------------------------------------------------------------------------------------- coming from TRL

def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def test_the_migration_page_runs_on_our_side(tmp_path, model, monkeypatch):
    """The reward function and the dataset are TRL's, unchanged; so is every script of our side but for names and sizes."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    ours = [b for b in blocks("migration.md") if "from trl" not in b]
    assert len(ours) >= 3
    for block in ours:
        block = block.replace('"Qwen/Qwen2.5-0.5B-Instruct"', repr(model)).replace('"max_tokens": 256', '"max_tokens": 6')
        exec(compile(block, "migration.md", "exec"), names)
    assert np.isfinite(names["metrics"]["rewards/reward_unique_letters/mean"])
