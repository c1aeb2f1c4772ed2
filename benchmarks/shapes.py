"""Random-weight models of real shapes, and the record every benchmark appends."""

import datetime
import json
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from verl.models.load import bind

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "q05": (Qwen2Config, dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                              intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768)),
    "q15": (Qwen2Config, dict(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                              intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768)),
    "l8": (LlamaConfig, dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                             intermediate_size=14336, vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=8192)),
}
TINY = {"tiny": (Qwen2Config, dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                   intermediate_size=64, vocab_size=512, tie_word_embeddings=True, max_position_embeddings=256))}


def config_of(case: str, **changes):
    """The transformers config of a case. Nothing ends a response: there is no end id."""
    kind, sizes = (SHAPES | TINY)[case]
    return kind(**sizes | changes, bos_token_id=None, eos_token_id=None, pad_token_id=0)


def random_lm(case: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int | None = None, seed: int = 0,
              **bound):
    """An LM of a case's shape with random weights, made on the device."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    torch.manual_seed(seed)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config_of(case, **changes), dtype=dtype)
    return bind(module, None, path=case, **bound)


def save_tokenizer(rows: int, directory: str) -> None:
    """A tokenizer whose token i is the word "i": every row of a random-weight model has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(rows)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(directory)


def flops_per_token(case: str, context: float, backward: bool = True, head: bool = True) -> float:
    """Matrix FLOPs of one token at a mean attention context of `context` tokens, with or without the output layer."""
    s = (SHAPES | TINY)[case][1]
    h = s["hidden_size"]
    kv = s["num_key_value_heads"] * (h // s["num_attention_heads"])
    layer = 2 * (h * (h + 2 * kv) + h * h + 3 * h * s["intermediate_size"]) + 4 * h * context
    return (s["num_hidden_layers"] * layer + (2 * h * s["vocab_size"] if head else 0)) * (3 if backward else 1)


def record(bench: str, case: str, system: str, metric: str, value: float, unit: str, file: str, **more) -> None:
    """Append one JSON line to results/<file>."""
    def version(name: str):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=Path(__file__).parent).stdout.strip() or None
    line = {"bench": bench, "case": case, "system": system, "metric": metric, "value": round(value, 4), "unit": unit,
            "commit": commit, "date": datetime.date.today().isoformat(),
            "versions": {n: version(n) for n in ("torch", "transformers", "triton", "vllm", "trl") if version(n)}, **more}
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / file, "a") as out:
        out.write(json.dumps(line) + "\n")
