"""A PPO step as one writes it with transformers and Accelerate: the plain baseline of step.py's ppo.

Actor and critic train with float32 weights under bf16 autocast, AdamW fused; reference and reward model are loaded in bf16.
`generate` samples, every model then sees padded rows in micro-batches, one epoch and one update of actor and critic
a step. The micro-batch is the largest power of two that fits, found by halving when memory runs out.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from measure import Case, Options, Rows, Work, free
from shapes import config_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, GenerationConfig

GAMMA, LAM, CLIP, KL, LR = 1.0, 0.95, 0.2, 0.05, 1e-6
TRIES = (64, 32, 16, 8, 4, 2, 1)


def model(case: Case, family, o: Options, dtype: torch.dtype, **labels):
    with torch.device(o.device):
        return family.from_config(config_of(case.shape, **labels), dtype=dtype, attn_implementation="sdpa").eval()


class Loop:
    """Four models, two optimizers, one step."""

    def __init__(self, case: Case, work: Work, o: Options):
        self.work, self.o = work, o
        self.accelerator = Accelerator(mixed_precision="bf16" if o.device == "cuda" else "no", cpu=o.device == "cpu")
        actor = model(case, AutoModelForCausalLM, o, torch.float32)
        critic = model(case, AutoModelForTokenClassification, o, torch.float32, num_labels=1)
        fused = {"fused": True}
        self.actor, self.critic, self.actor_optimizer, self.critic_optimizer = self.accelerator.prepare(
            actor, critic, torch.optim.AdamW(actor.parameters(), LR, weight_decay=0.0, **fused),
            torch.optim.AdamW(critic.parameters(), LR, weight_decay=0.0, **fused))
        self.reference, self.reward = self.accelerator.prepare(
            model(case, AutoModelForCausalLM, o, o.dtype).requires_grad_(False),
            model(case, AutoModelForSequenceClassification, o, o.dtype, num_labels=1).requires_grad_(False))
        self.vocabulary = actor.config.vocab_size
        for network, optimizer in ((self.actor, self.actor_optimizer), (self.critic, self.critic_optimizer)):
            for parameter in network.parameters():  # the moments take their memory before micro-batches are tried
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        self.micro = {"generate": work.sequences, "forward": o.micro or TRIES[0], "train": o.micro or TRIES[0]}

    def fits(self, phase: str, function):
        """`function(micro-batch)`, with half the micro-batch as long as memory runs out; what fitted is kept."""
        while True:
            try:
                return function(self.micro[phase])
            except torch.OutOfMemoryError:
                if self.micro[phase] == 1:
                    raise
            self.actor_optimizer.zero_grad()
            self.critic_optimizer.zero_grad()
            self.micro[phase] //= 2
            free(self.o.device)
            print(f"out of memory: {phase} goes on with {self.micro[phase]} sequences a micro-batch", flush=True)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        n = self.work.response
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=n, eos_token_id=None,
                                    pad_token_id=0)
        network = self.accelerator.unwrap_model(self.actor)

        def sample(part: torch.Tensor) -> torch.Tensor:
            return network.generate(input_ids=part, attention_mask=torch.ones_like(part), generation_config=settings)
        return self.fits("generate", lambda micro: torch.cat([sample(part) for part in prompts.split(micro)]))

    def logprobs(self, network, ids: torch.Tensor) -> torch.Tensor:
        """[B, R] log-probs of the response tokens."""
        logits = network(input_ids=ids, logits_to_keep=self.work.response + 1, use_cache=False).logits[:, :-1].float()
        targets = ids[:, self.work.prompt:]
        return logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)

    def values(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, R] values of the state before each response token."""
        return self.critic(input_ids=ids, use_cache=False).logits[:, self.work.prompt - 1:-1, 0].float()

    @torch.no_grad()
    def passes(self, ids: torch.Tensor, function) -> torch.Tensor:
        return self.fits("forward", lambda micro: torch.cat([function(part) for part in ids.split(micro)]))

    def advantages(self, scores: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, values: torch.Tensor):
        """GAE over rewards -KL, with the score on the last token; advantages whitened."""
        rewards = -KL * (old - ref)
        rewards[:, -1] += scores
        out, last = torch.empty_like(values), torch.zeros_like(values[:, 0])
        for t in reversed(range(values.shape[1])):
            after = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
            last = rewards[:, t] + GAMMA * after - values[:, t] + GAMMA * LAM * last
            out[:, t] = last
        return (out - out.mean()) / (out.std() + 1e-8), out + values

    def update(self, micro: int, ids, old, values, advantages, returns) -> None:
        """One update of each: gradients summed over micro-batches."""
        for x, o, v, a, r in zip(*(t.split(micro) for t in (ids, old, values, advantages, returns))):
            share = len(x) / len(ids)
            ratio = (self.logprobs(self.actor, x) - o).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            self.accelerator.backward(loss * share)
            value = self.values(x)
            bounded = v + (value - v).clamp(-CLIP, CLIP)
            self.accelerator.backward(torch.maximum(F.mse_loss(value, r, reduction="none"),
                                                    F.mse_loss(bounded, r, reduction="none")).mean() / 2 * share)
        for network, optimizer in ((self.actor, self.actor_optimizer), (self.critic, self.critic_optimizer)):
            self.accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def step(self, number: int, rows: Rows) -> None:
        rng = np.random.default_rng(number)
        prompts = torch.from_numpy(rng.integers(0, self.vocabulary, (self.work.sequences, self.work.prompt))).to(self.o.device)
        with rows.clock("generate"):
            ids = self.generate(prompts)
        assert ids.shape == (self.work.sequences, self.work.length)
        with rows.clock("score"):
            scores = self.passes(ids, lambda x: self.reward(input_ids=x, attention_mask=torch.ones_like(x)).logits[:, 0].float())
        with rows.clock("logprobs"):
            old = self.passes(ids, lambda x: self.logprobs(self.actor, x))
            ref = self.passes(ids, lambda x: self.logprobs(self.reference, x))
            values = self.passes(ids, self.values)
        with rows.clock("credit"):
            advantages, returns = self.advantages(scores, old, ref, values)
        with rows.clock("train"):
            self.fits("train", lambda micro: self.update(micro, ids, old, values, advantages, returns))


def run(method: str, case: Case, o: Options, system: str) -> dict[str, float]:
    """Medians of `o.steps` steps. The step before them trains on random rows instead of sampled ones: it finds the micro-batches
    and warms up at a fraction of the cost."""
    free(o.device)
    torch.manual_seed(0)
    work = o.work[method]
    loop = Loop(case, work, o)
    rows = Rows(f"accelerate {method} {case.name}", o.device)
    whole = loop.generate
    loop.generate = lambda prompts: torch.randint(0, loop.vocabulary, (work.sequences, work.length), device=o.device)
    with rows.step():
        loop.step(0, rows)
    loop.generate = whole
    free(o.device)
    for number in range(1, o.steps + 1):
        with rows.step():
            loop.step(number, rows)
    print(f"micro-batches that fit: {loop.micro}", flush=True)
    return rows.median()
