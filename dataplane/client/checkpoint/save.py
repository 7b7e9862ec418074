"""Save a consistent snapshot of partitions while the service continues.

Memory use at a time: the metadata of one field's cells (about 40 bytes each), and one chunk of their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.client.checkpoint import files, manifest
from dataplane.client.checkpoint.atomic_dir import Place
from dataplane.client.checkpoint.files import FILE_BYTES, DamagedValueError, FilePart, array_part, stored_part
from dataplane.client.checkpoint.manifest import CellsEntry, CheckpointInfo, FieldEntry, PartitionEntry, RowsEntry
from dataplane.client.operations.retry import ensure_known, with_retry
from dataplane.client.operations.steps import Operation, Post, Send, Sent, Work
from dataplane.client.session_state import SessionState
from dataplane.client.unit_connections import select_values, units_of
from dataplane.core import failpoints
from dataplane.core.types import FieldKind
from dataplane.data.columns import RowSource
from dataplane.data.meta import list_of_names
from dataplane.data.object_codec import encode_object
from dataplane.errors import ChecksumError, InvalidRequestError, RequestTooLargeError
from dataplane.ledger import commands as c

NAMES_PER_READ = 1 << 16
CELLS_PER_READ = 1 << 20
ROWS_PER_PIECE = 1 << 18
"""Samples per piece, unless more samples share one value. A piece is restored by one commit, for which the service
accepts 2^20 samples; one put, and therefore one value, cannot have more."""


@with_retry
def checkpoint(
    session_state: SessionState, path: str | os.PathLike[str], partitions: Sequence[str] | None = None
) -> Operation[CheckpointInfo]:
    """See `DataPlaneClient.checkpoint`."""
    names = selected_names(partitions)
    place = Place(path)
    try:
        yield Work(place.prepare)
        writer = _Writer(session_state, place)
        saved = yield Send(c.Save(partitions=names))
        try:
            writer.saved = saved
            failpoints.hit("checkpoint.saved")
            entries = []
            for described in saved.result.partitions:
                entries.append((yield from _save_partition(writer, saved.number, described)))
            yield from writer.flush()
            # Send, not Post: the release succeeds only if the session, and therefore its pins, lasted until now.
            yield Send(c.Release(located=saved.number))
        except BaseException:
            yield Post(c.Release(located=saved.number))
            raise
        content = manifest.Manifest(package=manifest.package(), partitions=tuple(entries), files=tuple(writer.entries))
        yield Work(lambda: place.finish(content))
    except BaseException:
        yield Work(place.abandon)
        raise
    return manifest.info(place.path, content, content.partitions)


def selected_names(partitions: Sequence[str] | None) -> tuple[str, ...]:
    """Return the named partitions; an empty tuple (for None) stands for all. Reject [] and a single string."""
    names = () if partitions is None else tuple(list_of_names("partitions", partitions))
    if partitions is not None and not names:
        raise InvalidRequestError(f"partitions={partitions!r}: pass at least one name, or None for all partitions")
    return names


class _Writer:
    """Collects tensors and writes a file when enough are collected. saved: the response to the Save command, once
    received. entries: the files that were written. `_parts` are the collected tensors, of `_bytes` bytes in total.
    `_pieces` counts the prefixes issued."""

    def __init__(self, session_state: SessionState, place: Place) -> None:
        self.session_state = session_state
        self.saved = Sent(0, None)  # until the response is received
        self.entries: list[manifest.FileEntry] = []
        self._place = place
        self._parts: list[FilePart] = []
        self._bytes = 0
        self._pieces = 0

    def prefix(self, name: str) -> str:
        """Return a unique, readable name for the tensors of a piece."""
        self._pieces += 1
        return f"{self._pieces:05}/{name}"

    def add(self, parts: Sequence[FilePart]) -> Operation[int]:
        """Add the tensors of one piece to the next file, and return its number. If the file would become too large,
        first write the tensors collected so far to a file of their own."""
        nbytes = sum(part.nbytes for part in parts)
        if self._parts and self._bytes + nbytes > FILE_BYTES:
            yield from self.flush()
        self._parts += parts
        self._bytes += nbytes
        return len(self.entries)

    def flush(self) -> Operation[None]:
        """Write the collected tensors to a file, if there are any."""
        if not self._parts:
            return
        parts, name = self._parts, f"{self._place.data}/{len(self.entries):05}.safetensors"
        stored = [part.content for part in parts if isinstance(part.content, c.FieldLocations)]
        # Learn the addresses of the values' units. Empty values may refer to removed units.
        yield from ensure_known(
            self.session_state, units_of([select_values(located, located.lengths > 0) for located in stored])
        )
        try:
            self.entries.append((yield Work(lambda: files.write(self._place.directory, name, parts, self._gather))))
        except DamagedValueError as error:
            raise (yield from self._checksum_error(error)) from None
        self._parts, self._bytes = [], 0

    def _checksum_error(self, error: DamagedValueError) -> Operation[ChecksumError]:
        """Return the error that names the first sample with the damaged value."""
        value, partition = error.located, error.partition  # `value` holds the location of a single value
        assert value.checksums is not None
        described = next(each for each in self.saved.result.partitions if each.partition == partition)
        cells = yield from _locate_cells(self.saved.number, described, value.name)
        # The samples with this value; the first one is named.
        has_value = (cells.units == value.units[0]) & (cells.offsets == value.offsets[0]) & (cells.lengths > 0)
        first = int(has_value.argmax())
        command = c.ReadSaved(saved=self.saved.number, partition=partition, first=first, last=first + 1, names=True)
        read: c.SavedRows = (yield Send(command)).result
        return ChecksumError(
            partition=partition,
            sample=read.ids[0],
            field=value.name,
            unit=int(value.units[0]),
            expected=int(value.checksums[0]),
            got=error.got,
        )

    def _gather(self, located: c.FieldLocations) -> RowSource:
        """Return the values at these locations in this process's memory."""
        return self.session_state.connections.gather([located], units_of([located]))[located.name]


def _save_partition(writer: _Writer, saved: int, described: c.SavedPartition) -> Operation[PartitionEntry]:
    """Write one partition and return its manifest entry. saved: number of the `Save` call."""
    claimed = np.frombuffer(b"".join(task.claimed for task in described.tasks), np.uint8)
    prefix = writer.prefix(described.partition)
    file = yield from writer.add([array_part(f"{prefix}/claimed", claimed)])
    rows = yield from _save_names(writer, saved, described)
    cells: list[CellsEntry] = []
    for field in described.fields:
        cells += yield from _save_field(writer, saved, described, field.name)
    return PartitionEntry(
        partition=described.partition,
        live=described.live,
        born=described.born,
        fields=tuple(FieldEntry(name=field.name, declared=field.declared) for field in described.fields),
        tasks=tuple(task.name for task in described.tasks),
        num_samples=described.num_samples,
        group_size=described.group_size,
        enums=described.enums,
        strict=described.strict,
        sealed=described.sealed,
        version=described.version,
        budget_bytes=described.budget_bytes,
        when_full=described.when_full,
        file=file,
        prefix=prefix,
        rows=tuple(rows),
        cells=tuple(cells),
    )


def _save_names(writer: _Writer, saved: int, described: c.SavedPartition) -> Operation[list[RowsEntry]]:
    """Write the ids and tags of all samples, in pages. Return an entry for each page."""
    entries: list[RowsEntry] = []
    first, page_rows = 0, NAMES_PER_READ
    while first < described.live:
        last = min(first + page_rows, described.live)
        command = c.ReadSaved(saved=saved, partition=described.partition, first=first, last=last, names=True)
        try:
            read: c.SavedRows = (yield Send(command)).result
        except RequestTooLargeError:  # the response would be too large: read smaller pages
            if page_rows == 1:
                raise
            page_rows = max(page_rows // 4, 1)
            continue
        prefix = writer.prefix(f"{described.partition}/samples")
        ids = [name.encode() for name in read.ids]
        tags = [
            [tag.name, None if tag.positions is None else tag.positions.tolist(), [*tag.values]] for tag in read.tags
        ]
        parts: dict[str, npt.NDArray[Any]] = {
            "ids": np.frombuffer(b"".join(ids), np.uint8),
            "id_lengths": np.array([len(name) for name in ids], np.int64),
            "tags": np.frombuffer(encode_object(tags), np.uint8),
        }
        file = yield from writer.add([array_part(f"{prefix}/{name}", array) for name, array in parts.items()])
        entries.append(RowsEntry(file=file, prefix=prefix, count=last - first))
        first = last
    return entries


def _save_field(writer: _Writer, saved: int, described: c.SavedPartition, field: str) -> Operation[list[CellsEntry]]:
    """Write the field's cells in pieces, each value once. Return an entry for each piece."""
    entries: list[CellsEntry] = []
    if not described.live:
        return entries
    for located, rows, index in _pieces((yield from _locate_cells(saved, described, field))):
        prefix = writer.prefix(f"{described.partition}/{field}")
        values = stored_part(f"{prefix}/values", described.partition, located)
        parts = [values]
        if located.spec.kind is not FieldKind.DENSE:
            parts.append(array_part(f"{prefix}/lengths", located.lengths))
        first = int(rows[0])
        consecutive = bool((rows == np.arange(first, first + len(rows))).all())
        if not consecutive:
            parts.append(array_part(f"{prefix}/rows", rows))
        if index is not None:
            parts.append(array_part(f"{prefix}/index", index))
        file = yield from writer.add(parts)
        entries.append(
            CellsEntry(
                field=field,
                spec=located.spec,
                file=file,
                prefix=prefix,
                values=len(located.lengths),
                rows=len(rows),
                nbytes=values.nbytes,
                first=first if consecutive else None,
                shared=index is not None,
            )
        )
    return entries


def _locate_cells(saved: int, described: c.SavedPartition, field: str) -> Operation[c.FieldLocations]:
    """Return the locations of the field's cells for all samples of the partition, which has at least one."""
    pages: list[c.FieldLocations] = []
    for first in range(0, described.live, CELLS_PER_READ):
        last = min(first + CELLS_PER_READ, described.live)
        command = c.ReadSaved(saved=saved, partition=described.partition, first=first, last=last, fields=(field,))
        pages.append((yield Send(command)).result.fields[0])
    return _concatenate(pages)


def _concatenate(pages: Sequence[c.FieldLocations]) -> c.FieldLocations:
    """Return the locations of all pages of one field."""
    if len(pages) == 1:
        return pages[0]
    return c.FieldLocations(
        name=pages[0].name,
        spec=pages[0].spec,
        units=np.concatenate([page.units for page in pages]),
        offsets=np.concatenate([page.offsets for page in pages]),
        lengths=np.concatenate([page.lengths for page in pages]),
        checksums=_concatenate_checksums(pages),
    )


def _concatenate_checksums(pages: Sequence[c.FieldLocations]) -> c.UInt32s | None:
    """Return the checksums of all pages, 0 for the values of a page without checksums; None if no page has any."""
    if all(page.checksums is None for page in pages):
        return None
    checksums = [np.zeros(len(page.lengths), np.uint32) if page.checksums is None else page.checksums for page in pages]
    return np.concatenate(checksums)


Piece = tuple[c.FieldLocations, c.Int64s, c.Int64s | None]
"""Locations of distinct values, the positions of the samples that have them, and for each sample the number of its
value in the piece (None: sample i has value i)."""


def _pieces(located: c.FieldLocations) -> Iterator[Piece]:
    """Split a field's cells into pieces of at most `FILE_BYTES` and `ROWS_PER_PIECE` samples, but of at least one
    value."""
    rows = np.flatnonzero(located.lengths >= 0)  # length -1: the sample has no value
    if not len(rows):
        return
    cells = select_values(located, rows)
    firsts, index = _distinct(cells)
    values = select_values(cells, firsts)
    # The cells ordered by their values. Values 0 to v have `row_ends[v]` cells and `byte_ends[v]` bytes.
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=len(firsts))
    row_ends, byte_ends = np.cumsum(counts), np.cumsum(values.lengths * values.spec.unit_bytes)
    first = 0
    while first < len(firsts):
        rows_before, bytes_before = (int(row_ends[first - 1]), int(byte_ends[first - 1])) if first else (0, 0)
        by_rows = int(np.searchsorted(row_ends, rows_before + ROWS_PER_PIECE, "right"))
        by_bytes = int(np.searchsorted(byte_ends, bytes_before + FILE_BYTES, "right"))
        last = max(min(by_rows, by_bytes), first + 1)  # at least one value
        piece_cells = np.sort(order[rows_before : int(row_ends[last - 1])])
        shared = len(piece_cells) != last - first  # there are more cells than values
        piece_index = index[piece_cells] - first if shared else None
        yield select_values(values, slice(first, last)), rows[piece_cells], piece_index
        first = last


def _distinct(cells: c.FieldLocations) -> tuple[c.Int64s, c.Int64s]:
    """Number the distinct values of the cells in the order of their first cells. Return the first cell of each value,
    and the value of each cell. Cells with equal locations share one value; each empty cell is a value of its own."""
    count = len(cells.lengths)
    filled = cells.lengths * cells.spec.unit_bytes > 0
    # Sorted by unit, offset and `filled`, cells that share a value are neighbours.
    order = np.lexsort((filled, cells.offsets, cells.units))
    units, offsets, filled = cells.units[order], cells.offsets[order], filled[order]
    same_as_previous = np.zeros(count, np.bool_)
    same_as_previous[1:] = (units[1:] == units[:-1]) & (offsets[1:] == offsets[:-1]) & filled[1:] & filled[:-1]
    if not same_as_previous.any():
        every = np.arange(count)
        return every, every
    groups = np.empty(count, np.int64)  # number of each cell's value, by location
    groups[order] = np.cumsum(~same_as_previous) - 1
    _, firsts, inverse = np.unique(groups, return_index=True, return_inverse=True)
    # Renumber the values by their first cells.
    by_first_cell = np.argsort(firsts)
    number = np.empty(len(firsts), np.int64)
    number[by_first_cell] = np.arange(len(firsts))
    return firsts[by_first_cell], number[inverse]
