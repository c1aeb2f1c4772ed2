"""SFT, then a reward model, then PPO against it, all from one file of preferences.

    python examples/sft_rm_ppo.py MODEL pairs.jsonl runs/recipe [SETTING=VALUE ...]

A row has `chosen` and `rejected` (whole conversations as in UltraFeedback, or answers to `prompt`). OpenAssistant's message trees
become such a file with examples/openassistant_pairs.py. Running it again goes on where it stopped.
"""

import sys

from verl.data import RLDataLoader
from verl.trainer import RLTrainer
from verl.trainer.config import load_run

base, pairs, out, *overrides = sys.argv[1:]


def stage(name: str, actor: str, trainer: dict, model: dict | None = None) -> str:
    """Train one stage to its end; the directory it exports."""
    config = load_run(data={
        "trainer": {"output_dir": f"{out}/{name}", "rollout_batch_size": 32, "save": {"every": 50}, **trainer},
        "model": {"actor": {"model_name_or_path": actor}, **(model or {})},
        "data": {"train": pairs, "eval_size": 32, "max_prompt_tokens": 1024, "overlong": "drop"},
    }, overrides=overrides).config
    RLTrainer(config.trainer, RLDataLoader(config.data), config.model).train()
    return f"{out}/{name}/model"


sft = stage("sft", base, {"algorithm": "sft", "epochs": 1, "optim": {"lr": 1e-5, "schedule": "cosine"}})
judge = stage("reward_model", sft, {"algorithm": "reward_model", "epochs": 1, "algo": {"center_coef": 0.01}, "optim": {"lr": 1e-5}})
policy = stage("ppo", sft, {"algorithm": "ppo", "steps": 200, "sampling": {"max_tokens": 512}, "optim": {"lr": 1e-6},
                            "eval": {"every": 20}},
               {"reward_model": {"model_name_or_path": judge}})
print(f"policy: {policy}   reward model: {judge}")
