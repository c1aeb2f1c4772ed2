"""The public config loader: YAML to a typed RunConfig (`.trainer`, `.model`, `.data`)."""

from verl.trainer.config import load_config

__all__ = ["load_config"]
