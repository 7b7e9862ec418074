"""Save a consistent snapshot of partitions while the service continues.

Memory use at a time: the tensors of one file, and the values of one chunk as they are received.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dataplane.client.checkpoint import manifest
from dataplane.client.checkpoint.manifest import (
    CellsEntry,
    CheckpointInfo,
    FileEntry,
    Manifest,
    NamesEntry,
    PartitionEntry,
)
from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import select_values, units_of
from dataplane.core.checksums import damaged
from dataplane.core.failpoints import failpoint
from dataplane.core.file_locks import HeldFile
from dataplane.core.private_dir import (
    FILE_MODE,
    MODE,
    private,
    refuse_link_of_another,
    sync_path,
)
from dataplane.core.row_copy import UInt8s, gather
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.meta import list_of_names
from dataplane.data.object_codec import encode_object
from dataplane.errors import (
    CheckpointError,
    CheckpointWriteError,
    ChecksumError,
    DataPlaneError,
    InvalidRequestError,
    RequestTooLargeError,
)
from dataplane.ledger import commands as c

FILE_BYTES = 256 << 20
"""Maximum size of the tensors of a file, unless a single value is larger."""
CHUNK_BYTES = 32 << 20
"""Bytes of values that are received at a time, unless a single value is larger."""
NAMES_PER_READ = 1 << 16
CELLS_PER_READ = 1 << 18
"""Cells of one field that are read and stored together. A value that samples share is stored once for
each such page. A page is restored by one commit, for which the service accepts 2^20 samples."""

_RAW_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"})
"""The dtypes that numpy, or a supported version of safetensors, lacks."""


@with_retry
def checkpoint(
    session_state: SessionState,
    path: str | os.PathLike[str],
    partitions: Sequence[str] | None = None,
) -> Operation[CheckpointInfo]:
    """See `DataPlaneClient.checkpoint`."""
    names = selected_names(partitions)
    staged = StagedCheckpoint(path)
    try:
        yield Work(staged.prepare)
        saved = yield Send(c.Save(partitions=names))
        writer = _Writer(session_state, staged, saved.call_id)
        try:
            failpoint("checkpoint.saved")
            entries = []
            for described in saved.result.partitions:
                entries.append((yield from _save_partition(writer, described)))
            yield from writer.flush()
            # Send, not Post: the release succeeds only if the session, and therefore its pins,
            # lasted until now.
            yield Send(c.Release(located=saved.call_id))
        except BaseException:
            yield Post(c.Release(located=saved.call_id))
            raise
        content = Manifest(package=manifest.package(), partitions=tuple(entries), files=tuple(writer.files))
        yield Work(partial(staged.publish, content))
    except BaseException:
        yield Work(staged.abandon)
        raise
    return manifest.info(path, content, content.partitions)


def selected_names(partitions: Sequence[str] | None) -> tuple[str, ...]:
    """Return the named partitions; an empty tuple (for None) stands for all. Reject [] and a single
    string."""
    names = () if partitions is None else tuple(list_of_names("partitions", partitions))
    if partitions is not None and not names:
        raise InvalidRequestError(f"partitions={partitions!r}: pass at least one name, or None for all partitions")
    return names


# --- partitions -----------------------------------------------------------------------------------


class _Writer:
    """Collects tensors, and writes them to a file when there are enough."""

    def __init__(self, session_state: SessionState, staged: StagedCheckpoint, saved: int) -> None:
        self.session_state = session_state
        self.saved = saved
        """Id of the `Save` call."""
        self.files: list[FileEntry] = []
        """The files written so far."""
        self._staged = staged
        self._tensors: dict[str, npt.NDArray[Any]] = {}
        self._bytes = 0
        """Size of `_tensors`."""
        self._memory = np.empty(FILE_BYTES, np.uint8)
        """Has the values of the file; the next file uses it again."""
        self._prefixes = 0

    def prefix(self, name: str) -> str:
        """Return a unique, readable name for the tensors of a piece."""
        self._prefixes += 1
        return f"{self._prefixes:05}/{name}"

    def make_room(self, nbytes: int) -> Operation[int]:
        """Return the number of the file for the next tensors, of `nbytes` bytes. If it would become
        too large, first write the tensors collected so far to a file of their own."""
        if self._bytes + nbytes > FILE_BYTES:
            yield from self.flush()
        return len(self.files)

    def memory(self, nbytes: int) -> UInt8s:
        """Return memory for values of the file for which there is room."""
        if self._bytes + nbytes > len(self._memory):  # a single large value
            return np.empty(nbytes, np.uint8)
        return self._memory[self._bytes : self._bytes + nbytes]

    def add(self, name: str, tensor: npt.NDArray[Any]) -> None:
        self._tensors[name] = np.ascontiguousarray(tensor)
        self._bytes += tensor.nbytes

    def flush(self) -> Operation[None]:
        """Write the collected tensors to a file, if there are any."""
        if self._tensors:
            name = f"data-{self._staged.id}-{len(self.files):05}.safetensors"
            path = self._staged.directory / name
            self.files.append((yield Work(partial(_write_file, path, self._tensors))))
        self._tensors = {}
        self._bytes = 0


def _write_file(path: Path, tensors: dict[str, npt.NDArray[Any]]) -> FileEntry:
    """Write the tensors to a new file, sync it and return its entry."""
    with _writing(path):
        save_file(tensors, path)
        path.chmod(FILE_MODE)
        failpoint("checkpoint.file_written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            nbytes = os.fstat(file.fileno()).st_size
    return FileEntry(name=path.name, nbytes=nbytes, sha256=digest)


def _save_partition(writer: _Writer, described: c.SavedPartition) -> Operation[PartitionEntry]:
    """Write one partition and return its manifest entry."""
    names = yield from _save_names(writer, described)
    cells: list[CellsEntry] = []
    for field in described.fields:
        for first in range(0, described.live, CELLS_PER_READ):
            command = c.ReadSaved(
                saved=writer.saved,
                partition=described.partition,
                first=first,
                last=min(first + CELLS_PER_READ, described.live),
                fields=(field.name,),
            )
            located: c.FieldLocations = (yield Send(command)).result.fields[0]
            for values, rows, index in _pieces(located):
                piece = _save_piece(writer, described.partition, values, first + rows, index)
                cells.append((yield from piece))
    return PartitionEntry(saved=described, names=tuple(names), cells=tuple(cells))


def _save_names(writer: _Writer, described: c.SavedPartition) -> Operation[list[NamesEntry]]:
    """Write the ids and tags of all samples, in pages. Return an entry for each page."""
    entries: list[NamesEntry] = []
    page_rows = NAMES_PER_READ
    first = 0
    while first < described.live:
        last = min(first + page_rows, described.live)
        command = c.ReadSaved(
            saved=writer.saved,
            partition=described.partition,
            first=first,
            last=last,
            names=True,
        )
        try:
            read: c.SavedRows = (yield Send(command)).result
        except RequestTooLargeError:  # the response would be too large: read smaller pages
            if page_rows == 1:
                raise
            page_rows = max(page_rows // 4, 1)
            continue
        tags = [
            [tag.name, None if tag.positions is None else tag.positions.tolist(), [*tag.values]] for tag in read.tags
        ]
        content = np.frombuffer(encode_object([[*read.ids], tags]), np.uint8)
        tensor = writer.prefix(f"{described.partition}/samples")
        file = yield from writer.make_room(content.nbytes)
        writer.add(tensor, content)
        entries.append(NamesEntry(file=file, tensor=tensor))
        first = last
    return entries


def _save_piece(
    writer: _Writer,
    partition: str,
    located: c.FieldLocations,
    rows: c.Int64s,
    index: c.Int64s | None,
) -> Operation[CellsEntry]:
    """Write the located values of a field and return their entry. rows: the samples that have them,
    counted from the oldest. index: the value of each of these (None: sample i has value i)."""
    prefix = writer.prefix(f"{partition}/{located.name}")
    spec = located.spec
    count = int(located.lengths.sum())
    file = yield from writer.make_room(count * spec.unit_bytes)
    values = yield from _read_values(writer, partition, located, rows, index)
    writer.add(f"{prefix}/values", _typed(values, count, spec))
    if spec.kind is not FieldKind.DENSE:
        writer.add(f"{prefix}/lengths", located.lengths)
    first = int(rows[0])
    consecutive = bool((rows == np.arange(first, first + len(rows))).all())
    if not consecutive:
        writer.add(f"{prefix}/rows", rows)
    if index is not None:
        writer.add(f"{prefix}/index", index)
    return CellsEntry(
        field=located.name,
        spec=spec,
        file=file,
        prefix=prefix,
        nbytes=values.nbytes,
        first=first if consecutive else None,
        shared=index is not None,
    )


def _read_values(
    writer: _Writer,
    partition: str,
    located: c.FieldLocations,
    rows: c.Int64s,
    index: c.Int64s | None,
) -> Operation[UInt8s]:
    """Return the values' bytes, one after another. Raise `ChecksumError` for a value that does not
    match its checksum, with the first sample that has it."""
    # Empty values are skipped: their location may refer to a removed unit.
    filled = np.flatnonzero(located.lengths * located.spec.unit_bytes)
    if not len(filled):
        return np.zeros(0, np.uint8)
    located = select_values(located, filled)
    sizes = located.lengths * located.spec.unit_bytes
    units = units_of([located])
    connections = writer.session_state.connections
    yield from ensure_known(writer.session_state, units)

    def read() -> UInt8s:
        memory = writer.memory(int(sizes.sum()))
        end = 0
        for chunk in _chunks(sizes, CHUNK_BYTES):
            values = select_values(located, chunk)
            source = connections.gather([values], units_of([values]))[located.name]
            begin = end
            end += int(sizes[chunk].sum())
            gather(source.buffers, source.which, source.offsets, source.sizes, memory[begin:end])
        return memory

    memory: UInt8s = yield Work(read)
    checksums = located.checksums
    if checksums is None:
        return memory
    offsets = np.cumsum(sizes) - sizes
    wrong, got = yield Work(partial(damaged, memory, offsets, sizes, checksums))
    if len(wrong):
        value = int(filled[wrong[0]])
        sample = int(rows[value if index is None else int((index == value).argmax())])
        command = c.ReadSaved(saved=writer.saved, partition=partition, first=sample, last=sample + 1, names=True)
        names: c.SavedRows = (yield Send(command)).result
        raise ChecksumError(
            partition=partition,
            sample=names.ids[0],
            field=located.name,
            unit=int(located.units[wrong[0]]),
            expected=int(checksums[wrong[0]]),
            got=int(got[0]),
        )
    return memory


def _typed(values: UInt8s, count: int, spec: FieldSpec) -> npt.NDArray[Any]:
    """Return the bytes of values as the array to store, see `CellsEntry`. count: of dense values, or
    elements of jagged ones."""
    if spec.kind not in (FieldKind.DENSE, FieldKind.JAGGED):
        return values
    if spec.dtype is None or spec.dtype in _RAW_DTYPES:
        return values.reshape(count, spec.unit_bytes)
    return values.view(spec.dtype).reshape(count, *(spec.inner or ()))


Piece = tuple[c.FieldLocations, c.Int64s, c.Int64s | None]
"""Locations of distinct values, the positions of the cells that have them, and for each of these the
number of its value in the piece (None: cell i has value i)."""


def _pieces(located: c.FieldLocations) -> Iterator[Piece]:
    """Split cells of a field into pieces of at most `FILE_BYTES`, but of at least one value."""
    rows = np.flatnonzero(located.lengths >= 0)  # length -1: the sample has no value
    if not len(rows):
        return
    cells = select_values(located, rows)
    firsts, index = _distinct(cells)
    values = select_values(cells, firsts)
    for chunk in _chunks(values.lengths * values.spec.unit_bytes, FILE_BYTES):
        taken = np.flatnonzero((index >= chunk.start) & (index < chunk.stop))
        shared = len(taken) != chunk.stop - chunk.start  # there are more cells than values
        piece_index = index[taken] - chunk.start if shared else None
        yield select_values(values, chunk), rows[taken], piece_index


def _chunks(sizes: c.Int64s, limit: int) -> Iterator[slice]:
    """Split values of these sizes into ranges of at most `limit` bytes, but of at least one value."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + limit, "right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def _distinct(cells: c.FieldLocations) -> tuple[c.Int64s, c.Int64s]:
    """Number the distinct values of the cells in the order of their first cells. Return the first
    cell of each value, and the value of each cell. Cells with equal locations share one value; each
    empty cell is a value of its own."""
    _, units = np.unique(cells.units, return_inverse=True)
    keys = units * (int(cells.offsets.max()) + 1) + cells.offsets  # a number for each location
    empty = np.flatnonzero(cells.lengths * cells.spec.unit_bytes == 0)
    keys[empty] = -1 - empty
    _, firsts, values = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    numbers = np.argsort(order)
    return firsts[order], numbers[values]


# --- the directory --------------------------------------------------------------------------------

_OURS = re.compile(
    r"manifest\.json|data-[0-9a-f]{24}-[0-9]{5,9}\.safetensors"
    r"|manifest\.json\.partial-[0-9a-f]{16}|data-[0-9a-f]{16}"  # of format 1
)


class StagedCheckpoint:
    """The directory PATH.tmp-ID, in which a checkpoint is written, and its renaming to PATH.

    A crash at any point leaves a complete checkpoint at PATH or, between the two renames of
    `publish`, at PATH.old-ID, where `manifest.current` finds it. The next save to PATH removes what
    remains. A lock on its directory, which ends with its process, protects a save from other saves;
    on a file system without locks (some NFS), leftovers stay until they are removed by hand.

    All files are private to the user regardless of the umask. An existing PATH keeps its mode and
    files that are not part of a checkpoint. Every method blocks on the file system, and raises
    `CheckpointWriteError` if that fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = manifest.resolved(path)
        self._given = path
        self.id = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        """Ids are sorted by the time of their saves."""
        self.directory = self._sibling("tmp")
        self._older = self._sibling("old")
        self._lock: HeldFile | None = None
        """None: not locked, or the file system has no locks."""

    def _sibling(self, kind: str) -> Path:
        return self.path.parent / f"{self.path.name}.{kind}-{self.id}"

    def prepare(self) -> None:
        """Remove leftovers, and create and lock the directory. Raise `CheckpointError` if the path is
        not replaceable, or another process is writing to it."""
        with _writing(self.directory):
            refuse_link_of_another(os.fsdecode(self._given))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._against_other_saves():
                self._check_replaceable()
                self._clean()
            self.directory.mkdir(MODE)
            with self._against_other_saves():
                self._lock = _locked(self.directory)

    def _check_replaceable(self) -> None:
        """Raise `CheckpointError` unless the path does not exist, or is a directory that is empty, has
        only files of a checkpoint, or is a valid checkpoint, possibly with foreign files."""
        if not os.path.lexists(self.path):
            return
        why = "the path exists, but is not a checkpoint; pass a new path, or that of an empty directory "
        why += "or an older checkpoint"
        if os.path.ismount(self.path):
            why = "the path is a mount point, which cannot be replaced; pass a directory inside it"
        elif self.path.is_dir():
            if all(_OURS.fullmatch(name) for name in os.listdir(self.path)):
                return
            with contextlib.suppress(CheckpointError):
                manifest.read(self.path)
                return
        raise CheckpointError(file=str(self.path), why=why)

    @contextlib.contextmanager
    def _against_other_saves(self) -> Iterator[None]:
        """Convert the errors of files that another process renames, removes or locks meanwhile."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EAGAIN):
                raise
            why = "another save to this path was running: the path or its directory was replaced "
            why += "or removed meanwhile; save again, one save at a time, or pass another path"
            raise CheckpointError(file=str(self.path), why=why) from error

    def _clean(self) -> None:
        """Remove what saves left that died, and put back an older checkpoint that one had set aside.
        Raise `CheckpointError` if another process is writing to the path."""
        for directory in manifest.siblings(self.path, "tmp"):
            try:
                lock = _locked(directory)
            except FileNotFoundError:
                continue  # its process has just renamed it
            except BlockingIOError:
                why = "another process is writing a checkpoint to this path; "
                why += "wait for it, or pass another path"
                raise CheckpointError(file=str(self.path), why=why) from None
            if lock is None:
                return  # nobody knows whether its process still runs
            shutil.rmtree(directory, ignore_errors=True)
            lock.close()
        # No other save is between its renames.
        for older in reversed(manifest.siblings(self.path, "old")):
            if not self.path.exists():
                older.rename(self.path)
            _discard(older, self.path)

    def publish(self, content: Manifest) -> None:
        """Complete the checkpoint after all of its data files are written, and rename it to the path.
        Remove an older one."""
        with _writing(self.directory / manifest.NAME):
            with open(self.directory / manifest.NAME, "xb", opener=private) as file:
                file.write(manifest.encode(content))
                file.flush()
                os.fsync(file.fileno())
            sync_path(self.directory)
        failpoint("checkpoint.before_rename")
        with _writing(self.path), self._against_other_saves():
            self._check_replaceable()  # again: another process may have created the path
            if self.path.exists():
                self.directory.chmod(stat.S_IMODE(self.path.stat().st_mode))
                self.path.rename(self._older)
            failpoint("checkpoint.between_renames")
            self.directory.rename(self.path)
            sync_path(self.path.parent)
        failpoint("checkpoint.after_rename")
        _discard(self._older, self.path)
        self._unlock()

    def abandon(self) -> None:
        """Remove the files that were not published; an older checkpoint at the path stays."""
        with contextlib.suppress(OSError):
            if not self.path.exists():
                self._older.rename(self.path)
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _locked(directory: Path) -> HeldFile | None:
    """Lock the directory; return None if the file system has no locks. Raise `BlockingIOError` if
    another process has locked it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return HeldFile(descriptor)


def _discard(older: Path, path: Path) -> None:
    """Remove the checkpoint `older`, if it exists, which that at `path` has replaced. Its foreign files
    move to `path`. What cannot be removed stays for the next save."""
    with contextlib.suppress(OSError):
        for entry in older.iterdir():
            if not _OURS.fullmatch(entry.name):
                if not os.path.lexists(path / entry.name):
                    entry.rename(path / entry.name)
            elif entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        older.rmdir()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Convert errors of the file system to `CheckpointWriteError`; keep errors of this package, some
    of which are OSErrors."""
    try:
        yield
    except DataPlaneError:
        raise
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointWriteError(file=str(path), why=why) from error
