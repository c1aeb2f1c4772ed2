"""DPO, KTO and their like on prompts: the policy's own scored answers are paired or labelled; recorded answers are not sampled."""

import runpy

import numpy as np
import pytest
import torch
from test_objects import EXAMPLES, tiny_bert
from tiny_runs import arithmetic, curve, tiny_model, verl, weights, workspace

from verl.algorithms import ALGORITHMS
from verl.core.batch import Batch
from verl.core.errors import ConfigError, DataError
from verl.core.types import Task
from verl.models import load_lm
from verl.trainer import DPOTrainer, KTOTrainer, SFTTrainer
from verl.trainer.online_preference import FromSamples, by_data

PROMPTS = [{"prompt": f"{i}+1="} for i in range(8)]
SMALL = {"rollout_batch_size": 4, "group_size": 4, "sampling": {"max_tokens": 6}, "optim": {"lr": 3e-3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("pairs") / "model")


def digits(completions, **_):
    return [sum(ch.isdigit() for ch in c) / 8 for c in completions]


def letters(completions, **_):
    return [sum(map(ord, c)) % 97 for c in completions]


def sampled(scores: list[list[float]], ids: list[list[list[int]]] | None = None) -> Batch:
    """A batch of prompts with one scored answer of three tokens for each score; NaN: nobody scored it."""
    groups = [len(s) for s in scores]
    owner = np.repeat(np.arange(len(scores)), groups)
    answers = [a for g in ids for a in g] if ids else [[i, i + 1, i + 2] for i in range(sum(groups))]
    return Batch(prompts=[np.array([7, p], np.int32) for p in range(len(scores))], prompt_S=owner,
                 lengths_S=np.array([len(a) for a in answers]),
                 ids_T=np.concatenate(answers).astype(np.int32), mask_T=np.ones(sum(map(len, answers)), bool),
                 row_S=np.arange(len(answers)), group_S=owner.copy(), rewards_S=np.array([x for s in scores for x in s]))


def test_the_best_answer_is_paired_with_the_worst_by_score():
    nan = float("nan")
    scores = [[0.1, 0.9, nan, -2.0], [5.0, 5.0, 5.0, 5.0], [nan, nan, nan, 1.0], [3.0, nan, 1.0, 2.0]]
    batch, metrics = FromSamples(ALGORITHMS["dpo"]()).choose(sampled(scores))
    assert batch.row_S.tolist() == [1, 3, 12, 14] and batch.label_S.tolist() == [1, -1, 1, -1]
    assert batch.group_S.tolist() == [0, 0, 3, 3] and len(batch.prompts) == 2
    assert metrics["pairs"] == 2 and metrics["groups_tied"] == 1 and metrics["groups_unscored"] == 1
    assert metrics["reward"] == pytest.approx((0.1 + 0.9 - 2 + 20 + 1 + 6) / 11)
    assert metrics["frac_reward_zero_std"] == 0.5  # the tied group, and the one with a single score


def test_an_answer_is_never_paired_with_itself():
    """A reward that is noise gives equal answers unlike scores: log(2) that teaches nothing is no pair (field case D062)."""
    noisy = sampled([[1.0, 0.0], [1.0, 0.0]], [[[4, 4], [4, 4]], [[4, 4], [4, 5]]])
    batch, metrics = FromSamples(ALGORITHMS["dpo"]()).choose(noisy)
    assert batch.row_S.tolist() == [2, 3] and metrics["groups_tied"] == 1 and metrics["pairs"] == 1


def test_kto_labels_answers_above_and_below_the_mean_of_their_prompt():
    nan = float("nan")
    scores = [[0.0, 1.0, 2.0, 1.0], [7.0, 7.0, 7.0, 7.0], [nan, 4.0, 8.0, nan]]
    batch, metrics = FromSamples(ALGORITHMS["kto"]()).choose(sampled(scores))
    assert batch.row_S.tolist() == [0, 2, 9, 10] and batch.label_S.tolist() == [-1, 1, -1, 1]
    assert metrics["groups_tied"] == 1 and "pairs" not in metrics


def test_nothing_to_compare_is_an_empty_batch():
    batch, metrics = FromSamples(ALGORITHMS["simpo"]()).choose(sampled([[1.0, 1.0], [float("nan")] * 2]))
    assert len(batch) == 0 and metrics["pairs"] == 0


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "simpo"])
def test_the_kind_of_rows_decides(name):
    algo = ALGORITHMS[name]()
    online, line = by_data(algo, [Task("t-0", "hi")])
    assert isinstance(online, FromSamples) and "online from 1 prompt rows" in line
    assert online.online and online.min_group == 2 and online.reduction == algo.reduction
    offline, line = by_data(algo, [Task("t-0", "hi", chosen="a", rejected="b")])
    assert offline is algo and "offline from 1 preference rows" in line
    with pytest.raises(DataError, match=r"t-0.*learns from .* rows, or from prompts alone; this is a prompt row"):
        by_data(algo, [Task("t-0", "hi"), Task("t-1", "hi", completion="a")])


def test_methods_that_cannot_sample_refuse_prompts():
    for name in ("sft", "reward_model"):
        with pytest.raises(DataError, match=f"{name} learns from .* this is a prompt row"):
            by_data(ALGORITHMS[name](), [Task("t-0", "hi")])
    assert by_data(ALGORITHMS["grpo"](), [Task("t-0", "hi")])[0].name == "grpo"


@pytest.mark.parametrize("trainer", [DPOTrainer, KTOTrainer])
def test_online_training_moves_the_policy_towards_the_reward(model, trainer, capsys):
    config = SMALL | {"rollout_batch_size": 8, "group_size": 8, "optim": {"lr": 1e-2}, "algo": {"beta": 0.05}}
    learner = trainer(actor=str(model), reward_fn=digits, config=config)
    first = learner.train_epoch(PROMPTS)
    last = learner.train_epoch(PROMPTS * 16)
    out = capsys.readouterr().out
    assert f"{trainer.algorithm} learns online from 8 prompt rows" in out and "does not use" not in out
    assert first["reward"] < 0.1 and last["reward"] > 0.3, (first["reward"], last["reward"])
    assert np.isfinite(last["loss"]) and "rewards/digits/mean" in last


def test_kto_takes_its_reference_point_from_its_own_samples(model):
    """z0 = max(0, mean log ratio) over the sampled rows; at the first update policy and reference agree, so it is 0."""
    from verl.engine.train import TrainEngine
    from verl.trainer.offline import context
    from verl.trainer.roles import Reference
    engine = TrainEngine(load_lm(model))
    batch, _ = FromSamples(ALGORITHMS["kto"]()).choose(sampled([[0.0, 1.0], [2.0, 5.0]]))
    batch.ref_logprobs_T = np.full(len(batch.ids_T), -1.0, np.float32)
    got = context(batch, FromSamples(ALGORITHMS["kto"]()), engine, Reference(engine, False))["kl"]
    sums = np.add.reduceat(engine.logprobs(batch).astype(np.float64) + 1.0, batch.offsets[:-1])
    assert got == pytest.approx(max(0.0, sums.mean()), abs=1e-6)
    batch.ref_logprobs_T = None
    assert context(batch, FromSamples(ALGORITHMS["kto"]()), engine, Reference(engine, False))["kl"] == 0.0


def test_pairs_are_never_cut_by_updates(model):
    """4 pairs a step and train_batch_size 2: two updates of two pairs each; a tiny token budget cuts between pairs only."""
    config = SMALL | {"train_batch_size": 2, "micro_batch_tokens": 8}
    metrics = DPOTrainer(actor=str(model), reward_fn=letters, config=config).train_epoch(PROMPTS[:4])
    assert metrics["pairs"] == 4 and metrics["groups_tied"] == 0 and metrics["weight_version"] == 2


def test_recorded_answers_are_learnt_without_sampling(model, capsys):
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(8)]
    metrics = KTOTrainer(actor=str(model), reward_fn=digits, config=SMALL).train_epoch(pairs)  # a pair is two labelled answers
    out = capsys.readouterr().out
    assert "kto learns offline from 8 preference rows" in out and "kto does not use rewards" in out
    assert {"rewards/chosen", "rewards/rejected"} <= metrics.keys() and "completions/mean_length" not in metrics
    first = SFTTrainer(actor=str(model), config=SMALL).train_epoch(pairs)["nll"]  # learns the chosen answers
    assert np.isfinite(first)


def test_too_few_samples_to_compare(model):
    with pytest.raises(ConfigError, match="group_size: 1 leaves dpo nothing to compare"):
        DPOTrainer(actor=str(model), reward_fn=digits, config=SMALL | {"group_size": 1}).train_epoch(PROMPTS)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_runs_from_a_config_evaluate_save_and_resume(name, tmp_path):
    config = str(workspace(tmp_path))
    args = [config, f"trainer.algorithm={name}", "trainer.train_batch_size=2", "trainer.save.every=0"]
    assert verl("train", *args, "trainer.steps=3", f"trainer.output_dir={tmp_path}/whole").returncode == 0
    assert verl("train", *args, "trainer.steps=2", f"trainer.output_dir={tmp_path}/cut").returncode == 0
    done = verl("train", *args, "trainer.steps=3", f"trainer.output_dir={tmp_path}/cut")
    assert done.returncode == 0 and "learns online from 40 prompt rows" in done.stdout and "resuming after step 2" in done.stdout
    assert curve(tmp_path / "whole", "loss") == curve(tmp_path / "cut", "loss") and curve(tmp_path / "whole", "eval_reward")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("trainer", ["GRPOTrainer", "DPOTrainer", "KTOTrainer"])
def test_only_the_class_changes_in_the_objects_example(tmp_path, model, trainer, monkeypatch, capsys):
    line = "from verl.trainer.ppo_trainer import PPOTrainer  # or: from verl.trainer import GRPOTrainer as PPOTrainer"
    text = (EXAMPLES / "ppo_from_objects.py").read_text()
    for big, small in {
            line: f"from verl.trainer import {trainer} as PPOTrainer", "range(3)": "range(1)", "range(2, 130)": "range(2, 10)",
            "Qwen/Qwen2-1.5B-Instruct": str(model), "bert-base-chinese": str(tiny_bert(tmp_path / "judge")),
            '"kl_target": 0.02': '"kl_target": 0.02, "group_size": 4, "sampling": {"max_tokens": 4}'}.items():
        assert big in text, big
        text = text.replace(big, small)
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py")
    unused = next(line for line in capsys.readouterr().out.splitlines() if "does not use" in line)
    assert unused.startswith(f"verl: {trainer.removesuffix('Trainer').lower()} does not use "), unused
    assert "vf_coef" in unused and "critic" in unused
    assert load_lm(tmp_path / "checkpoints" / "epoch_0").native


def test_arithmetic_rows_are_prompts():
    assert isinstance(by_data(ALGORITHMS["dpo"](), [Task("a", r["prompt"]) for r in arithmetic(2)])[0], FromSamples)
