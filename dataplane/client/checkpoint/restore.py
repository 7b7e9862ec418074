"""Restore a checkpoint: verify all files, write into hidden staging partitions, then publish these
with one command.

Memory use at a time: the row handles of one partition's samples (16 bytes each) and the arrays of
one piece. The values are copied from the mapped file directly to their storage unit.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import torch

from dataplane.client.checkpoint import manifest
from dataplane.client.checkpoint.manifest import (
    CellsEntry,
    CheckpointInfo,
    Manifest,
    NamesEntry,
    PartitionEntry,
)
from dataplane.client.checkpoint.save import selected_names
from dataplane.client.operations.put import store
from dataplane.client.operations.retry import with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Work
from dataplane.client.session_state import SessionState
from dataplane.core.failpoints import failpoint
from dataplane.core.row_copy import UInt8s
from dataplane.core.types import FieldKind, granules_up
from dataplane.data.columns import EncodedColumn
from dataplane.data.columns.values import FlatValues
from dataplane.data.object_codec import decode_object
from dataplane.data.tensor_memory import byte_view
from dataplane.errors import (
    CapacityTimeoutError,
    CheckpointError,
    InternalError,
    PartitionExistsError,
    PartitionNotFoundError,
    RequestTooLargeError,
)
from dataplane.ledger import commands as c

TOO_LARGE = "Restore fewer partitions, or use a service with more or larger storage units."
MAX_LENGTH = 1 << 40
"""Maximum length of a value: the sum of the lengths of millions of values cannot overflow."""

_Names = tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...] | None, tuple[Any, ...]], ...]]
"""Ids and tags, as `NamesEntry` describes them."""


@with_retry
def restore(
    session_state: SessionState,
    path: str | os.PathLike[str],
    partitions: Sequence[str] | None = None,
    *,
    replace: bool = False,
) -> Operation[CheckpointInfo]:
    """See `DataPlaneClient.restore`."""
    resolved = manifest.resolved(path)
    directory: Path = yield Work(partial(manifest.current, resolved))
    content: Manifest = yield Work(partial(manifest.read, directory))
    entries = _selected(content, partitions)
    for file in content.files:
        yield Work(partial(manifest.verify, directory, file))
    yield from _check_target(session_state, entries, replace=replace)
    failpoint("restore.verified")

    @functools.lru_cache(maxsize=1)
    def opened(number: int) -> _File:
        return _File(directory / content.files[number].name)

    suffix = secrets.token_hex(8)
    staged = [f"restoring-{suffix}-{number}" for number in range(len(entries))]
    try:
        for name, entry in zip(staged, entries, strict=True):
            yield Send(c.Stage(partition=name))
            yield from _fill_partition(session_state, opened, name, entry)
        failpoint("restore.before_publish")
        saved = tuple(entry.saved for entry in entries)
        yield Send(c.Publish(staged=tuple(staged), partitions=saved, replace=replace))
    except BaseException:
        for name in staged:  # also those that were not staged yet: clearing them has no effect
            yield Post(c.Clear(partition=name, samples=None))
        raise
    for entry in entries:  # the cached schemas may differ from the restored ones
        session_state.schemas.forget(entry.saved.partition)
    return manifest.info(path, content, entries)


def _selected(content: Manifest, partitions: Sequence[str] | None) -> tuple[PartitionEntry, ...]:
    """Return the entries of the named partitions, each once; of all partitions for None. Raise
    `PartitionNotFoundError` for a name that the checkpoint does not have."""
    if partitions is None:
        return content.partitions
    by_name = {entry.saved.partition: entry for entry in content.partitions}
    names = selected_names(partitions)
    for name in names:
        if name not in by_name:
            raise PartitionNotFoundError(partition=name, known=list(by_name))
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _check_target(session_state: SessionState, entries: Sequence[PartitionEntry], replace: bool) -> Operation[None]:
    """Raise `PartitionExistsError` (unless `replace`), or `RequestTooLargeError` or
    `CapacityTimeoutError` for too little space. Otherwise such errors would occur only after much
    data was written."""
    stats: c.StatsReport = (yield Send(c.Stats())).result
    existing = {partition.partition for partition in stats.partitions}
    for entry in entries:
        if entry.saved.partition in existing and not replace:
            raise PartitionExistsError(partition=entry.saved.partition)
    sizes = [cells.nbytes for entry in entries for cells in entry.cells]
    wanted = sum(granules_up(nbytes) for nbytes in sizes)
    capacity = sum(unit.capacity_bytes for unit in stats.units)
    # Too large for empty units; without any unit, the error below is raised.
    if wanted > capacity and stats.units:
        raise RequestTooLargeError(wanted_bytes=wanted, limit_bytes=capacity, what="this checkpoint", hint=TOO_LARGE)
    free = sum(
        unit.capacity_bytes - unit.live_bytes - unit.reserved_bytes - unit.retired_bytes
        for unit in stats.units
        if unit.connected
    )
    if wanted > free:
        by_size = sorted(stats.partitions, key=lambda partition: -partition.live_bytes)
        holders = [(f"partition {each.partition!r}", each.live_bytes) for each in by_size]
        raise CapacityTimeoutError(wanted_bytes=wanted, free_bytes=free, waited_s=0.0, holders=holders)


class _File:
    """A verified data file, memory-mapped. All methods raise `CheckpointError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with manifest.reading(path):
            self._file = safetensors.safe_open(path, "pt")

    def tensor(self, name: str) -> torch.Tensor:
        try:
            return self._file.get_tensor(name)  # type: ignore[no-any-return, no-untyped-call]
        except (OSError, safetensors.SafetensorError, ValueError, RuntimeError) as error:
            raise self.error(f"tensor {name!r}: {error}") from error

    def bytes_of(self, name: str) -> UInt8s:
        return byte_view(self.tensor(name))

    def int64s(self, name: str) -> c.Int64s:
        tensor = self.tensor(name)
        if tensor.dtype != torch.int64 or tensor.ndim != 1:
            got = f"{tensor.dtype} of shape {list(tensor.shape)}"
            raise self.error(f"tensor {name!r} is {got}, expected a vector of int64")
        return tensor.numpy().copy()

    def error(self, why: str) -> CheckpointError:
        """Return an error that names this file."""
        return CheckpointError(file=str(self.path), why=f"{why}; use another copy")


def _fill_partition(
    session_state: SessionState,
    opened: Callable[[int], _File],
    staged: str,
    entry: PartitionEntry,
) -> Operation[None]:
    """Write all data of a partition into its staging partition."""
    # First create all samples, with their ids and tags; then put the values of their fields.
    rows = [np.zeros(0, np.int64)]  # `concatenate` needs at least one array
    generations = [np.zeros(0, np.int64)]
    for page in entry.names:
        creation: c.Commit = yield Work(partial(_read_names, opened, staged, page))
        committed: c.Committed = (yield Send(creation)).result
        rows.append(committed.rows)
        generations.append(committed.generations)
    all_rows = np.concatenate(rows)
    all_generations = np.concatenate(generations)
    for cells in entry.cells:
        content: tuple[c.Int64s, EncodedColumn] = yield Work(partial(_read_column, opened, cells, len(all_rows)))
        positions, column = content
        samples = c.Samples(rows=all_rows[positions], generations=all_generations[positions])
        commit = c.Commit(partition=staged, samples=samples, mode=c.Mode.UPDATE)
        # The ids are not kept in memory; errors name the samples by their numbers.
        numbers = [f"number {position}" for position in positions.tolist()]
        yield from store(session_state, commit, numbers, [column])
        failpoint("restore.stored")


def _read_names(opened: Callable[[int], _File], staged: str, entry: NamesEntry) -> c.Commit:
    """Read the ids and tags of a page. Return the commit that creates these samples in the partition
    `staged`. Raise `CheckpointError` if they are invalid."""
    file = opened(entry.file)
    content = file.bytes_of(entry.tensor).data
    try:
        ids, tags = msgspec.convert(decode_object(content), _Names)
        columns = tuple(
            c.TagColumn(
                name=name,
                values=values,
                positions=None if positions is None else np.array(positions, np.int64),
            )
            for name, positions, values in tags
        )
    except (ValueError, TypeError, OverflowError, InternalError) as error:
        raise file.error(f"ids or tags are invalid ({entry.tensor}): {error}") from error
    samples = c.Samples(ids=ids)
    return c.Commit(partition=staged, samples=samples, mode=c.Mode.CREATE, tags=columns)


def _read_column(opened: Callable[[int], _File], cells: CellsEntry, live: int) -> tuple[c.Int64s, EncodedColumn]:
    """Return the positions of the samples of a piece and its column. The values stay in the mapped
    file. live: the samples of the partition. Raise `CheckpointError` if the piece is inconsistent."""
    file = opened(cells.file)
    tensor = file.tensor(f"{cells.prefix}/values")
    if cells.spec.kind is FieldKind.DENSE:
        count = tensor.shape[0] if tensor.ndim else 0
        if count > live:
            raise file.error(f"{count} values for {live} samples ({cells.prefix})")
        lengths = np.ones(count, np.int64)
    else:
        lengths = file.int64s(f"{cells.prefix}/lengths")
    if not _within(lengths, MAX_LENGTH):
        raise file.error(f"lengths of values are out of range ({cells.prefix})")
    values = byte_view(tensor)
    nbytes = int(lengths.sum()) * cells.spec.unit_bytes
    if not nbytes == values.nbytes == cells.nbytes:
        raise file.error(
            f"{values.nbytes} bytes of values, expected {nbytes} by their lengths and "
            f"{cells.nbytes} by the manifest ({cells.prefix})"
        )
    index = file.int64s(f"{cells.prefix}/index") if cells.shared else None
    count = len(lengths) if index is None else len(index)
    if cells.first is None:  # the samples are not consecutive
        positions = file.int64s(f"{cells.prefix}/rows")
    elif cells.first + count <= live:
        positions = np.arange(cells.first, cells.first + count)
    else:
        raise file.error(f"the first of {count} samples is number {cells.first} of {live}")
    if len(positions) != count or not _within(positions, live):
        raise file.error(f"the positions of the samples are out of range ({cells.prefix})")
    if index is not None and not _within(index, len(lengths)):
        raise file.error(f"the index of the values is out of range ({cells.prefix})")
    sizes = lengths * cells.spec.unit_bytes
    flat = FlatValues(values, np.cumsum(sizes) - sizes, sizes)
    return positions, EncodedColumn(cells.field, cells.spec, lengths, sizes, index, flat)


def _within(numbers: c.Int64s, count: int) -> bool:
    """Return whether all numbers, if there are any, are indexes below `count`."""
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < count)
