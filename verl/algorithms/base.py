"""The contract between an algorithm and the engines: credit before the update, unreduced values inside it.

An algorithm is a frozen dataclass whose fields are its settings (they are what `trainer.algo` in the config may set)
and whose methods are pure. It never divides by a count: `reduction` names how coefficients are computed once over the
whole optimizer batch (reduce.py), the engine sums value * coefficient over any micro-batches, packing and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from verl.core.batch import Batch
from verl.core.errors import ConfigError


@dataclass(slots=True)
class LossInputs:
    """One micro-batch as a loss sees it: float32 tensors on the engine's device, T tokens of S whole sequences.

    All sequences of the batch's `group_S` unit are present when the algorithm's `unit` is "group". Values in slots
    where mask_T is False are undefined (possibly NaN) and must be selected away, never multiplied by zero.
    """

    logprobs_T: torch.Tensor  # current policy, carries gradient
    mask_T: torch.Tensor  # bool
    sequence_T: torch.Tensor  # int64 in [0, S)
    sequences: int  # S
    group_S: torch.Tensor  # int64
    entropy_T: torch.Tensor | None = None  # carries gradient when the algorithm asks for an entropy bonus
    values_T: torch.Tensor | None = None  # critic's current values, carries gradient
    rollout_logprobs_T: torch.Tensor | None = None
    old_logprobs_T: torch.Tensor | None = None  # None: first update on fresh data, old = detached current
    ref_logprobs_T: torch.Tensor | None = None
    advantages_T: torch.Tensor | None = None
    returns_T: torch.Tensor | None = None
    old_values_T: torch.Tensor | None = None
    label_S: torch.Tensor | None = None  # +1 / -1
    margin_S: torch.Tensor | None = None
    ref_sums_S: torch.Tensor | None = None
    scores_S: torch.Tensor | None = None  # a reward model's output, carries gradient
    context: Mapping[str, float] = field(default_factory=dict)  # numbers `prepare` computed over the optimizer batch


@dataclass(slots=True)
class LossOutputs:
    """Unreduced values and metrics.

    `values` has shape [T] (per_token True) or [S]; the engine multiplies it with weights_T or weights_S and sums.
    `metrics`: name -> ([T] or [S] detached values, bool selection of the same shape); averaged over the selection of
    the whole optimizer batch. A "/min" or "/max" at the end of a name takes that extreme instead of the mean.
    """

    values: torch.Tensor
    per_token: bool
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class Credit:
    """What `credit` computed for a whole step: float32 [T] columns (0 outside the mask) and plain-number metrics."""

    advantages_T: np.ndarray
    returns_T: np.ndarray | None = None
    keep_S: np.ndarray | None = None  # bool; rows that take part in the loss (None: all that were scored)
    metrics: dict[str, float] = field(default_factory=dict)


class Algorithm:
    """Base of every algorithm. Class attributes say what it needs; subclasses are frozen dataclasses."""

    name: ClassVar[str]
    online: ClassVar[bool] = True  # samples from the policy; False: learns from recorded answers
    unit: ClassVar[str] = "row"  # smallest piece a batch may be cut into: "row" or "group" (pairs)
    needs_scores: ClassVar[bool] = False  # the loss is over a model's score of whole sequences, not over log-probs
    min_group: ClassVar[int] = 1  # samples per prompt below which the estimator is undefined
    needs_greedy: ClassVar[bool] = False  # wants the reward of a greedy answer per prompt in batch.baselines_S
    needs_logprob_sums: ClassVar[bool] = False  # `prepare` wants the policy's log-prob sums of the optimizer batch

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def needs_entropy_grad(self) -> bool:
        return False

    @property
    def reduction(self) -> str:
        """One of reduce.REDUCTIONS."""
        return "token_mean"

    def check_group(self, samples: int) -> None:
        """Raise ConfigError, before anything runs, when `samples` per prompt are too few for this estimator."""
        if samples < self.min_group:
            raise ConfigError(f"trainer.group_size: {samples} leaves {self.name} nothing to compare with; it needs at "
                              f"least {self.min_group} samples per prompt. Set trainer.group_size: {self.min_group} or "
                              "more, or use an algorithm with another baseline (ppo, reinforce, reinforce_pp, remax)")

    def usable(self, batch: Batch) -> np.ndarray | None:
        """bool [S]: rows of groups worth training on; the trainer samples further prompts in place of the others.

        None: every group is trained on (no dynamic sampling).
        """
        return None

    def credit(self, batch: Batch) -> Credit:
        """Advantages from rewards_S (NaN: nobody scored it), groups, log-probs and values of the whole step."""
        raise NotImplementedError

    def prepare(self, batch: Batch, logprob_sums_S: np.ndarray | None = None) -> dict[str, float]:
        """Numbers the loss needs over the whole optimizer batch (KTO's reference point). Default: none."""
        return {}

    def should_stop(self, approx_kl: float) -> bool:
        """True when the updates on this step's batch should end at this KL(old || policy), nats per token. Default: never."""
        return False

    def steered(self, observed_kl: float, samples: int) -> Algorithm:
        """The algorithm of the next step, after this KL to the reference. Default: itself."""
        return self

    def loss(self, x: LossInputs) -> LossOutputs:
        """Unreduced policy (and, for a shared trunk, value) loss."""
        raise NotImplementedError

    def value_loss(self, x: LossInputs) -> LossOutputs:
        """Unreduced loss of an independent critic; only when needs_critic."""
        raise NotImplementedError
