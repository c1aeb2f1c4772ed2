"""Nested run state as JSON plus tensors, and random states: what a checkpoint holds besides weights. Never a pickle."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl.core.errors import CheckpointError


def flatten(value: Any, name: str = "state") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested state into JSON and named tensors; `unflatten` gives the same back, types included.

    Takes None, bool, int, float, str, list, tuple, dict with str or int keys, numpy arrays and scalars, torch tensors,
    in any nesting (an optimizer's state_dict is one). Raises CheckpointError naming the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(value, name, tensors), tensors


def _flatten(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)):
        numpy = isinstance(value, np.ndarray)
        if name in tensors:  # keys with dots can spell one name twice
            name = f"{name}#{len(tensors)}"
        try:
            tensors[name] = torch.from_numpy(np.array(value)) if numpy else value.detach()
        except TypeError as error:
            raise CheckpointError(f"{name}: an array of {value.dtype} cannot be stored; use numbers") from error
        return {"$array" if numpy else "$tensor": name}
    if isinstance(value, list):
        return [_flatten(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_flatten(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _flatten(item, f"{name}.{key}", tensors) for key, item in value.items()}
        return {"$items": [[key, _flatten(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    raise CheckpointError(f"{name}: a {type(value).__name__} cannot be stored; a checkpoint holds numbers, strings, lists, "
                          "dicts with str or int keys, arrays and tensors")


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The nested state that `flatten` split. Raises CheckpointError when a tensor it refers to is not there."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    for mark, content in value.items() if len(value) == 1 else ():
        if mark in ("$tensor", "$array"):
            if content not in tensors:
                raise CheckpointError(f"the state refers to tensor {content!r}, which its file does not hold")
            return tensors[content] if mark == "$tensor" else tensors[content].cpu().numpy()
        if mark == "$float":
            return float(content)
        if mark == "$tuple":
            return tuple(unflatten(item, tensors) for item in content)
        if mark == "$items":
            return {key: unflatten(item, tensors) for key, item in content}
    return {key: unflatten(item, tensors) for key, item in value.items()}


def rng_state() -> dict[str, Any]:
    """States of Python's, numpy's (legacy), torch's CPU and, where CUDA is in use, every GPU's generator."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": {"version": version, "words": np.array(words, np.int64), "gauss": gauss},
            "numpy": {"name": name, "keys": keys.astype(np.int64), "position": position, "has_gauss": has_gauss,
                      "cached": cached},
            "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue every generator where `rng_state` saw it; GPUs this machine lacks are left out."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["keys"].astype(np.uint32), numpy["position"], numpy["has_gauss"],
                         numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        for device, cuda in enumerate(state["cuda"][:torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda.cpu(), device)
