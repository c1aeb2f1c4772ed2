"""Trainers: RLTrainer runs a config; PPOTrainer and its siblings run Python objects."""

from importlib import import_module

_LAZY = {"RLTrainer": "rl_trainer", **dict.fromkeys(("PPOTrainer", "GRPOTrainer", "DPOTrainer", "KTOTrainer", "SFTTrainer",
                                                     "RewardTrainer"), "ppo_trainer")}
__all__ = list(_LAZY)


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(f"verl.trainer.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'verl.trainer' has no attribute {name!r}; it has {', '.join(_LAZY)}")
