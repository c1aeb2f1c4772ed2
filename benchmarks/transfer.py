"""Bytes of a weight sync: resharding by plan against gathering everything to every rank.

    python benchmarks/transfer.py

Four FSDP trainers feed a tensor-parallel pair of samplers on two further ranks: six real processes over gloo on this machine,
with every dimension of the 0.5B shape divided by SCALE so that it runs in seconds; both systems use the same executor, and
bytes are those it counted. The same plans are then made, not run, for the true shapes.

- seed_4to2: all weights changed. - lora: rank-16 adapters on every linear layer changed, the base is frozen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from verl.flow.layout import Layout, Split, TensorSpec, fsdp, only, table_of, tensor_parallel, whole
from verl.flow.reshard import Plan, plan
from verl.flow.transfer import Target, transfer
from verl.flow.transport import TorchTransport

FILE = "transfer.cpu.jsonl"
TRAINERS, SAMPLERS = range(4), (4, 5)
SCALE, LORA_RANK, REPEATS = 8, 16, 3
HEADS = {"q05": (14, 2), "l8": (32, 8)}  # attention heads, KV heads
CASES = {"seed_4to2": ("*.weight", "*.bias"), "lora": ("*.lora_A", "*.lora_B")}  # the tensors that changed


def table(case: str, scale: int) -> dict[str, TensorSpec]:
    """Parameters of a shape with all widths divided by `scale`, with LoRA adapters on the linear layers of the blocks."""
    from shapes import SHAPES  # transformers is slow to import, and the workers do not need it
    from transformers import AutoModelForCausalLM
    kind, sizes = SHAPES[case]
    narrow = {k: v // scale for k, v in sizes.items() if k in ("hidden_size", "intermediate_size", "vocab_size")}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(kind(**sizes | narrow, pad_token_id=0), dtype=torch.bfloat16)
    found = table_of(module.named_parameters())
    for name, spec in list(found.items()):
        if ".layers." in name and len(spec.shape) == 2:
            stem, rank = name.removesuffix(".weight"), LORA_RANK // scale
            found[f"{stem}.lora_A"] = TensorSpec((rank, spec.shape[1]), spec.dtype)
            found[f"{stem}.lora_B"] = TensorSpec((spec.shape[0], rank), spec.dtype)
    return found


def samplers(case: str, named: dict[str, TensorSpec]) -> Layout:
    """A tensor-parallel pair as serving engines store it: fused projections, adapters whole on each rank."""
    heads, kv_heads = HEADS[case]
    rules = [Split("*.lora_*", None), Split("*.q_proj.*", 0, heads, ("q_proj", "qkv_proj")),
             *(Split(f"*.{n}_proj.*", 0, kv_heads, (f"{n}_proj", "qkv_proj")) for n in "kv"),
             *(Split(f"*.{n}_proj.*", 0, None, (f"{n}_proj", "gate_up_proj")) for n in ("gate", "up")),
             Split("*.o_proj.*", 1, heads), Split("*.down_proj.*", 1), Split("*embed_tokens.*", 0), Split("lm_head.*", 0)]
    return tensor_parallel(named, rules, SAMPLERS)


def plans(case: str, named: dict[str, TensorSpec], changed: tuple[str, ...]) -> dict[str, Plan]:
    """The plan, gathering everything to every rank, and (kinder) everything to each sampler only."""
    versions = dict.fromkeys(named, 0) | dict.fromkeys(only(named, *changed), 1)
    source = fsdp(named, TRAINERS)
    return {"plan": plan(source, samplers(case, named), versions, dict.fromkeys(SAMPLERS, 0)),
            "gather": plan(source, whole(named, (*TRAINERS, *SAMPLERS))),
            "samplers": plan(source, whole(named, SAMPLERS))}


def arrays(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Random storage for a rank's pieces."""
    extent: dict[str, list[int]] = {}
    for p in layout.pieces.get(rank, ()):
        ends = [o + n for o, n in zip(p.offset, p.box.shape)]
        extent[p.array] = [max(a, b) for a, b in zip(ends, extent.get(p.array, ends))]
    return {name: torch.randn(shape).bfloat16() for name, shape in extent.items()}


def work(rank: int, store: str, named: dict[str, TensorSpec], changed: tuple[str, ...], results) -> None:
    """One rank: runs both systems, REPEATS times; puts (rank, system, bytes sent, seconds) into `results`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(TRAINERS) + len(SAMPLERS))
    for system, made in plans("q05", named, changed).items():
        if system == "samplers":
            continue
        transport, held = TorchTransport(system), arrays(made.source, rank) or None
        target = Target(arrays(made.destination, rank), version=0) if rank in made.destination.pieces else None
        for version in range(1, REPEATS + 1):
            report = transfer(made, transport, version=version if held else None, arrays=held, target=target)
            results.put((rank, system, report.sent_bytes, report.seconds))
    results.close()
    results.join_thread()
    dist.barrier()


def measure(named: dict[str, TensorSpec], changed: tuple[str, ...]) -> dict[str, tuple[int, float]]:
    """system -> (bytes put on the wire by all ranks in one sync, median seconds of the slowest rank)."""
    context = multiprocessing.get_context("spawn")
    results, ranks = context.Queue(), len(TRAINERS) + len(SAMPLERS)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [context.Process(target=work, args=(r, store, named, changed, results)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        rows = [results.get(timeout=300) for _ in range(ranks * 2 * REPEATS)]
        for worker in workers:
            worker.join()
    found = {}
    for system in ("plan", "gather"):
        syncs = [[row for row in rows if row[:2] == (r, system)] for r in range(ranks)]
        slowest = [max(of[i][3] for of in syncs) for i in range(REPEATS)]
        found[system] = (sum(of[0][2] for of in syncs), statistics.median(slowest))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from shapes import record
    small, tables = table("q05", SCALE), {model: table(model, 1) for model in HEADS}
    for case, changed in CASES.items():
        made, seen = plans("q05", small, changed), measure(small, changed)
        assert seen["plan"][0] == made["plan"].wire_bytes == sum(made["plan"].lacking.values()), "more bytes than needed"
        assert seen["gather"][0] == made["gather"].wire_bytes
        more = dict(model=f"q05 with widths / {SCALE}", sent_bytes=seen["plan"][0], gathered_bytes=seen["gather"][0])
        record("transfer", case, "verl", "saved_fraction", 1 - seen["plan"][0] / seen["gather"][0], "fraction", FILE, **more)
        for system, (_, seconds) in seen.items():
            record("transfer", case, "verl" if system == "plan" else "gather", "seconds", seconds, "s", FILE, **more)
        print(f"{case}: {seen['plan'][0]:,} bytes in {seen['plan'][1]:.3f} s; gathering everything to every rank "
              f"{seen['gather'][0]:,} in {seen['gather'][1]:.3f} s: {1 - seen['plan'][0] / seen['gather'][0]:.2%} saved (measured)")
        for model, named in tables.items():
            made = {system: p.wire_bytes for system, p in plans(model, named, changed).items()}
            for metric, other in (("saved_fraction", "gather"), ("saved_fraction_of_gathering_at_samplers", "samplers")):
                record("transfer", f"{case}_{model}", "verl", metric, 1 - made["plan"] / made[other], "fraction", FILE,
                       planned_bytes=made["plan"], gathered_bytes=made[other])
                print(f"  {model}: {made['plan']:,} of {made[other]:,} bytes, {metric} "
                      f"{1 - made['plan'] / made[other]:.2%} (planned)")


if __name__ == "__main__":
    main()
