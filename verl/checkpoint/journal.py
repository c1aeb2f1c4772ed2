"""Journal: the finished samples of the step in flight, so that a killed step does not sample them again.

One append-only file of records, each `length, checksum, safetensors bytes` with the JSON part in the metadata. A record
cut by a kill is left out when read and overwritten by the next append.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from verl.checkpoint.state import flatten, unflatten
from verl.core.errors import CheckpointError

_HEAD = struct.Struct("<QI")


class Journal:
    """Records of one `key` (step, weight version, ...); a file written under another key is started anew.

    No fsync: what `write` handed to the kernel survives the process, and a torn tail after a power cut is cut off.
    """

    def __init__(self, path: str | Path, key: dict[str, Any]):
        self.path, self.key = Path(path), json.loads(json.dumps(key))
        self._file = None

    def read(self) -> list[Any]:
        """The whole records written under this key, in order; arrays come back as they were appended."""
        records = [record for record, _ in self._records()]
        return records[1:] if records and records[0] == self.key else []

    def append(self, record: Any) -> None:
        """Add nested data (see `flatten`); it is safe from a kill when this returns."""
        if self._file is None:
            self._open()
        _write(self._file, record)

    def clear(self) -> None:
        """Forget everything: the step these samples belong to is checkpointed."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        end, mine = 0, False
        for record, position in self._records():
            mine = mine or (end == 0 and record == self.key)
            end = position
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0)
        self._file.truncate(end if mine else 0)
        self._file.seek(0, 2)
        if not mine:
            _write(self._file, self.key)

    def _records(self) -> Iterator[tuple[Any, int]]:
        """(record, position after it), up to the first that is torn."""
        if not self.path.exists():
            return
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                length, crc = _HEAD.unpack(head)
                if file.tell() + length > size:  # also a torn length, which could ask for any amount of memory
                    return
                data = file.read(length)
                if zlib.crc32(data) != crc:
                    return
                yield _decode(data), file.tell()


def _write(file: Any, record: Any) -> None:
    plain, tensors = flatten(record, "r")
    own = {name: t.contiguous().clone() for name, t in tensors.items()}  # views of one storage are refused
    data = safetensors.torch.save(own, {"json": json.dumps(plain)})
    block = memoryview(_HEAD.pack(len(data), zlib.crc32(data)) + data)
    while block:
        block = block[file.write(block):]


def _decode(data: bytes) -> Any:
    (size,) = struct.unpack("<Q", data[:8])
    try:
        plain = json.loads(json.loads(data[8:8 + size])["__metadata__"]["json"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"a journal record is whole but not a journal record ({error})") from error
    return unflatten(plain, safetensors.torch.load(data))
