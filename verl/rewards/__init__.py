"""Rewards: functions, rule verifiers, reward models, judges, remote services and people, composed into one score."""

from verl.rewards.base import Item, Source
from verl.rewards.build import build_rewards
from verl.rewards.compose import Composition, Entry
from verl.rewards.config import JudgeSettings, RewardSource
from verl.rewards.function import openrlhf
from verl.rewards.scorer import Scorer

__all__ = ["Composition", "Entry", "Item", "JudgeSettings", "RewardSource", "Scorer", "Source", "build_rewards",
           "openrlhf"]
