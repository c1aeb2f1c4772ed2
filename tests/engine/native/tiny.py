"""Tiny real models of several architectures, with random weights large enough that their tokens vary."""

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from verl.core.batch import Batch
from verl.core.types import Request
from verl.models.load import bind
from verl.models.packed import Packed

VOCAB = 97
_BASE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXTRA = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "GptOss": {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
               "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "GPT2": {},
}


def tiny(architecture: str, device: str = "cpu", tokenizer=None, seed: int = 0, **changes):
    """An LM of the named architecture (Llama, Qwen2, Gemma2, GptOss, GPT2)."""
    settings = {**_BASE, **_EXTRA[architecture], **changes}
    if architecture == "GPT2":
        settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 2,
                    "bos_token_id": 1}
    config = getattr(transformers, architecture + "Config")(**settings)
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.35 if "embed" in name or "lm_head" in name or "wte" in name else 0.25)
            elif "sinks" in name:
                parameter.normal_(0, 1)
    lm = bind(module.to(device), tokenizer)
    assert lm.native, lm.why_not
    return lm


def requests(lengths, n: int = 1, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [Request(f"r{i}", rng.integers(3, VOCAB, length).astype(np.int32), tuple(range(100 * i + seed, 100 * i + seed + n)))
            for i, length in enumerate(lengths)]


def rescore(lm, asked, answers, temperature: float = 1.0) -> list[np.ndarray]:
    """Log-probs of the same samples by the training forward over one packed batch."""
    samples = [s for answer in answers for s in answer]
    lengths = np.array([len(s) for s in samples])
    ids = np.concatenate([s.ids_L for s in samples])
    batch = Batch(prompts=[r.prompt_ids for r in asked], prompt_S=np.repeat(np.arange(len(asked)), [len(a) for a in answers]),
                  lengths_S=lengths, ids_T=ids, mask_T=np.ones(len(ids), bool), row_S=np.arange(len(samples)),
                  group_S=np.arange(len(samples)))
    with torch.no_grad():
        out = lm.forward(Packed(batch, lm.device), temperature)
    return np.split(out.logprobs_T.float().cpu().numpy(), np.cumsum(lengths)[:-1])
