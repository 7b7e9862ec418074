"""Moving rows of bytes between buffers, with few copies for long rows and few Python steps for short ones. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

WORD_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""A numpy dtype that carries any element of so many bytes bit for bit."""

_FEW_RUNS = 48
_SHORT_BYTES = 384


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
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lasts = np.concatenate((firsts[1:], [len(offsets)])) - 1
    holders = [0] * len(firsts) if which is None else which[firsts].tolist()
    return holders, offsets[firsts].tolist(), ends[lasts].tolist()


def gather(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s, out: UInt8s) -> None:
    """Copies rows into `out`, one after another; `out` has exactly their bytes. Releases the GIL on long rows."""
    check_bounds(buffers, which, offsets, sizes)
    assert out.nbytes == int(sizes.sum()), (out.nbytes, int(sizes.sum()))
    holders, starts, stops = merge_runs(which, offsets, sizes)
    if len(starts) > _FEW_RUNS and out.nbytes < len(starts) * _SHORT_BYTES:
        positions = np.cumsum(sizes) - sizes
        _scatter_words(buffers, which, offsets, sizes, out, positions)
        return
    position = 0
    for holder, start, stop in zip(holders, starts, stops, strict=True):
        end = position + stop - start
        out[position:end] = buffers[holder][start:stop]
        position = end


def gather_padded(
    buffers: Sequence[UInt8s],
    which: Int32s,
    offsets: Int64s,
    sizes: Int64s,
    out: UInt8s,
    pad: npt.NDArray[np.generic],
) -> None:
    """Copies row i to the start of `out[i]` ([N, row bytes], contiguous) and fills its rest with `pad`.

    `pad` is one element (0-d) of a type of `WORD_TYPES`; every size is a multiple of its bytes.
    """
    check_bounds(buffers, which, offsets, sizes)
    count, row_bytes = out.shape
    if not out.nbytes:
        return
    words = out.view(pad.dtype)
    if count > _FEW_RUNS and int(sizes.sum()) < count * _SHORT_BYTES:
        words[...] = pad
        positions = np.arange(count, dtype=np.int64) * row_bytes
        _scatter_words(buffers, which, offsets, sizes, out.reshape(-1), positions)
        return
    item = pad.dtype.itemsize
    rows = zip(which.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
    for i, (holder, offset, size) in enumerate(rows):
        out[i, :size] = buffers[holder][offset : offset + size]
        if size < row_bytes:
            words[i, size // item :] = pad


def check_bounds(buffers: Sequence[UInt8s], which: Int32s | None, offsets: Int64s, sizes: Int64s) -> None:
    """Asserts that every row lies within its buffer (numpy would cut a slice silently)."""
    if not len(offsets):
        return
    limits = np.array([buffer.nbytes for buffer in buffers], dtype=np.int64)
    limit = limits[0] if which is None else limits[which]
    outside = (offsets < 0) | (sizes < 0) | ((offsets + sizes > limit) & (sizes > 0))
    assert not outside.any(), f"row {int(outside.argmax())} lies outside its buffer"


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
