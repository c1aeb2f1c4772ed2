"""Algorithms: pure maths, a file each. Adding one is one file and one row (or `module:Class` in the config)."""

from verl.core.registry import Table

ALGORITHMS = Table("trainer.algorithm", {
    "grpo": "verl.algorithms.grpo:GRPO",
    "dr_grpo": "verl.algorithms.dr_grpo:DrGRPO",
    "dapo": "verl.algorithms.dapo:DAPO",
    "gspo": "verl.algorithms.gspo:GSPO",
    "cispo": "verl.algorithms.cispo:CISPO",
    "rloo": "verl.algorithms.rloo:RLOO",
    "reinforce": "verl.algorithms.reinforce:Reinforce",
    "reinforce_pp": "verl.algorithms.reinforce_pp:ReinforcePP",
    "reinforce_pp_baseline": "verl.algorithms.reinforce_pp:ReinforcePPBaseline",
    "remax": "verl.algorithms.remax:ReMax",
    "ppo": "verl.algorithms.ppo:PPO",
    "sft": "verl.algorithms.sft:SFT",
    "dpo": "verl.algorithms.dpo:DPO",
    "kto": "verl.algorithms.kto:KTO",
    "orpo": "verl.algorithms.orpo:ORPO",
    "simpo": "verl.algorithms.simpo:SimPO",
    "reward_model": "verl.algorithms.reward_model:BradleyTerry",
})
