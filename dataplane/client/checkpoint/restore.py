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
from dataplane.client.checkpoint.save import selected_names
from dataplane.client.operations.put import store
from dataplane.client.operations.retry import with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.core import failpoints
from dataplane.core.types import ceil_div, granules_up
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
        return (yield from _restore(session_state, reading, partitions, replace=replace))


def _restore(
    session_state: SessionState, reading: Reading, partitions: Sequence[str] | None, *, replace: bool
) -> Operation[CheckpointInfo]:
    """Verify the files, fill staging partitions and publish them."""
    content: Manifest = yield Work(reading.open)
    entries = _selected(content, partitions)
    for file in content.files:
        yield Work(partial(files.verify, reading.directory, file))
    yield from _check_target(session_state, entries, replace=replace)
    failpoints.hit("restore.verified")
    suffix = secrets.token_hex(8)
    staged = [f"restoring-{suffix}-{number}" for number in range(len(entries))]
    file_cache = _FileCache(reading.directory, content)
    try:
        published = []
        for name, entry in zip(staged, entries, strict=True):
            yield Send(c.Stage(partition=name))
            published.append((yield from _fill_partition(session_state, file_cache, name, entry)))
        failpoints.hit("restore.before_publish")
        yield Send(c.Publish(staged=tuple(staged), partitions=tuple(published), replace=replace))
    except BaseException:
        for name in staged:  # also those that were not staged yet: clearing them has no effect
            yield Post(c.Clear(partition=name, samples=None))
        raise
    for entry in entries:  # the cached schemas may differ from the restored ones
        session_state.schemas.forget(entry.partition)
    return manifest.info(reading.directory, content, entries)


def _selected(content: Manifest, partitions: Sequence[str] | None) -> tuple[PartitionEntry, ...]:
    """Return the entries of the named partitions, each once; of all partitions for None. Raise
    `PartitionNotFoundError` for a name that the checkpoint does not have."""
    if partitions is None:
        return content.partitions
    by_name = {entry.partition: entry for entry in content.partitions}
    names = selected_names(partitions)
    for name in names:
        if name not in by_name:
            raise PartitionNotFoundError(partition=name, known=list(by_name))
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _check_target(session_state: SessionState, entries: Sequence[PartitionEntry], replace: bool) -> Operation[None]:
    """Raise `PartitionExistsError` (unless `replace`), or `RequestTooLargeError` or `CapacityTimeoutError` for too
    little space. Otherwise such errors would occur only after much data was written."""
    stats: c.StatsReport = (yield Send(c.Stats())).result
    existing = {partition.partition for partition in stats.partitions}
    for entry in entries:
        if entry.partition in existing and not replace:
            raise PartitionExistsError(partition=entry.partition)
    sizes = [cells.nbytes for entry in entries for cells in entry.cells]
    wanted = sum(granules_up(nbytes) for nbytes in sizes)
    capacity = sum(unit.capacity_bytes for unit in stats.units)
    if wanted > capacity and stats.units:  # too large for empty units; without any unit, the error below is raised
        raise RequestTooLargeError(wanted_bytes=wanted, limit_bytes=capacity, what="this checkpoint", hint=TOO_LARGE)
    free = sum(
        unit.capacity_bytes - unit.live_bytes - unit.reserved_bytes - unit.retired_bytes
        for unit in stats.units
        if unit.connected
    )
    if wanted > free:
        by_size = sorted(stats.partitions, key=lambda partition: -partition.live_bytes)
        holders = [(f"partition {partition.partition!r}", partition.live_bytes) for partition in by_size]
        raise CapacityTimeoutError(wanted_bytes=wanted, free_bytes=free, waited_s=0.0, holders=holders)


class _FileCache:
    """The files of the checkpoint. The last used file, `_opened` with number `_number`, stays open."""

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


def _fill_partition(
    session_state: SessionState, file_cache: _FileCache, staged: str, entry: PartitionEntry
) -> Operation[c.SavedPartition]:
    """Write all data of a partition into its staging partition. Return the description to publish."""
    # First create all samples, with their ids and tags; then put the values of their fields.
    rows, generations = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]  # `concatenate` needs at least one array
    for piece in entry.rows:
        creation: c.Commit = yield Work(partial(_read_names, file_cache, staged, piece))
        committed: c.Committed = (yield Send(creation)).result
        rows.append(committed.rows)
        generations.append(committed.generations)
    handles = c.Samples(rows=np.concatenate(rows), generations=np.concatenate(generations))
    for cells in entry.cells:
        content: tuple[c.Samples, EncodedColumn] = yield Work(partial(_read_column, file_cache, cells, handles))
        samples, column = content
        commit = c.Commit(partition=staged, samples=samples, mode=c.Mode.UPDATE)
        # `_Positions` stands for the ids, which `store` only needs for errors.
        yield from store(session_state, commit, _Positions(len(samples)), [column])
        failpoints.hit("restore.stored")
    claimed: list[bytes] = yield Work(lambda: _read_claimed(file_cache, entry))
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


def _read_names(file_cache: _FileCache, staged: str, piece: RowsEntry) -> c.Commit:
    """Read the ids and tags of a piece (see `RowsEntry`). Return the commit that creates these samples in the partition
    `staged`. Raise `CheckpointError` if they are invalid."""
    opened = file_cache.file(piece.file)
    lengths = opened.int64s(f"{piece.prefix}/id_lengths")
    text = opened.bytes_of(f"{piece.prefix}/ids").tobytes()
    if len(lengths) != piece.count or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(text):
        raise opened.error(
            f"the {len(text)} bytes of ids do not match the {len(lengths)} lengths of {piece.count} samples "
            f"({piece.prefix})"
        )
    ends = np.cumsum(lengths).tolist()
    try:
        ids = tuple(text[first:last].decode() for first, last in zip([0, *ends[:-1]], ends, strict=True))
        tags = tuple(_tag_column(*entry) for entry in decode_object(opened.bytes_of(f"{piece.prefix}/tags").data))
    except (ValueError, TypeError, InternalError) as error:
        raise opened.error(f"ids or tags are invalid ({piece.prefix}): {error}") from error
    return c.Commit(partition=staged, samples=c.Samples(ids=ids), mode=c.Mode.CREATE, tags=tags)


def _tag_column(name: Any, positions: Any, values: Any) -> c.TagColumn:
    """Return the column of one tag from its entry in the file. positions: of the samples that have the tag, None for
    all. Raise ValueError or TypeError for values of the wrong type."""
    if type(name) is not str or type(values) is not list:
        raise ValueError(f"invalid tag {name!r}")
    return c.TagColumn(
        name=name, values=tuple(values), positions=None if positions is None else np.array(positions, np.int64)
    )


def _read_column(file_cache: _FileCache, cells: CellsEntry, handles: c.Samples) -> tuple[c.Samples, EncodedColumn]:
    """Return the samples of a piece and its column. The values stay in the mapped file. handles: the row handles of
    all samples of the partition, oldest first. Raise `CheckpointError` if the piece is inconsistent."""
    opened = file_cache.file(cells.file)
    assert handles.rows is not None
    assert handles.generations is not None
    values = opened.bytes_of(f"{cells.prefix}/values")
    lengths = lengths_of(opened, cells.prefix, cells.spec, cells.values)
    sizes = lengths * cells.spec.unit_bytes
    if int(sizes.sum()) != values.nbytes or values.nbytes != cells.nbytes:
        raise opened.error(
            f"{values.nbytes} bytes of values, expected {int(sizes.sum())} by their lengths and {cells.nbytes} by the "
            f"manifest ({cells.prefix})"
        )
    if cells.first is None:  # the samples are not consecutive
        positions = opened.int64s(f"{cells.prefix}/rows")
    else:
        positions = np.arange(cells.first, cells.first + cells.rows)
    # The value of each sample; None: each sample has a value of its own.
    index = opened.int64s(f"{cells.prefix}/index").copy() if cells.shared else None
    if len(positions) != cells.rows or not _within(positions, len(handles.rows)):
        raise opened.error(f"the positions of the samples are out of range ({cells.prefix})")
    if index is not None and (len(index) != cells.rows or not _within(index, cells.values)):
        raise opened.error(f"the index of the values is out of range ({cells.prefix})")
    samples = c.Samples(rows=handles.rows[positions], generations=handles.generations[positions])
    flat = FlatValues(values, np.cumsum(sizes) - sizes, sizes)
    return samples, EncodedColumn(cells.field, cells.spec, lengths.copy(), sizes, index, flat)


def _within(numbers: c.Int64s, count: int) -> bool:
    """Return whether all numbers, if there are any, are indexes below `count`."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < count)


def _read_claimed(file_cache: _FileCache, entry: PartitionEntry) -> list[bytes]:
    """Return each task's bitmap of claimed samples, one bit each. Raise `CheckpointError` if the size is wrong."""
    opened = file_cache.file(entry.file)
    bitmaps = opened.bytes_of(f"{entry.prefix}/claimed").tobytes()
    size = ceil_div(entry.live, 8)  # bytes per task
    if len(bitmaps) != size * len(entry.tasks):
        raise opened.error(f"{len(bitmaps)} bytes of claims for {len(entry.tasks)} tasks of {entry.live} samples")
    return [bitmaps[size * task : size * (task + 1)] for task in range(len(entry.tasks))]


class _Positions(Sequence[str]):
    """Texts such as "number 3" that stand for the ids of samples in errors; the ids are not kept in memory."""

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
