"""RunConfig: everything a user can set, under `trainer`, `model` and `data`. Each default stands here or in its owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.algorithms import ALGORITHMS
from verl.core.config import Loaded, load, option
from verl.core.errors import ConfigError
from verl.core.registry import Table
from verl.data.config import DataConfig
from verl.engine.optimizer import OptimConfig
from verl.models.load import LoraConfig
from verl.rewards.config import RewardSource

SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
MEMORY = ("checkpoint", "offload")
KV_DTYPES = ("auto", "bf16", "fp8")


@dataclass(slots=True)
class SamplingConfig:
    """How the policy answers while training. The same temperature belongs to every log-prob of the run."""

    temperature: float = option(1.0, "of the policy, in sampling and in every log-prob")
    max_tokens: int = option(256, "longest response in tokens")
    min_tokens: int = option(0, "no end before this many tokens")
    stop: list[str] = option([], "strings that end a response (kept in it)")

    def __post_init__(self):
        if not self.temperature > 0:
            raise ConfigError(f"temperature: {self.temperature} gives no gradient; it must be above 0 (1.0 is usual)")
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(f"max_tokens {self.max_tokens}, min_tokens {self.min_tokens}: need 0 <= min_tokens <= max_tokens, "
                              "max_tokens >= 1")


@dataclass(slots=True)
class EvalConfig:
    every: int = option(0, "evaluate after every so many steps, and before the first; 0: only at both ends")
    samples: int = option(1, "answers per held-out prompt")
    temperature: float = option(1.0, "0 answers greedily")
    top_p: float = option(1.0, "nucleus of the answers; 1 is off")

    def __post_init__(self):
        if self.every < 0:
            raise ConfigError(f"every: {self.every} must be at least 0 (0: only at both ends)")
        if self.samples < 1:
            raise ConfigError(f"samples: {self.samples} must be at least 1")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(f"temperature {self.temperature}, top_p {self.top_p}: need temperature >= 0 and 0 < top_p <= 1")


@dataclass(slots=True)
class SaveConfig:
    every: int = option(0, "checkpoint after every so many steps; 0: only at the end")
    keep_last: int = option(2, "whole checkpoints kept")

    def __post_init__(self):
        if self.every < 0:
            raise ConfigError(f"every: {self.every} must be at least 0 (0: only at the end)")
        if self.keep_last < 1:
            raise ConfigError(f"keep_last: {self.keep_last} would delete every checkpoint; it must be at least 1")


@dataclass(slots=True)
class RolloutConfig:
    """Where and with what memory responses are sampled."""

    engine: str | bool = option("auto", "auto | native | vllm | hf, or module:Class; true is vllm, false auto")
    workers: int = option(1, "independent rollout processes")
    tensor_parallel_size: int = option(1, "GPUs one rollout copy is split over")
    kv_cache_dtype: str = option("auto", "auto | bf16 | fp8: what keys and values are stored in")
    kv_memory: float = option(0.3, "share of the device's memory the KV pool may take")
    chunked_prefill: bool = option(True, "long prompts are read in pieces between decode steps")

    def __post_init__(self):
        self.engine = {True: "vllm", False: "auto"}.get(self.engine, self.engine)  # use_vllm is an alias
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_cache_dtype: {self.kv_cache_dtype!r} is not known; allowed: {', '.join(KV_DTYPES)}")
        if not 0 < self.kv_memory <= 0.95 or self.workers < 1 or self.tensor_parallel_size < 1:
            raise ConfigError("kv_memory must lie in (0, 0.95], workers and tensor_parallel_size must be at least 1")


METHODS = Table("trainer.algorithm", {**ALGORITHMS.rows, "hybrid": "verl.trainer.tasks:Hybrid"})


def _algo_schema(section: dict[str, Any]) -> type:
    return METHODS[section["algorithm"]]


@dataclass(slots=True)
class TrainerConfig:
    algorithm: str = option("grpo", "the method's name, or module:Class")
    algo: Any = option(None, "the method's own settings (docs/algorithms.md)", schema_from=_algo_schema)
    rewards: list[RewardSource] = option([], "reward sources and their weights")
    aggregate: str = option("sum", "sum | normalise_then_sum, or file.py:function: how sources become one score", path=True)
    output_dir: Path = option(Path("runs/run"), "everything the run writes")
    resume: bool = option(True, "continue the run found in output_dir; false refuses a directory that holds one")
    seed: int = option(0, "of data order, sampling and fresh weights")
    steps: int | None = option(None, "rollout steps; none: from epochs")
    epochs: float = option(1.0, "passes over the prompts when steps is not set")
    rollout_batch_size: int = option(64, "prompts per step")
    group_size: int | None = option(None, "samples per prompt; none: 8, or 1 where the method compares none")
    train_batch_size: int | None = option(None, "samples per optimizer update; none: the whole step in one update")
    update_epochs: int = option(1, "times each step's samples are trained on")
    micro_batch_tokens: int | None = option(None, "computed tokens per forward; none: from the memory there is")
    placement: str | dict[str, str] = option("auto", "auto, or role: devices (actor, critic, rollout, ...), as cuda:0-1 or cpu*2")
    pipeline: str = option("step", "step | ahead | stale(k): what is sampled while the policy trains")
    memory: list[str] = option([], "memory for time: checkpoint (recompute activations), offload (optimizer in main memory)")
    compile: bool | None = option(None, "fuse decoder layers on a GPU; none: when the run is long enough to pay for it")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    report_to: list[str] = option(["tensorboard"], "tensorboard, wandb, mlflow, trackio")
    samples_every: int = option(10, "show and store completions every so many steps; 0: never")
    callbacks: list[str] = option([], "module:Class or file.py:Class of callbacks (step, samples, save)", path=True)
    strict: bool = option(False, "errors instead of printed fall-backs")

    base_dir: Path = field(init=False, default_factory=Path.cwd)  # of the config file; reward functions are found from here

    def __post_init__(self):
        for name in ("rollout_batch_size", "update_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("group_size", "train_batch_size", "steps", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} must be at least 1 (or left out)")
        for name in ("seed", "samples_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 0")
        if wrong := [word for word in self.memory if word not in MEMORY]:
            raise ConfigError(f"memory: {wrong[0]!r} is not known; allowed: {', '.join(MEMORY)}")
        if not self.epochs > 0:
            raise ConfigError(f"epochs: {self.epochs} must be above 0")
        if self.algo is None:
            self.algo = METHODS[self.algorithm]()

    @property
    def samples_per_prompt(self) -> int:
        if self.group_size is not None:
            return self.group_size
        return 8 if self.algo.min_group > 1 else 1

    @property
    def units_per_step(self) -> int:
        """What train_batch_size counts in one step: samples, recorded answers, or pairs."""
        per_prompt = self.samples_per_prompt if self.algo.online and self.algo.unit == "row" else 1
        return self.rollout_batch_size * per_prompt

    @property
    def parts(self) -> list[TrainerConfig]:
        """These settings; in a mixture, one copy for each task with the task's own values."""
        return self.algo.split(self) if hasattr(self.algo, "split") else [self]

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates one step makes: units / train_batch_size (rounded up), times update_epochs. A mixture makes
        as many as its largest task needs."""
        return max(-(-p.units_per_step // (p.train_batch_size or p.units_per_step)) for p in self.parts) * self.update_epochs


@dataclass(slots=True)
class FsdpConfig:
    sharding_strategy: str = option("FULL_SHARD", f"one of {', '.join(SHARDING)}")

    def __post_init__(self):
        if self.sharding_strategy not in SHARDING:
            raise ConfigError(f"sharding_strategy: {self.sharding_strategy!r} is not known; allowed: {', '.join(SHARDING)}")


@dataclass(slots=True)
class RoleConfig:
    """One model role. Left out, a role is derived: reference = the frozen start, critic = a value head on the actor."""

    model_name_or_path: str | None = option(None, "a model directory, or a hub name when online", path=True)
    dtype: str = option("auto", "auto: bf16 on a GPU, fp32 on a CPU")
    device_map: str = option("auto", "auto, cpu, cuda:2, cuda:0-1, host/cuda:2")
    implementation: str | None = option(None, "module:Class that takes the role's place (alias: class)")
    trust_remote_code: bool = option(False, "run Python code that the model directory carries")


@dataclass(slots=True)
class TrainedRoleConfig(RoleConfig):
    """A role whose weights are trained."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    use_fsdp: bool = option(False, "shard over the ranks that train")
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    megatron: dict[str, int] = option({}, "train with Megatron-Core: {tensor: 2, pipeline: 2}")
    use_flash_attn: bool = option(False, "ask for flash attention; results do not depend on it")

    def __post_init__(self):
        if wrong := [key for key in self.megatron if key not in ("tensor", "pipeline")]:
            raise ConfigError(f"megatron: {wrong[0]!r} is not known; allowed: tensor, pipeline (sequence parallel follows tensor)")
        if self.megatron and self.lora.rank:
            raise ConfigError(f"megatron: {self.megatron} trains all weights, but lora.rank is {self.lora.rank}; leave one out "
                              "(use_fsdp shards a model with adapters)")


@dataclass(slots=True)
class ModelConfig:
    actor: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    reference: RoleConfig = field(default_factory=RoleConfig)
    critic: RoleConfig = field(default_factory=RoleConfig)
    reward_model: RoleConfig = field(default_factory=RoleConfig)


@dataclass(slots=True)
class RunConfig:
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self):
        for part in self.trainer.parts:
            part.algo.check_group(part.samples_per_prompt)


# Another spelling -> the one key it stands for.
ALIASES = {
    "trainer.use_vllm": "trainer.rollout.engine",
    "trainer.num_rollout_workers": "trainer.rollout.workers",
    "trainer.tensor_parallel_size": "trainer.rollout.tensor_parallel_size",
    "trainer.kv_cache_dtype": "trainer.rollout.kv_cache_dtype",
    "trainer.enable_chunked_prefill": "trainer.rollout.chunked_prefill",
    "trainer.gpu_memory_utilization": "trainer.rollout.kv_memory",
    "trainer.num_generations": "trainer.group_size",
    "trainer.ppo_epochs": "trainer.update_epochs",
    "trainer.learning_rate": "trainer.optim.lr",
    "trainer.max_steps": "trainer.steps",
    "trainer.clip_coef": "trainer.algo.clip_low",
    "trainer.vf_coef": "trainer.algo.vf_coef",
    "trainer.kl_target": "trainer.algo.kl_target",
    "trainer.tasks": "trainer.algo.tasks",
    "trainer.task_weights": "trainer.algo.task_weights",
    "trainer.use_flash_attn": "model.actor.use_flash_attn",
    **{f"model.{role}.class": f"model.{role}.implementation" for role in ("actor", "reference", "critic", "reward_model")},
}


def load_run(path: str | Path | None = None, overrides: Sequence[str] = (), data: dict[str, Any] | None = None) -> Loaded:
    """Load a RunConfig with the origin of every value. Raises ConfigError listing every problem at once."""
    loaded = load(RunConfig, path, overrides, data, ALIASES)
    if path is not None:
        loaded.config.trainer.base_dir = Path(path).expanduser().resolve().parent
    return loaded


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A YAML file (and dotted overrides) as a typed config with `.trainer`, `.data` and `.model`."""
    return load_run(path, overrides).config

