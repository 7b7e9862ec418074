"""Splitting reads into bounded requests, and the layout of their results: arithmetic only, no sockets.

A request returns at most `READ_BYTES` of payload.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dataplane.core.inner_slice import InnerSlice
from dataplane.errors import InvalidRequestError
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.request_chunks import CHUNK_RANGES, MAX_ARENA_BYTES, READ_BYTES, Bytes, Int32s, Int64s


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """One read request. The ranges (`offsets`, `sizes`) of the arena, concatenated, have `nbytes`. They fill the bytes
    [first, last) of each entry (buffer, first, last) of `targets` in turn. inner: as in `ReadRanges`."""

    offsets: list[int]
    sizes: list[int]
    targets: list[tuple[int, int, int]]
    nbytes: int
    inner: InnerSlice | None = None


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
    targets = stream.packed - np.repeat(starts[:-1], counts)
    if order is not None:  # back to the order of the call
        sorted_positions, targets = targets, np.empty_like(targets)
        targets[order] = sorted_positions
    return ReadPlan(
        requests=[stream.request(begin, end, starts) for begin, end in pairwise(stream.cuts(chunk_bytes))],
        buffers=[end - begin for begin, end in pairwise(starts)],
        which=which,
        offsets=targets,
    )


def plan_slices(offsets: Int64s, elements: Int64s, inner: InnerSlice, *, within: int) -> ReadPlan:
    """Return the requests that read the part `inner` of each of the `elements[i]` elements that begin at `offsets[i]`.
    The result is one buffer with the parts in this order. `within` and errors as in `plan_read`."""
    longest = int(elements.max()) * inner.unit_bytes if len(elements) else 0  # exact: the products may overflow int64
    if longest > within:
        raise _outside(within)
    _require_within(offsets, elements * inner.unit_bytes, within)
    count = len(offsets)
    ends = np.cumsum(elements * inner.nbytes)
    starts = ends - elements * inner.nbytes
    requests: list[ReadRequest] = []
    nbytes = int(ends[-1]) if count else 0
    if nbytes:
        offsets, elements, inner = _divisible(offsets, elements, inner)
        first = 0  # byte of the buffer that the next request fills
        for ranges in _cut(offsets, elements, max(1, READ_BYTES // inner.nbytes)):
            sizes = [count * inner.nbytes for _, count, _ in ranges]
            begins = [offset + number * inner.unit_bytes + inner.first for offset, _, number in ranges]
            last = first + sum(sizes)
            requests.append(
                ReadRequest(offsets=begins, sizes=sizes, targets=[(0, first, last)], nbytes=last - first, inner=inner)
            )
            first = last
    return ReadPlan(requests=requests, buffers=[nbytes], which=np.zeros(count, np.int32), offsets=starts)


def _divisible(offsets: Int64s, elements: Int64s, inner: InnerSlice) -> tuple[Int64s, Int64s, InnerSlice]:
    """Return the same bytes, in the same order, as parts of smaller elements, until one part fits into a request."""
    while inner.nbytes > READ_BYTES:
        # Each element becomes a range of its own: the steps of its outermost dimension, or the bytes of its only run.
        count, stride = (inner.counts[0], inner.strides[0]) if inner.counts else (inner.run, 1)
        numbers = np.arange(int(elements.sum())) - np.repeat(np.cumsum(elements) - elements, elements)
        offsets = np.repeat(offsets, elements) + numbers * inner.unit_bytes + inner.first
        elements = np.full(len(offsets), count)
        rest = (inner.counts[1:], inner.strides[1:], inner.run) if inner.counts else ((), (), 1)
        inner = InnerSlice(stride, 0, *rest)
    return offsets, elements, inner


def _cut(offsets: Int64s, elements: Int64s, most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the ranges of each request: up to `most` elements of up to `CHUNK_RANGES` ranges. A range is (offset of
    the first element of its row, count of its elements, number of its first element in the row)."""
    ranges: list[tuple[int, int, int]] = []
    free = most
    for offset, count in zip(offsets.tolist(), elements.tolist(), strict=True):
        done = 0
        while done < count:
            taken = min(free, count - done)
            ranges.append((offset, taken, done))
            done += taken
            free -= taken
            if not free or len(ranges) == CHUNK_RANGES:
                yield ranges
                ranges = []
                free = most
    if ranges:
        yield ranges


def _require_within(offsets: Int64s, sizes: Int64s, limit: int) -> None:
    """Raise InvalidRequestError for a negative offset or size, and for a range that ends after byte `limit`."""
    # Offsets and sizes are checked separately first, because their sums may overflow. a | b is negative if a or b is.
    if len(offsets) and (
        np.minimum.reduce(offsets | sizes) < 0
        or max(np.maximum.reduce(offsets), np.maximum.reduce(sizes)) > limit
        or np.maximum.reduce(offsets + sizes) > limit
    ):
        raise _outside(limit)


def _outside(limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"a range lies outside the {limit:,} bytes of the storage unit")


def _plan_nonempty(offsets: Int64s, sizes: Int64s, counts: Sequence[int], which: Int32s, chunk_bytes: int) -> ReadPlan:
    """Return the plan of a read with empty ranges. These are at byte 0 of their buffers. `counts` and `which`: the
    number of ranges of each column, and the column of each range."""
    filled = sizes > 0
    filled_counts = np.bincount(which[filled], minlength=len(counts)).tolist()  # of each column
    plan = plan_read(offsets[filled], sizes[filled], columns=filled_counts, chunk_bytes=chunk_bytes)
    targets = np.zeros(len(offsets), np.int64)
    targets[filled] = plan.offsets
    return ReadPlan(requests=plan.requests, buffers=plan.buffers, which=which, offsets=targets)


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
        offsets = self._arena[low:high].tolist()
        sizes = self._sizes[low:high].tolist()
        sizes[-1] = min(sizes[-1], last - int(self._begins[high - 1]))
        skipped = max(0, first - int(self._begins[low]))
        offsets[0] += skipped
        sizes[0] -= skipped
        return ReadRequest(
            offsets=offsets,
            sizes=sizes,
            # The part of these bytes that each column's buffer gets.
            targets=[
                (number, max(first, begin) - begin, min(last, end) - begin)
                for number, (begin, end) in enumerate(pairwise(starts))
                if max(first, begin) < min(last, end)
            ],
            nbytes=last - first,
        )


@dataclass(frozen=True, kw_only=True)
class Received:
    """The result of a read. Range i of the call is contiguous in `buffers[which[i]]` from byte `offsets[i]`.

    Each column has one buffer. The buffer holds the column's ranges in address order, without gaps; bytes shared by
    several ranges are stored once. shared: the buffers are slices of one ZMQ frame, their alignment is arbitrary, and
    each of them keeps the whole frame in memory. Otherwise the caller owns the buffers, aligned to 16 bytes.
    """

    buffers: list[Bytes]
    which: Int32s
    offsets: Int64s
    shared: bool

    def range(self, number: int, nbytes: int) -> Bytes:
        """Return the first `nbytes` of range `number`, without a copy."""
        offset = int(self.offsets[number])
        return self.buffers[int(self.which[number])][offset : offset + nbytes] if nbytes else np.empty(0, np.uint8)


def inner_to_pb(inner: InnerSlice) -> pb.InnerSlice:
    """Convert a slice whose ranges begin at their first selected byte."""
    return pb.InnerSlice(unit_bytes=inner.unit_bytes, counts=inner.counts, strides=inner.strides, run=inner.run)


def inner_from_pb(read: pb.ReadRanges) -> InnerSlice | None:
    """Return the slice of a request, which is not validated."""
    if not read.HasField("inner"):
        return None
    inner = read.inner
    return InnerSlice(inner.unit_bytes, 0, tuple(inner.counts), tuple(inner.strides), inner.run)
