"""Payloads as ZMQ frames, sent without a copy and received in place. Client half and unit half."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import zmq

from dataplane.core.buffer_pool import BufferPool
from dataplane.core.failpoints import failpoint
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.connection import Wire
from dataplane.storage.transport.interface import ArrivedPayload, Fill, Offer, SentPayload
from dataplane.storage.transport.request_chunks import WriteChunk

REPLY_MEMORY_BYTES = 64 << 20
"""Maximum memory of sent replies that is kept for reuse."""


class ClientFrames:
    """The client half."""

    def send(
        self, wire: Wire, header: pb.BulkRequest, chunk: WriteChunk, *, held: list[zmq.MessageTracker]
    ) -> SentPayload:
        """Send the frames without a copy. `frame_ranges` assigns ranges to frames."""
        header.write.frame_ranges.extend(chunk.frame_ranges)
        wire.send(header, chunk.frames, held=held)
        return SentPayload(call=header.call, chunk=chunk)

    def not_fetched(self, why: str) -> None:
        """No-op: the unit fetches no payload sent in frames."""

    def set_fetch(self, request: pb.ReadRanges, nbytes: int) -> None:
        """No-op: the unit returns the payload in a frame by default."""

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """Return the frame itself, without a copy."""
        return ArrivedPayload(data=wire.payload(nbytes), lasting=True)


class UnitFrames:
    """The unit half, used by the thread of the bulk server. It receives the payload frames of the message that the
    router is currently receiving. No payload is fetched, so it does not implement `UnitPayloads`."""

    def __init__(self, router: zmq.Socket[bytes], fault: Callable[[str], Exception]) -> None:
        """`fault`: creates the error for a client whose frames do not match its ranges."""
        self._router = router
        self._fault = fault
        self._memory = BufferPool(REPLY_MEMORY_BYTES)

    def collect(self, write: pb.WriteRanges) -> Fill:
        """Return the payload; its frames have always arrived."""
        return partial(self._fill, write.frame_ranges)

    def _fill(self, frame_ranges: Iterable[int], arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
        """Receive the payload frames of a write into their ranges. frame_ranges: the number of ranges of each frame."""
        first = 0  # the frame's first range
        for count in frame_ranges:
            if count < 1 or first + count > len(offsets):
                raise self._fault("a payload frame refers to ranges that are not in the request")
            if not self.more():
                raise self._fault("a payload frame is missing")
            failpoint("unit.write.between_frames")
            if count == 1:
                self._receive_one(arena[offsets[first] : offsets[first] + sizes[first]])
            else:
                self._receive_many(arena, offsets[first : first + count], sizes[first : first + count])
            first += count
        if first != len(offsets) or self.more():
            raise self._fault("the request has more ranges or payload frames than frame_ranges lists")

    def more(self) -> bool:
        """Whether the current message has further frames. (The attribute `rcvmore` costs three times as much.)"""
        return bool(self._router.getsockopt(zmq.RCVMORE))

    def drop(self) -> None:
        """Receive the remaining frames of the current message, and ignore them."""
        while self.more():
            self._router.recv(copy=False)

    def _receive_one(self, target: memoryview) -> None:
        """Receive a frame directly into the arena. ZMQ truncates a longer frame at the end of the range."""
        received = self._router.recv_into(target)
        if received != len(target):
            raise self._fault(f"a payload frame has {received} bytes for a range of {len(target)} bytes")

    def _receive_many(self, arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
        """Receive one frame and copy it into several ranges."""
        frame = self._router.recv(copy=False).buffer
        if len(frame) != sum(sizes):
            raise self._fault(f"a payload frame has {len(frame)} bytes for ranges of {sum(sizes)} bytes")
        scatter(arena, frame, offsets, sizes)

    def offer(self, nbytes: int) -> Offer:
        """Return memory from the buffer pool; it is sent without a copy."""
        return Offer(data=self._memory.take(max(1, nbytes))[:nbytes])  # `take` requires a byte


def scatter(arena: memoryview, payload: memoryview, offsets: list[int], sizes: list[int]) -> None:
    """Copy the payload into the ranges, one after another. Its length is the sum of `sizes`."""
    position = 0
    for offset, size in zip(offsets, sizes, strict=True):
        arena[offset : offset + size] = payload[position : position + size]
        position += size
