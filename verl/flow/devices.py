"""Device groups in words: "cpu", "cpu*2", "cuda:2", "cuda:0-1", "host/cuda:0,2", "a/cuda:0-7+b/cuda:0-7"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl.core.errors import ConfigError

_CUDA = re.compile(r"cuda(?::(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?")
_CPU = re.compile(r"cpu(?:\*(\d+))?")
EXAMPLES = "cpu, cpu*2, cuda:2, cuda:0-1, cuda:0,2, host/cuda:2; groups on several hosts: a/cuda:0-7+b/cuda:0-7"


@dataclass(frozen=True, slots=True)
class Device:
    """What one process runs on: a GPU of a host by its number there, or CPU cores. No host: this one (a CPU process: any)."""

    gpu: int | None = None
    host: str | None = None

    @property
    def type(self) -> str:
        """As torch calls it."""
        return "cpu" if self.gpu is None else "cuda"

    def __str__(self) -> str:
        return (f"{self.host}/" if self.host else "") + ("cpu" if self.gpu is None else f"cuda:{self.gpu}")


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The devices of one role, a process each. `own`: it was asked for processes of its own ("cpu*1", a host, several)."""

    devices: tuple[Device, ...]
    own: bool

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of the GPUs of this host."""
        return tuple(d.gpu for d in self.devices if d.gpu is not None and d.host is None)

    def __str__(self) -> str:
        """The words again, "cpu*2" for two CPU processes."""
        parts: dict[tuple[str | None, str], list[Device]] = {}
        for d in self.devices:
            parts.setdefault((d.host, d.type), []).append(d)
        return "+".join((f"{host}/" if host else "") + (("cpu" if not self.own else f"cpu*{len(held)}") if kind == "cpu" else
                                                        "cuda:" + ",".join(str(d.gpu) for d in held))
                        for (host, kind), held in parts.items())


def device_group(text: str, setting: str) -> DeviceGroup:
    """Read a device group. Raises ConfigError naming `setting` for words that name none, or one GPU twice."""
    devices: list[Device] = []
    for part in text.replace(" ", "").split("+"):
        host, _, local = part.rpartition("/")
        cpu, cuda = _CPU.fullmatch(local), _CUDA.fullmatch(local)
        if cpu and int(cpu[1] or 1) > 0:
            devices += [Device(None, host or None)] * int(cpu[1] or 1)
        elif cuda:
            ranges = [r.partition("-") for r in (cuda[1] or "0").split(",")]
            devices += [Device(i, host or None) for a, _, b in ranges for i in range(int(a), int(b or a) + 1)]
        else:
            raise ConfigError(f"{setting}: {text!r} names no devices; write it like {EXAMPLES}")
    gpus = [d for d in devices if d.gpu is not None]
    if len(set(gpus)) < len(gpus) or not devices:
        raise ConfigError(f"{setting}: {text!r} names {'a GPU twice' if gpus else 'no device'}; write it like {EXAMPLES}")
    return DeviceGroup(tuple(devices), len(devices) > 1 or "*" in text or "/" in text)
