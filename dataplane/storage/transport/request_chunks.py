"""Splitting writes into bounded requests, and the limits of requests: arithmetic only, no sockets.

A request carries at most `CHUNK_BYTES` of payload. A write combines small pieces in one
frame. Each large piece has a separate frame, which is sent without a copy and received in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
                run = piece[added : added + builder.free_bytes]
                yield from builder.add(piece_offset + added, run)
                added += len(run)
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
            self._small = []
            self._small_ranges = 0


def _byte_views(given: Buffer | Sequence[Buffer]) -> Iterable[memoryview]:
    """Return a buffer, or each buffer of a list, as a view of bytes. Empty ones are left out."""
    if isinstance(given, list | tuple):
        return (view for each in given for view in _byte_views(each))
    view = memoryview(cast(memoryview, given))
    return [view.cast("B")] if view.nbytes else []
