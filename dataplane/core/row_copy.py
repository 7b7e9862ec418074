"""Moving rows of bytes between buffers, with few copies for long rows and few Python steps for short ones. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

Run = tuple[UInt8s, UInt8s]
"""Target and source of a copy, as many bytes each."""

CopyRuns = Callable[[Sequence[Run]], None]
"""Makes every copy. When it returns or raises, none of them goes on."""

WORD_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""A numpy dtype that carries any element of so many bytes bit for bit."""

_FEW_RUNS = 48
_SHORT_BYTES = 256
"""Rows shorter than this on average are moved by index arithmetic, all at once."""
LONG_BYTES = 128 << 10
"""Copies from this on let other threads of the interpreter run meanwhile; for shorter ones that costs too much."""


def copy_runs(runs: Iterable[Run]) -> None:
    """The plain `CopyRuns`: one after another, in the calling thread. Releases the GIL."""
    for target, source in runs:
        target[...] = source


def merge_runs(which: Int32s | None, offsets: Int64s, sizes: Int64s) -> tuple[list[int], list[int], list[int]]:
    """(buffer, start, stop) of every stretch of rows that follow one another in one buffer, as three lists, in order.

    Rows without bytes are passed over. `which` None stands for one buffer.
    """
    filled = sizes > 0
    if not filled.all():
        offsets, sizes = offsets[filled], sizes[filled]
        which = None if which is None else which[filled]
    if not len(offsets):
        return [], [], []
    ends = offsets + sizes
    breaks = offsets[1:] != ends[:-1]
    if which is not None:
        breaks |= which[1:] != which[:-1]
    if not breaks.any():
        return [0 if which is None else int(which[0])], [int(offsets[0])], [int(ends[-1])]
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lasts = np.concatenate((firsts[1:], [len(offsets)])) - 1
    holders = [0] * len(firsts) if which is None else which[firsts].tolist()
    return holders, offsets[firsts].tolist(), ends[lasts].tolist()


def merge_copies(sources: Int64s, targets: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The same copies (from, to, bytes; none is empty) in fewer ranges: those that follow one another at both ends are
    one."""
    ends = np.flatnonzero((sources[1:] != (sources + sizes)[:-1]) | (targets[1:] != (targets + sizes)[:-1]))
    firsts = np.concatenate((np.zeros(1, np.int64), ends + 1))
    return sources[firsts], targets[firsts], np.add.reduceat(sizes, firsts)


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
    """Copies rows into `out`, one after another; `out` has exactly their bytes.

    later: is given the copies of `LONG_BYTES` and more, which the caller makes; by default they are made here.
    checked: `row_outside` found none.
    """
    if not checked:
        check_bounds(buffers, which, offsets, sizes)
    assert out.nbytes == int(sizes.sum()), (out.nbytes, int(sizes.sum()))
    holders, starts, stops = merge_runs(which, offsets, sizes)
    if len(starts) > _FEW_RUNS and out.nbytes < len(starts) * _SHORT_BYTES:
        _scatter_words(buffers, which, offsets, sizes, out, np.cumsum(sizes) - sizes)
        return
    _place(buffers, zip(holders, starts, stops, strict=True), out, later)


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
    """Copies row i to the start of `out[i]` ([N, row bytes], contiguous) and fills its rest with `pad`.

    `pad` is one element (0-d) of a type of `WORD_TYPES`; every size is a multiple of its bytes. later, checked: as in
    `gather`.
    """
    if not checked:
        check_bounds(buffers, which, offsets, sizes)
    count, row_bytes = out.shape
    if not out.nbytes:
        return
    flat = out.reshape(-1)
    if count > _FEW_RUNS and int(sizes.sum()) < count * _SHORT_BYTES:
        out.view(pad.dtype)[...] = pad
        _scatter_words(buffers, which, offsets, sizes, flat, np.arange(count, dtype=np.int64) * row_bytes)
        return
    holders = itertools.repeat(0, count) if which is None else which.tolist()
    tail = np.full((row_bytes - int(np.minimum.reduce(sizes))) // pad.itemsize, pad, pad.dtype).view(np.uint8)
    runs = zip(holders, offsets.tolist(), (offsets + sizes).tolist(), strict=False)
    _place(buffers, runs, flat, later, row_bytes=row_bytes, tail=tail)


def _place(
    buffers: Sequence[UInt8s],
    runs: Iterable[tuple[int, int, int]],
    out: UInt8s,
    later: list[Run] | None,
    *,
    row_bytes: int = 0,
    tail: UInt8s | None = None,
) -> None:
    """Copies `buffers[holder][start:stop]` of each run one after another, each filled up from `tail` to `row_bytes`."""
    sources = [buffer.data for buffer in buffers]
    target = out.data
    rest = None if tail is None else tail.data
    long: list[Run] = [] if later is None else later
    position = 0
    for holder, start, stop in runs:
        end = position + stop - start
        if end - position < LONG_BYTES:
            target[position:end] = sources[holder][start:stop]
        else:
            long.append((out[position:end], buffers[holder][start:stop]))
        if tail is None or rest is None:
            position = end
            continue
        position += row_bytes
        if position - end < LONG_BYTES:
            target[end:position] = rest[: position - end]
        else:
            long.append((out[end:position], tail[: position - end]))
    if later is None:
        copy_runs(long)


def check_bounds(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s) -> None:
    """Asserts that every row lies within its buffer (numpy would cut a slice silently)."""
    row = row_outside(buffers, which, offsets, sizes)
    assert row is None, f"row {row} lies outside its buffer"


def row_outside(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s) -> int | None:
    """The first row that does not lie within its buffer. Rows without bytes may have any offset from 0 on. `sizes` are
    below 2^62."""
    if not len(offsets):
        return None
    limits = [buffer.nbytes for buffer in buffers]
    # Subtracted from the limit: a sum of what may be anything could pass for small.
    if np.minimum.reduce(offsets | sizes) >= 0 and np.minimum.reduce(min(limits, default=0) - sizes - offsets) >= 0:
        return None
    limit = limits[0] if which is None else np.array(limits, dtype=np.int64)[which]
    outside = (offsets < 0) | (sizes < 0) | ((limit - sizes - offsets < 0) & (sizes > 0))
    return int(outside.argmax()) if outside.any() else None


def address(buffer: npt.NDArray[np.generic]) -> int:
    """Where the array's first byte is."""
    return int(buffer.__array_interface__["data"][0])


def _scatter_words(
    buffers: Sequence[UInt8s],
    which: Int32s | None,
    offsets: Int64s,
    sizes: Int64s,
    out: UInt8s,
    positions: Int64s,
) -> None:
    """Row i goes to `out[positions[i]:]`, by index arithmetic: for many short rows."""
    if which is None:
        which = np.zeros(len(offsets), dtype=np.int32)
    for holder in np.unique(which).tolist():
        chosen = np.flatnonzero((which == holder) & (sizes > 0))
        if len(chosen):
            _scatter_from(buffers[holder], offsets[chosen], sizes[chosen], out, positions[chosen])


def _scatter_from(buffer: UInt8s, offsets: Int64s, sizes: Int64s, out: UInt8s, positions: Int64s) -> None:
    low, high = int(offsets.min()), int((offsets + sizes).max())
    offsets = offsets - low
    bits = int(np.bitwise_or.reduce(offsets | sizes | positions)) | (address(buffer) + low) | address(out) | 8
    word = bits & -bits
    source = _as_words(buffer[low:high], word)
    target = _as_words(out, word)
    counts = sizes // word
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    target[np.repeat(positions // word, counts) + within] = source[np.repeat(offsets // word, counts) + within]


def _as_words(buffer: UInt8s, word: int) -> npt.NDArray[np.generic]:
    return buffer[: buffer.nbytes // word * word].view(WORD_TYPES[word])
