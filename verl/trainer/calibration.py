"""Constants of the cost model in one table: each is measured and named by its record, or is stated to be an assumption.

A new measurement is one row of MEASURED in tests/trainer/test_cost.py; when a row is missed by more than 5%, a constant here
is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl.core.errors import ConfigError, nearest

GIB = 1 << 30


def _measured(value: float, source: str):
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Calibration:
    """What arithmetic cannot know. Units: bytes, seconds, or a share."""

    context: float = _measured(0.8 * GIB, "CUDA context, loaded kernels, cuBLAS: rollout.h200.jsonl q05 and l8 peak_gib at 44738c5")
    margin: float = _measured(0.05, "share of a device left free: the error that the memory rows are held to")
    narrow: float = _measured(420, "matrix products of width h reach h / (h + this): step q05 and q15 train_s at c2858b1")
    micro_layer: float = _measured(5e-4, "seconds a layer and micro-batch beside its FLOPs: the same with 16,384 and 6,144 tokens")
    kv_read: float = _measured(0.9, "share of copy bandwidth at which a decode step reads the cache: rollout at 44738c5")
    decode_layer: float = _measured(65e-6, "seconds of launches a layer and decode step: rollout q05, q15, l8 tokens_per_s")
    prefill: float = _measured(0.06, "seconds before the first token: rollout q05, q15, l8 prefill_s at 44738c5")
    link_share: float = _measured(0.7, "assumed: share of a link's data-sheet bandwidth that NCCL reaches")
    small_reduce: float = _measured(15e-6, "assumed: seconds of one all-reduce of a decode step's hidden states")


CALIBRATION = Calibration()


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. memory: bytes torch reports. matmul: bf16 FLOP/s of large products. Bandwidths in bytes/s, one way."""

    name: str
    memory: float
    matmul: float
    copy: float
    link: float  # to the devices of its host
    network: float  # to other hosts, its share
    main: float  # to main memory
    host: int = 8  # devices of one host


# H200: memory, matmul and copy measured (matrix products on the shapes of a 1.5B model); links from its data sheet. H100 and
# A100: the H200's shares of the data sheets' figures.
DEVICES = {d.name: d for d in (
    Device("H200", 139.8 * GIB, 650e12, 4.2e12, 450e9, 50e9, 55e9),
    Device("H100", 79.1 * GIB, 650e12, 2.93e12, 450e9, 50e9, 55e9),
    Device("A100", 79.1 * GIB, 205e12, 1.78e12, 300e9, 25e9, 25e9),
)}


def parse_devices(text: str) -> tuple[int, Device]:
    """`8xH200` -> (8, the device). Raises ConfigError for what is no count and known kind."""
    found = re.fullmatch(r"(\d+)\s*[x*]\s*([\w-]+)", text.strip())
    if not found or int(found[1]) < 1:
        raise ConfigError(f"--devices {text!r} is no number of devices; write it like 1xH200, 8xH100 or 1024xH100")
    kind = next((name for name in DEVICES if name.lower() == found[2].lower()), None)
    if kind is None:
        raise ConfigError(f"--devices {text}: nothing is known about {found[2]!r}; {nearest(found[2], DEVICES)}")
    return int(found[1]), DEVICES[kind]
