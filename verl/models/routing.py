"""Which experts a mixture-of-experts model chooses: recorded while sampling, chosen again in training.

Sampler and trainer round differently, and now and then a router then picks another expert: the log-prob of such a token
belongs to another network. Replay makes training use the experts that sampled (rollout routing replay, arXiv 2510.11370): the
present router's weights over the recorded experts, so that gradients reach the router but not its choice.

Routers are found by what they do (`torch.topk` over the experts), not by name, and keep their names and parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NOT_COMPUTED = -1  # an expert id that leaves the choice to the router


class _Choice(TorchFunctionMode):
    """Inside a router's forward: records what its top-k over the experts picks, or picks what `router.verl_route` says."""

    def __init__(self, router: nn.Module):
        self.router = router

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK or (out.indices.dim(), args[0].shape[-1], out.indices.shape[-1]) != self.router.verl_choice:
            return out
        route = self.router.verl_route
        if isinstance(route, list):
            route.append(out.indices.to(torch.int16))
            return out
        if len(route) != len(out.indices):
            raise ValueError(f"experts of {len(route)} tokens were recorded, {len(out.indices)} are computed")
        ids = torch.where(route < 0, out.indices, route)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


@cache
def _with_route(kind: type[nn.Module]) -> type[nn.Module]:
    """The router's class, obeying `verl_route`: None (as ever), a list (record into it) or int64 ids [N, k] (replay)."""

    class Router(kind):
        verl_route: list | torch.Tensor | None = None
        verl_choice: tuple[int, int, int]  # axes, experts, k of its top-k

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) if self.verl_route is None else self._routed(*args, **kwargs)

        @torch.compiler.disable
        def _routed(self, *args, **kwargs):
            with _Choice(self):
                return kind.forward(self, *args, **kwargs)

    Router.__name__, Router.__qualname__, Router.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Router


def prepare(module: nn.Module) -> bool:
    """Find a causal LM's routers with one small forward and make them obey; whether there are any."""
    config = module.config.get_text_config()
    if module.config.is_encoder_decoder or not any((getattr(config, name, None) or 0) > 1 for name in _COUNTS):
        return False
    inside, chosen = [], {}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in _TOPK and inside:
                chosen[inside[-1]] = (out.indices.dim(), args[0].shape[-1], out.indices.shape[-1])  # the last one is the choice
            return out

    hooks = [h for m in module.modules() for h in (m.register_forward_pre_hook(lambda m, _: inside.append(m)),
                                                   m.register_forward_hook(lambda *_: inside.pop() and None))]
    kept = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad(), Watch():
            ids = torch.arange(3, device=module.get_input_embeddings().weight.device)[None]
            module.base_model(input_ids=ids, use_cache=False)
    finally:
        module.set_attn_implementation(kept)
        for hook in hooks:
            hook.remove()
    for router, choice in chosen.items():
        router.__class__ = _with_route(type(router))
        router.verl_choice = choice
    return bool(chosen)


def routers(module: nn.Module) -> list[nn.Module]:
    """The routers that `prepare` found, in the order of the layers."""
    return [m for m in module.modules() if hasattr(m, "verl_choice")]


@contextmanager
def record(module: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Inside, every forward adds its tokens' experts, int16 [tokens, k], to each router's list."""
    found = routers(module)
    for router in found:
        router.verl_route = []
    try:
        yield [router.verl_route for router in found]
    finally:
        for router in found:
            router.verl_route = None


def stacked(lists: list[list[torch.Tensor]], index: int = -1) -> np.ndarray:
    """What one forward recorded, int16 [tokens, layers, k]."""
    return torch.stack([of[index] for of in lists], 1).cpu().numpy()


def replay(module: nn.Module, routes_NLK: torch.Tensor | None) -> None:
    """From now on forwards of N tokens choose these experts (int64; -1: the router's own choice); None: their own. It holds until
    the next call, since a backward that recomputes activations must choose alike."""
    for i, router in enumerate(routers(module)):
        router.verl_route = None if routes_NLK is None else routes_NLK[:, i]


def of_sample(prompt_LLK: np.ndarray, own_LLK: np.ndarray) -> np.ndarray:
    """Experts of a sample's prompt and own tokens, int16 [tokens, layers, k]; its last token was never computed."""
    out = np.concatenate([prompt_LLK, own_LLK]).astype(np.int16)
    out[-1] = NOT_COMPUTED
    return out
