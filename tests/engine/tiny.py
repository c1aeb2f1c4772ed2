"""Tiny real model directories: a byte-level tokenizer, and transformers models with weights large enough to have opinions."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

IDS, ROWS = 258, 264  # ids of the tokenizer; rows of the output layer, six of them without a token
BASE = {"vocab_size": ROWS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 96, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, "tie_word_embeddings": False}
# field case D073: what a checkpoint's file asks for beside its end ids, which is all that may be followed
GENERATION = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [7, 9], "do_sample": True}


def tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then <eos> (256) and <end> (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return fast


def model_dir(path: Path, kind: str = "llama", **settings) -> Path:
    """A directory that transformers and vLLM load. Rows without a token are the loudest: they win unless masked."""
    config = AutoConfig.for_model(kind, **{**BASE, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
        model.get_output_embeddings().weight[IDS:] *= 4
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    (Path(path) / "generation_config.json").write_text(json.dumps(GENERATION))
    return path
