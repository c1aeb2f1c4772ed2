"""AdamW (arXiv 1711.05101) with float32 masters beside low-precision working weights, and schedules as functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from verl.core.errors import ConfigError

EPS = 1e-8  # added to the root of AdamW's second moment
WIDE = (torch.float32, torch.float64)  # parameters that are their own masters


@dataclass(frozen=True, slots=True)
class OptimConfig:
    lr: float = field(default=1e-6, metadata={"help": "peak learning rate"})
    schedule: str = field(default="constant", metadata={
        "help": "constant | linear | cosine, after the warm-up, to 0 at the last step"})
    warmup_steps: int = field(default=0, metadata={"help": "optimizer updates of linear warm-up"})
    betas: tuple[float, float] = field(default=(0.9, 0.999), metadata={"help": "decay of AdamW's two moments"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled decay of matrices; vectors are never decayed"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are scaled down to this global norm"})

    def __post_init__(self):
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule {self.schedule!r} is not known; allowed: constant, linear, cosine")
        if not self.lr >= 0 or not self.max_grad_norm > 0 or self.warmup_steps < 0:
            raise ConfigError(f"lr {self.lr}, max_grad_norm {self.max_grad_norm}, warmup_steps {self.warmup_steps}: "
                              "lr and warmup_steps must be >= 0, max_grad_norm > 0")


def learning_rate(config: OptimConfig, update: int, total: int) -> float:
    """The rate of update number `update` (0-based) of `total`: a pure function, so a resume cannot restart it."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class MasterAdamW:
    """Owns float32 masters, moments and gradient accumulators; writes back into the working weights in place.

    A float32 parameter is its own master. A low-precision one gets a float32 copy, and a float32 accumulator that takes
    its gradient as soon as autograd has finished it, so that no sum over micro-batches is ever made in low precision.
    """

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], config: OptimConfig):
        self.config, self.updates = config, 0
        trained = [(n, p) for n, p in named if p.requires_grad]
        if not trained:
            raise ConfigError("no parameter of the model requires a gradient; nothing would be trained")
        self.names = [n for n, _ in trained]
        self.working = [p for _, p in trained]
        self._allocate()
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulate(h)) for p, h in zip(self.working, self.sums)
                       if h is not p]

    def _allocate(self) -> None:
        """Masters, moments, and `sums`: for each parameter the holder of its accumulated gradient (`.grad`)."""
        self.sums = self.masters = [p if p.dtype in WIDE else p.detach().float() for p in self.working]
        groups = [{"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": self.config.weight_decay},
                  {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.config.lr, betas=self.config.betas, eps=EPS,
                                       fused=True)

    @staticmethod
    def _accumulate(holder):
        def hook(parameter: torch.nn.Parameter):
            if holder.grad is None:
                holder.grad = parameter.grad.float()
            else:
                holder.grad.add_(parameter.grad)
            parameter.grad = None
        return hook

    def gradients(self) -> list[torch.Tensor]:
        """The accumulated gradients there are."""
        return [h.grad for h in self.sums if h.grad is not None]

    def grad_norm(self) -> torch.Tensor:
        """Global 2-norm of the accumulated gradients, on the device; 0 when there are none."""
        grads = self.gradients()
        if not grads:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([n.double() for n in torch._foreach_norm(grads)]))

    def clear(self) -> None:
        """Drop accumulated gradients."""
        for holder in self.sums:
            holder.grad = None

    @torch.no_grad()
    def step(self, rate: float, norm: float) -> None:
        """One update at this rate with gradients clipped to max_grad_norm, then write-back."""
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        if scale < 1.0:
            torch._foreach_mul_(self.gradients(), scale)
        self._apply(rate)
        self.clear()
        self.updates += 1

    def _apply(self, rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        low = [(p, m) for p, m in zip(self.working, self.masters) if m is not p]
        if low:
            torch._foreach_copy_([p.detach() for p, _ in low], [m for _, m in low])

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name: what a resume needs beside `updates`."""
        out = {}
        for i, (name, working, master) in enumerate(zip(self.names, self.working, self.masters)):
            if master is not working:
                out[f"master.{name}"] = master.detach()
            out |= {f"{key}.{name}": value.detach() for key, value in self._moments_of(i).items()}
        return out

    def _moments_of(self, i: int) -> dict[str, torch.Tensor]:
        """AdamW's state of parameter i; empty before its first update."""
        return self.adamw.state.get(self.masters[i], {})

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], updates: int) -> None:
        """Restore `state()`; moments held before are gone. Raises KeyError naming a tensor that is missing or of another
        shape, before anything was changed."""
        found = {}
        for i, (name, working, master) in enumerate(zip(self.names, self.working, self.masters)):
            if master is not working:
                find(tensors, f"master.{name}", master.shape)
            if f"exp_avg.{name}" in tensors:
                shapes = {"step": (), "exp_avg": master.shape, "exp_avg_sq": master.shape}
                found[i] = {k: find(tensors, f"{k}.{name}", s) for k, s in shapes.items()}
        for name, working, master in zip(self.names, self.working, self.masters):
            if master is not working:
                master.copy_(tensors[f"master.{name}"])
                working.copy_(master)
        self._take_moments(found)
        self.updates = updates

    def _take_moments(self, found: dict[int, dict[str, torch.Tensor]]) -> None:
        self.adamw.state.clear()
        for i, moments in found.items():
            master = self.masters[i]
            self.adamw.state[master] = {k: t.to(master.device, copy=True) for k, t in moments.items()}


def find(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a checkpoint. Raises KeyError when it is missing or of another shape."""
    if name not in tensors or tensors[name].shape != shape:
        seen = tuple(tensors[name].shape) if name in tensors else "nothing"
        raise KeyError(f"{name}: expected a tensor of shape {tuple(shape)}, the checkpoint has {seen}")
    return tensors[name]
