"""Memory of a device by part, as pure functions of a run in numbers. Bytes throughout; docs/plan.md has the formulas.

Parts belong to phases: optimizer state is always there, activations only while training, the cache only while sampling. What
must fit is the larger phase. What a monitor shows is more (`in_use`), because torch keeps the memory of a phase that is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verl.trainer.calibration import CALIBRATION, GIB, Calibration
from verl.trainer.shape import Shape

PAGE = 64  # tokens of one page of the sampler's cache on a GPU
PREFILL = 8192  # tokens of one prefill pass
BUCKET = 1 << 24  # elements of masters and moments that an offloaded optimizer has on the device, twice
HEAD_CHUNK = {True: GIB, False: GIB >> 4}  # bytes of float32 logits that the output layer computes at a time: GPU, CPU


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one purpose on one device. when: always | train | score | generate. mapped: outside of torch's allocator."""

    name: str
    bytes: float
    when: str = "always"
    mapped: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a trained model lies on `devices`: cut by tensor and pipeline, its state cut over `shard` of the copies that are left.

    gather: what FSDP puts together again: "" nothing | "layer", a layer at a time | "whole", all weights while training.
    """

    devices: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: int = 1
    gather: str = ""

    @property
    def split(self) -> int:
        """Devices that one set of weights is cut over by tensor and pipeline."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Groups of devices that each compute micro-batches of their own."""
        return self.devices // self.split


@dataclass(frozen=True, slots=True)
class Job:
    """A run in numbers: all that memory and time depend on. Lengths in tokens, widths in bytes of a number."""

    actor: Shape
    trained: int  # parameters of the actor that are trained
    prompts: int  # of a step
    group: int  # answers to each
    prompt: int
    response: int
    micro: int  # computed tokens of a micro-batch, at most
    score: int = 0  # the same for models that only score; 0: as micro
    critic: Shape | None = None  # only as a model of its own
    values: bool = False  # there is a critic, of its own or on the actor's trunk
    reference: Shape | None = None  # only as a copy of its own
    referenced: bool = False  # log-probs of a reference are taken
    reward: Shape | None = None
    online: bool = True
    updates: int = 1  # optimizer updates a step
    epochs: int = 1
    width: int = 2
    kv_width: int = 2
    kv_share: float = 0.3
    kv_tokens: int | None = None  # of the cache; None: the share, and no more than could be used
    sequences: int = 512  # that decode together, at most
    compiled: bool = True
    checkpoint: bool = False
    offload: bool = False
    gpu: bool = True

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def lora(self) -> bool:
        return self.trained < self.actor.parameters

    @property
    def computed(self) -> int:
        """Tokens of one pass over a step: each prompt once, each answer once."""
        return self.prompts * self.prompt + self.samples * self.response


# -- training --------------------------------------------------------------------------------------------------------------

def saved_per_token(s: Shape, width: int = 2, compiled: bool = True, tensor: int = 1, reread: float = 1.25) -> float:
    """Bytes that one token of a micro-batch keeps for the backward of one layer.

    Compiled: the input, both normed inputs, the sum between attention and MLP; queries and attention's output; gate, up and
    their product; keys and values, and those gathered for attention (`reread` for each computed token: a prompt's again for each
    answer). Not compiled: both norms keep float32 copies, and the activation function its result. Tensor parallelism divides
    all of it: between its matrix products by heads and widths, elsewhere by tokens (sequence parallel).
    """
    numbers = (4 if compiled or width == 4 else 8) * s.hidden + 2 * s.heads * s.head_dim + (3 if compiled else 4) * s.inner
    numbers += 2 * (1 + reread) * s.kv_heads * s.head_dim
    return (width * numbers + 4 * s.heads + 8) / tensor


def activations(s: Shape, tokens: int, p: Parallel = Parallel(), width: int = 2, compiled: bool = True,
                checkpoint: bool = False) -> float:
    """Bytes that a micro-batch keeps for its backward. Pipeline stages hold as many micro-batches as there are stages, so
    together as much as all layers of one. Beside the layers: embeddings, the final norm, the output layer's input and gradient."""
    layer = saved_per_token(s, width, compiled, p.tensor)
    stack = s.layers * width * s.hidden / p.tensor + layer if checkpoint else s.layers * layer
    return tokens * (stack + 7 * width * s.hidden / p.tensor)


def backward_peak(s: Shape, tokens: int, width: int = 2, trained_head: bool = True, tensor: int = 1, gpu: bool = True) -> float:
    """Bytes beside the activations when backward begins: two chunks of logits and the output layer's gradient in float32 beside
    a product of it, or later the gradients inside of one layer."""
    logits = min(tokens, HEAD_CHUNK[gpu] // (4 * s.vocabulary)) * s.vocabulary * width
    head = 2 * logits + (s.matrix * (4 + width) if trained_head else 0)
    return max(head, width * tokens * 3 * (s.hidden + s.inner)) / tensor


def state_parts(s: Shape, trained: int, p: Parallel, job: Job, role: str = "") -> list[Part]:
    """Weights and optimizer of one trained model. A float32 weight is its own master."""
    own = trained / p.split / p.shard
    masters, away = 4 * own if job.width < 4 else 0, job.offload and job.gpu
    stored = s.parameters * job.width / p.split / p.shard
    if p.gather:  # the shards are the masters; frozen weights lie in shards beside them
        stored = (s.parameters - trained) * job.width / p.split / p.shard
    out = [Part(f"{role}working weights", stored), Part(f"{role}float32 masters", 0 if away else masters),
           Part(f"{role}moments", 0 if away else 8 * own), Part(f"{role}gradient sums", 4 * own, "train")]
    if away:
        out.append(Part(f"{role}optimizer buckets", min(24 * BUCKET, 12 * own), "train"))
    if p.gather:
        ends = s.parameters - s.blocks
        held = s.parameters if p.gather == "whole" else ends + 2 * s.block
        largest = max(s.block, s.matrix) if trained == s.parameters else 2 * trained / s.layers
        out.append(Part(f"{role}gathered weights", held * job.width / p.split, "train"))
        out.append(Part(f"{role}gradients on their way", (job.width + 4) * largest / p.split, "train"))
    return [part for part in out if part.bytes]


def train_parts(job: Job, p: Parallel, cal: Calibration = CALIBRATION) -> list[Part]:
    """Everything but the sampler: context, actor, critic, reference, reward model, and a micro-batch."""
    out = [Part("context and kernels", cal.context if job.gpu else 0), *state_parts(job.actor, job.trained, p, job)]
    if job.critic is not None:
        out += state_parts(job.critic, job.critic.parameters, p, job, "critic's ")
    if job.reference is not None:
        out.append(Part("reference", job.reference.parameters * job.width / p.split / p.shard))
    if job.reward is not None:
        out.append(Part("reward model", job.reward.parameters * job.width))
    models = [(job.actor, not job.lora)] + ([(job.critic, False)] if job.critic is not None else [])
    kept, peak = max((activations(s, job.micro, p, job.width, job.compiled, job.checkpoint),
                      backward_peak(s, job.micro, job.width, head, p.tensor, job.gpu)) for s, head in models)
    out += [Part("activations", kept, "train"), Part("logits and their gradient", peak, "train")]
    if job.reference is not None or job.values:
        out.append(Part("scoring pass", forward_peak(job.actor, job.score or job.micro, job.width, p.tensor, job.gpu), "score"))
    return [part for part in out if part.bytes]


def score_parts(job: Job, cal: Calibration = CALIBRATION) -> list[Part]:
    """A model on devices of its own that only scores."""
    return [Part("context and kernels", cal.context if job.gpu else 0), Part("weights", job.actor.parameters * job.width),
            Part("scoring pass", forward_peak(job.actor, job.score or job.micro, job.width, gpu=job.gpu), "score")]


def forward_peak(s: Shape, tokens: int, width: int = 2, tensor: int = 1, gpu: bool = True) -> float:
    """Bytes of a pass without gradient: the residual, a float32 copy, and the widest part of a layer; a chunk of logits."""
    logits = min(tokens, HEAD_CHUNK[gpu] // (4 * s.vocabulary)) * s.vocabulary
    return width * (tokens * (4 * s.hidden + 3 * s.inner / tensor) + logits)


# -- sampling --------------------------------------------------------------------------------------------------------------

def kv_slots(job: Job, free: float, tensor: int = 1) -> int:
    """Tokens of the cache: as set, or the share of the memory that is free when it is sized; no more than could be used, and room
    for one sequence at least."""
    limit = min(job.prompt + job.response, job.actor.context)
    most = job.sequences * (limit + 2 * PAGE)
    asked = job.kv_tokens if job.kv_tokens is not None else int(max(free, 0) * job.kv_share / cache_bytes(job, tensor))
    return (max(min(asked, most), limit + 2 * PAGE) // PAGE + 1) * PAGE


def cache_bytes(job: Job, tensor: int = 1) -> float:
    """Bytes of one cached token on one device; a KV head is never cut."""
    return job.actor.kv_bytes(job.kv_width) / min(tensor, job.actor.kv_heads)


def rollout_parts(job: Job, free: float, tensor: int = 1) -> list[Part]:
    """The sampler beside its weights: the cache, the memory of captured decode steps, prefill and the logits drawn from."""
    rows = min(job.sequences, job.samples)
    draws = 2 * rows * job.actor.vocabulary + PREFILL * (4 * job.actor.hidden + 3 * job.actor.inner / tensor)
    out = [Part("KV pool", kv_slots(job, free, tensor) * cache_bytes(job, tensor), "generate", mapped=True),
           Part("decode graphs", forward_peak(job.actor, rows, job.width, tensor) if job.gpu else 0),
           Part("prefill and draws", job.width * draws, "generate")]
    return [part for part in out if part.bytes]


def sampler_parts(job: Job, tensor: int, own_process: bool, cal: Calibration = CALIBRATION) -> list[Part]:
    """A sampler's own copy of the weights, where it cannot share the trainer's: one device shares, shards do not."""
    held = [Part("sampler's weights", job.actor.parameters * job.width / tensor)]
    return [Part("sampler's context", cal.context), *held] if own_process and job.gpu else held


# -- sums ------------------------------------------------------------------------------------------------------------------

def phase(parts: Iterable[Part], when: str) -> float:
    """Bytes in use during a phase."""
    return sum(part.bytes for part in parts if part.when in ("always", when))


def needed(parts: Iterable[Part]) -> float:
    """Bytes that must fit: the largest phase. The cache sleeps while others work, and torch gives back what it only keeps."""
    parts = list(parts)
    return max(phase(parts, when) for when in ("train", "score", "generate"))


def in_use(parts: Iterable[Part]) -> float:
    """Bytes that a monitor shows at worst, where there is room: torch keeps its largest phase while the cache is mapped."""
    parts = list(parts)
    torchs = [part for part in parts if not part.mapped]
    return needed(torchs) + sum(part.bytes for part in parts if part.mapped)


def fits(parts: Iterable[Part], memory: float, cal: Calibration = CALIBRATION) -> bool:
    """Whether it fits with the margin that the model's own error asks for."""
    return needed(parts) <= memory * (1 - cal.margin)

