"""Exact resume: checkpoints that are whole or absent, the journal of a step in flight, the lock of a run directory."""

from verl.checkpoint.journal import Journal
from verl.checkpoint.lock import RunLock
from verl.checkpoint.state import flatten, rng_state, set_rng_state, unflatten
from verl.checkpoint.store import Checkpoint, Draft, Restored, load, newest, save

__all__ = ["Checkpoint", "Draft", "Journal", "Restored", "RunLock", "flatten", "load", "newest", "rng_state", "save",
           "set_rng_state", "unflatten"]
