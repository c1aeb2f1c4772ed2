"""Experts of a mixture: found, recorded by both engines, chosen again in training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from verl.core.batch import from_groups
from verl.core.types import Group, Request, Sampling, Task
from verl.engine.hf_engine import HFEngine
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.models import routing
from verl.models.load import bind
from verl.models.packed import Packed

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
         "max_position_embeddings": 128}
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2,
                            rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "deepseek_v3": DeepseekV3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 4},
                                    n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
                                    q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                                    n_shared_experts=1, moe_intermediate_size=16),
}


def model(name: str):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)  # routers of small random models are nearly undecided otherwise
    lm = bind(module, None)
    lm.replays = True
    return lm


def sampled(engine) -> list[Group]:
    rng = np.random.default_rng(1)
    asked = [Request(str(i), rng.integers(0, 100, 5 + i).astype(np.int32), (1, 2, 3)) for i in range(3)]
    answers = engine.generate(asked, Sampling(max_tokens=6, ignore_eos=True))
    return [Group(Task(r.key, "p"), r.prompt_ids, s) for r, s in zip(asked, answers)]


def chosen(lm, batch) -> np.ndarray:
    """What a training forward really uses, int16 [packed tokens, layers, k]."""
    found, seen = routing.routers(lm.module), []
    hooks = [r.register_forward_hook(lambda m, _, out: seen.append(out)) for r in found]
    lm.forward(Packed(batch, "cpu"), 1.0)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(found) > 0
    return seen


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["native", "hf"])
def test_what_was_sampled_is_what_is_trained(name, kind):
    lm = model(name)
    assert lm.mixture
    groups = sampled(NativeEngine(lm, NativeConfig(kv_tokens=2048, prefill_tokens=4)) if kind == "native" else HFEngine(lm))
    batch = from_groups(groups)
    for group in groups:
        for s in group.samples:
            assert s.experts.shape == (len(group.prompt_ids) + len(s), len(routing.routers(lm.module)), 2)
            assert (s.experts[:-1] >= 0).all() and (s.experts[-1] == -1).all()
    own = lm.forward(Packed(replace(batch, experts_T=None, prompt_experts=None), "cpu"), 1.0).logprobs_T
    forced = lm.forward(Packed(batch, "cpu"), 1.0).logprobs_T
    torch.testing.assert_close(forced, own, rtol=1e-5, atol=1e-5)  # the same weights: the same experts
    np.testing.assert_allclose(forced.detach().numpy(), batch.rollout_logprobs_T, atol=2e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_moved_routers_keep_the_recorded_experts_and_learn(name):
    """Weights move until routers would choose otherwise: training uses the recorded ones, by the router's present weights."""
    lm = model(name)
    batch = from_groups(sampled(NativeEngine(lm, NativeConfig(kv_tokens=2048))))
    router = routing.routers(lm.module)[0]
    with torch.no_grad():
        for r in routing.routers(lm.module):
            r.weight.copy_(torch.randn(r.weight.shape, dtype=r.weight.dtype))
    packed = Packed(batch, "cpu")
    with routing.record(lm.module) as lists:
        lm.hidden(packed.ids_N, packed.positions_N, packed)
    assert (routing.stacked(lists) != packed.experts_NLK.numpy()).any(), "the routers would choose as before: nothing is tested"
    seen = []
    hook = router.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    lm.forward(packed, 1.0).logprobs_T.sum().backward()
    hook.remove()
    hidden, (_, weights_NK, ids_NK) = seen[0]
    recorded = packed.experts_NLK[:, 0]
    known = (recorded >= 0).all(-1)
    assert (ids_NK[known] == recorded[known]).all()
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T  # weights over the forced experts, written out
    probs = torch.softmax(logits.float(), -1)
    want = probs.gather(-1, ids_NK)
    torch.testing.assert_close(weights_NK.float(), (want / want.sum(-1, keepdim=True)).float(), rtol=1e-5, atol=1e-6)
    assert router.weight.grad.abs().sum() > 0, "gradients reach the router's weights"


def test_a_reference_chooses_its_own_and_copies_have_their_own_routers():
    lm = model("mixtral")
    batch = from_groups(sampled(NativeEngine(lm, NativeConfig(kv_tokens=2048))))
    other = lm.copy()
    assert not other.replays and set(map(id, routing.routers(other.module))).isdisjoint(map(id, routing.routers(lm.module)))
    with torch.no_grad():
        for r in routing.routers(other.module):
            r.weight.copy_(-r.weight)
    stripped = replace(batch, experts_T=None, prompt_experts=None)
    a, b = (other.forward(Packed(data, "cpu"), 1.0).logprobs_T for data in (batch, stripped))
    torch.testing.assert_close(a, b)


def test_unknown_experts_are_the_routers_own_and_selections_keep_theirs():
    lm = model("mixtral")
    groups = sampled(NativeEngine(lm, NativeConfig(kv_tokens=2048)))
    whole = from_groups(groups)
    groups[1].samples[0].experts = None  # of an engine that records none
    batch = from_groups(groups)
    assert (batch.experts_T[whole.offsets[3]:whole.offsets[4]] == -1).all()
    rows = [1, 4, 7]
    part, alone = whole.select(rows), lm.forward(Packed(whole.select(rows), "cpu"), 1.0).logprobs_T
    assert len(part.prompt_experts) == len(part.prompts) == 3
    everything = lm.forward(Packed(whole, "cpu"), 1.0).logprobs_T
    offsets = whole.offsets
    torch.testing.assert_close(alone, torch.cat([everything[offsets[r]:offsets[r + 1]] for r in rows]), rtol=1e-4, atol=1e-5)


def test_dense_models_have_none():
    from transformers import Qwen2Config
    lm = bind(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)), None)
    assert not lm.mixture and not routing.routers(lm.module)
    assert all(s.experts is None for g in sampled(NativeEngine(lm, NativeConfig(kv_tokens=2048))) for s in g.samples)
