"""Train from a config file: python examples/train_from_config.py [CONFIG.yaml]

The same as `verl train CONFIG.yaml`, as a script you can extend. Running it again resumes.
"""

import sys

from verl.data import RLDataLoader
from verl.trainer import RLTrainer
from verl.utils.config import load_config

config = load_config(sys.argv[1] if len(sys.argv) > 1 else "configs/llama3_8b_ppo.yaml")
dataloader = RLDataLoader(config.data)
trainer = RLTrainer(config=config.trainer, dataloader=dataloader, model_config=config.model)
trainer.train()
