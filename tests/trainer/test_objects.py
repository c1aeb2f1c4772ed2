"""PPOTrainer and its siblings from Python objects, and the examples as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import REWARDS, arithmetic, tiny_model, workspace, write_jsonl
from transformers import AutoModelForCausalLM, BertConfig, BertModel, BertTokenizerFast

from verl import get_actor_critic_from_hf
from verl.core.errors import ConfigError
from verl.trainer import DPOTrainer, GRPOTrainer, KTOTrainer, PPOTrainer, SFTTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {"train_batch_size": 32, "rollout_batch_size": 64, "ppo_epochs": 1, "clip_coef": 0.2, "vf_coef": 0.1, "kl_target": 0.02}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("objects") / "model")


def tiny_bert(directory: Path) -> Path:
    """A fresh BERT encoder with a character vocabulary: no classification head."""
    directory.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [chr(c) for c in range(33, 127)]
    (directory / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                         max_position_embeddings=512)).save_pretrained(directory)
    return directory


def run_example(name: str, folder: Path, replace: dict[str, str], *args: str) -> str:
    """The example's own text with tiny models in place of the big names, run by a fresh Python."""
    text = (EXAMPLES / name).read_text()
    for big, small in replace.items():
        assert big in text, big
        text = text.replace(big, small)
    (folder / name).write_text(text)
    done = subprocess.run([sys.executable, name, *args], cwd=folder, capture_output=True, text=True, timeout=280,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "CI": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_config_example_runs_and_says_what_falls_back(tmp_path):
    workspace(tmp_path)
    text = (EXAMPLES.parent / "configs" / "llama3_8b_ppo.yaml").read_text()
    judge = tiny_bert(tmp_path / "judge")
    small = text.replace("meta-llama/Meta-Llama-3-8B", str(tmp_path / "model")).replace("weibomiaoo/llama3-8b-rm", str(judge))
    small = small.replace("max_tokens: 1024", "max_tokens: 6").replace("prompts.jsonl", "train.jsonl")
    (tmp_path / "ppo.yaml").write_text(small.replace("rollout_batch_size: 128", "rollout_batch_size: 20"))
    out = run_example("train_from_config.py", tmp_path, {}, "ppo.yaml")
    for line in ("vllm", "trainer.rollout.workers: 4", "use_fsdp", "use_flash_attn", "step 2/2"):
        assert line in out, out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "llama3-8b-ppo" / "model").num_parameters() > 0


def test_the_objects_example_runs_unchanged_but_for_the_names(tmp_path, model):
    judge = tiny_bert(tmp_path / "judge")
    run_example("ppo_from_objects.py", tmp_path, {"Qwen/Qwen2-1.5B-Instruct": str(model), "bert-base-chinese": str(judge),
                                                  '"kl_target": 0.02': '"kl_target": 0.02, "sampling": {"max_tokens": 5}'})
    saved = tmp_path / "checkpoints" / "epoch_2"
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() > 0
    assert (saved / "tokenizer.json").exists()


def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def test_64_prompts_and_32_samples_an_update_make_two_updates(model):
    actor, critic = get_actor_critic_from_hf(str(model))
    trainer = PPOTrainer(actor=actor, critic=critic, reward_fn=digits, config=SETTINGS | {"sampling": {"max_tokens": 4}})
    trainer.train_epoch([{"prompt": f"{i}:"} for i in range(64)])
    assert trainer._roles.policy.optimizer.updates == 2
    assert trainer._roles.critic is trainer._roles.policy


def test_an_independent_critic_learns_beside_the_actor(model):
    actor, _ = get_actor_critic_from_hf(str(model))
    critic, _ = get_actor_critic_from_hf(str(model))
    before = critic.module.get_input_embeddings().weight.clone()
    trainer = PPOTrainer(actor=actor, critic=critic, reward_fn=digits,
                         config={"rollout_batch_size": 8, "sampling": {"max_tokens": 4}})
    metrics = trainer.train_epoch([{"prompt": f"{i}:"} for i in range(16)])
    assert trainer._roles.critic is not trainer._roles.policy
    assert not torch.equal(before, critic.module.get_input_embeddings().weight)
    assert "value_loss" in metrics


def test_only_the_class_changes_and_what_does_not_apply_is_named(model, capsys):
    config = SETTINGS | {"rollout_batch_size": 8, "train_batch_size": 16, "group_size": 4, "sampling": {"max_tokens": 4}}
    actor, critic = get_actor_critic_from_hf(str(model))
    metrics = GRPOTrainer(actor=actor, critic=critic, reward_model=digits, config=config).train_epoch([{"prompt": "1+1="}] * 8)
    out = capsys.readouterr().out
    assert "grpo does not use vf_coef, critic" in out
    assert np.isfinite(metrics["loss"])


def test_offline_trainers_learn_recorded_answers(model, capsys):
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(16)]
    settings = {"rollout_batch_size": 8, "optim": {"lr": 3e-3}}
    trainer = DPOTrainer(actor=str(model), reward_model=digits, config=SETTINGS | settings | {"train_batch_size": 8})
    for _ in range(4):
        metrics = trainer.train_epoch(pairs)
    assert metrics["rewards/margins"] > 0 and metrics["loss"] < 0.69
    assert "dpo does not use" in capsys.readouterr().out
    labelled = [{"prompt": r["prompt"], "completion": r[k], "label": k == "chosen"} for r in pairs for k in ("chosen", "rejected")]
    metrics = KTOTrainer(actor=str(model), config=settings).train_epoch(labelled)
    assert np.isfinite(metrics["loss"])
    answers = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in pairs]
    trainer = SFTTrainer(actor=str(model), config=settings)
    first = trainer.train_epoch(answers)["nll"]
    for _ in range(4):
        last = trainer.train_epoch(answers)["nll"]
    assert last < first


def test_saving_before_training_is_an_error(model):
    with pytest.raises(ConfigError, match="train_epoch"):
        PPOTrainer(actor=str(model), reward_fn=digits).save_checkpoint("nowhere")


def test_reward_files_and_prompts_may_be_paths(tmp_path, model):
    (tmp_path / "my.py").write_text(REWARDS)
    data = write_jsonl(tmp_path / "p.jsonl", arithmetic(8))
    trainer = GRPOTrainer(actor=str(model), reward_fn={"function": f"{tmp_path}/my.py:digits"},
                          config={"rollout_batch_size": 4, "group_size": 2, "sampling": {"max_tokens": 4},
                                  "output_dir": tmp_path / "o"})
    assert np.isfinite(trainer.train_epoch(str(data))["loss"])


def test_remax_takes_the_greedy_answer_as_baseline(model):
    class ReMaxTrainer(PPOTrainer):
        algorithm = "remax"

    trainer = ReMaxTrainer(actor=str(model), reward_fn=digits, config={"rollout_batch_size": 8, "sampling": {"max_tokens": 4}})
    assert np.isfinite(trainer.train_epoch([{"prompt": f"{i}:"} for i in range(8)])["loss"])


def test_kto_compares_with_answers_under_other_prompts():
    from verl.core.batch import Batch
    from verl.trainer.offline import mismatched
    batch = Batch(prompts=[np.array([1]), np.array([2, 3]), np.array([2, 3])], prompt_S=np.array([0, 0, 1, 2]),
                  lengths_S=np.array([1, 2, 1, 1]), ids_T=np.array([5, 6, 7, 8, 9]), mask_T=np.ones(5, bool), row_S=np.arange(4),
                  group_S=np.arange(4), label_S=np.array([1, -1, 1, -1], np.int8))
    other = mismatched(batch)  # a pair shares a prompt, and two rows may have the same one: neither is another prompt
    assert other.prompt_S.tolist() == [1, 1, 0, 0] and other.ids_T.tolist() == [5, 6, 7, 8, 9] and not other.label_S.any()
