"""The bytes of a checkpoint: safetensors files, written as a stream and checked before they are read.

A file is written from memory that belongs to others (arenas, received frames), a stretch at a time through one small
buffer: the `safetensors` package, which wants every tensor of a file in memory, reads them only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from dataplane.client.checkpoint.manifest import FileEntry
from dataplane.client.unit_connections import chosen
from dataplane.core import failpoints
from dataplane.core.checksums import damaged
from dataplane.core.private_dir import private
from dataplane.core.row_copy import UInt8s, gather
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec
from dataplane.data.columns import RowSource
from dataplane.data.jagged import byte_view
from dataplane.errors import CheckpointError, CheckpointWriteError, DataPlaneError
from dataplane.ledger import commands as c

FILE_BYTES = 256 << 20
"""A file has no more, unless one value has."""
STRETCH_BYTES = 8 << 20
"""So much is gathered, hashed and written at a time; of units on other hosts, received at a time."""

MAX_LENGTH = 1 << 44
"""No value is longer: sums of as many lengths as a piece has do not overflow."""

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}

Gather = Callable[[c.FieldLocations], RowSource]
"""Brings the values that lie there into reach."""


@dataclass(frozen=True)
class FilePart:
    """One tensor of a file: `dtype` by torch's name; `content` is it (any array, as bytes), or where it lies, as values
    of `partition`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: npt.NDArray[Any] | c.FieldLocations
    partition: str = ""


class DamagedValueError(Exception):
    """A value that was to be written is not what its writer wrote."""

    def __init__(self, partition: str, located: c.FieldLocations, got: int) -> None:
        """located: that one value."""
        super().__init__(partition, located.name)
        self.partition = partition
        self.located = located
        self.got = got


def array_part(name: str, array: npt.NDArray[Any]) -> FilePart:
    """A tensor that is in memory."""
    return FilePart(name, array.dtype.name, array.shape, array.nbytes, array)


def stored_part(name: str, partition: str, located: c.FieldLocations) -> FilePart:
    """The values that lie there, one after another. Ragged and object rows are what their kind stores, as bytes."""
    spec = located.spec
    count = int(located.lengths.sum())
    nbytes = count * spec.unit_bytes
    if spec.kind not in (FieldKind.DENSE, FieldKind.JAGGED):
        return FilePart(name, "uint8", (nbytes,), nbytes, located, partition)
    dtype, shape = spec.dtype or "", (count, *(spec.inner or ()))
    if dtype in _COMPLEX:
        dtype, shape = _COMPLEX[dtype], (*shape, 2)
    return FilePart(name, dtype, shape, nbytes, located, partition)


# --- writing ------------------------------------------------------------------------------------------------------


def write(directory: Path, name: str, parts: Sequence[FilePart], bring: Gather) -> FileEntry:
    """Write a file of these tensors and sync it; its entry. `CheckpointWriteError` where the file system fails,
    `DamagedValueError` for a value that does not have its checksum."""
    # Larger elements first: every tensor then begins at a multiple of its element.
    ordered = sorted(parts, key=lambda part: -DTYPE_BYTES[part.dtype])
    digest, written, path = hashlib.sha256(), 0, directory / name
    with translated(path), open(path, "xb", buffering=0, opener=private) as file:
        for stretch in _stretches(ordered, bring):
            digest.update(stretch)
            write_all(file.fileno(), stretch)
            written += len(stretch)
            failpoints.hit("checkpoint.mid_file")
        os.fsync(file.fileno())
    return FileEntry(name=name, nbytes=written, sha256=digest.hexdigest())


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """OSErrors of the file system as `CheckpointWriteError`; ours, some of which are OSErrors too, as they are."""
    try:
        yield
    except DataPlaneError:
        raise
    except OSError as error:
        raise CheckpointWriteError(file=str(path), why=error.strerror or str(error)) from error


def write_all(descriptor: int, data: memoryview) -> None:
    """All of it, however often the kernel takes less."""
    while data:
        data = data[os.write(descriptor, data) :]


def _stretches(parts: Sequence[FilePart], bring: Gather) -> Iterator[memoryview]:
    yield memoryview(_header(parts))
    scratch = np.empty(STRETCH_BYTES, np.uint8)
    for part in parts:
        if isinstance(part.content, np.ndarray):
            flat = np.ascontiguousarray(part.content).reshape(-1).view(np.uint8)
            for start in range(0, flat.nbytes, STRETCH_BYTES):
                yield flat[start : start + STRETCH_BYTES].data
        else:
            yield from _stored(part.partition, part.content, bring, scratch)


def _header(parts: Sequence[FilePart]) -> bytes:
    table: dict[str, Any] = {}
    at = 0
    for part in parts:
        table[part.name] = {
            "dtype": _DTYPES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [at, at + part.nbytes],
        }
        at += part.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stored(partition: str, located: c.FieldLocations, bring: Gather, scratch: UInt8s) -> Iterator[memoryview]:
    """The values' bytes. Empty ones may lie anywhere, also where no unit is any more."""
    located = chosen(located, np.flatnonzero(located.lengths * located.spec.unit_bytes))
    sizes = located.lengths * located.spec.unit_bytes
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + len(scratch), "right")), first + 1)
        these = chosen(located, slice(first, last))
        source = bring(these)
        nbytes = int(ends[last - 1]) - before
        if nbytes <= len(scratch):
            target = scratch[:nbytes]
            gather(source.buffers, source.which, source.offsets, source.sizes, target)
            _check(partition, these, target)
            yield target.data
        else:
            (row,) = source.rows()
            _check(partition, these, row)
            for start in range(0, nbytes, len(scratch)):
                yield row[start : start + len(scratch)].data
        first = last


def _check(partition: str, located: c.FieldLocations, memory: UInt8s) -> None:
    """Compare the values, which are one after another in `memory`."""
    if located.checksums is None:
        return
    sizes = located.lengths * located.spec.unit_bytes
    wrong, got = damaged(memory, np.cumsum(sizes) - sizes, sizes, located.checksums)
    if len(wrong):
        raise DamagedValueError(partition, chosen(located, wrong[:1]), int(got[0]))


# --- reading ------------------------------------------------------------------------------------------------------


def verify(directory: Path, entry: FileEntry) -> None:
    """`CheckpointError` unless the file is the one that was written."""
    path = directory / entry.name
    digest, found = hashlib.sha256(), 0
    buffer = memoryview(bytearray(STRETCH_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                found += count
                if found > entry.nbytes:
                    break
    except FileNotFoundError:
        raise CheckpointError(file=str(path), why="missing") from None
    except OSError as error:
        raise CheckpointError(file=str(path), why=error.strerror or str(error)) from error
    if found != entry.nbytes:
        how = "truncated" if found < entry.nbytes else "too long"
        raise CheckpointError(file=str(path), why=f"{how}: {found:,} bytes and more of {entry.nbytes:,}")
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(file=str(path), why="its content does not have the checksum it had: it was changed")


class OpenedFile:
    """A verified file, mapped: its tensors are read where they lie."""

    def __init__(self, directory: Path, entry: FileEntry) -> None:
        self.path = directory / entry.name
        try:
            self._file = safetensors.safe_open(self.path, "pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise self.wrong(str(error)) from error

    def bytes_of(self, name: str) -> UInt8s:
        """A tensor's bytes, mapped. `CheckpointError` if it is not there."""
        try:
            return byte_view(self._file.get_tensor(name))  # type: ignore[no-untyped-call]
        except (OSError, safetensors.SafetensorError, ValueError, RuntimeError) as error:
            raise self.wrong(f"tensor {name!r}: {error}") from error

    def int64s(self, name: str) -> c.Int64s:
        """A tensor of integers."""
        found = self.bytes_of(name)
        if found.nbytes % 8:
            raise self.wrong(f"tensor {name!r} holds no integers of 64 bits")
        integers: c.Int64s = found.view(np.int64)
        return integers

    def wrong(self, why: str) -> CheckpointError:
        """The error that names this file."""
        return CheckpointError(file=str(self.path), why=why)


def lengths_of(opened: OpenedFile, prefix: str, spec: FieldSpec, values: int) -> c.Int64s:
    """Length of each value, none negative."""
    if spec.kind is FieldKind.DENSE:
        return np.ones(values, np.int64)
    lengths = opened.int64s(f"{prefix}/lengths")
    if len(lengths) != values or (values and not 0 <= int(lengths.min()) <= int(lengths.max()) <= MAX_LENGTH):
        raise opened.wrong(f"{len(lengths)} lengths of {values} values, or some that cannot be ({prefix})")
    return lengths
