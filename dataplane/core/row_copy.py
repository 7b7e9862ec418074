"""Copying rows of bytes between buffers: merged copies for long rows, vectorized copies for short rows. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

Run = tuple[UInt8s, UInt8s]
"""Target and source of a copy, of equal size."""

CopyRuns = Callable[[Sequence[Run]], None]
"""Function that performs all copies. No copy is active after it returns or raises."""

WORD_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""By element size in bytes, a numpy dtype that preserves every bit pattern."""

_FEW_RUNS = 48
"""Up to this number of ranges, a Python step for each is fast enough."""
_SHORT_BYTES = 256
"""Rows with a shorter average length are copied together by index arithmetic."""
LONG_BYTES = 128 << 10
"""Copies of at least this size release the GIL; for smaller copies the release costs too much."""

_BLOCK_BYTES = 512 << 10
"""Maximum size of the blocks in which padded rows are filled and copied: it fits the cache of a
core."""


def copy_runs(runs: Iterable[Run]) -> None:
    """Perform the copies one after another in the calling thread (the default `CopyRuns`). Releases the GIL."""
    for target, source in runs:
        target[...] = source


def merge_runs(which: Int32s | None, offsets: Int64s, sizes: Int64s) -> tuple[list[int], list[int], list[int]]:
    """Merge rows that are adjacent in one buffer. Return buffer number, start and stop of each merged range, as three
    lists in row order.

    Empty rows are skipped. `which` has the buffer number of each row; None means that all rows are in one buffer.
    """
    if len(sizes) and np.minimum.reduce(sizes) <= 0:
        filled = sizes > 0
        offsets = offsets[filled]
        sizes = sizes[filled]
        which = None if which is None else which[filled]
    if not len(offsets):
        return [], [], []
    ends = offsets + sizes
    breaks = offsets[1:] != ends[:-1]  # whether a new range begins at row i + 1
    if which is not None:
        breaks |= which[1:] != which[:-1]
    if not np.count_nonzero(breaks):
        return [0 if which is None else int(which[0])], [int(offsets[0])], [int(ends[-1])]
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lasts = np.concatenate((firsts[1:], [len(offsets)])) - 1
    numbers = [0] * len(firsts) if which is None else which[firsts].tolist()
    return numbers, offsets[firsts].tolist(), ends[lasts].tolist()


def gather(
    buffers: Sequence[UInt8s],
    which: Int32s | None,
    offsets: Int64s,
    sizes: Int64s,
    out: UInt8s,
    *,
    later: list[Run] | None = None,
    checked: bool = False,
) -> None:
    """Copy rows into `out` back to back: row i is `sizes[i]` bytes at `offsets[i]` of `buffers[which[i]]`, or of
    `buffers[0]` if `which` is None. `out` has exactly the total size of the rows.

    later: list to which copies of at least `LONG_BYTES` are appended, for the caller to perform; by default `gather`
    performs them. checked: the caller has verified the bounds with `row_outside`.
    """
    if not checked:
        check_bounds(buffers, which, offsets, sizes)
    assert out.nbytes == int(np.add.reduce(sizes)), (out.nbytes, int(sizes.sum()))
    numbers, starts, stops = merge_runs(which, offsets, sizes)
    # Many short ranges: one vectorized copy is cheaper than a Python step for each.
    if len(starts) > _FEW_RUNS and out.nbytes < len(starts) * _SHORT_BYTES:
        _copy_short_rows(buffers, which, offsets, sizes, out, np.cumsum(sizes) - sizes)
        return
    long_copies: list[Run] = [] if later is None else later
    _copy_ranges(buffers, zip(numbers, starts, stops, strict=True), out, long_copies)
    if later is None:
        copy_runs(long_copies)


def gather_padded(
    buffers: Sequence[UInt8s],
    which: Int32s | None,
    offsets: Int64s,
    sizes: Int64s,
    out: UInt8s,
    pad: npt.NDArray[np.generic],
    *,
    later: list[Run] | None = None,
    checked: bool = False,
) -> None:
    """Copy row i to the start of `out[i]` ([N, row bytes], contiguous) and fill the rest of `out[i]` with `pad`. Row i
    is given as in `gather`.

    `pad` is one element (0-d) of a dtype in `WORD_TYPES`; every size is a multiple of its item size. later, checked: as
    in `gather`.
    """
    if not checked:
        check_bounds(buffers, which, offsets, sizes)
    count, row_bytes = out.shape
    if not out.nbytes:
        return
    flat = out.reshape(-1)
    if np.minimum.reduce(sizes) == row_bytes:  # there is nothing to fill
        gather(buffers, which, offsets, sizes, flat, later=later, checked=True)
        return
    # Many short rows: as in `gather`, after a fill of all padding at once.
    if count > _FEW_RUNS and int(np.add.reduce(sizes)) < count * _SHORT_BYTES:
        out.view(pad.dtype)[...] = pad
        _copy_short_rows(buffers, which, offsets, sizes, flat, np.arange(count, dtype=np.int64) * row_bytes)
        return
    numbers = itertools.repeat(0, count) if which is None else which.tolist()
    ranges = list(zip(numbers, offsets.tolist(), (offsets + sizes).tolist(), strict=False))
    long_copies: list[Run] = [] if later is None else later
    copy_padded(buffers, ranges, out, pad, long_copies)
    if later is None:
        copy_runs(long_copies)


def copy_padded(
    buffers: Sequence[UInt8s],
    ranges: Sequence[tuple[int, int, int]],
    out: UInt8s,
    pad: npt.NDArray[np.generic],
    long_copies: list[Run],
) -> None:
    """Copy `buffers[number][start:stop]` of range i (number, start, stop) to the start of `out[i]`
    ([N, row bytes], contiguous, not empty), and fill the rest of `out[i]` with `pad`. Copies of at
    least `LONG_BYTES` are only appended to `long_copies`."""
    count, row_bytes = out.shape
    words = out.view(pad.dtype)
    flat = out.reshape(-1)
    # A fill of whole rows needs no bytes from memory, and leaves the cache lines for the copies.
    block = _BLOCK_BYTES // row_bytes
    if block < 2:  # the rows do not fit the cache: fill only what they leave
        for row, (_, start, stop) in zip(words, ranges, strict=True):
            row[(stop - start) // pad.itemsize :] = pad
        _copy_ranges(buffers, ranges, flat, long_copies, row_bytes=row_bytes)
    else:
        for first in range(0, count, block):
            last = first + block
            words[first:last] = pad
            target = flat[first * row_bytes : last * row_bytes]
            _copy_ranges(buffers, ranges[first:last], target, long_copies, row_bytes=row_bytes)


def _copy_ranges(
    buffers: Sequence[UInt8s],
    ranges: Iterable[tuple[int, int, int]],
    out: UInt8s,
    long_copies: list[Run],
    *,
    row_bytes: int | None = None,
) -> None:
    """Copy `buffers[number][start:stop]` of each range (number, start, stop) to `out`: back to
    back, or with `row_bytes` each to the start of a row of this many bytes. Copies of at least
    `LONG_BYTES` are only appended to `long_copies`."""
    # Slices of memoryviews are cheaper than slices of arrays.
    sources = [buffer.data for buffer in buffers]
    target = out.data
    position = 0
    for number, start, stop in ranges:
        end = position + stop - start
        if stop - start < LONG_BYTES:
            target[position:end] = sources[number][start:stop]
        else:
            long_copies.append((out[position:end], buffers[number][start:stop]))
        position = end if row_bytes is None else position + row_bytes


def check_bounds(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s) -> None:
    """Assert that every row lies within its buffer (numpy would truncate a slice silently)."""
    row = row_outside(buffers, which, offsets, sizes)
    assert row is None, f"row {row} lies outside its buffer"


def row_outside(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s) -> int | None:
    """Return the first row (given as in `gather`) that does not lie within its buffer, or None. Empty rows may have any
    non-negative offset. `sizes` must be below 2^62."""
    if not len(offsets):
        return None
    limits = [buffer.nbytes for buffer in buffers]
    # First a cheap test with the smallest buffer: `offsets | sizes` is negative if either is. Subtract from the limit:
    # the sum of an arbitrary offset and a size could overflow and appear small.
    if np.minimum.reduce(offsets | sizes) >= 0 and np.minimum.reduce(min(limits, default=0) - sizes - offsets) >= 0:
        return None
    limit = limits[0] if which is None else np.array(limits, dtype=np.int64)[which]
    outside = (offsets < 0) | (sizes < 0) | ((limit - sizes - offsets < 0) & (sizes > 0))
    return int(outside.argmax()) if outside.any() else None


def address(buffer: npt.NDArray[np.generic]) -> int:
    """Return the address of the array's first byte."""
    return int(buffer.__array_interface__["data"][0])


def _copy_short_rows(
    buffers: Sequence[UInt8s],
    which: Int32s | None,
    offsets: Int64s,
    sizes: Int64s,
    out: UInt8s,
    positions: Int64s,
) -> None:
    """Copy row i, given as in `gather`, to `out[positions[i]:]` by index arithmetic. Faster than `_copy_ranges` for
    many short rows."""
    if which is None:
        which = np.zeros(len(offsets), dtype=np.int32)
    for number in np.unique(which).tolist():
        chosen = np.flatnonzero((which == number) & (sizes > 0))
        if len(chosen):
            _copy_short_rows_of(buffers[number], offsets[chosen], sizes[chosen], out, positions[chosen])


def _copy_short_rows_of(buffer: UInt8s, offsets: Int64s, sizes: Int64s, out: UInt8s, positions: Int64s) -> None:
    """Copy `sizes[i]` bytes at `offsets[i]` of `buffer` to `out[positions[i]:]` for each row i, by index arithmetic on
    words of the largest size (up to 8 bytes) to which all rows are aligned."""
    low, high = int(offsets.min()), int((offsets + sizes).max())  # the part of `buffer` that has the rows
    offsets = offsets - low
    # The lowest bit that is set anywhere is the largest power of two that divides all of these numbers.
    bits = int(np.bitwise_or.reduce(offsets | sizes | positions)) | (address(buffer) + low) | address(out) | 8
    word_bytes = bits & -bits
    source = _as_words(buffer[low:high], word_bytes)
    target = _as_words(out, word_bytes)
    counts = sizes // word_bytes  # words of each row
    # The index of each word within its row, for all rows one after another: 0, 1, 2, 0, 1, ...
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    source_words = np.repeat(offsets // word_bytes, counts) + within
    target[np.repeat(positions // word_bytes, counts) + within] = source[source_words]


def _as_words(buffer: UInt8s, word_bytes: int) -> npt.NDArray[np.generic]:
    """Return `buffer` as an array of words, without a copy. Bytes after the last whole word are left out."""
    return buffer[: buffer.nbytes // word_bytes * word_bytes].view(WORD_TYPES[word_bytes])
