"""Checkpoints on disk: whole or not there at all.

    run/checkpoints/step_300/  manifest.json (written last: step, sizes, checksums), state.json, *.safetensors

A checkpoint is written aside (`.saving-300`), made durable, and renamed; a kill or a full disk at any moment leaves
the older ones as they were. Files are safetensors and JSON; nothing is ever unpickled. The step of a checkpoint is the
number in its manifest; names and times on disk mean nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from verl.checkpoint.state import flatten, unflatten
from verl.core.errors import CheckpointError

_FORMAT = "verl-checkpoint-1"
_BLOCK = 1 << 24
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
           torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
           torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint64: "U64", torch.uint32: "U32",
           torch.uint16: "U16"}

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest could be read. `files`: name -> {"bytes": size, "crc32": checksum}."""

    path: Path
    name: str  # the directory it was saved as
    step: int
    attempt: int  # a later save of the same step has a higher one
    files: Mapping[str, Mapping[str, int]]

    def tensors(self, file: str, device: str | torch.device = "cpu", mmap: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of one file. With `mmap` on the CPU they are read from disk when first touched."""
        path = self.path / f"{file}.safetensors"
        if path.name not in self.files:
            raise CheckpointError(f"{self.path} has no {path.name}; it holds {', '.join(sorted(self.files))}")
        if not mmap:
            return {name: t.to(device) for name, t in safetensors.torch.load(path.read_bytes()).items()}
        return safetensors.torch.load_file(path, device=str(device))

    def state(self) -> Any:
        """The nested state given to `save`, its tensors on the CPU."""
        tensors = self.tensors("state") if "state.safetensors" in self.files else {}
        return unflatten(json.loads((self.path / "state.json").read_text("utf-8")), tensors)

    def check_sizes(self) -> None:
        """Raise CheckpointError naming the first file that is missing or has another size than the manifest says."""
        for name, info in self.files.items():
            file = self.path / name
            size = file.stat().st_size if file.is_file() else None
            if size != info["bytes"]:
                seen = "is missing" if size is None else f"has {size} bytes instead of {info['bytes']}"
                raise CheckpointError(f"{self.path}: {name} {seen}")

    def verify(self) -> None:
        """Read every byte; raise CheckpointError naming a file that differs from what was saved."""
        self.check_sizes()
        with ThreadPoolExecutor(4) as pool:  # zlib and file reads run without the interpreter lock
            found = dict(zip(self.files, pool.map(lambda name: _crc(self.path / name), self.files)))
        for name, info in self.files.items():
            if found[name] != info["crc32"]:
                raise CheckpointError(f"{self.path}: the content of {name} is not what was saved (checksum)")


@dataclass(frozen=True, slots=True)
class Restored:
    """What `load` returns: `tensors[file][name]` and the nested state."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    state: Any


class Draft:
    """A checkpoint being written aside. One process makes it with `leader`, others of the run join; then each writes
    files of its own names, the leader gathers what `write` returned and commits.
    """

    def __init__(self, root: str | Path, step: int, leader: bool = True):
        self.root, self.step = Path(root), int(step)
        self.path = self.root / f".saving-{self.step}"
        self.files: dict[str, dict[str, int]] = {}
        if leader:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in [*self.root.glob(".saving-*"), *self.root.glob(".deleting-*")]:  # of saves that were killed
                shutil.rmtree(leftover)
            self.path.mkdir()

    def write(self, file: str, tensors: Tensors) -> dict[str, dict[str, int]]:
        """Write `file`.safetensors, one tensor in host memory at a time; returns its manifest entry.

        Raises CheckpointError for NaN or infinity in any tensor: such a save would rotate good checkpoints away.
        """
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", file):
            raise CheckpointError(f"{file!r} is not a plain file name")
        name = f"{file}.safetensors"
        with open(self.path / name, "wb") as out:
            entry = {name: _write_tensors(out, tensors, f"step {self.step}: {file}")}
        self.files |= entry
        return entry

    def commit(self, state: Any = None, keep_last: int | None = None,
               others: Mapping[str, Mapping[str, int]] | None = None) -> Checkpoint:
        """Add the state and the manifest, make all durable, rename into place, then drop all but `keep_last`."""
        plain, tensors = flatten(state)
        if tensors:
            with open(self.path / "state.safetensors", "wb") as out:
                self.files["state.safetensors"] = _write_tensors(out, tensors, f"step {self.step}: state", finite=False)
        self.files["state.json"] = _write_bytes(self.path / "state.json", json.dumps(plain, allow_nan=False).encode())
        same = [c for c in _scan(self.root, lambda line: None) if c.step == self.step]
        attempt = max((c.attempt for c in same), default=0) + 1
        name = f"step_{self.step}" + (f"-{attempt}" if attempt > 1 or (self.root / f"step_{self.step}").exists() else "")
        manifest = {"format": _FORMAT, "name": name, "step": self.step, "attempt": attempt, "time": time.time(),
                    "files": {**self.files, **(others or {})}}
        _write_bytes(self.path / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync_directory(self.path)
        os.rename(self.path, self.root / name)
        _sync_directory(self.root)
        saved = Checkpoint(self.root / name, name, self.step, attempt, manifest["files"])
        for old in same:
            _delete(old)
        if keep_last is not None:
            _retain(self.root, keep_last, saved)
        return saved

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def save(root: str | Path, step: int, tensors: Mapping[str, Tensors], state: Any = None,
         keep_last: int | None = None) -> Checkpoint:
    """Save `tensors` (file name -> name -> tensor) and nested `state` as the checkpoint of `step`, whole or not at all.

    Older checkpoints beyond `keep_last` whole ones are deleted afterwards. Raises CheckpointError when a tensor is not
    finite, the state holds something that is no data, or the disk refuses; every older checkpoint is then untouched.
    """
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last: {keep_last} would delete the checkpoint just saved; use 1 or more")
    draft = None
    try:
        draft = Draft(root, step)
        for file, named in tensors.items():
            draft.write(file, named)
        return draft.commit(state, keep_last)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(f"step {step} could not be saved to {root}: {error.strerror}; older checkpoints are untouched"
                              + ("; free space, lower keep_last, or choose another trainer.output_dir" if full else "")
                              ) from error
    finally:
        if draft is not None:
            draft.discard()  # nothing is left there after a commit


def newest(root: str | Path, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The whole checkpoint of the highest step, every byte checked; None when there is none. `say` names each skipped."""
    for checkpoint in reversed(_scan(Path(root), say)):
        try:
            checkpoint.verify()
            return checkpoint
        except CheckpointError as error:
            say(f"skipping a broken checkpoint: {error}")
    return None


def load(source: str | Path | Checkpoint, device: str | torch.device = "cpu", mmap: bool = True) -> Restored:
    """All tensors and the state of a checkpoint. A path is verified first (`newest` has done so already)."""
    if not isinstance(source, Checkpoint):
        source = _read_manifest(Path(source))
        source.verify()
    files = [name.removesuffix(".safetensors") for name in source.files if name.endswith(".safetensors")]
    return Restored(source.step, {f: source.tensors(f, device, mmap) for f in files if f != "state"}, source.state())


# ------------------------------------------------------------------------------------------------- reading directories
def _read_manifest(path: Path) -> Checkpoint:
    """Raises CheckpointError when there is no manifest or it is not one of ours."""
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        files, name, step, attempt = (manifest[key] for key in ("files", "name", "step", "attempt"))
        sound = manifest["format"] == _FORMAT and type(step) is int and type(attempt) is int and all(
            os.path.basename(file) == file and {"bytes", "crc32"} <= set(info) for file, info in files.items())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no manifest.json; it was never finished, or is not a checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path}: manifest.json cannot be read ({type(error).__name__}: {error})") from error
    if not sound:
        raise CheckpointError(f"{path}: manifest.json is not a {_FORMAT} manifest")
    return Checkpoint(path, name, step, attempt, files)


def _scan(root: Path, say: Callable[[str], None]) -> list[Checkpoint]:
    """Checkpoints in `root` by step; a directory renamed or copied by hand is the user's and not among them."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.is_dir() or path.name.startswith("."):
            continue
        try:
            checkpoint = _read_manifest(path)
        except CheckpointError as error:
            if path.name.startswith("step_"):
                say(f"skipping a broken checkpoint: {error}")
            continue
        if checkpoint.name == path.name and not path.is_symlink():
            found.append(checkpoint)
    return sorted(found, key=lambda c: (c.step, c.attempt))


def _retain(root: Path, keep_last: int, saved: Checkpoint) -> None:
    """Delete the lowest steps beyond `keep_last` whole checkpoints; `saved` stays, and broken ones are not counted."""
    whole = []
    for checkpoint in _scan(root, lambda line: None):
        try:
            checkpoint.check_sizes()
            whole.append(checkpoint)
        except CheckpointError:
            continue
    others = [c for c in whole if c.path != saved.path]
    for checkpoint in others[:max(0, len(whole) - keep_last)]:
        _delete(checkpoint)


def _delete(checkpoint: Checkpoint) -> None:
    """Rename first, so that a kill while deleting leaves no half checkpoint under its name."""
    aside = checkpoint.path.with_name(f".deleting-{checkpoint.path.name}")
    os.rename(checkpoint.path, aside)
    shutil.rmtree(aside)


# --------------------------------------------------------------------------------------------------------------- bytes
def _write_tensors(out: Any, tensors: Tensors, where: str, finite: bool = True) -> dict[str, int]:
    """Stream tensors in safetensors format (header, then data, widest types first so that all are aligned)."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{where}: {name} has type {tensor.dtype}, which safetensors cannot hold")
        if finite and tensor.is_floating_point() and not _finite(tensor):
            raise CheckpointError(f"{where}: {name} holds NaN or infinity; nothing was saved, older checkpoints are kept")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    out.write(head)
    crc = zlib.crc32(head)
    for name in order:
        data = tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), _BLOCK):
            block = memoryview(data[start:start + _BLOCK])
            crc = zlib.crc32(block, crc)
            out.write(block)
    out.flush()
    os.fsync(out.fileno())
    return {"bytes": len(head) + offset, "crc32": crc}


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # float8 has no reductions
        tensor = tensor.to(torch.float32)
    low, high = torch.aminmax(tensor.detach())  # one pass, carries NaN; several times faster than isfinite().all()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _write_bytes(path: Path, data: bytes) -> dict[str, int]:
    with open(path, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
