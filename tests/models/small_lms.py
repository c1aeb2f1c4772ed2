"""Small random language models of many architectures, ragged batches, and what stock transformers says about them."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.core.batch import Batch

VOCAB = 96
BASE = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SHORT = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
KINDS = {  # name -> (model type, settings beside BASE); a tuple of three: settings alone
    "llama": ("llama", {}),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=8)),
    "gemma2": ("gemma2", dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
                              final_logit_softcapping=5.0)),
    "gemma3": ("gemma3_text", dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8)),
    "mistral": ("mistral", dict(sliding_window=3)),
    "phi": ("phi", dict(num_key_value_heads=4)),
    "gpt2": ("gpt2", dict(SHORT, n_embd=32, n_layer=2, n_head=4, n_positions=128), None),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", dict(num_local_experts=4)),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=4, head_dim=8, sliding_window=4)),
    "deepseek_v3": ("deepseek_v3", dict(num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                                        moe_intermediate_size=16, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
                                        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)),
    "cohere": ("cohere", dict(logit_scale=0.25)),
    "granite": ("granite", dict(logits_scaling=3.0)),
    "llama4": ("llama4_text", dict(intermediate_size_mlp=64, num_local_experts=2, head_dim=8)),
    "mamba2": ("mamba2", dict(SHORT, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=16, n_groups=1),
               None),
    "bloom": ("bloom", dict(SHORT, hidden_size=32, n_layer=2, n_head=4), None),
    "falcon": ("falcon", dict(SHORT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4), None),
    "qwen3_next": ("qwen3_next", dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                      shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2,
                                      linear_key_head_dim=8, linear_value_head_dim=8,
                                      layer_types=["linear_attention", "full_attention"])),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"])),
    "phi3": ("phi3", dict(original_max_position_embeddings=16, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
        original_max_position_embeddings=16))),
}


def small(kind, dtype=torch.float32, seed=0, **settings):
    """A transformers model in eval mode whose weights are large enough to have opinions."""
    model_type, own, *alone = KINDS[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**({} if alone else BASE), **own, **settings})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager",
                                              experts_implementation="eager")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return module.to(dtype).eval()


def ragged(seed=0, vocab=VOCAB, prompts=(6, 3, 0, 4), answers=((5, 1, 0), (4, 9), (7,), (1,)), **columns) -> Batch:
    """Prompts of these lengths, each with answers of those lengths; without a prompt the first token is not trained."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(prompts)), [len(a) for a in answers])
    lengths = np.array([n for a in answers for n in a], np.int64)
    mask = np.ones(lengths.sum(), bool)
    starts = np.cumsum(lengths) - lengths
    mask[starts[(np.array(prompts)[owner] == 0) & (lengths > 0)]] = False
    return Batch(prompts=[rng.integers(0, vocab, n).astype(np.int32) for n in prompts], prompt_S=owner.astype(np.int64),
                 lengths_S=lengths, ids_T=rng.integers(0, vocab, lengths.sum()).astype(np.int32), mask_T=mask,
                 row_S=np.arange(len(lengths)), group_S=owner.astype(np.int64), **columns)


def stock(module, batch, temperature=1.0, rows=None, value_head=None):
    """(log-probs, entropies, values) [T] of every sequence alone through transformers; 0 where nothing predicts a token."""
    columns = [[], [], []]
    for s, n in enumerate(batch.lengths_S):
        prompt, start = batch.prompts[batch.prompt_S[s]], batch.offsets[s]
        ids = torch.from_numpy(np.concatenate([prompt, batch.ids_T[start:start + n]]).astype(np.int64)).to(module.device)
        if n == 0 or len(ids) == 1:
            continue
        out = module(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        logp = (out.logits[0, :, :rows].double() / temperature).log_softmax(-1)
        hidden = module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        first = max(len(prompt), 1)
        pad = [logp.new_zeros(first - len(prompt))]
        columns[0].append(torch.cat([*pad, logp[first - 1:-1].gather(-1, ids[first:, None])[:, 0]]))
        columns[1].append(torch.cat([*pad, -(logp.exp() * logp)[first - 1:-1].sum(-1)]))
        if value_head is not None:
            columns[2].append(torch.cat([*pad, value_head(hidden[first - 1:-1].to(value_head.weight.dtype))[:, 0].double()]))
    return tuple(torch.cat(c) if c else None for c in columns)


def gradients(module):
    """Name -> gradient, float64; parameters that got none are left out."""
    return {n: p.grad.double() for n, p in module.named_parameters() if p.grad is not None}


def worst(got, want):
    """Largest difference between two gradients, relative to the largest entry of the wanted one over all tensors."""
    assert {n for n, g in got.items() if g.any()} == {n for n, g in want.items() if g.any()}
    scale = max(float(g.abs().max()) for g in want.values())
    return max(float((got[n] - want[n]).abs().max()) for n in want if n in got) / scale
