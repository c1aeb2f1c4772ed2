"""What is special about training a reward model: its rows are tokenised as it will later judge, and how it is written."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from verl.algorithms.base import Algorithm
from verl.core.types import Message, Task
from verl.models import LM, export
from verl.models.reward_model import RewardModel
from verl.rewards.model import render


def encode_pair(tokenizer, task: Task) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, int]]]:
    """(shared ids, [(ids, mask, label)] of chosen and rejected): exactly the ids RewardModel scores for each answer.

    The shared ids are the longest common beginning that leaves each answer a token; it is computed once.
    """
    def ids_of(answer: str | list[Message]) -> np.ndarray:
        text, special = render(tokenizer, task.prompt, answer)
        return np.array(tokenizer(text, add_special_tokens=special)["input_ids"], np.int32)

    chosen, rejected = ids_of(task.chosen), ids_of(task.rejected)
    room = max(min(len(chosen), len(rejected)) - 1, 0)
    same = chosen[:room] == rejected[:room]
    shared = room if same.all() else int(np.argmin(same))
    own = [(ids[shared:], label) for ids, label in ((chosen, 1), (rejected, -1))]
    return chosen[:shared], [(ids, np.ones(len(ids), bool), label) for ids, label in own]


def export_reward_model(lm: LM, directory: str | os.PathLike, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write trunk and score head as a directory that RewardModel loads, and transformers where it has the classifier.

    `tensors` (name -> tensor) replaces the model's own values. Scores equal training's when the model is float32; in
    bfloat16 the head, which trains in float32, is rounded like the trunk.
    """
    directory = Path(directory)
    staging = directory.with_name(f".{directory.name}.language-model")
    try:
        export(lm, staging, dict(tensors) if tensors is not None else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # its head is fresh, and replaced below
            model = RewardModel(str(staging), dtype=lm.dtype)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    head = (tensors or {}).get("score_head.weight", lm.score_head.weight)
    with torch.no_grad():
        model.model.score.weight.copy_(head)
    model.save_pretrained(directory)
    return directory


def export_trained(lm: LM, algo: Algorithm, directory: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """What a method trains: a policy, or a reward model. A mixture writes both, the reward model into `DIR-reward`."""
    if algo.needs_scores:
        return export_reward_model(lm, directory, tensors)
    if lm.score_head is not None:
        export_reward_model(lm, directory.with_name(f"{directory.name}-reward"), tensors)
    return export(lm, directory, tensors)
