"""Reward models: trained from pairs on a language model, written as a directory, and then judging with the scores they learnt."""

import json

import numpy as np
import pytest
import torch
from test_objects import tiny_bert
from tiny_runs import arithmetic, curve, tiny_model, verl, workspace, write_jsonl
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from verl.algorithms import ALGORITHMS
from verl.core.types import Finish, Sample, Task
from verl.data import as_tasks
from verl.models import load_lm
from verl.models.reward_model import RewardModel
from verl.rewards.base import Item
from verl.rewards.model import ModelSource
from verl.trainer import GRPOTrainer, RewardTrainer
from verl.trainer.offline import pack_answers
from verl.trainer.reward_training import encode_pair, export_reward_model

SETTINGS = {"rollout_batch_size": 8, "optim": {"lr": 3e-3}, "report_to": []}


def pairs(n: int, chat: bool = False) -> list[dict]:
    """The better answer is in digits."""
    rows = []
    for i in range(n):
        prompt, good, bad = f"{i}+1=", str(i + 1), "none" * (1 + i % 2)
        rows.append({"prompt": [{"role": "user", "content": prompt}], "chosen": [{"role": "assistant", "content": good}],
                     "rejected": [{"role": "assistant", "content": bad}]} if chat
                    else {"prompt": prompt, "chosen": good, "rejected": bad})
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("reward") / "model")


def watched(seen: list):
    """The loss of reward-model training; the scores it saw are kept."""
    def loss(x):
        seen.append(x.scores_S.detach())
        return ALGORITHMS["reward_model"]().loss(x)
    return loss


def judged(source: ModelSource, task: Task, text: str) -> float:
    ids = np.zeros(1, np.int32)
    sample = Sample(ids, np.zeros(1, np.float32), ids, Finish.STOP, 0, text=text)
    return source.score([Item(task, sample)])[0].value


@pytest.mark.parametrize("chat", [False, True], ids=["strings", "chat"])
def test_a_reward_source_scores_exactly_what_was_trained(model, tmp_path, chat):
    trainer = RewardTrainer(actor=str(model), config=SETTINGS)
    for _ in range(4):
        metrics = trainer.train_epoch(pairs(16, chat))
    assert metrics["rewards/accuracies"] == 1.0 and metrics["rewards/margins"] > 0.5 and metrics["loss"] < 0.5
    saved = trainer.save_checkpoint(tmp_path / "judge")

    engine, tasks = trainer._roles.policy, as_tasks(pairs(6, chat))
    batch = pack_answers(tasks, engine.lm.tokenizer, trainer.config.data, ALGORITHMS["reward_model"](), engine.lm.context)
    batch.weights_S, seen = np.ones(len(batch)), []
    engine.forward_backward(batch, watched(seen), "group", scores=True)
    source = ModelSource(RewardModel.from_pretrained(str(saved)))
    texts = [a if isinstance(a, str) else a[0]["content"] for t in tasks for a in (t.chosen, t.rejected)]
    got = [judged(source, tasks[i // 2], text) for i, text in enumerate(texts)]
    assert got == pytest.approx(seen[0].tolist(), abs=1e-5)
    assert all(good > bad for good, bad in zip(got[::2], got[1::2]))
    assert AutoModelForSequenceClassification.from_pretrained(saved).config.num_labels == 1


def test_the_trained_model_rewards_a_policy(model, tmp_path):
    judge = RewardTrainer(actor=str(model), config=SETTINGS)
    judge.train_epoch(pairs(16))
    saved = judge.save_checkpoint(tmp_path / "judge")
    config = SETTINGS | {"group_size": 4, "sampling": {"max_tokens": 4}}
    prompts = [{"prompt": f"{i}+1="} for i in range(8)]
    metrics = GRPOTrainer(actor=str(model), reward_model=str(saved), config=config).train_epoch(prompts)
    assert np.isfinite(metrics["rewards/judge/mean"]) and metrics["rewards/judge/std"] > 0


def test_pairs_share_their_beginning_and_keep_their_own_end(model):
    tokenizer = load_lm(model).tokenizer
    for chosen, rejected, shared in (("12", "19", 3), ("12", "1", 2), ("a", "b", 2), ("same", "same", 5)):
        task = Task("t", "q:", chosen=chosen, rejected=rejected)
        prompt, rows = encode_pair(tokenizer, task)
        assert len(prompt) == shared, (chosen, rejected)
        for (ids, mask, _), text in zip(rows, (chosen, rejected)):
            assert tokenizer.decode([*prompt, *ids]) == f"q:{text}" and mask.all() and len(ids) >= 1
        assert [label for _, _, label in rows] == [1, -1]


@pytest.mark.parametrize("kind", ["gpt2", "granite", "lora"])
def test_other_architectures_and_adapters_are_written_whole(tmp_path, model, kind):
    """GPT-2 has absolute positions, Granite no classifier in transformers; adapters are merged."""
    lm_path, extra = model, {}
    if kind == "lora":
        extra = {"rank": 4}
    else:
        lm_path = tmp_path / "base"
        tokenizer = load_lm(model).tokenizer
        torch.manual_seed(0)
        size = {"vocab_size": 264, "eos_token_id": 256, "bos_token_id": None, "pad_token_id": 256}
        base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **size)) if kind == "gpt2" else \
            GraniteForCausalLM(GraniteConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                             num_key_value_heads=2, max_position_embeddings=128, **size))
        base.save_pretrained(lm_path)
        tokenizer.save_pretrained(lm_path)
    from verl.models import LoraConfig
    actor = load_lm(lm_path, lora=LoraConfig(**extra))
    trainer = RewardTrainer(actor=actor, config=SETTINGS | {"optim": {"lr": 1e-2}})
    for _ in range(3):
        trainer.train_epoch(pairs(8))
    judge = RewardModel.from_pretrained(str(export_reward_model(actor, tmp_path / "judge")))
    assert not judge.fresh_head and not (tmp_path / ".judge.language-model").exists()
    prompt, rows = encode_pair(actor.tokenizer, as_tasks(pairs(1))[0])
    batch = pack_answers(as_tasks(pairs(1)), actor.tokenizer, trainer.config.data, ALGORITHMS["reward_model"](), 128)
    batch.weights_S, seen = np.ones(2), []
    trainer._roles.policy.forward_backward(batch, watched(seen), "group", scores=True)
    texts = [actor.tokenizer.decode([*prompt, *ids]) for ids, _, _ in rows]
    assert judge.score(texts) == pytest.approx(seen[0].tolist(), abs=1e-5)


def test_margins_and_centring_reach_the_loss(model):
    rows = pairs(8)
    plain = RewardTrainer(actor=str(model), config=SETTINGS).train_epoch(rows)["loss"]
    margin = RewardTrainer(actor=str(model), config=SETTINGS).train_epoch([r | {"margin": 2.0} for r in rows])["loss"]
    centred = RewardTrainer(actor=str(model), config=SETTINGS | {"algo": {"center_coef": 1e3}}).train_epoch(rows)["loss"]
    assert plain == pytest.approx(np.log(2), abs=0.02) and centred > plain
    assert margin == pytest.approx(np.log1p(np.exp(2)), abs=0.02)


def test_a_run_from_a_config_logs_held_out_accuracy_and_exports(tmp_path):
    config = str(workspace(tmp_path))
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs(40, chat=True))
    args = [config, "trainer.algorithm=reward_model", f"data.train={data}", "data.eval=null", "data.eval_size=8", "trainer.steps=8",
            "trainer.rollout_batch_size=8", "trainer.eval.every=4", f"trainer.output_dir={tmp_path}/rm", "trainer.save.every=3"]
    done = verl("train", *args)
    assert done.returncode == 0, done.stderr
    assert "reward_model learns offline from 32 preference rows" in done.stdout
    accuracy = curve(tmp_path / "rm", "eval_rewards/accuracies")
    assert [step for step, _ in accuracy] == [0, 4, 8] and accuracy[-1][1] == 1.0
    judge = RewardModel.from_pretrained(str(tmp_path / "rm" / "model"))
    assert not judge.fresh_head and "LlamaForSequenceClassification" in json.loads(
        (tmp_path / "rm" / "model" / "config.json").read_text())["architectures"]
    assert verl("export", str(tmp_path / "rm"), str(tmp_path / "again")).returncode == 0
    again = RewardModel.from_pretrained(str(tmp_path / "again"))
    assert torch.equal(again.model.score.weight, judge.model.score.weight)
    policy = [config, f"model.reward_model.model_name_or_path={tmp_path}/rm/model", "trainer.rewards=[]", "trainer.steps=1",
              f"trainer.output_dir={tmp_path}/policy"]
    assert verl("train", *policy).returncode == 0
    assert curve(tmp_path / "policy", "rewards/model/mean")


def test_encoders_are_judges_but_not_trained_here(tmp_path):
    """A BERT can be a reward model; training one is refused by name, before anything runs."""
    workspace(tmp_path)
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs(8))
    done = verl("train", str(tmp_path / "run.yaml"), "trainer.algorithm=reward_model", f"data.train={data}", "data.eval=null",
                f"model.actor.model_name_or_path={tiny_bert(tmp_path / 'bert')}", f"trainer.output_dir={tmp_path}/rm")
    assert done.returncode == 1 and "is an encoder (bert)" in done.stderr, done.stderr


def test_prompts_alone_are_refused(tmp_path):
    workspace(tmp_path)
    done = verl("train", str(tmp_path / "run.yaml"), "trainer.algorithm=reward_model", f"trainer.output_dir={tmp_path}/rm")
    assert done.returncode == 1 and "reward_model learns from preference rows" in done.stderr and len(arithmetic(1)) == 1
