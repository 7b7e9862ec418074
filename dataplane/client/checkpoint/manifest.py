"""What a checkpoint says of itself: one small JSON file that names all others, with their sizes and checksums.

    {"format": 1, "sha256": "of the bytes of what follows", "checkpoint": {...}}

The checksums find what broke on the way, and files of another checkpoint. They do not tell who wrote it: whoever can
write to the directory can write them, too.
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
    """Base of what the manifest lists."""


class FileEntry(ManifestEntry, frozen=True, kw_only=True):
    """`name` is relative to the checkpoint."""

    name: str
    nbytes: int
    sha256: str


class RowsEntry(ManifestEntry, frozen=True, kw_only=True):
    """Ids and tags of the next `count` samples, oldest first: tensors `PREFIX/ids` (UTF-8, one after another),
    `PREFIX/id_lengths` (bytes of each), `PREFIX/tags` (msgpack: a list of [name, positions or null, values])."""

    file: int
    prefix: str
    count: int


class CellsEntry(ManifestEntry, frozen=True, kw_only=True):
    """`values` values of a field, for `rows` samples: tensors `PREFIX/values`, `PREFIX/lengths` (of each value, but for
    dense ones: elements of jagged rows, else bytes), `PREFIX/rows` (the samples, counted from the oldest; absent where
    they are those from `first` on), `PREFIX/index` (the value of each sample; absent where they are one for one)."""

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
    """Tensor `PREFIX/claimed` of file `file` has the bits of each task, one task after another."""

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
    package: str
    partitions: tuple[PartitionEntry, ...]
    files: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    sha256: str = ""
    checkpoint: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What was saved or restored: samples by partition, and the bytes of the whole checkpoint in its `files` files."""

    path: str
    partitions: dict[str, int]
    nbytes: int
    files: int


def info(path: Path, manifest: Manifest, partitions: tuple[PartitionEntry, ...]) -> CheckpointInfo:
    """What the client is told."""
    return CheckpointInfo(
        path=str(path),
        partitions={entry.partition: entry.live for entry in partitions},
        nbytes=manifest.nbytes,
        files=len(manifest.files),
    )


def package() -> str:
    """Who writes."""
    try:
        return f"rl-dataplane {importlib.metadata.version('rl-dataplane')}"
    except importlib.metadata.PackageNotFoundError:
        return "rl-dataplane"


def encode(manifest: Manifest) -> bytes:
    """The file's content."""
    inner = msgspec.json.encode(manifest)
    outer = _Outer(format=FORMAT, sha256=hashlib.sha256(inner).hexdigest(), checkpoint=msgspec.Raw(inner))
    return msgspec.json.encode(outer)


def decode(path: Path, content: bytes) -> Manifest:
    """What `encode` wrote; `path` is for errors. `CheckpointError` for anything else."""
    try:
        outer = msgspec.json.decode(content, type=_Outer)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(file=str(path), why=f"truncated or not a manifest ({error})") from error
    if outer.format != FORMAT:
        raise CheckpointError(
            file=str(path), why=f"of format {outer.format}; this version ({package()}) reads format {FORMAT}"
        )
    if hashlib.sha256(bytes(outer.checkpoint)).hexdigest() != outer.sha256:
        raise CheckpointError(file=str(path), why="its content does not have the checksum it names: it was changed")
    try:
        manifest = msgspec.json.decode(outer.checkpoint, type=Manifest)
        _check(manifest)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(file=str(path), why=f"its content makes no sense ({error})") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """ValueError for names that lead elsewhere and numbers that cannot be."""
    for file in manifest.files:
        if not FILE_NAME.fullmatch(file.name) or file.nbytes < 0:
            raise ValueError(f"a file {file.name[:80]!r} of {file.nbytes} bytes")
    names = [entry.partition for entry in manifest.partitions]
    if len(set(names)) != len(names):
        raise ValueError("a partition is there twice")
    for entry in manifest.partitions:
        pieces = [(entry.file, 0, 0, 0), *((rows.file, rows.count, 0, 0) for rows in entry.rows)]
        pieces += [(cells.file, cells.rows, cells.values, cells.nbytes) for cells in entry.cells]
        for number, *counts in pieces:
            if not 0 <= number < len(manifest.files) or min(counts) < 0:
                raise ValueError(f"a piece of file {number} with {counts}")
        for cells in entry.cells:
            last = cells.rows + (cells.first or 0)
            if not (cells.values <= cells.rows and 0 <= (cells.first or 0) <= last <= entry.live):
                raise ValueError(
                    f"{cells.values} values for {cells.rows} samples from {cells.first} on, of {entry.live} there are"
                )
        if not all(cells.spec.settled for cells in entry.cells):
            raise ValueError(f"cells of partition {entry.partition!r} whose kind is open")
        if sum(rows.count for rows in entry.rows) != entry.live:
            raise ValueError(f"partition {entry.partition!r} has {entry.live} samples, and other numbers of ids")


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. `CheckpointError` where there is none."""
    file = path / NAME
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            content = opened.read(size) if size <= MAX_BYTES else b""
    except (FileNotFoundError, NotADirectoryError):
        why = "missing: no checkpoint was finished there" if path.exists() else "there is no such checkpoint"
        raise CheckpointError(file=str(file), why=why) from None
    except OSError as error:
        raise CheckpointError(file=str(file), why=error.strerror or str(error)) from error
    if size > MAX_BYTES:
        raise CheckpointError(file=str(file), why=f"more than {MAX_BYTES:,} bytes: no manifest")
    return decode(file, content)
