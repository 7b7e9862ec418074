"""The form of a checkpoint on disk: a directory of safetensors files and a manifest.

    PATH/manifest.json                        lists the other files with their sizes and checksums
    PATH/data-ID-00000.safetensors ...        tensors of ids, tags and values

The manifest is {"format": 2, "sha256": "of the bytes of the next value", "checkpoint": {...}}. The
checksums detect corruption and files of another checkpoint. They do not authenticate the author:
any user with write access to the directory can also write matching checksums.

A save writes PATH.tmp-ID, then renames an older checkpoint to PATH.old-ID and the new one to PATH.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import io
import os
import re
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import safetensors

from dataplane.core.types import FieldSpec
from dataplane.errors import CheckpointError, UnsupportedValueError
from dataplane.ledger import commands as c

FORMAT = 2
NAME = "manifest.json"
MAX_BYTES = 1 << 30
FILE_NAME = r"^data-[0-9a-f]{24}-[0-9]{5,9}\.safetensors\Z"
Count = Annotated[int, msgspec.Meta(ge=0)]


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the entries of the manifest."""


class FileEntry(ManifestEntry, frozen=True, kw_only=True):
    """A data file. Its name has the ID of its save: no other checkpoint has a file of that name."""

    name: Annotated[str, msgspec.Meta(pattern=FILE_NAME)]
    nbytes: Count
    sha256: str


class NamesEntry(ManifestEntry, frozen=True, kw_only=True):
    """Ids and tags of the next samples, oldest first: one tensor of bytes (msgpack: a list of the
    ids, then a list of [tag, positions or null, values])."""

    tensor: str
    file: Count


class CellsEntry(ManifestEntry, frozen=True, kw_only=True):
    """Values of a field: tensors `PREFIX/values`; `PREFIX/lengths` (of each value, except for dense
    fields: elements of jagged rows, else bytes); `PREFIX/rows` (the samples, counted from the
    oldest; omitted if they are consecutive from `first` on); `PREFIX/index` (the value of each
    sample, if `shared`; otherwise each sample has one value of its own).

    Dense and jagged values of a dtype that numpy has are stored with it, all others as bytes.
    `nbytes` is the size of `PREFIX/values`."""

    field: str
    spec: FieldSpec
    file: Count
    prefix: str
    nbytes: Count
    first: Count | None
    shared: bool


class PartitionEntry(ManifestEntry, frozen=True, kw_only=True):
    saved: c.SavedPartition
    names: tuple[NamesEntry, ...]
    cells: tuple[CellsEntry, ...]


class Manifest(ManifestEntry, frozen=True, kw_only=True):
    """The content of the manifest. `package` is the name and version of the package that wrote it."""

    package: str
    partitions: tuple[PartitionEntry, ...]
    files: tuple[FileEntry, ...]


class _Outer(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest file: `sha256` is the checksum of the encoded `Manifest` in `checkpoint`."""

    format: int
    sha256: str = ""
    checkpoint: msgspec.Raw = msgspec.Raw()


_decode_outer = msgspec.json.Decoder(_Outer).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Result of a save or restore: samples by partition, and the total bytes of the checkpoint in its `files`
    files."""

    path: str
    partitions: dict[str, int]
    nbytes: int
    files: int


def info(path: str | os.PathLike[str], manifest: Manifest, partitions: tuple[PartitionEntry, ...]) -> CheckpointInfo:
    """Return the result that the client receives. partitions: those that were saved or restored."""
    return CheckpointInfo(
        path=os.path.abspath(path),
        partitions={entry.saved.partition: entry.saved.live for entry in partitions},
        nbytes=sum(file.nbytes for file in manifest.files),
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
    digest = hashlib.sha256(inner).hexdigest()
    return msgspec.json.encode(_Outer(format=FORMAT, sha256=digest, checkpoint=msgspec.Raw(inner)))


def decode(path: Path, content: bytes) -> Manifest:
    """Decode the output of `encode`; `path` is for errors. Raise `CheckpointError` for any other
    content."""
    try:
        outer = _decode_outer(content)
    except ValueError as error:  # the base of all errors of msgspec
        why = f"the file is truncated, or is not the manifest of a checkpoint ({error})"
        raise CheckpointError(file=str(path), why=why) from error
    if outer.format != FORMAT:
        why = (
            f"it has format {outer.format}, but this version ({package()}) reads format {FORMAT}; "
            "restore it with a version that reads it"
        )
        raise CheckpointError(file=str(path), why=why)
    if hashlib.sha256(bytes(outer.checkpoint)).hexdigest() != outer.sha256:
        why = "its content does not match its checksum: the file was modified; use another copy"
        raise CheckpointError(file=str(path), why=why)
    try:
        manifest = _decode_manifest(outer.checkpoint)
        _check(manifest)
    except ValueError as error:
        why = f"its content is invalid ({error}); use another copy"
        raise CheckpointError(file=str(path), why=why) from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for repeated partitions, unknown files and cells whose kind is not known."""
    names = {entry.saved.partition for entry in manifest.partitions}
    if len(names) != len(manifest.partitions):
        raise ValueError("a partition is listed twice")
    for entry in manifest.partitions:
        files = [names.file for names in entry.names] + [cells.file for cells in entry.cells]
        if max(files, default=-1) >= len(manifest.files):
            raise ValueError(f"tensors are in file {max(files)} of {len(manifest.files)}")
        if not all(cells.spec.settled for cells in entry.cells):
            raise ValueError(f"cells of partition {entry.saved.partition!r} have no kind")


def read(directory: Path) -> Manifest:
    """Read the manifest in `directory`. Raise `CheckpointError` if there is none or it is invalid."""
    file = directory / NAME
    why = "the checkpoint does not exist"
    if directory.exists():
        why = "the file is missing: the directory has no complete checkpoint"
    with reading(file, missing=why), _opened(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = opened.read(size) if size <= MAX_BYTES else b""
    if size > MAX_BYTES:
        why = f"the file has more than {MAX_BYTES:,} bytes, so it is not the manifest of a checkpoint"
        raise CheckpointError(file=str(file), why=why)
    return decode(file, content)


def verify(directory: Path, entry: FileEntry) -> None:
    """Raise `CheckpointError` unless the file matches its size and checksum in the manifest."""
    path = directory / entry.name
    digest = ""
    with reading(path), _opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == entry.nbytes:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if nbytes != entry.nbytes:
        how = "truncated" if nbytes < entry.nbytes else "too long"
        why = f"the file is {how}: it has {nbytes:,} bytes, expected {entry.nbytes:,}; use another copy"
        raise CheckpointError(file=str(path), why=why)
    if digest != entry.sha256:
        why = "its content does not match its checksum: the file was modified; use another copy"
        raise CheckpointError(file=str(path), why=why)


MISSING = (
    "the file is missing; use a complete copy of the checkpoint, or, if another process has saved a "
    "newer one to this path, restore again"
)


def _opened(path: Path) -> io.BufferedReader:
    """Open a regular file. OSError for another kind, such as a pipe, on which reading could block."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file; use another copy")
    return file


@contextlib.contextmanager
def reading(path: Path, missing: str = MISSING) -> Iterator[None]:
    """Convert errors of reading the file to `CheckpointError`. missing: why, if it does not exist."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(file=str(path), why=missing) from None
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(file=str(path), why=why) from error


# --- paths ----------------------------------------------------------------------------------------


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without symbolic links. Raise `CheckpointError` for an empty path or
    one with a NUL character, and `UnsupportedValueError` (a TypeError) for no path."""
    if not isinstance(path, str | bytes | os.PathLike):
        got = "None" if path is None else f"{type(path).__name__} {reprlib.repr(path)}"
        hint = "Pass the path of a directory, as a string or a pathlib.Path."
        raise UnsupportedValueError(field="argument path", row=None, got=got, hint=hint)
    given = os.fsdecode(path)
    if "\0" in given:
        why = "the path contains a NUL character (\\0); pass a path without it"
        raise CheckpointError(file=repr(given), why=why)
    try:
        given.encode()
    except UnicodeEncodeError:
        why = "the path is not valid UTF-8, which the format of its files needs; rename its directories"
        raise CheckpointError(file=repr(given), why=why) from None
    if not given:
        why = "the path is empty (an unset variable?); pass the path of a directory"
        raise CheckpointError(file="''", why=why)
    return Path(os.path.realpath(given))


def siblings(path: Path, kind: str) -> list[Path]:
    """Return the directories PATH.KIND-ID of all saves to `path`, oldest first."""
    if not path.parent.is_dir():
        return []
    pattern = re.compile(rf"{re.escape(path.name)}\.{kind}-[0-9a-f]{{24}}")
    names = sorted(name for name in os.listdir(path.parent) if pattern.fullmatch(name))
    return [path.parent / name for name in names]


def current(path: Path) -> Path:
    """Return the directory of the checkpoint at `path`: `path` itself, or the older checkpoint that a
    save has set aside, if it died before the new one was in its place."""
    with reading(path):
        if path.exists():
            return path
        return next(reversed(siblings(path, "old")), path)
