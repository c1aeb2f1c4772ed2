"""Mixtures: several methods over one policy and one optimizer; shares do not depend on batch sizes; killed runs go on exactly."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from test_reward_training import pairs
from tiny_runs import arithmetic, curve, tiny_model, verl, verl_until, weights, workspace, write_jsonl
from transformers import GPT2Config, GPT2LMHeadModel

from verl.core.errors import ConfigError
from verl.data import as_tasks
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models import load_lm
from verl.models.reward_model import RewardModel
from verl.trainer.config import load_run
from verl.trainer.hybrid import Part, Parts, Task, accumulate, own_gradient, update
from verl.trainer.offline import pack_answers
from verl.trainer.tasks import Hybrid, TaskConfig

THREE = """
    - {algorithm: sft, weight: 0.4, data: {train: answers.jsonl, eval_size: 4}, rollout_batch_size: 6}
    - {algorithm: ppo, weight: 0.4}
    - {algorithm: dpo, weight: 0.2, data: {train: pairs.jsonl}, rollout_batch_size: 2}
"""


def mixture(folder, tasks: str = THREE, more: str = ""):
    """The usual small run as a mixture."""
    text = workspace(folder).read_text().replace("algorithm: grpo", f"algorithm: hybrid\n  tasks: {tasks}{more}")
    (folder / "run.yaml").write_text(text.replace("  group_size: 4\n", ""))
    write_jsonl(folder / "answers.jsonl", [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(30)])
    write_jsonl(folder / "pairs.jsonl", pairs(20))
    return str(folder / "run.yaml")


def hybrid(**settings) -> Hybrid:
    return load_run(data={"trainer": {"algorithm": "hybrid", **settings}}).config.trainer.algo


def test_names_and_weights_are_the_short_form():
    assert [(t.name, t.weight) for t in hybrid().tasks] == [("sft", 1.0), ("ppo", 1.0), ("dpo", 1.0)]
    assert [t.weight for t in hybrid(task_weights=[0.4, 0.4, 0.2]).tasks] == [0.4, 0.4, 0.2]
    assert [t.weight for t in hybrid(task_weights={"dpo": 0.2, "sft": 0.4, "ppo": 0.4}).tasks] == [0.4, 0.4, 0.2]
    full = hybrid(tasks=["grpo", {"algorithm": "dpo", "name": "safe", "algo": {"beta": 0.5}, "weight": 2}])
    assert [(t.name, t.weight) for t in full.tasks] == [("grpo", 1.0), ("safe", 2.0)] and full.tasks[1].algo.beta == 0.5
    assert full.needs_reference and full.online and not full.needs_critic


@pytest.mark.parametrize("settings, words", [
    ({"task_weights": [0.4, 0.4]}, "task_weights.*2 numbers for 3 tasks \\(sft, ppo, dpo\\)"),
    ({"task_weights": {"sft": 1, "ppo": 1, "dop": 1}}, "'dop' is no task; did you mean 'dpo'"),
    ({"task_weights": {"sft": 1, "ppo": 1}}, "'dpo' is a task without a weight"),
    ({"task_weights": [1, 0, 1]}, "0.0 of task 'ppo'; a weight is a number above 0"),
    ({"tasks": ["sft", {"algorithm": "ppo", "weight": 1}], "task_weights": [1, 1]}, "keep one"),
    ({"tasks": ["sft", "sft"]}, "two of one algorithm a `name` each"),
    ({"tasks": []}, "at least one"),
    ({"tasks": ["gpro"]}, "did you mean 'grpo'"),
    ({"tasks": [{"algorithm": "sft", "data": {"trian": "x"}}]}, "did you mean .*data.train"),
    ({"tasks": ["grpo"], "group_size": 1}, "group_size.*: 1 leaves grpo nothing to compare"),
])
def test_what_is_wrong_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        hybrid(**settings)


def test_tasks_on_one_file_see_other_rows_and_have_their_own_sizes():
    config = load_run(data={"trainer": {"algorithm": "hybrid", "rollout_batch_size": 8, "train_batch_size": 16, "tasks": [
        "ppo", {"algorithm": "grpo", "group_size": 4, "rollout_batch_size": 6}]}}).config.trainer
    ppo, grpo = config.parts
    assert (ppo.units_per_step, grpo.units_per_step) == (8, 24) and ppo.seed != grpo.seed and config.updates_per_step == 2


# ---------------------------------------------------------------------------------------------------------- one update

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """GPT-2, whose forward is float64 throughout when its weights are."""
    path = tiny_model(tmp_path_factory.mktemp("hybrid") / "model")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=2, n_positions=128, eos_token_id=256, bos_token_id=None)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def part(model, name: str, weight: float, rows: int) -> Part:
    """A recorded task with a batch of its own size."""
    algo = {"sft": "sft", "orpo": "orpo", "reward": "reward_model"}[name]
    config = load_run(data={"trainer": {"algorithm": algo}}).config
    lm = load_lm(model)
    batch = pack_answers(as_tasks(pairs(rows)), lm.tokenizer, config.data, config.trainer.algo, lm.context)
    return Part(Task(name, weight, config.trainer, None), batch, {})


def engine(model) -> TrainEngine:
    lm = load_lm(model, "float64")
    lm.add_score_head()
    return TrainEngine(lm, 1.0, OptimConfig(lr=0.1), token_budget=40)


def gradients(e: TrainEngine) -> list[torch.Tensor]:
    return [torch.zeros_like(m) if m.grad is None else m.grad.clone() for m in e.optimizer.masters]


def test_the_gradient_is_the_weighted_sum_of_each_tasks_own(model):
    """Batches of 3, 8 and 5 rows: alone at weight 1 and in the mixture, the shares are the weights and nothing else."""
    shares = [("sft", 0.4, 3), ("orpo", 0.4, 8), ("reward", 0.2, 5)]
    whole = engine(model)
    losses = [accumulate(p.batch, p, 16, whole, None)["loss"] for p in (part(model, *s) for s in shares)]
    alone = []
    for name, weight, rows in shares:
        e = engine(model)
        p = part(model, name, 1.0, rows)
        loss = accumulate(p.batch, p, 16, e, None)["loss"]
        assert losses.pop(0) == pytest.approx(weight * loss, rel=1e-12)
        alone.append([weight * g for g in gradients(e)])
    for got, *want in zip(gradients(whole), *alone):
        assert (got - sum(want)).abs().max() < 1e-12


def test_doubling_one_tasks_rows_leaves_the_others_share(model):
    """The same rows twice are the same mean: the mixture's gradient does not move."""
    def both(repeat: int) -> list[torch.Tensor]:
        e = engine(model)
        sft, orpo = part(model, "sft", 0.5, 4), part(model, "orpo", 0.5, 4)
        rows = np.tile(np.arange(len(sft.batch)), repeat)
        for p, batch in ((sft, sft.batch.select(rows)), (orpo, orpo.batch)):
            accumulate(batch, p, 16, e, None)
        return gradients(e)

    assert max((a - b).abs().max() for a, b in zip(both(1), both(5))) < 1e-12


def test_a_tasks_own_gradient_norm_is_measured_without_changing_the_sum(model):
    plain, measured = engine(model), engine(model)
    tasks = [part(model, "sft", 0.3, 4), part(model, "orpo", 0.7, 3)]
    for p in tasks:
        accumulate(p.batch, p, 16, plain, None)
    norms = []
    for p in tasks:
        with own_gradient(measured.optimizer, True) as norm:
            accumulate(p.batch, p, 16, measured, None)
        norms += norm
    assert max((a - b).abs().max() for a, b in zip(gradients(plain), gradients(measured))) < 1e-14
    single = engine(model)
    accumulate(tasks[1].batch, tasks[1], 16, single, None)
    assert norms[1] == pytest.approx(float(single.optimizer.grad_norm()), rel=1e-12) and norms[0] > 0


def test_a_task_without_rows_in_a_step_takes_no_part(model):
    class Run:
        config, sampling, step = load_run(data={"trainer": {"algorithm": "hybrid"}}).config.trainer, None, 0

    Run.sampling = dataclasses.make_dataclass("S", ["max_tokens"])(16)
    e, sft, empty = engine(model), part(model, "sft", 1.0, 4), part(model, "orpo", 1.0, 4)
    empty.batch = empty.batch.select([])
    metrics = update(Run(), Parts([sft, empty]), hybrid(), e, None, None)
    assert metrics["loss"] == pytest.approx(metrics["sft/loss"]) and "orpo/loss" not in metrics and e.version == 1


# ------------------------------------------------------------------------------------------------------------ whole runs

def test_sft_ppo_and_dpo_in_one_run(tmp_path):
    config = mixture(tmp_path, more="  algo: {grad_norm_every: 2}")
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out", "trainer.steps=4", "trainer.eval.every=2")
    assert done.returncode == 0, done.stderr
    for line in ("sft learns offline from 26 completion", "ppo samples answers to 40 prompt", "dpo learns offline from 20"):
        assert line in done.stdout, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if "loss" in row}
    for row in steps.values():
        assert {"ppo/reward", "ppo/value_loss", "dpo/rewards/margins", "grad_norm", "lr"} <= row.keys()
        want = 0.4 * row["sft/loss"] + 0.4 * row["ppo/loss"] + 0.2 * row["dpo/loss"]
        assert row["loss"] == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert [step for step in steps if "ppo/grad_norm" in steps[step]] == [2, 4] and steps[2]["dpo/grad_norm"] > 0
    assert {row["step"] for row in rows if "sft/eval_nll" in row} == {0, 2, 4} and any("ppo/eval_reward" in row for row in rows)
    assert curve(tmp_path / "out", "sft/eval_nll")[-1][1] < curve(tmp_path / "out", "sft/eval_nll")[0][1]
    assert "weight_version" in steps[4] and steps[4]["weight_version"] == 4


def test_one_file_of_pairs_serves_every_task_of_the_short_form(tmp_path):
    config = mixture(tmp_path, "[sft, ppo, dpo]", "\n  task_weights: [0.4, 0.4, 0.2]")
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out", "trainer.steps=2", f"data.train={tmp_path}/pairs.jsonl",
                "data.eval=null", "trainer.train_batch_size=2")
    assert done.returncode == 0, done.stderr
    for line in ("sft learns offline from 20 preference rows", "ppo samples answers to 20 preference rows"):
        assert line in done.stdout, done.stdout
    assert curve(tmp_path / "out", "weight_version")[-1][1] == 4


def test_ppo_with_its_own_critic_reward_model_and_grpo_and_online_dpo(tmp_path):
    """Every kind of task at once; the reward model's head is written beside the policy."""
    tasks = """
    - {algorithm: ppo, rewards: [{function: "my.py:digits"}]}
    - {algorithm: reward_model, data: {train: pairs.jsonl}}
    - {algorithm: grpo, group_size: 4, rollout_batch_size: 2}
    - {algorithm: kto, group_size: 4, rollout_batch_size: 2}
"""
    config = mixture(tmp_path, tasks)
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out", "trainer.steps=2",
                f"model.critic.model_name_or_path={tmp_path}/model")
    assert done.returncode == 0, done.stderr
    last = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line][-1]
    assert {"ppo/critic/loss", "critic/grad_norm", "reward_model/rewards/accuracies", "grpo/reward", "kto/loss"} <= last.keys()
    assert not RewardModel.from_pretrained(str(tmp_path / "out" / "model-reward")).fresh_head
    assert load_lm(tmp_path / "out" / "model").native
    assert verl("export", str(tmp_path / "out"), str(tmp_path / "again")).returncode == 0
    assert (tmp_path / "again-reward" / "config.json").is_file()


def test_rows_of_the_wrong_kind_name_the_task(tmp_path):
    config = mixture(tmp_path, "[sft, ppo]")
    done = verl("train", config, f"trainer.output_dir={tmp_path}/out")
    assert done.returncode == 1 and "sft learns from completion" in done.stderr


def test_sigkill_in_mid_step_then_resume_equals_the_uninterrupted_run(tmp_path):
    tasks = """
    - {algorithm: sft, weight: 0.4, data: {train: answers.jsonl}, rollout_batch_size: 7}
    - {algorithm: ppo, weight: 0.4, algo: {kl_target: 0.02}}
    - {algorithm: dpo, weight: 0.2, data: {train: pairs.jsonl}, rollout_batch_size: 3}
    - {algorithm: grpo, weight: 0.2, group_size: 4}
"""
    config = mixture(tmp_path, tasks)
    args = ["trainer.steps=5", "trainer.save.every=2", "trainer.sampling.max_tokens=24", "trainer.train_batch_size=8",
            "data.eval=null"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert verl("train", config, *args, f"trainer.output_dir={whole}").returncode == 0
    journal = killed / "progress.journal"

    def in_step_four() -> bool:
        done = curve(killed, "loss") if (killed / "metrics.jsonl").exists() else []
        return bool(done) and done[-1][0] >= 3 and journal.exists() and journal.stat().st_size > 3000

    code, out = verl_until("train", config, *args, f"trainer.output_dir={killed}", ready=in_step_four, sig=signal.SIGKILL)
    assert code == -signal.SIGKILL, out
    resumed = verl("train", config, *args, f"trainer.output_dir={killed}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout and "finished samples of the interrupted step are kept" in resumed.stdout
    a, b = weights(whole), weights(killed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    for name in ("loss", "sft/loss", "ppo/kl_coef", "dpo/loss", "grpo/reward"):
        assert curve(whole, name) == curve(killed, name) and curve(whole, name), name


STOPS = """

def stops(completions, trainer_state, **kw):
    import os, pathlib, signal
    once = pathlib.Path(__file__).with_name("once")
    if trainer_state.global_step == 2 and not once.exists():  # in the third step, before dpo and the update
        once.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return digits(completions)
"""


def test_a_signal_stops_between_tasks_and_the_same_command_goes_on(tmp_path):
    """What the first tasks took from their data in the step that was stopped is taken again."""
    config = mixture(tmp_path)
    (tmp_path / "my.py").write_text((tmp_path / "my.py").read_text() + STOPS)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    args = ["trainer.steps=4", "data.eval=null"]
    assert verl("train", config, *args, f"trainer.output_dir={whole}").returncode == 0
    args += [f"trainer.output_dir={stopped}", "trainer.rewards=[{function: 'my.py:stops'}]"]
    assert verl("train", config, *args).returncode == 128 + signal.SIGTERM
    assert len(curve(stopped, "loss")) == 2
    assert verl("train", config, *args).returncode == 0
    assert curve(whole, "loss") == curve(stopped, "loss")
    a, b = weights(whole), weights(stopped)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_first_row_of_every_task_can_be_shown(tmp_path):
    done = verl("show", "data", mixture(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("sft: data: 26 prompts", "ppo: data: 40 prompts", "dpo: data: 20", "chosen: ", "completion: ", "rejected: "):
        assert word in done.stdout, done.stdout


def test_every_setting_of_a_task_says_what_it_is():
    for schema in (TaskConfig, Hybrid):
        assert all(f.metadata.get("help") for f in dataclasses.fields(schema)), schema
    assert len(arithmetic(2)) == 2
