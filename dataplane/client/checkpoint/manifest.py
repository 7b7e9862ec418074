"""The manifest of a checkpoint: a small JSON file that lists all other files with their sizes and checksums.

    {"format": 1, "sha256": "of the bytes of the next value", "checkpoint": {...}}

The checksums detect corruption and files of another checkpoint. They do not authenticate the author: any user with
write access to the directory can also write matching checksums.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dataplane.core.types import FieldSpec
from dataplane.errors import CheckpointError
from dataplane.ledger.commands import WhenFull

FORMAT = 1
NAME = "manifest.json"
FILE_NAME = re.compile(r"data-[0-9a-f]{16}/[0-9]{5,9}\.safetensors")
MAX_BYTES = 1 << 30


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the entries of the manifest."""


class FileEntry(ManifestEntry, frozen=True, kw_only=True):
    """A data file; `name` is relative to the checkpoint."""

    name: str
    nbytes: int
    sha256: str


class RowsEntry(ManifestEntry, frozen=True, kw_only=True):
    """Ids and tags of the next `count` samples, oldest first: tensors `PREFIX/ids` (UTF-8, concatenated),
    `PREFIX/id_lengths` (bytes of each id), `PREFIX/tags` (msgpack: a list of [name, positions or null, values])."""

    file: int
    prefix: str
    count: int


class CellsEntry(ManifestEntry, frozen=True, kw_only=True):
    """`values` values of a field, for `rows` samples: tensors `PREFIX/values`; `PREFIX/lengths` (of each value,
    except for dense fields: elements of jagged rows, else bytes); `PREFIX/rows` (the samples, counted from the
    oldest; omitted if they are consecutive from `first` on); `PREFIX/index` (the value of each sample; omitted if
    the mapping is one-to-one)."""

    field: str
    spec: FieldSpec
    file: int
    prefix: str
    values: int
    rows: int
    nbytes: int
    first: int | None = None
    shared: bool = False


class FieldEntry(ManifestEntry, frozen=True, kw_only=True):
    name: str
    declared: FieldSpec | None


class PartitionEntry(ManifestEntry, frozen=True, kw_only=True):
    """A partition. Tensor `PREFIX/claimed` of file `file` is the concatenated claim bitmap of all tasks."""

    partition: str
    live: int
    born: int
    fields: tuple[FieldEntry, ...]
    tasks: tuple[str, ...]
    num_samples: int | None
    group_size: int | None
    enums: dict[str, tuple[str, ...]] | None
    strict: bool
    sealed: bool
    version: int | None
    file: int
    prefix: str
    rows: tuple[RowsEntry, ...]
    cells: tuple[CellsEntry, ...]
    budget_bytes: int | None = None
    when_full: WhenFull = WhenFull.WAIT


class Manifest(ManifestEntry, frozen=True, kw_only=True):
    """The content of the manifest. `package` is the name and version of the package that wrote it."""

    package: str
    partitions: tuple[PartitionEntry, ...]
    files: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest file: `sha256` is the checksum of the encoded `Manifest` in `checkpoint`."""

    format: int
    sha256: str = ""
    checkpoint: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Result of a save or restore: samples by partition, and the total bytes of the checkpoint in its `files`
    files."""

    path: str
    partitions: dict[str, int]
    nbytes: int
    files: int


def info(path: Path, manifest: Manifest, partitions: tuple[PartitionEntry, ...]) -> CheckpointInfo:
    """Return the result that the client receives. partitions: those that were saved or restored."""
    return CheckpointInfo(
        path=str(path),
        partitions={entry.partition: entry.live for entry in partitions},
        nbytes=manifest.nbytes,
        files=len(manifest.files),
    )


def package() -> str:
    """Return the name and version of the package that writes the manifest."""
    try:
        return f"rl-dataplane {importlib.metadata.version('rl-dataplane')}"
    except importlib.metadata.PackageNotFoundError:
        return "rl-dataplane"


def encode(manifest: Manifest) -> bytes:
    """Return the content of the manifest file."""
    inner = msgspec.json.encode(manifest)
    outer = _Outer(format=FORMAT, sha256=hashlib.sha256(inner).hexdigest(), checkpoint=msgspec.Raw(inner))
    return msgspec.json.encode(outer)


def decode(path: Path, content: bytes) -> Manifest:
    """Decode the output of `encode`; `path` is for errors. Raise `CheckpointError` for any other content."""
    try:
        outer = msgspec.json.decode(content, type=_Outer)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(
            file=str(path), why=f"the file is truncated, or is not the manifest of a checkpoint ({error})"
        ) from error
    if outer.format != FORMAT:
        raise CheckpointError(
            file=str(path),
            why=f"it has format {outer.format}, but this version ({package()}) reads format {FORMAT}; restore it with "
            "a version that reads it",
        )
    if hashlib.sha256(bytes(outer.checkpoint)).hexdigest() != outer.sha256:
        raise CheckpointError(
            file=str(path), why="its content does not match its checksum: the file was modified; use another copy"
        )
    try:
        manifest = msgspec.json.decode(outer.checkpoint, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(file=str(path), why=f"its content is invalid ({error}); use another copy") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for file names outside the checkpoint, repeated partitions, cells of a field whose kind is not
    known, and inconsistent numbers."""
    for file in manifest.files:
        if not FILE_NAME.fullmatch(file.name) or file.nbytes < 0:
            raise ValueError(f"invalid file entry {file.name[:80]!r} of {file.nbytes} bytes")
    names = [entry.partition for entry in manifest.partitions]
    if len(set(names)) != len(names):
        raise ValueError("a partition is listed twice")
    for entry in manifest.partitions:
        # The number of its file and the counts of every piece: of the partition itself, of its rows and its cells.
        pieces = [(entry.file, 0, 0, 0), *((rows.file, rows.count, 0, 0) for rows in entry.rows)]
        pieces += [(cells.file, cells.rows, cells.values, cells.nbytes) for cells in entry.cells]
        for number, *counts in pieces:
            if not 0 <= number < len(manifest.files) or min(counts) < 0:
                raise ValueError(f"invalid piece of file {number} with counts {counts}")
        for cells in entry.cells:
            first = cells.first or 0  # None: the samples are not consecutive; then only their number is checked
            if not (cells.values <= cells.rows and 0 <= first <= first + cells.rows <= entry.live):
                raise ValueError(
                    f"{cells.values} values for {cells.rows} samples from number {first} on, "
                    f"but the partition has {entry.live} samples"
                )
        if not all(cells.spec.settled for cells in entry.cells):
            raise ValueError(f"cells of partition {entry.partition!r} have no kind")
        if sum(rows.count for rows in entry.rows) != entry.live:
            raise ValueError(f"partition {entry.partition!r} has {entry.live} samples, but a different number of ids")


def read(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`. Raise `CheckpointError` if there is none or it is invalid."""
    file = path / NAME
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            content = opened.read(size) if size <= MAX_BYTES else b""  # too large: rejected below
    except (FileNotFoundError, NotADirectoryError):
        why = (
            "the file is missing: the directory has no complete checkpoint"
            if path.exists()
            else "the checkpoint does not exist"
        )
        raise CheckpointError(file=str(file), why=why) from None
    except OSError as error:
        raise CheckpointError(file=str(file), why=error.strerror or str(error)) from error
    if size > MAX_BYTES:
        raise CheckpointError(
            file=str(file),
            why=f"the file is larger than {MAX_BYTES:,} bytes, so it is not the manifest of a checkpoint",
        )
    return decode(file, content)
