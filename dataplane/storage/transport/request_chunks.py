"""Splitting reads and writes into bounded requests: arithmetic only, no sockets.

A request carries at most `CHUNK_BYTES` (a write) or `READ_BYTES` of payload. A write combines small pieces in one
frame. Each large piece has a separate frame, which is sent without a copy and received in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequestError

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Any C-contiguous object that supports memoryview."""

CHUNK_BYTES = 2 << 20
"""Maximum payload of one write request."""
READ_BYTES = 4 << 20
"""Maximum payload of one read request. It bounds the time a request waits for another one to below a millisecond."""
CHUNK_RANGES = 8192
"""Maximum number of ranges of one request, which keeps its header near 100 kB."""
SMALL_BYTES = 64 << 10
"""Pieces below this size are copied into a common frame, which is cheaper than separate frames (ZMQ copies small ones
anyway)."""
MAX_HEADER_BYTES = 1 << 20
"""The unit drops a message with a larger header without parsing it: a one-byte varint becomes a 32-byte integer."""
MAX_ARENA_BYTES = 1 << 48
"""Maximum size of an arena, so that addresses times columns fit into 64 bits."""
MAX_REQUEST_BYTES = 64 << 20
"""The unit rejects a larger request."""
MAX_FRAME_BYTES = CHUNK_BYTES + 1024
"""The unit disconnects a peer that sends a larger frame than a chunk plus the overhead of CURVE. A peer without a valid
ticket can make the unit hold one such frame."""


@dataclass
class WriteChunk:
    """One write request. `frames[k]` fills the next `frame_ranges[k]` of the ranges (`offsets`, `sizes`)."""

    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    frame_ranges: list[int] = field(default_factory=list)
    frames: list[memoryview | bytes] = field(default_factory=list)
    nbytes: int = 0


def plan_write(
    offsets: Sequence[int], buffers: Sequence[Buffer | Sequence[Buffer]], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[WriteChunk]:
    """Yield requests that write `buffers[k]` (one buffer, or several consecutive ones) at `offsets[k]`.

    Buffers must be C-contiguous. Large pieces are referenced, not copied. chunk_bytes: the most payload of a request.
    """
    if len(offsets) != len(buffers):
        raise InvalidRequestError(f"{len(offsets)} offsets for {len(buffers)} buffers")
    builder = _ChunkBuilder(chunk_bytes)
    for offset, given in zip(offsets, buffers, strict=True):
        piece_offset = int(offset)
        for piece in _byte_views(given):
            added = 0  # bytes of the piece that are in chunks
            while added < len(piece):
                part = piece[added : added + builder.free_bytes]
                yield from builder.add(piece_offset + added, part)
                added += len(part)
            piece_offset += len(piece)
    yield from builder.finish()


class _ChunkBuilder:
    """Collects pieces into chunks, one chunk at a time. `_small`: consecutive small pieces that will share a frame, and
    fill `_small_ranges` ranges."""

    def __init__(self, chunk_bytes: int) -> None:
        self._limit = chunk_bytes
        self._chunk = WriteChunk()
        self._small: list[memoryview] = []
        self._small_ranges = 0

    @property
    def free_bytes(self) -> int:
        """Free bytes of the current chunk; never 0."""
        return self._limit - self._chunk.nbytes

    def add(self, offset: int, piece: memoryview) -> Iterator[WriteChunk]:
        """Add a piece of at most `free_bytes`. Yield the chunk if it is full."""
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
        """Yield the current chunk, unless it is empty, and start the next one."""
        self._flush_small()
        if self._chunk.frames:
            yield self._chunk
            self._chunk = WriteChunk()

    def _add_small(self, offset: int, piece: memoryview) -> None:
        """Add a piece to the common frame. A piece directly behind the previous small one extends its range."""
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
        """Copy the collected small pieces into one frame of the chunk."""
        if self._small:
            self._chunk.frames.append(b"".join(self._small))
            self._chunk.frame_ranges.append(self._small_ranges)
            self._small, self._small_ranges = [], 0


def _byte_views(given: Buffer | Sequence[Buffer]) -> Iterable[memoryview]:
    """Return a buffer, or each buffer of a list, as a view of bytes. Empty ones are left out."""
    if isinstance(given, list | tuple):
        return (view for each in given for view in _byte_views(each))
    view = memoryview(cast(memoryview, given))
    return [view.cast("B")] if view.nbytes else []


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One read request. The ranges (`offsets`, `sizes`) of the arena, concatenated, have `nbytes`. They fill the bytes
    [first, last) of each entry (buffer, first, last) of `places` in turn."""

    offsets: list[int]
    sizes: list[int]
    places: list[tuple[int, int, int]]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """The requests of a read and the layout of its result. Buffer k, for column k, has `buffers[k]` bytes. Range i of
    the call begins at byte `offsets[i]` of buffer `which[i]`."""

    requests: list[ReadRequest]
    buffers: list[int]
    which: Int32s
    offsets: Int64s


def plan_read(
    offsets: Int64s,
    sizes: Int64s,
    *,
    within: int = MAX_ARENA_BYTES,
    columns: Sequence[int] | None = None,
    chunk_bytes: int = READ_BYTES,
) -> ReadPlan:
    """Return the requests that read every range, and the position of every range in the result.

    columns: the number of ranges of column 0, of column 1, and so on; by default one column has all ranges. Within a
    column, shared bytes are transferred once; bytes outside the ranges are not transferred. A buffer holds its ranges
    in address order, without gaps, so ranges adjacent in the arena are adjacent in the buffer. Empty ranges are at byte
    0 and cost nothing. chunk_bytes: the most payload of a request. Raises `InvalidRequestError` for a range beyond the
    arena of `within` bytes.
    """
    if offsets.shape != sizes.shape or offsets.ndim != 1:
        raise InvalidRequestError(f"offsets of shape {offsets.shape} for sizes of shape {sizes.shape}")
    _require_within(offsets, sizes, within)
    counts = [len(offsets)] if columns is None else columns
    which = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    if not sizes.all():  # some ranges are empty
        return _plan_nonempty(offsets, sizes, counts, which, chunk_bytes)
    if not len(offsets):
        return ReadPlan(requests=[], buffers=[0] * len(counts), which=which, offsets=offsets)
    # Columns get disjoint address spaces, so that no range touches a range of another column.
    space = int(offsets.max() + sizes.max()) + 1
    first = offsets + which * np.int64(space)
    # The ranges in address order; None: they are in this order already.
    order = None if (first[1:] >= first[:-1]).all() else np.argsort(first, kind="stable")
    stream = _Stream(first, sizes, space) if order is None else _Stream(first[order], sizes[order], space)
    # Column k has the sorted ranges [edges[k], edges[k + 1]), which are the bytes [starts[k], starts[k + 1]) of the
    # stream.
    edges = [0, *itertools.accumulate(counts)]
    starts = [int(stream.packed[edge]) if edge < len(offsets) else stream.nbytes for edge in edges]
    places = stream.packed - np.repeat(starts[:-1], counts)
    if order is not None:  # back to the order of the call
        sorted_places, places = places, np.empty_like(places)
        places[order] = sorted_places
    return ReadPlan(
        requests=[stream.request(begin, end, starts) for begin, end in pairwise(stream.cuts(chunk_bytes))],
        buffers=[end - begin for begin, end in pairwise(starts)],
        which=which,
        offsets=places,
    )


def _require_within(offsets: Int64s, sizes: Int64s, limit: int) -> None:
    """Raise InvalidRequestError for a negative offset or size, and for a range that ends after byte `limit`."""
    # Offsets and sizes are checked separately first, because their sums may overflow. a | b is negative if a or b is.
    if len(offsets) and (
        np.minimum.reduce(offsets | sizes) < 0
        or max(np.maximum.reduce(offsets), np.maximum.reduce(sizes)) > limit
        or np.maximum.reduce(offsets + sizes) > limit
    ):
        raise InvalidRequestError(f"a range lies outside the {limit:,} bytes of the storage unit")


def _plan_nonempty(offsets: Int64s, sizes: Int64s, counts: Sequence[int], which: Int32s, chunk_bytes: int) -> ReadPlan:
    """Return the plan of a read with empty ranges. These are at byte 0 of their buffers. `counts` and `which`: the
    number of ranges of each column, and the column of each range."""
    filled = sizes > 0
    filled_counts = np.bincount(which[filled], minlength=len(counts)).tolist()  # of each column
    plan = plan_read(offsets[filled], sizes[filled], columns=filled_counts, chunk_bytes=chunk_bytes)
    places = np.zeros(len(offsets), np.int64)
    places[filled] = plan.offsets
    return ReadPlan(requests=plan.requests, buffers=plan.buffers, which=which, offsets=places)


class _Stream:
    """Sorted ranges, concatenated; overlapping ranges share their bytes. `packed`: the position of each range in the
    stream.

    Ranges that touch or overlap are merged into spans. Span k, of `_sizes[k]` bytes, is at `_arena[k]` of the arena and
    fills the bytes [`_begins[k]`, `_ends[k]`) of the stream.
    """

    def __init__(self, first: Int64s, sizes: Int64s, space: int) -> None:
        """Range i, of `sizes[i]` bytes, begins at byte `first[i] % space` of the arena; `first[i] // space` is its
        column. `first` is sorted."""
        # Span k has the ranges [heads[k], tails[k]). A span begins at a range that no earlier range reaches.
        reach = np.maximum.accumulate(first + sizes)
        heads = np.concatenate(([0], np.flatnonzero(first[1:] > reach[:-1]) + 1))
        tails = np.append(heads[1:], len(first))
        span_first = first[heads]
        self._sizes = reach[tails - 1] - span_first
        self._ends = np.cumsum(self._sizes)
        self._begins = self._ends - self._sizes
        self._arena = span_first % space
        # Every range of a span moves by the same distance, to where the span lies in the stream.
        self.packed = first - np.repeat(span_first - self._begins, tails - heads)
        self.nbytes = int(self._ends[-1])

    def cuts(self, chunk_bytes: int) -> list[int]:
        """Return the boundaries between requests: every `chunk_bytes`, and every `CHUNK_RANGES` spans."""
        if self.nbytes <= chunk_bytes and len(self._begins) <= CHUNK_RANGES:
            return [0, self.nbytes]
        by_bytes = np.arange(0, self.nbytes, chunk_bytes)
        edges: list[int] = np.unique(np.concatenate([by_bytes, self._begins[::CHUNK_RANGES], [self.nbytes]])).tolist()
        return edges

    def request(self, first: int, last: int, starts: Sequence[int]) -> ReadRequest:
        """Return the request for bytes [first, last) of the stream; buffer k holds [starts[k], starts[k + 1])."""
        low = int(np.searchsorted(self._ends, first, side="right"))
        high = int(np.searchsorted(self._begins, last, side="left"))
        # The request needs the spans [low, high); it may begin within the first one and end within the last one.
        offsets, sizes = self._arena[low:high].tolist(), self._sizes[low:high].tolist()
        sizes[-1] = min(sizes[-1], last - int(self._begins[high - 1]))
        skipped = max(0, first - int(self._begins[low]))
        offsets[0] += skipped
        sizes[0] -= skipped
        return ReadRequest(
            offsets=offsets,
            sizes=sizes,
            # The part of these bytes that each column's buffer gets.
            places=[
                (number, max(first, begin) - begin, min(last, end) - begin)
                for number, (begin, end) in enumerate(pairwise(starts))
                if max(first, begin) < min(last, end)
            ],
            nbytes=last - first,
        )
