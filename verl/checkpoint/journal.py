"""Journal: the finished samples that are not trained yet, so that a killed run does not sample them again.

One append-only file of records, each `length, checksum, safetensors bytes` with the JSON part in the metadata. A record
cut by a kill is left out when read and overwritten by the next append.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from verl.checkpoint.state import flatten, unflatten
from verl.core.errors import CheckpointError

_HEAD = struct.Struct("<QI")


class Journal:
    """Records of one `key` (step, weight version, ...); a file written under another key is started anew.

    No fsync: what `write` handed to the kernel survives the process, and a torn tail after a power cut is cut off. A new key
    comes in two steps around what makes it true (a checkpoint): `prepare` writes the next file aside, `commit` puts it in
    place; after a kill between the two, whichever file has the key that is asked for is read. Threads may append.
    """

    def __init__(self, path: str | Path, key: dict[str, Any]):
        self.path, self.key = Path(path), json.loads(json.dumps(key))
        self._aside = self.path.with_name(self.path.name + ".next")
        self._lock = threading.RLock()
        self._file = None
        self._next: Journal | None = None
        if next((record for record, _ in _records(self._aside)), None) == self.key:
            os.replace(self._aside, self.path)

    def read(self) -> list[Any]:
        """The whole records written under this key, in order; arrays come back as they were appended."""
        records = [record for record, _ in _records(self.path)]
        return records[1:] if records and records[0] == self.key else []

    def append(self, record: Any) -> None:
        """Add nested data (see `flatten`); it is safe from a kill when this returns."""
        with self._lock:
            if self._file is None:
                self._open()
            _write(self._file, record)
            if self._next is not None:
                self._next.append(record)

    def prepare(self, key: dict[str, Any], records: Callable[[], Iterable[Any]]) -> None:
        """Write the file of the next key aside, with these records; until `commit`, appended ones go into both."""
        with self._lock:
            if self._next is not None:  # what it was for did not come true
                self._next.close()
            self._aside.unlink(missing_ok=True)
            self._next = Journal(self._aside, key)
            for record in records():
                self._next.append(record)

    def commit(self) -> None:
        """The prepared key is true now: its file takes the place of this one; everything else is forgotten."""
        with self._lock:
            self.close()
            self.key, self._next = self._next.key, None
            if self._aside.exists():
                os.replace(self._aside, self.path)
            else:
                self.path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._next is not None:
                self._next.close()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> None:
        end, mine = 0, False
        for record, position in _records(self.path):
            mine = mine or (end == 0 and record == self.key)
            end = position
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0)
        self._file.truncate(end if mine else 0)
        self._file.seek(0, 2)
        if not mine:
            _write(self._file, self.key)


def _records(path: Path) -> Iterator[tuple[Any, int]]:
    """(record, position after it), up to the first that is torn."""
    if not path.exists():
        return
    size = path.stat().st_size
    with open(path, "rb") as file:
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
