"""How reads and writes are cut into bounded requests: arithmetic only, no sockets.

A request carries at most `CHUNK_BYTES` of payload. Small pieces travel together in one frame, large ones in a frame of
their own that is sent, and received, in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequestError
from dataplane.types import GRANULE_BYTES

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Anything C-contiguous that a memoryview can be made of."""

CHUNK_BYTES = 2 << 20
"""Payload of one request; also what one request waits for behind another in the unit: less than a millisecond."""
CHUNK_RANGES = 8192
"""Ranges of one request, so that its header stays near 100 kB."""
SMALL_BYTES = 64 << 10
"""Pieces below this are copied together into one frame: cheaper than a frame each (and ZMQ would copy them anyway)."""
MAX_REQUEST_BYTES = 64 << 20
"""The unit refuses a request, and drops a peer whose frame is larger."""


@dataclass
class WriteChunk:
    """One write request: `frames[k]` fills the next `frame_ranges[k]` of the ranges (`offsets`, `sizes`)."""

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    frame_ranges: list[int] = field(default_factory=list)
    frames: list[memoryview | bytes] = field(default_factory=list)
    nbytes: int = 0


def plan_write(
    offsets: Sequence[int], buffers: Sequence[Buffer | Sequence[Buffer]], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[WriteChunk]:
    """Requests that put `buffers[k]` (one buffer, or several one after another) at `offsets[k]`.

    Buffers must be C-contiguous. Large pieces are referred to, not copied.
    """
    if len(offsets) != len(buffers):
        raise InvalidRequestError(f"{len(offsets)} offsets for {len(buffers)} buffers")
    cutter = _Cutter(chunk_bytes)
    for offset, given in zip(offsets, buffers, strict=True):
        place = int(offset)
        for piece in _pieces(given):
            at = 0
            while at < len(piece):
                part = piece[at : at + cutter.room]
                yield from cutter.add(place + at, part)
                at += len(part)
            place += len(piece)
    yield from cutter.finish()


class _Cutter:
    """Fills one chunk after another."""

    def __init__(self, chunk_bytes: int) -> None:
        self._limit = chunk_bytes
        self._chunk = WriteChunk()
        self._small: list[memoryview] = []
        self._small_ranges = 0

    @property
    def room(self) -> int:
        """Bytes that the chunk under way still takes; never 0."""
        return self._limit - self._chunk.nbytes

    def add(self, offset: int, piece: memoryview) -> Iterator[WriteChunk]:
        if len(piece) < SMALL_BYTES:
            self._add_small(offset, piece)
        else:
            self._flush_small()
            self._add_range(offset, len(piece))
            self._chunk.frame_ranges.append(1)
            self._chunk.frames.append(piece)
        self._chunk.nbytes += len(piece)
        if self._chunk.nbytes >= self._limit or len(self._chunk.offsets) >= CHUNK_RANGES:
            yield from self.finish()

    def finish(self) -> Iterator[WriteChunk]:
        self._flush_small()
        if self._chunk.frames:
            yield self._chunk
            self._chunk = WriteChunk()

    def _add_small(self, offset: int, piece: memoryview) -> None:
        chunk = self._chunk
        if self._small and chunk.offsets[-1] + chunk.sizes[-1] == offset:
            chunk.sizes[-1] += len(piece)
        else:
            self._add_range(offset, len(piece))
            self._small_ranges += 1
        self._small.append(piece)

    def _add_range(self, offset: int, nbytes: int) -> None:
        self._chunk.offsets.append(offset)
        self._chunk.sizes.append(nbytes)

    def _flush_small(self) -> None:
        if self._small:
            self._chunk.frames.append(b"".join(self._small))
            self._chunk.frame_ranges.append(self._small_ranges)
            self._small, self._small_ranges = [], 0


def _pieces(given: Buffer | Sequence[Buffer]) -> Iterable[memoryview]:
    if isinstance(given, list | tuple):
        return (view for each in given for view in _pieces(each))
    view = memoryview(cast(memoryview, given))
    return [view.cast("B")] if view.nbytes else []


@dataclass(frozen=True, kw_only=True)
class ReadBuffer:
    """One buffer of a read: `nbytes` long, filled by the ranges (`offsets`, `sizes`) one after another.

    At most `CHUNK_BYTES`, then one request fetches it; or a single longer range, fetched piece by piece.
    """

    offsets: Int64s
    sizes: Int64s
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """Range i of the call is found in `buffers[which[i]]` from byte `offsets[i]` on."""

    buffers: list[ReadBuffer]
    which: Int32s
    offsets: Int64s


def plan_read(offsets: Int64s, sizes: Int64s, *, chunk_bytes: int = CHUNK_BYTES) -> ReadPlan:
    """Buffers that together hold every range whole, overlapping and adjacent ones merged.

    Ranges are widened to whole granules, which merges more and keeps each range as aligned in its buffer as it is in
    the arena, up to a granule. Empty ranges are at (0, 0) and cost nothing.
    """
    if offsets.shape != sizes.shape or offsets.ndim != 1:
        raise InvalidRequestError(f"offsets of shape {offsets.shape} for sizes of shape {sizes.shape}")
    which, places = np.zeros(len(offsets), np.int32), np.zeros(len(offsets), np.int64)
    wanted = np.flatnonzero(sizes > 0)
    order = wanted[np.argsort(offsets[wanted], kind="stable")]
    first = offsets[order] // GRANULE_BYTES * GRANULE_BYTES
    last = -(-(offsets[order] + sizes[order]) // GRANULE_BYTES) * GRANULE_BYTES
    runs = _Runs(first, np.maximum.accumulate(last) if len(last) else last)
    buffers: list[ReadBuffer] = []
    at = 0
    while at < len(order):
        end = runs.cut(at, chunk_bytes)
        inside = order[at:end]
        which[inside] = len(buffers)
        places[inside] = runs.packed[at:end] - runs.packed[at] + offsets[inside] - first[at:end]
        buffers.append(runs.buffer(at, end))
        at = end
    return ReadPlan(buffers=buffers, which=which, offsets=places)


class _Runs:
    """Sorted ranges [first, reach) laid into one long stream in which ranges that touch share their bytes; `reach` is
    the furthest end so far."""

    def __init__(self, first: Int64s, reach: Int64s) -> None:
        self.first, self.reach = first, reach
        self.heads = np.ones(len(first), np.bool_)
        self.heads[1:] = first[1:] > reach[:-1]
        gaps = np.zeros(len(first), np.int64)
        gaps[1:] = np.where(self.heads[1:], first[1:] - reach[:-1], 0)
        skipped = np.cumsum(gaps) + (first[0] if len(first) else 0)
        self.packed = first - skipped
        self.packed_reach = reach - skipped
        self.runs = np.cumsum(self.heads)

    def cut(self, at: int, chunk_bytes: int) -> int:
        """Where the buffer that begins with range `at` ends: it takes as many as fit, and with a range that is longer
        than a chunk all that lie within it."""
        limit = max(self.packed[at] + chunk_bytes, self.packed_reach[at])
        by_bytes = np.searchsorted(self.packed_reach, limit, side="right")
        by_ranges = np.searchsorted(self.runs, self.runs[at] + CHUNK_RANGES, side="left")
        return int(min(by_bytes, by_ranges))

    def buffer(self, at: int, end: int) -> ReadBuffer:
        starts = np.flatnonzero(self.heads[at:end]) + at
        if not len(starts) or starts[0] != at:
            starts = np.concatenate([[at], starts])
        stops = np.append(starts[1:], end) - 1
        offsets = self.first[starts]
        return ReadBuffer(
            offsets=offsets,
            sizes=self.reach[stops] - offsets,
            nbytes=int(self.packed_reach[end - 1] - self.packed[at]),
        )
