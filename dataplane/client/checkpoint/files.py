"""The data files of a checkpoint: safetensors files, written as a stream and verified before they are read.

Source memory (arenas, received frames) is not owned by the writer, so files are written in chunks through one small
buffer. The `safetensors` package needs all tensors of a file in memory for writing and is used only for reading.
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
from dataplane.client.unit_connections import select_values
from dataplane.core import failpoints
from dataplane.core.checksums import damaged
from dataplane.core.private_dir import private
from dataplane.core.row_copy import UInt8s, gather
from dataplane.core.types import DTYPE_BYTES, FieldKind, FieldSpec
from dataplane.data.columns import RowSource
from dataplane.data.tensor_memory import byte_view
from dataplane.errors import CheckpointError, CheckpointWriteError, DataPlaneError
from dataplane.ledger import commands as c

FILE_BYTES = 256 << 20
"""Maximum size of a file, unless a single value is larger."""
CHUNK_BYTES = 8 << 20
"""Bytes (a chunk) gathered, hashed and written at a time; for remote units also the bytes received at a time."""

MAX_LENGTH = 1 << 44
"""Maximum length of a value. The sum of all lengths in a piece cannot overflow."""

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
"""Complex elements are stored as pairs of these."""

Gather = Callable[[c.FieldLocations], RowSource]
"""Fetches the values at these locations."""


@dataclass(frozen=True)
class FilePart:
    """One tensor of a file. `dtype` is the torch name. `content` is an array, whose bytes are stored, or the
    locations of values of `partition`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: npt.NDArray[Any] | c.FieldLocations
    partition: str = ""


class DamagedValueError(Exception):
    """A value to be written does not match its checksum."""

    def __init__(self, partition: str, located: c.FieldLocations, got: int) -> None:
        """located: the location of that single value; got: the checksum of its present bytes."""
        super().__init__(partition, located.name)
        self.partition = partition
        self.located = located
        self.got = got


def array_part(name: str, array: npt.NDArray[Any]) -> FilePart:
    """Return the part for an array in memory."""
    return FilePart(name, array.dtype.name, array.shape, array.nbytes, array)


def stored_part(name: str, partition: str, located: c.FieldLocations) -> FilePart:
    """Return the part for stored values, concatenated. Ragged and object rows are stored as the bytes of their
    encoding."""
    spec = located.spec
    count = int(located.lengths.sum())  # of dense values, elements of jagged ones, or bytes
    nbytes = count * spec.unit_bytes
    if spec.kind not in (FieldKind.DENSE, FieldKind.JAGGED):
        return FilePart(name, "uint8", (nbytes,), nbytes, located, partition)
    dtype, shape = spec.dtype or "", (count, *(spec.inner or ()))
    if dtype in _COMPLEX:
        dtype, shape = _COMPLEX[dtype], (*shape, 2)  # real and imaginary part
    return FilePart(name, dtype, shape, nbytes, located, partition)


# --- writing ------------------------------------------------------------------------------------------------------


def write(directory: Path, name: str, parts: Sequence[FilePart], fetch: Gather) -> FileEntry:
    """Write the tensors to a new file, sync it and return its entry. Raise `CheckpointWriteError` if the file system
    fails, `DamagedValueError` for a value that does not match its checksum."""
    # Larger elements first, so that every tensor is aligned to its element size.
    ordered = sorted(parts, key=lambda part: -DTYPE_BYTES[part.dtype])
    digest, written, path = hashlib.sha256(), 0, directory / name
    with translated(path), open(path, "xb", buffering=0, opener=private) as file:
        for chunk in _chunks(ordered, fetch):  # the header, then the bytes of all tensors
            digest.update(chunk)
            write_all(file.fileno(), chunk)
            written += len(chunk)
            failpoints.hit("checkpoint.mid_file")
        os.fsync(file.fileno())
    return FileEntry(name=name, nbytes=written, sha256=digest.hexdigest())


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Convert an OSError of the file system to `CheckpointWriteError`; keep errors of this package, some of which
    are OSErrors."""
    try:
        yield
    except DataPlaneError:
        raise
    except OSError as error:
        raise CheckpointWriteError(file=str(path), why=error.strerror or str(error)) from error


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all data, in several calls if the kernel accepts less."""
    while data:
        data = data[os.write(descriptor, data) :]


def _chunks(parts: Sequence[FilePart], fetch: Gather) -> Iterator[memoryview]:
    """Yield the content of the file in chunks of at most `CHUNK_BYTES` (the header may be longer). A chunk is valid
    until the next one is requested."""
    yield memoryview(_header(parts))
    scratch = np.empty(CHUNK_BYTES, np.uint8)
    for part in parts:
        if isinstance(part.content, np.ndarray):
            flat = np.ascontiguousarray(part.content).reshape(-1).view(np.uint8)
            for start in range(0, flat.nbytes, CHUNK_BYTES):
                yield flat[start : start + CHUNK_BYTES].data
        else:
            yield from _value_chunks(part.partition, part.content, fetch, scratch)


def _header(parts: Sequence[FilePart]) -> bytes:
    """Return the header of a safetensors file with these tensors, in this order: its length, then a JSON object."""
    table: dict[str, Any] = {}
    offset = 0
    for part in parts:
        table[part.name] = {
            "dtype": _DTYPES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data that follows is aligned to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _value_chunks(partition: str, located: c.FieldLocations, fetch: Gather, scratch: UInt8s) -> Iterator[memoryview]:
    """Yield the values' bytes, after comparing them with their checksums, in chunks of at most `len(scratch)`. Empty
    values are skipped: their location may refer to a removed unit."""
    located = select_values(located, np.flatnonzero(located.lengths * located.spec.unit_bytes))
    sizes = located.lengths * located.spec.unit_bytes
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        # As many values as fit into `scratch`, at least one.
        last = max(int(np.searchsorted(ends, before + len(scratch), "right")), first + 1)
        values = select_values(located, slice(first, last))
        source = fetch(values)
        nbytes = int(ends[last - 1]) - before
        if nbytes <= len(scratch):
            target = scratch[:nbytes]
            # Copies the values into `target`, one after another.
            gather(source.buffers, source.which, source.offsets, source.sizes, target)
            _verify_values(partition, values, target)
            yield target.data
        else:  # a single large value
            (row,) = source.rows()
            _verify_values(partition, values, row)
            for start in range(0, nbytes, len(scratch)):
                yield row[start : start + len(scratch)].data
        first = last


def _verify_values(partition: str, located: c.FieldLocations, memory: UInt8s) -> None:
    """Compare the values, which are concatenated in `memory`, with their checksums, if they have any. Raise
    `DamagedValueError` for the first wrong value."""
    if located.checksums is None:
        return
    sizes = located.lengths * located.spec.unit_bytes
    wrong, got = damaged(memory, np.cumsum(sizes) - sizes, sizes, located.checksums)
    if len(wrong):
        raise DamagedValueError(partition, select_values(located, wrong[:1]), int(got[0]))


# --- reading ------------------------------------------------------------------------------------------------------


def verify(directory: Path, entry: FileEntry) -> None:
    """Raise `CheckpointError` unless the file matches its size and checksum in the manifest."""
    path = directory / entry.name
    digest, nbytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                nbytes += count
                if nbytes > entry.nbytes:  # too long; the rest need not be read
                    break
    except FileNotFoundError:
        raise CheckpointError(
            file=str(path), why="the file is missing; use a complete copy of the checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(file=str(path), why=error.strerror or str(error)) from error
    if nbytes != entry.nbytes:
        how = "the file is truncated" if nbytes < entry.nbytes else "the file is too long"
        raise CheckpointError(
            file=str(path), why=f"{how}: read {nbytes:,} bytes, expected {entry.nbytes:,}; use another copy"
        )
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(
            file=str(path), why="its content does not match its checksum: the file was modified; use another copy"
        )


class OpenedFile:
    """A verified, memory-mapped file. Raise `CheckpointError` if it cannot be opened."""

    def __init__(self, directory: Path, entry: FileEntry) -> None:
        self.path = directory / entry.name
        try:
            self._file = safetensors.safe_open(self.path, "pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise self.error(str(error)) from error

    def bytes_of(self, name: str) -> UInt8s:
        """Return a tensor's mapped bytes. Raise `CheckpointError` if the tensor is missing or unreadable."""
        try:
            return byte_view(self._file.get_tensor(name))  # type: ignore[no-untyped-call]
        except (OSError, safetensors.SafetensorError, ValueError, RuntimeError) as error:
            raise self.error(f"tensor {name!r}: {error}") from error

    def int64s(self, name: str) -> c.Int64s:
        """Return a tensor of 64-bit integers, mapped. Raise `CheckpointError` if it is missing, or its size is not a
        multiple of 8 bytes."""
        mapped = self.bytes_of(name)
        if mapped.nbytes % 8:
            raise self.error(f"tensor {name!r} has {mapped.nbytes} bytes, expected 64-bit integers")
        integers: c.Int64s = mapped.view(np.int64)
        return integers

    def error(self, why: str) -> CheckpointError:
        """Return an error that names this file."""
        return CheckpointError(file=str(self.path), why=why)


def lengths_of(opened: OpenedFile, prefix: str, spec: FieldSpec, values: int) -> c.Int64s:
    """Return the length of each of the `values` values of the piece with this prefix. Raise `CheckpointError` unless
    their number and range are valid."""
    if spec.kind is FieldKind.DENSE:
        return np.ones(values, np.int64)  # not stored: every dense value has length 1
    lengths = opened.int64s(f"{prefix}/lengths")
    if len(lengths) != values:
        raise opened.error(f"tensor {prefix + '/lengths'!r} has {len(lengths)} lengths for {values} values")
    if values and not 0 <= int(lengths.min()) <= int(lengths.max()) <= MAX_LENGTH:
        raise opened.error(
            f"tensor {prefix + '/lengths'!r} has lengths from {int(lengths.min())} to {int(lengths.max())}, expected 0 "
            f"to {MAX_LENGTH}"
        )
    return lengths
