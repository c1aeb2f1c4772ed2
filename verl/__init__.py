"""verl: reinforcement learning for the post-training of large language models.

Importing this package loads no optional dependency and no model; the public names resolve on first use.
"""

from importlib import import_module

__version__ = "0.3.0"

_LAZY = {"get_actor_critic_from_hf": "verl.models"}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
