"""PPO from Python objects: an actor with a critic on its trunk, vLLM where it is installed, a BERT as reward model."""

import torch
from transformers import AutoTokenizer

from verl import get_actor_critic_from_hf
from verl.engine.vllm_engine import vLLMEngine
from verl.models.reward_model import RewardModel
from verl.trainer.ppo_trainer import PPOTrainer  # or: from verl.trainer import GRPOTrainer as PPOTrainer

MODEL = "Qwen/Qwen2-1.5B-Instruct"  # a model directory or, online, a hub name
JUDGE = "bert-base-chinese"  # fresh head: train it first (docs/rewards.md), or give a trained directory
prompts = [{"prompt": f"Count from 1 to {n}."} for n in range(2, 130)]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
actor, critic = get_actor_critic_from_hf(model_name=MODEL, use_flash_attention_2=True, torch_dtype=torch.bfloat16)
engine = vLLMEngine(model_name=MODEL, tensor_parallel_size=2, dtype="bfloat16", max_num_batched_tokens=4096,
                    gpu_memory_utilization=0.9)
judge = RewardModel(base_model_name=JUDGE, num_labels=1, dropout=0.1)

trainer = PPOTrainer(
    actor=actor, critic=critic, reward_model=judge, tokenizer=tokenizer, rollout_engine=engine,
    config={"train_batch_size": 32, "rollout_batch_size": 64, "ppo_epochs": 1, "clip_coef": 0.2, "vf_coef": 0.1, "kl_target": 0.02},
)
for epoch in range(3):
    trainer.train_epoch(dataset=prompts)
    trainer.save_checkpoint(f"checkpoints/epoch_{epoch}")
