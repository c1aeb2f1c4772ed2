"""Rollout speed: output tokens per second (prefill included) and device memory, native against vLLM and transformers.

    python benchmarks/rollout.py                     check the engine on this GPU, time everything missing, print the table
    python benchmarks/rollout.py --cases q05 l8 --systems native --redo
    python benchmarks/rollout.py --check [q05]       only the checks, or those of the models whose name has this in it
    python benchmarks/rollout.py --warm q05          compile and capture only: later runs on this machine start quickly

Random weights of the real shapes; 64 prompts x 8 samples, prompt 256, response 1024 forced, temperature 1, the sampled
tokens' log-probs returned. Each case and system runs in a process of its own and appends one JSON object a line to
results/rollout.h200.jsonl; a case and system that is there already is not run again unless --redo.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import transformers
from shapes import RESULTS, SHAPES, random_lm, record, save_tokenizer
from transformers import AutoModelForCausalLM

from verl.core.batch import Batch
from verl.core.types import Request, Sampling
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.models.load import bind
from verl.models.packed import Packed

FILE = "rollout.h200.jsonl"


def bound(config, dtype=torch.bfloat16, spread: float = 1.0):
    """A random-weight LM on the GPU; `spread` multiplies matrices so that small models do not answer uniformly."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    return native(bind(module, None))


def native(lm):
    assert lm.native, lm.why_not
    return lm


def ask(prompts: int, samples: int, length: int, vocabulary: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [Request(str(i), rng.integers(0, vocabulary, length).astype(np.int32),
                    tuple(int(s) for s in rng.integers(0, 2**62, samples))) for i in range(prompts)]


# -- checks --------------------------------------------------------------------------------------------------------------

def rescored_error(lm, asked, answers, temperature: float = 1.0) -> np.ndarray:
    """|log-prob of the engine - log-prob of the training forward| of every sampled token."""
    samples = [s for a in answers for s in a]
    ids = np.concatenate([s.ids_L for s in samples])
    batch = Batch(prompts=[r.prompt_ids for r in asked], prompt_S=np.repeat(np.arange(len(asked)), [r.n for r in asked]),
                  lengths_S=np.array([len(s) for s in samples]), ids_T=ids, mask_T=np.ones(len(ids), bool),
                  row_S=np.arange(len(samples)), group_S=np.arange(len(samples)))
    with torch.no_grad():
        want = lm.forward(Packed(batch, lm.device), temperature).logprobs_T.float().cpu().numpy()
    return np.abs(want - np.concatenate([s.logprobs_L for s in samples]))


def _tiny_configs() -> dict:
    base = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": None, "bos_token_id": None,
            "pad_token_id": None}
    alternate = {"sliding_window": 50, "layer_types": ["sliding_attention", "full_attention"]}
    return {
        "llama": transformers.LlamaConfig(**base),
        "gemma2 (window, softcap)": transformers.Gemma2Config(**base, **alternate, attn_logit_softcapping=5.0,
                                                              final_logit_softcapping=10.0),
        "gpt-oss (window, sinks)": transformers.GptOssConfig(**base, **alternate, num_local_experts=4, num_experts_per_tok=2,
                                                             rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "q05, 4 layers": None,
    }


def same_ids(a, b) -> str:
    pairs = [(x, y) for p, q in zip(a, b) for x, y in zip(p, q)]
    return f"{sum(len(x) == len(y) and bool((x.ids_L == y.ids_L).all()) for x, y in pairs)}/{len(pairs)} samples equal"


def check(wanted: str) -> None:
    """Engine against the training forward, graphs against none, chunks and preemption against neither; raises if wrong."""
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    failures = []
    for name, config in _tiny_configs().items():
        if wanted not in name:
            continue
        routed = 5.0 if "oss" in name else 0.2  # a router may flip
        for dtype, mean, most in ((torch.float32, 1e-5, 1e-4), (torch.bfloat16, 0.03, routed)):
            fused = "q05" in name and dtype == torch.bfloat16
            lm = bound(config, dtype, spread=3.0) if config else native(random_lm("q05", dtype=dtype, layers=4))
            asked = ask(5, 6, 150, lm.head.rows) + ask(3, 1, 70, lm.head.rows, seed=1)
            plain = NativeEngine(lm, NativeConfig(kv_tokens=40_000, cuda_graphs=False, compile=False))
            first = plain.generate(asked, sampling)
            error = rescored_error(lm, asked, first)
            graphed = NativeEngine(lm, NativeConfig(kv_tokens=40_000, compile=fused))
            second = graphed.generate(asked, sampling)
            third = NativeEngine(lm, NativeConfig(kv_tokens=1600, prefill_tokens=64, max_sequences=16, compile=False))
            fourth = third.generate(asked, sampling)
            error2 = rescored_error(lm, asked, second)
            good = all(bool(np.isfinite(e).all()) and e.mean() <= mean and e.max() <= most for e in (error, error2))
            why = graphed.runner.graphs.why_not
            print(f"check {name} {str(dtype)[6:]}: |dlogp| mean {error.mean():.1e} max {error.max():.1e}; graphs"
                  f"{fused * ' + compile'} mean {error2.mean():.1e} max {error2.max():.1e}, {same_ids(first, second)}; cramped "
                  f"({third.preemptions} preempted) {same_ids(first, fourth)}{why and '; no graphs: ' + why}"
                  f"{'' if good else '   <-- WRONG'}", flush=True)
            failures += [] if good else [f"{name} {dtype}"]
            graphed.sleep()
            again = graphed.generate(asked, sampling)
            if not same_ids(second, again).startswith("33/33"):
                failures.append(f"{name} {dtype}: sleep and wake changed {same_ids(second, again)}")
            greedy = [plain.generate(asked, Sampling(max_tokens=40, ignore_eos=True, temperature=0)) for _ in range(2)]
            assert same_ids(*greedy).startswith("33/33"), "greedy differs between two runs"
    if wanted in "q05":
        failures += check_fp8(sampling)
    if failures:
        raise SystemExit(f"the engine is wrong on this machine: {', '.join(failures)}")


def check_fp8(sampling: Sampling) -> list[str]:
    """The fp8 cache within its wider bound."""
    lm = native(random_lm("q05", layers=4))
    asked = ask(5, 6, 150, lm.head.rows)
    small = NativeEngine(lm, NativeConfig(kv_tokens=40_000, kv_cache_dtype="fp8", prefill_tokens=64, compile=False))
    error = rescored_error(lm, asked, small.generate(asked, sampling))
    print(f"check q05, 4 layers, fp8 cache: |dlogp| mean {error.mean():.1e} max {error.max():.1e}", flush=True)
    return [] if error.mean() < 0.1 else ["fp8 cache"]


# -- timing --------------------------------------------------------------------------------------------------------------

def used_gib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def clocked(call) -> tuple[float, object]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, out


def tokens(answers) -> int:
    return sum(len(s) for a in answers for s in a)


def native_main(case: str) -> dict[str, float]:
    lm = native(random_lm(case))
    asked = ask(64, 8, 256, lm.head.rows)
    engine = NativeEngine(lm, NativeConfig(kv_tokens=620_000, max_total_tokens=1280))
    warm, _ = clocked(lambda: engine.generate(asked, Sampling(max_tokens=20, ignore_eos=True)))
    prefill, _ = clocked(lambda: engine.generate(asked, Sampling(max_tokens=1, ignore_eos=True)))
    seconds, answers = clocked(lambda: engine.generate(asked, Sampling(max_tokens=1024, ignore_eos=True)))
    again, _ = clocked(lambda: engine.generate(asked, Sampling(max_tokens=1024, ignore_eos=True)))
    gib = used_gib()
    error = rescored_error(lm, asked[:4], answers[:4])
    return {"tokens_per_s": tokens(answers) / min(seconds, again), "peak_gib": gib, "prefill_s": prefill, "first_call_s": warm,
            "logp_error_mean": float(error.mean()), "logp_error_max": float(error.max())}


def native_shapes(case: str) -> dict[str, float]:
    """Small batches, ragged lengths, graphs off, compile off."""
    lm = native(random_lm(case))
    out = {}
    engine = NativeEngine(lm, NativeConfig(kv_tokens=900_000, max_total_tokens=2560))
    for n in (1, 8):
        asked, sampling = ask(1, n, 256, lm.head.rows), Sampling(max_tokens=256, ignore_eos=True)
        engine.generate(asked, sampling)
        seconds, answers = clocked(lambda a=asked, s=sampling: engine.generate(a, s))
        out[f"batch{n}_tokens_per_s"] = tokens(answers) / seconds
    asked, ragged = ask(64, 8, 256, lm.head.rows), ragged_sampling(lm.head.rows)
    engine.generate(asked, ragged)
    seconds, answers = clocked(lambda: engine.generate(asked, ragged))
    out.update(ragged_s=seconds, ragged_tokens_per_s=tokens(answers) / seconds)
    fixed = Sampling(max_tokens=128, ignore_eos=True)
    plain = {"compile": False, "cuda_graphs": False}
    for name, settings in (("graphs_and_compile", {}), ("graphs", {"compile": False}), ("eager", plain)):
        other = NativeEngine(lm, NativeConfig(kv_tokens=250_000, max_total_tokens=512, **settings))
        other.generate(asked, fixed)
        seconds, answers = clocked(lambda e=other: e.generate(asked, fixed))
        out[f"{name}_tokens_per_s"] = tokens(answers) / seconds
    return out


def ragged_sampling(vocabulary: int) -> Sampling:
    """Geometric lengths of mean 300 under near-uniform logits: a long tail, cut at 2048."""
    ends = np.random.default_rng(5).choice(vocabulary, vocabulary // 300, replace=False)
    return Sampling(max_tokens=2048, stop_ids=tuple(int(e) for e in ends))


def native_long(case: str) -> dict[str, float]:
    """8K contexts: bf16 cache with whole prompts in one pass against fp8 with chunks."""
    lm = native(random_lm(case))
    asked, out = ask(32, 1, 7800, lm.head.rows), {}
    for name, settings in (("bf16", {"prefill_tokens": 1 << 20}), ("fp8", {"kv_cache_dtype": "fp8", "prefill_tokens": 8192})):
        engine = NativeEngine(lm, NativeConfig(kv_tokens=32 * 8256, max_sequences=32, **settings))
        engine.generate(asked[:1] * 1, Sampling(max_tokens=20, ignore_eos=True))
        engine.generate(asked, Sampling(max_tokens=9, ignore_eos=True))
        first, _ = clocked(lambda e=engine: e.generate(asked, Sampling(max_tokens=1, ignore_eos=True)))
        seconds, answers = clocked(lambda e=engine: e.generate(asked, Sampling(max_tokens=257, ignore_eos=True)))
        error = rescored_error(lm, asked[:2], answers[:2])
        out.update({f"{name}_total_s": seconds, f"{name}_prefill_s": first, f"{name}_step_ms": (seconds - first) / 256 * 1e3,
                    f"{name}_peak_gib": used_gib(), f"{name}_logp_error_mean": float(error.mean()),
                    f"{name}_logp_error_max": float(error.max())})
        engine.close()
        gc.collect()
        torch.cuda.empty_cache()
    return out


def native_steady(case: str) -> dict[str, float]:
    """200 calls of ragged lengths: the last 50 against the first 50."""
    lm = native(random_lm(case))
    engine = NativeEngine(lm, NativeConfig(kv_tokens=100_000, max_sequences=64, max_total_tokens=512))
    times = []
    for i in range(210):
        asked = ask(8, 8, 32 + i % 100, lm.head.rows, seed=i)
        ends = tuple(int(e) for e in np.random.default_rng(i).choice(lm.head.rows, lm.head.rows // 30, replace=False))
        seconds, answers = clocked(lambda a=asked, e=ends: engine.generate(a, Sampling(max_tokens=128, stop_ids=e)))
        times.append(seconds / max(tokens(answers), 1))
    times = times[10:]
    return {"steady_last50_over_first50": float(np.median(times[-50:]) / np.median(times[:50])), "peak_gib": used_gib()}


def hf_main(case: str) -> dict[str, float]:
    module = random_lm(case).module
    module.set_attn_implementation("sdpa")
    response = 128 if case == "l8" else 1024
    prompts = torch.from_numpy(np.stack([r.prompt_ids for r in ask(64, 8, 256, module.config.vocab_size)]).astype(np.int64))
    ids = prompts.repeat_interleave(8, 0).cuda()

    def call(n):
        return module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=n,
                               min_new_tokens=n, pad_token_id=0)

    call(4)
    seconds, out = clocked(lambda: call(response))
    return {"tokens_per_s": (out.shape[1] - 256) * len(ids) / seconds, "peak_gib": used_gib()}


def vllm_main(case: str) -> dict[str, float]:
    from vllm import LLM, SamplingParams
    with tempfile.TemporaryDirectory() as directory:
        lm = native(random_lm(case))
        vocabulary = lm.head.rows
        lm.module.save_pretrained(directory)
        del lm
        gc.collect()
        torch.cuda.empty_cache()
        llm = LLM(directory, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.85, max_model_len=2560,
                  enable_prefix_caching=True)
        prompts = [{"prompt_token_ids": r.prompt_ids.tolist()} for r in ask(64, 8, 256, vocabulary)]

        def call(**settings):
            settings = SamplingParams(n=8, temperature=1.0, logprobs=0, detokenize=False, **settings)
            return llm.generate(prompts, settings, use_tqdm=False)

        call(max_tokens=8, ignore_eos=True)
        seconds, out = clocked(lambda: call(max_tokens=1024, ignore_eos=True))
        ragged = ragged_sampling(vocabulary)
        slow, _ = clocked(lambda: call(max_tokens=2048, stop_token_ids=list(ragged.stop_ids)))
        made = sum(len(o.token_ids) for r in out for o in r.outputs)
        return {"tokens_per_s": made / seconds, "peak_gib": used_gib(), "ragged_s": slow}


def vllm_engine(case: str) -> dict[str, float]:
    """verl's own vLLM engine beside the trainer's module: speed, weights in place, sleep and wake, agreement."""
    from verl.core.weights import Weights
    from verl.engine.vllm_engine import vLLMEngine
    lm = native(random_lm(case))
    weights = [Weights(v, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), lm.module) for v in range(1, 5)]
    with tempfile.TemporaryDirectory() as directory:
        lm.module.save_pretrained(directory)
        save_tokenizer(lm.head.rows, directory)
        engine = vLLMEngine(directory, dtype="bfloat16", gpu_memory_utilization=0.5, max_total_tokens=1280)
        asked = ask(64, 8, 256, lm.head.rows)
        engine.generate(asked, Sampling(max_tokens=8, ignore_eos=True))
        loads = [clocked(lambda w=w: engine.load_weights(w))[0] for w in weights]
        seconds, answers = clocked(lambda: engine.generate(asked, Sampling(max_tokens=1024, ignore_eos=True)))
        error = rescored_error(lm, asked[:4], answers[:4])
        awake = used_gib()
        asleep, _ = clocked(engine.sleep)
        low = used_gib()
        woken, _ = clocked(engine.wake)
        after = rescored_error(lm, asked[:4], engine.generate(asked[:4], Sampling(max_tokens=64, ignore_eos=True)))
        engine.close()
    return {"tokens_per_s": tokens(answers) / seconds, "peak_gib": awake, "load_weights_ms": 1e3 * min(loads), "sleep_s": asleep,
            "asleep_gib": low, "wake_s": woken, "woken_logp_error_mean": float(after.mean()),
            "logp_error_mean": float(error.mean()), "logp_error_max": float(error.max())}


RUNS = {  # (case, system): what to measure
    **{(case, "native"): native_main for case in SHAPES},
    ("q05-shapes", "native"): native_shapes, ("q15-shapes", "native"): native_shapes,
    ("l8-long", "native"): native_long, ("q05-steady", "native"): native_steady,
    **{(case, "vllm"): vllm_main for case in SHAPES},
    ("q05-engine", "vllm"): vllm_engine, ("q15-engine", "vllm"): vllm_engine,
    **{(case, "hf"): hf_main for case in SHAPES},
}


def unit(metric: str) -> str:
    endings = {"tokens_per_s": "tokens/s", "_gib": "GiB", "_s": "s", "_ms": "ms", "_mean": "nats", "_max": "nats"}
    return next((u for ending, u in endings.items() if metric.endswith(ending)), "ratio")


def run(case: str, system: str) -> None:
    for metric, value in RUNS[case, system](case.split("-")[0]).items():
        record("rollout", case, system, metric, value, unit(metric), FILE, gpu=torch.cuda.get_device_name())
        print(f"{case} {system} {metric} = {value:.6g}", flush=True)


def rows() -> list[dict]:
    return [json.loads(line) for line in (RESULTS / FILE).read_text().splitlines()] if (RESULTS / FILE).exists() else []


def table() -> None:
    newest = {(row["case"], row["system"], row["metric"]): row for row in rows()}
    print(f"\n{'case':12} {'system':8} {'metric':30} {'value':>12}  unit       commit")
    for (case, system, metric), row in sorted(newest.items()):
        print(f"{case:12} {system:8} {metric:30} {row['value']:>12,.5g}  {row['unit']:10} {row['commit']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", help="q05 q15 l8 q05-shapes q15-shapes l8-long q05-steady; left out: all")
    parser.add_argument("--systems", nargs="*", default=["native"], help="native hf vllm")
    parser.add_argument("--check", nargs="?", const="", help="only check")
    parser.add_argument("--warm", metavar="CASE", help="only compile")
    parser.add_argument("--redo", action="store_true", help="run again what the results file holds")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SYSTEM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    if args.one:
        return run(*args.one)
    if args.warm:
        engine = NativeEngine(native(random_lm(args.warm)), NativeConfig(kv_tokens=80_000, max_total_tokens=1280))
        print("warm after", clocked(lambda: engine.generate(ask(64, 8, 40, 1000), Sampling(max_tokens=20, ignore_eos=True)))[0])
        return
    if args.check is not None or (not args.cases and "native" in args.systems):
        check(args.check or "")
    have = {(row["case"], row["system"]) for row in rows()}
    for case, system in RUNS if args.check is None else []:
        wanted = system in args.systems and (not args.cases or case in args.cases)
        if wanted and (args.redo or (case, system) not in have):
            code = subprocess.run([sys.executable, __file__, "--one", case, system]).returncode
            if code:
                print(f"{case} {system} FAILED with exit code {code}", flush=True)
    table()


if __name__ == "__main__":
    main()
