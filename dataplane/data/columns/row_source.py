"""Stored rows in the memory of this process: where they are, and their copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from dataplane.core.inner_slice import InnerSlice
from dataplane.core.row_copy import Int32s, Int64s, Run, UInt8s, gather, gather_padded, row_outside
from dataplane.core.types import FieldSpec
from dataplane.errors import InternalError

MAX_LENGTH = 1 << 44
"""Limit for the length of a row, so that sums of the lengths of one read cannot overflow int64."""


@dataclasses.dataclass(frozen=True)
class InnerPart:
    """A part of each element of a dense or jagged column. whole: the spec of the stored column. spec: that of the part.
    slices: of the first inner dimensions. bytes: the part in memory."""

    whole: FieldSpec
    spec: FieldSpec
    slices: tuple[slice, ...]
    bytes: InnerSlice


class Check(Protocol):
    """Verifies `rows` of a column (their numbers, or a slice of all rows), which are at `offsets` of `memory`. Raises
    if they differ from the expected content."""

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None: ...


@dataclasses.dataclass(eq=False)
class RowSource:
    """Memory locations of the N rows of one column, in the buffers from which they are decoded. Not
    changed once it is made; `frozen` would take three times as long to make it.

    spec: settled. buffers: flat byte arrays (an arena's mapping, received frames). which: `[N]` int32 into `buffers`
    (None: all rows are in the first one). offsets: `[N]` int64 byte offsets into the buffer. lengths: `[N]` int64 in
    units of `spec.unit_bytes`. A row without bytes may have any offset. ours: the buffers are writable, private to this
    process, have no other readers and hold only this column, so that a result may keep them. check: verifies the rows
    at their final location (None: no verification).

    pieces: number of entries of each row. `which`, `offsets` and `lengths` then have `N * pieces` entries, those of a
    row one after another. part: the part of each element that is read, which `spec` describes. The
    first `whole_buffers` buffers hold whole elements, the others hold the parts only.
    """

    spec: FieldSpec
    buffers: Sequence[UInt8s]
    which: Int32s | None
    offsets: Int64s
    lengths: Int64s
    ours: bool = False
    check: Check | None = None
    pieces: int = 1
    part: InnerPart | None = None
    whole_buffers: int = 0

    @functools.cached_property
    def sizes(self) -> Int64s:
        """Sizes of the entries in bytes, without unselected ones. Raises InternalError if an entry is outside its
        buffer, before any allocation."""
        lengths = self.lengths
        unit_bytes = self.spec.unit_bytes
        if not len(lengths):
            return lengths
        longest = int(np.maximum.reduce(lengths))  # checked first: `lengths * unit_bytes` could overflow
        most = max((buffer.nbytes for buffer in self.buffers), default=0)
        stored_bytes = unit_bytes if self.part is None else self.part.whole.unit_bytes
        if longest > MAX_LENGTH or longest * unit_bytes > most or longest * stored_bytes > 1 << 62:
            raise self._outside_error(int(lengths.argmax()))
        sizes: Int64s = lengths * unit_bytes
        if np.minimum.reduce(lengths) < 0:
            raise self._outside_error(int(lengths.argmin()))
        entry = row_outside(self.buffers, self.which, self.offsets, self._in_buffers(sizes))
        if entry is not None:
            raise self._outside_error(entry)
        return sizes

    def set_checked_sizes(self, sizes: Int64s) -> None:
        """Set `sizes`, which the caller has checked as `sizes` does."""
        vars(self)["sizes"] = sizes

    @property
    def stored_sizes(self) -> Int64s:
        """Sizes of the entries in their buffers in bytes, with the unselected ones of whole elements. Raises as
        `sizes`."""
        return self._in_buffers(self.sizes)

    def _in_buffers(self, sizes: Int64s) -> Int64s:
        """Return the sizes in the buffers of entries of which `sizes` bytes are read."""
        if self.part is None:
            return sizes
        whole = self.lengths * self.part.whole.unit_bytes
        return whole if self.which is None else np.where(self.which < self.whole_buffers, whole, sizes)

    @property
    def row_lengths(self) -> Int64s:
        """`[N]` int64 lengths of the rows."""
        return self.lengths if self.pieces == 1 else self.lengths.reshape(-1, self.pieces).sum(axis=1)

    def _outside_error(self, entry: int) -> InternalError:
        row, piece = divmod(entry, self.pieces)
        name = f"row {row}" if self.pieces == 1 else f"piece {piece} of row {row}"
        where = f"length {self.lengths[entry]} at byte {self.offsets[entry]}"
        return InternalError(what=f"{name} of {where} is outside the memory that was read")

    def __len__(self) -> int:
        return len(self.lengths) // self.pieces

    def rows(self) -> list[UInt8s]:
        """Return the bytes of each row, without a copy."""
        locations = zip(self.buffer_numbers(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        return [self.buffers[number][offset : offset + size] for number, offset, size in locations]

    def verified_rows(self) -> list[UInt8s]:
        """Return the bytes of each row. If the rows have a check, they are verified in a private copy, which other
        processes cannot change afterwards."""
        if self.check is None:
            return self.rows()
        ends = np.cumsum(self.sizes)
        memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        starts = ends - self.sizes
        gather(self.buffers, self.which, self.offsets, self.sizes, memory)
        self.check(memory, starts, slice(None))
        return [memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def check_in_place(self) -> None:
        """Verify the rows at their current location."""
        if self.check is None:
            return
        if self.which is None:  # one buffer
            self.check(self.buffers[0], self.offsets, slice(None))
            return
        for number in np.unique(self.which).tolist():
            rows = np.flatnonzero(self.which == number)
            self.check(self.buffers[number], self.offsets[rows], rows)

    def buffer_numbers(self) -> list[int]:
        """Return the index into `buffers` of each entry."""
        return [0] * len(self.lengths) if self.which is None else self.which.tolist()

    def copy_to(self, target: UInt8s, deferred_runs: list[Run]) -> None:
        """Copy all rows to `target`, back to back. deferred_runs: as `later` of `gather`."""
        # checked: `sizes` has verified that all rows are inside their buffers.
        if self.part is None:
            gather(
                self.buffers,
                self.which,
                self.offsets,
                self.sizes,
                target,
                later=deferred_runs,
                checked=True,
            )
        else:
            self._copy_entries(target, np.cumsum(self.sizes) - self.sizes, deferred_runs)

    def copy_padded(self, target: UInt8s, pad: np.ndarray[Any, Any], deferred_runs: list[Run]) -> None:
        """Copy each row to its row of `target` and fill the rest with `pad`. See `gather_padded`."""
        if self.part is None and self.pieces == 1:
            gather_padded(
                self.buffers,
                self.which,
                self.offsets,
                self.sizes,
                target,
                pad,
                later=deferred_runs,
                checked=True,
            )
            return
        positions = self.padded_positions(target.shape[1])
        self._copy_entries(target.reshape(-1), positions, deferred_runs)
        ends = self.sizes.reshape(-1, self.pieces).sum(axis=1)
        for row, end in zip(target, ends.tolist(), strict=True):
            row[end:].view(pad.dtype)[...] = pad

    def padded_positions(self, row_bytes: int) -> Int64s:
        """Return the position of each entry in a padded result whose rows have `row_bytes` bytes."""
        sizes = self.sizes.reshape(len(self), self.pieces)
        starts = np.arange(len(self), dtype=np.int64)[:, None] * row_bytes
        positions: Int64s = (starts + np.cumsum(sizes, axis=1) - sizes).reshape(-1)
        return positions

    def _copy_entries(self, target: UInt8s, positions: Int64s, deferred_runs: list[Run]) -> None:
        """Copy the selected bytes of entry i to `target[positions[i]:]`. A part of whole elements
        is copied now. Other entries are only added to `deferred_runs`: their bytes are there after
        the caller has copied these."""
        entries = zip(
            self.buffer_numbers(),
            self.offsets.tolist(),
            self.lengths.tolist(),
            self.sizes.tolist(),
            positions.tolist(),
            strict=True,
        )
        for number, offset, elements, selected_bytes, position in entries:
            if not selected_bytes:
                continue
            buffer = self.buffers[number]
            destination = target[position : position + selected_bytes]
            if self.part is not None and number < self.whole_buffers:
                self.part.bytes.copy(buffer, offset, elements, destination)
            else:
                deferred_runs.append((destination, buffer[offset : offset + selected_bytes]))


def check_together(sources: Collection[RowSource]) -> None:
    """Check the rows of all sources and set their `sizes`, in one pass, if all of them are whole
    rows of one buffer. Do nothing otherwise, or if a row is outside of the buffer: `sizes` checks
    each source by itself."""
    columns = len(sources)
    first = next(iter(sources), None)
    if first is None or len(first.buffers) != 1 or columns < 2:
        return
    for source in sources:
        if source.which is not None or source.part is not None or source.buffers is not first.buffers:
            return
        if len(source.lengths) != len(first.lengths):  # some have several entries in each row
            return
    units = [source.spec.unit_bytes for source in sources]
    lengths = np.concatenate([source.lengths for source in sources])
    offsets = np.concatenate([source.offsets for source in sources])
    if not len(lengths) or np.minimum.reduce(lengths | offsets) < 0:
        return
    longest = int(np.maximum.reduce(lengths))
    if longest > MAX_LENGTH or longest * max(units) > 1 << 62:  # the sizes could overflow
        return
    sizes = lengths.reshape(columns, -1) * np.array(units)[:, None]
    left = first.buffers[0].nbytes - sizes.reshape(-1)
    # In this order: with a negative `left`, the difference could overflow.
    if np.minimum.reduce(left) < 0 or np.minimum.reduce(left - offsets) < 0:
        return
    for source, source_sizes in zip(sources, sizes, strict=True):
        source.set_checked_sizes(source_sizes)
