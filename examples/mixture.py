"""PPO against a reward model, more reward-model training, and GRPO against a rule: one run, one policy, one optimizer.

    python examples/mixture.py MODEL REWARD_MODEL helpful.jsonl pairs.jsonl maths.jsonl [SETTING=VALUE ...]

PPO answers the prompts of helpful.jsonl and is judged by REWARD_MODEL. A reward head on the policy's own trunk learns pairs.jsonl
(an auxiliary task, and a fresh reward model at the end). GRPO solves maths.jsonl, whose column `answer` a verifier compares.
"""

import sys

from verl.trainer import RLTrainer
from verl.trainer.config import load_run

model, judge, helpful, pairs, maths, *overrides = sys.argv[1:]

config = load_run(data={
    "trainer": {
        "algorithm": "hybrid",
        "tasks": [
            {"algorithm": "ppo", "weight": 0.4, "data": {"train": helpful}, "rewards": [{"model": judge}]},
            {"algorithm": "reward_model", "weight": 0.2, "data": {"train": pairs}},
            {"algorithm": "grpo", "weight": 0.4, "data": {"train": maths}, "rewards": [{"verifier": "math"}],
             "group_size": 8, "rollout_batch_size": 16},
        ],
        "rollout_batch_size": 64,
        "steps": 200,
        "sampling": {"max_tokens": 512},
        "optim": {"lr": 1e-6},
        "save": {"every": 20},
        "output_dir": "runs/mixture",
    },
    "model": {"actor": {"model_name_or_path": model}},
}, overrides=overrides).config
run = RLTrainer(config.trainer, None, config.model).train()
print(f"policy: {run.dir}/model   reward model: {run.dir}/model-reward")
