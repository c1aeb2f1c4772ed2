"""RLDataLoader: hands out Tasks in an order that any run can take up again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.core.errors import CheckpointError, DataError
from verl.core.registry import load_object
from verl.core.types import Task
from verl.data.config import DataConfig
from verl.data.dataset import PromptDataset, RewardDataset, hold_out, limited, load
from verl.data.order import Frontier, Order, Sampler, checked_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RLDataLoader:
    """Tasks in an endless order that is a pure function of (seed, epoch), and the place a run has reached in it.

    `data` is the `data` section of a config, or anything `as_tasks` reads. Takes `seed` until `bind` gives the
    trainer's. Raises DataError (schema, missing files) at construction.

    In step: `take(n)`. Out of step: `issue(n)` hands out (slot, task), `done(slots)` and `put_back(slots)` answer.
    """

    def __init__(self, data: DataConfig | Any, seed: int = 0, config: DataConfig | None = None):
        self.config = data if isinstance(data, DataConfig) else config or DataConfig()
        source = self.config.train if isinstance(data, DataConfig) else data
        if source is None:
            raise DataError("data.train is not set; give a path, e.g. data.train: prompts.jsonl")
        self.seed, self.notes = seed, []
        self._train, self._eval = load(source, self.config, self.config.split_of("train")), None
        if self.config.eval is not None:
            self._eval = load(self.config.eval, self.config, self.config.split_of("eval"))
        elif self.config.eval_size:
            self._train, self._eval, extra = hold_out(self._train, self.config.eval_size)
            if extra:
                self.notes.append(f"data: {extra} training rows dropped, their prompts are held out for evaluation")
        self.prompts: PromptDataset = self._train
        self.eval_prompts: PromptDataset | None = self._eval
        self.failed: list[int] = []
        self.longest_prompt: int | None = None  # tokens, of training and evaluation; known once bound
        self._frontier = Frontier()
        self._reset()

    def bind(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[str]:
        """Check every prompt under this tokenizer, apply data.max_prompt_tokens, take the run's seed.

        Call it before any weights load and before `load_state`. Returns lines to print (counts of what was dropped or
        cut). Raises DataError when a prompt cannot be encoded, is too long, or none is left.
        """
        self.prompts, note, self.longest_prompt = limited(self._train, tokenizer, self.config)
        lines = [*self.notes, f"data: {len(self.prompts)} prompts" + (f", {note}" if note else "")]
        if self._eval is not None:
            self.eval_prompts, note, longest = limited(self._eval, tokenizer, self.config)
            self.longest_prompt = max(self.longest_prompt, longest)
            lines.append(f"data: {len(self.eval_prompts)} evaluation prompts" + (f", {note}" if note else ""))
        self.seed = seed
        self._reset()
        return lines

    def _reset(self) -> None:
        self.rewards = RewardDataset(self.prompts)
        self._cache: tuple[int, np.ndarray] | None = None
        self._foreign = ":" in self.config.sampler
        if self._foreign:
            self._sampler: Sampler = load_object(self.config.sampler, "data.sampler")(self.prompts, self.seed)
        else:
            self._sampler = Order(self.prompts.sizes, self.prompts.weights, self.seed, self.config.sampler == "shuffle")
        self.size = len(self._order(0))
        self._fingerprint: str | None = None

    def _order(self, epoch: int) -> np.ndarray:
        if self._cache is None or self._cache[0] != epoch:
            order = self._sampler.order(epoch)
            if self._foreign:
                size = None if self._cache is None else self.size
                order = checked_order(order, len(self.prompts), size, "data.sampler")
            self._cache = (epoch, order)
        return self._cache[1]

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return self.size

    def task(self, slot: int) -> Task:
        """The task at a place of the endless order."""
        return self.prompts[int(self._order(slot // self.size)[slot % self.size])]

    def issue(self, n: int) -> list[tuple[int, Task]]:
        """The next n (slot, task), now in flight: put-back ones first. They count as consumed only when `done`."""
        return [(slot, self.task(slot)) for slot in self._frontier.issue(n)]

    def done(self, slots: Iterable[int], failed: bool = False) -> None:
        """These slots in flight are consumed, in any order. `failed`: for good; they are kept in `failed` and saved."""
        slots = list(slots)
        self._frontier.settle(slots)
        if failed:
            self.failed.extend(slots)

    def put_back(self, slots: Iterable[int]) -> None:
        """These slots in flight were not used after all; they are the next to be handed out."""
        self._frontier.put_back(slots)

    def take(self, n: int) -> list[Task]:
        """The next n tasks, consumed at once; goes on into the next epoch where one ends."""
        issued = self.issue(n)
        self.done(slot for slot, _ in issued)
        return [task for _, task in issued]

    def batches(self, n: int) -> Iterator[list[Task]]:
        """Batches of n from here to the end of the epoch; the last one may be smaller, none is empty."""
        end = (self.position // self.size + 1) * self.size
        while (left := end - self.position) > 0:
            yield self.take(min(n, left))

    @property
    def position(self) -> int:
        """Every slot below it is consumed; without work in flight, the number of prompts consumed by all ranks."""
        return self._frontier.start

    @position.setter
    def position(self, slot: int) -> None:
        self._frontier = Frontier(start=slot, next=slot)

    @property
    def consumed(self) -> int:
        """Prompts consumed, those out of order included."""
        return self._frontier.start + len(self._frontier.done)

    @property
    def epoch(self) -> int:
        return self.position // self.size

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the prompts and of how they are ordered, whatever the seed."""
        if self._fingerprint is None:
            self._fingerprint = f"{self.prompts.fingerprint()}-{self.config.sampler}"
        return self._fingerprint

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON. Slots in flight are absent: they are handed out again."""
        return {"fingerprint": self.fingerprint, "seed": self.seed, "position": self.position,
                "done": sorted(self._frontier.done), "failed": sorted(self.failed)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state, on any world size. Raises CheckpointError when data, order or seed are others."""
        for name, mine, setting in (("fingerprint", self.fingerprint, "the same data.* settings and files"),
                                    ("seed", self.seed, f"trainer.seed: {state['seed']}")):
            if state[name] != mine:
                raise CheckpointError(f"the checkpoint was made with data {name} {state[name]}, this run has {mine}; "
                                      f"use {setting}, or start a new run")
        self._frontier = Frontier(start=state["position"], done=set(state["done"]), next=state["position"])
        self.failed = list(state["failed"])
