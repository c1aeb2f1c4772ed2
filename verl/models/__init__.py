"""Models: load, prove and save model directories; heads; adapters; the one root forward."""

from verl.models.lm import LM, LayerKV, Outputs
from verl.models.load import LoraConfig, bind, context_length, export, get_actor_critic_from_hf, load_lm, load_tokenizer
from verl.models.packed import Packed

__all__ = ["LM", "LayerKV", "LoraConfig", "Outputs", "Packed", "bind", "context_length", "export",
           "get_actor_critic_from_hf", "load_lm", "load_tokenizer"]
