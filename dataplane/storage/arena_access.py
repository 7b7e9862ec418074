"""Access of requests to byte ranges of an arena: checks, reads and writes. No sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dataplane.core.inner_slice import InnerSlice
from dataplane.core.row_copy import gather
from dataplane.core.types import MAX_DIMENSIONS
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.arena import Arena
from dataplane.storage.transport.interface import Fill
from dataplane.storage.transport.read_plans import inner_from_pb
from dataplane.storage.transport.request_chunks import MAX_ARENA_BYTES, MAX_REQUEST_BYTES, Bytes

FEW_RANGES = 64
"""Reads of more ranges than this use one vectorised gather."""


class Ranges(NamedTuple):
    """Byte ranges of an arena, which are within its backed bytes. inner: they consist of these parts of elements; None:
    they are contiguous."""

    offsets: list[int]
    sizes: list[int]
    inner: InnerSlice | None


class ArenaAccess:
    """Access to the backed bytes of one arena. Not thread-safe: used by the unit's thread only. `fault` creates the
    error for invalid ranges."""

    def __init__(self, arena: Arena, fault: Callable[[str], Exception]) -> None:
        self._arena = arena
        self._fault = fault

    def ranges(self, request: pb.ReadRanges | pb.WriteRanges) -> Ranges:
        """Return the ranges of a request. Raises the error of `fault` unless all ranges are within the backed bytes and
        have at most `MAX_REQUEST_BYTES` in total. (They are not negative: on the wire they are unsigned.)"""
        inner = inner_from_pb(request) if isinstance(request, pb.ReadRanges) else None
        starts, lengths = list(request.offsets), list(request.sizes)
        if len(starts) != len(lengths):
            raise self._fault(f"{len(starts)} offsets for {len(lengths)} sizes")
        backed = self._arena.backed_bytes
        extents = lengths if inner is None else self._extents(lengths, inner)
        for start, extent in zip(starts, extents, strict=True):
            if start + extent > backed:
                raise self._fault(f"bytes {start} to {start + extent} are outside the {backed} backed bytes")
        if sum(lengths) > MAX_REQUEST_BYTES:
            raise self._fault(
                f"the ranges of one request have {sum(lengths):,} bytes, more than the fixed limit of "
                f"{MAX_REQUEST_BYTES:,}; split it into smaller requests"
            )
        return Ranges(starts, lengths, inner)

    def _extents(self, sizes: list[int], inner: InnerSlice) -> list[int]:
        """Return the bytes from the first to the last selected byte of each range. Raises the error of `fault` if the
        slice is malformed, or a range is not a whole number of parts."""
        numbers = (inner.unit_bytes, *inner.counts, *inner.strides, inner.run)
        if (
            len(inner.counts) != len(inner.strides)
            or len(inner.counts) > MAX_DIMENSIONS
            or max(numbers) > MAX_ARENA_BYTES
            or not 0 < inner.nbytes <= MAX_REQUEST_BYTES
        ):
            raise self._fault(f"malformed slice of elements: {inner}")
        if any(size % inner.nbytes for size in sizes):
            raise self._fault(f"a range is not a multiple of the {inner.nbytes} selected bytes of an element")
        return [(size // inner.nbytes - 1) * inner.unit_bytes + inner.extent if size else 0 for size in sizes]

    def write(self, ranges: Ranges, fill: Fill) -> None:
        """Let `fill` copy a payload into the ranges."""
        fill(self._arena.data.data, ranges.offsets, ranges.sizes)

    def read(self, ranges: Ranges, target: Bytes) -> None:
        """Copy the ranges into `target`, one after another. Its length is the sum of their sizes."""
        offsets, sizes, inner = ranges
        arena = self._arena.data
        if inner is None and len(offsets) > FEW_RANGES:
            starts, lengths = np.array(offsets, np.int64), np.array(sizes, np.int64)
            gather([arena], which=None, offsets=starts, sizes=lengths, out=target)
            return
        position = 0
        for offset, size in zip(offsets, sizes, strict=True):
            part = target[position : position + size]
            if inner is None:
                part[...] = arena[offset : offset + size]
            else:
                inner.copy(arena, offset, size // inner.nbytes, part)
            position += size
