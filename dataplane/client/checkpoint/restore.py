"""Restore a checkpoint: verify all files, write into hidden staging partitions, then publish these with one
command.

Memory use at a time: the row handles of one partition's samples (16 bytes each) and the arrays of one piece. The
values are copied from the mapped file directly to their storage unit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from dataplane.client.checkpoint import files, manifest
from dataplane.client.checkpoint.atomic_dir import Reading
from dataplane.client.checkpoint.files import OpenedFile, lengths_of
from dataplane.client.checkpoint.manifest import CellsEntry, CheckpointInfo, Manifest, PartitionEntry, RowsEntry
from dataplane.client.checkpoint.save import chosen_names
from dataplane.client.operations.put import store
from dataplane.client.operations.retry import with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.core import failpoints
from dataplane.core.types import GRANULE_BYTES
from dataplane.data.columns import EncodedColumn
from dataplane.data.columns.values import FlatValues
from dataplane.data.object_codec import decode_object
from dataplane.errors import (
    CapacityTimeoutError,
    InternalError,
    PartitionExistsError,
    PartitionNotFoundError,
    RequestTooLargeError,
)
from dataplane.ledger import commands as c

TOO_LARGE = "Restore fewer partitions, or use a service with more or larger storage units."


@with_retry
def restore(
    session_state: SessionState,
    path: str | os.PathLike[str],
    partitions: Sequence[str] | None = None,
    *,
    replace: bool = False,
) -> Operation[CheckpointInfo]:
    """See `DataPlaneClient.restore`."""
    with Reading(path) as reading:
        return (yield from _restored(session_state, reading, partitions, replace=replace))


def _restored(
    session_state: SessionState, reading: Reading, partitions: Sequence[str] | None, *, replace: bool
) -> Operation[CheckpointInfo]:
    """Verify the files, fill staging partitions and publish them."""
    content: Manifest = yield Work(reading.open)
    entries = _named(content, partitions)
    for file in content.files:
        yield Work(partial(files.verify, reading.directory, file))
    yield from _check_space(session_state, entries, replace)
    failpoints.hit("restore.verified")
    tag = secrets.token_hex(8)
    staged = [f"restoring-{tag}-{number}" for number in range(len(entries))]
    file_cache = _FileCache(reading.directory, content)
    try:
        published = []
        for name, entry in zip(staged, entries, strict=True):
            yield Send(c.Stage(partition=name))
            published.append((yield from _fill(session_state, file_cache, name, entry)))
        failpoints.hit("restore.before_publish")
        yield Send(c.Publish(staged=tuple(staged), partitions=tuple(published), replace=replace))
    except BaseException:
        for name in staged:
            yield Post(c.Clear(partition=name, samples=None))
        raise
    for entry in entries:
        session_state.schemas.forget(entry.partition)
    return manifest.info(reading.directory, content, entries)


def _named(content: Manifest, partitions: Sequence[str] | None) -> tuple[PartitionEntry, ...]:
    if partitions is None:
        return content.partitions
    by_name = {entry.partition: entry for entry in content.partitions}
    names = chosen_names(partitions)
    for name in names:
        if name not in by_name:
            raise PartitionNotFoundError(partition=name, known=list(by_name))
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _check_space(session_state: SessionState, entries: Sequence[PartitionEntry], replace: bool) -> Operation[None]:
    """Raise errors that would otherwise occur only after much data was written."""
    stats: c.StatsReport = (yield Send(c.Stats())).result
    there = {found.partition for found in stats.partitions}
    for entry in entries:
        if entry.partition in there and not replace:
            raise PartitionExistsError(partition=entry.partition)
    sizes = [cells.nbytes for entry in entries for cells in entry.cells]
    wanted = sum(-(-nbytes // GRANULE_BYTES) * GRANULE_BYTES for nbytes in sizes)
    whole = sum(unit.capacity_bytes for unit in stats.units)
    if wanted > whole and stats.units:
        raise RequestTooLargeError(wanted_bytes=wanted, limit_bytes=whole, what="this checkpoint", hint=TOO_LARGE)
    free = sum(
        unit.capacity_bytes - unit.live_bytes - unit.reserved_bytes - unit.retired_bytes
        for unit in stats.units
        if unit.connected
    )
    if wanted > free:
        holders = sorted(((f"partition {p.partition!r}", p.live_bytes) for p in stats.partitions), key=lambda h: -h[1])
        raise CapacityTimeoutError(wanted_bytes=wanted, free_bytes=free, waited_s=0.0, holders=holders)


class _FileCache:
    """The files of the checkpoint. The last used file stays open."""

    def __init__(self, directory: Path, content: Manifest) -> None:
        self._directory = directory
        self._content = content
        self._number = -1
        self._opened: OpenedFile | None = None

    def file(self, number: int) -> OpenedFile:
        """Return the file with this number in the manifest."""
        if self._opened is None or number != self._number:
            self._opened = OpenedFile(self._directory, self._content.files[number])
            self._number = number
        return self._opened


def _fill(
    session_state: SessionState, file_cache: _FileCache, staged: str, entry: PartitionEntry
) -> Operation[c.SavedPartition]:
    """Write all data of a partition into its staging partition. Return the description to publish."""
    rows, generations = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for piece in entry.rows:
        making: c.Commit = yield Work(partial(_names, file_cache, staged, piece))
        committed: c.Committed = (yield Send(making)).result
        rows.append(committed.rows)
        generations.append(committed.generations)
    handles = c.Samples(rows=np.concatenate(rows), generations=np.concatenate(generations))
    for cells in entry.cells:
        found: tuple[c.Samples, EncodedColumn] = yield Work(partial(_column, file_cache, cells, handles))
        samples, column = found
        commit = c.Commit(partition=staged, samples=samples, mode=c.Mode.UPDATE)
        yield from store(session_state, commit, _Positions(len(samples)), [column])
        failpoints.hit("restore.stored")
    claimed: list[bytes] = yield Work(lambda: _claimed(file_cache, entry))
    return c.SavedPartition(
        partition=entry.partition,
        live=entry.live,
        born=entry.born,
        fields=tuple(c.SavedField(name=field.name, declared=field.declared) for field in entry.fields),
        tasks=tuple(c.SavedTask(name=name, claimed=bits) for name, bits in zip(entry.tasks, claimed, strict=True)),
        num_samples=entry.num_samples,
        group_size=entry.group_size,
        enums=entry.enums,
        strict=entry.strict,
        sealed=entry.sealed,
        version=entry.version,
        budget_bytes=entry.budget_bytes,
        when_full=entry.when_full,
    )


def _names(file_cache: _FileCache, staged: str, piece: RowsEntry) -> c.Commit:
    """Return the commit that creates these samples."""
    opened = file_cache.file(piece.file)
    lengths = opened.int64s(f"{piece.prefix}/id_lengths")
    text = opened.bytes_of(f"{piece.prefix}/ids").tobytes()
    if len(lengths) != piece.count or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(text):
        raise opened.wrong(f"{len(text)} bytes of ids for {piece.count} samples ({piece.prefix})")
    ends = np.cumsum(lengths).tolist()
    try:
        ids = tuple(text[first:last].decode() for first, last in zip([0, *ends[:-1]], ends, strict=True))
        tags = tuple(_tag(*found) for found in decode_object(opened.bytes_of(f"{piece.prefix}/tags").data))
    except (ValueError, TypeError, InternalError) as error:
        raise opened.wrong(f"ids or tags are invalid ({piece.prefix}): {error}") from error
    return c.Commit(partition=staged, samples=c.Samples(ids=ids), mode=c.Mode.CREATE, tags=tags)


def _tag(name: Any, positions: Any, values: Any) -> c.TagColumn:
    if type(name) is not str or type(values) is not list:
        raise ValueError(f"invalid tag {name!r}")
    return c.TagColumn(
        name=name, values=tuple(values), positions=None if positions is None else np.array(positions, np.int64)
    )


def _column(file_cache: _FileCache, cells: CellsEntry, handles: c.Samples) -> tuple[c.Samples, EncodedColumn]:
    """Return the samples of a piece and its column. The values stay in the mapped file."""
    opened = file_cache.file(cells.file)
    assert handles.rows is not None
    assert handles.generations is not None
    values = opened.bytes_of(f"{cells.prefix}/values")
    lengths = lengths_of(opened, cells.prefix, cells.spec, cells.values)
    sizes = lengths * cells.spec.unit_bytes
    if int(sizes.sum()) != values.nbytes or values.nbytes != cells.nbytes:
        raise opened.wrong(
            f"{values.nbytes} bytes of values, expected {int(sizes.sum())} by their lengths and {cells.nbytes} by the "
            f"manifest ({cells.prefix})"
        )
    if cells.first is None:
        places = opened.int64s(f"{cells.prefix}/rows")
    else:
        places = np.arange(cells.first, cells.first + cells.rows)
    index = opened.int64s(f"{cells.prefix}/index").copy() if cells.shared else None
    if len(places) != cells.rows or not _within(places, len(handles.rows)):
        raise opened.wrong(f"sample positions out of range ({cells.prefix})")
    if len(places if index is None else index) != cells.rows or not _within(index, cells.values):
        raise opened.wrong(f"value index out of range ({cells.prefix})")
    samples = c.Samples(rows=handles.rows[places], generations=handles.generations[places])
    flat = FlatValues(values, np.cumsum(sizes) - sizes, sizes)
    return samples, EncodedColumn(cells.field, cells.spec, lengths.copy(), sizes, index, flat)


def _within(numbers: c.Int64s | None, count: int) -> bool:
    return numbers is None or not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < count)


def _claimed(file_cache: _FileCache, entry: PartitionEntry) -> list[bytes]:
    opened = file_cache.file(entry.file)
    whole = opened.bytes_of(f"{entry.prefix}/claimed").tobytes()
    size = -(-entry.live // 8)
    if len(whole) != size * len(entry.tasks):
        raise opened.wrong(f"{len(whole)} bytes of claims for {len(entry.tasks)} tasks of {entry.live} samples")
    return [whole[size * task : size * (task + 1)] for task in range(len(entry.tasks))]


class _Positions(Sequence[str]):
    """Positions in place of the sample ids in errors; the ids are not kept."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        return [f"number {n}" for n in range(self._count)[place]] if isinstance(place, slice) else f"number {place}"
