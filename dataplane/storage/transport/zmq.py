"""Payloads as ZMQ frames: sent from where they are, received in place. Both halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import zmq

from dataplane.core.buffer_pool import BufferPool
from dataplane.core.failpoints import hit
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.connection import Wire
from dataplane.storage.transport.interface import ArrivedPayload, Fill, Offer, SentPayload
from dataplane.storage.transport.request_chunks import WriteChunk

REPLY_MEMORY_BYTES = 64 << 20
"""Memory of replies that were sent, kept for the next ones."""


class ClientFrames:
    """The client's half."""

    def send(
        self, wire: Wire, header: pb.BulkRequest, chunk: WriteChunk, *, held: list[zmq.MessageTracker]
    ) -> SentPayload:
        """Not copied. `frame_ranges` tells which frame fills which ranges."""
        header.write.frame_ranges.extend(chunk.frame_ranges)
        wire.send(header, chunk.frames, held=held)
        return SentPayload(call=header.call, chunk=chunk)

    def not_fetched(self, why: str) -> None:
        """Nothing was to be fetched."""

    def ask(self, request: pb.ReadRanges, nbytes: int) -> None:
        """In a frame, if nothing is said."""

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """The frame itself, not copied."""
        return ArrivedPayload(data=wire.payload(nbytes), lasting=True)


class UnitFrames:
    """The unit's half. Frames are taken from the router while its message is the one under way."""

    trial = pb.Memory()

    def __init__(self, router: zmq.Socket[bytes], fault: Callable[[str], Exception]) -> None:
        """`fault`: makes the error for a client whose frames do not fit."""
        self._router = router
        self._fault = fault
        self._memory = BufferPool(REPLY_MEMORY_BYTES)

    def collect(self, write: pb.WriteRanges, later: Callable[[Fill | str], None]) -> Fill | None:
        """Frames are there at once."""
        return partial(self._fill, write.frame_ranges)

    def _fill(self, frame_ranges: Iterable[int], arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
        at = 0
        for count in frame_ranges:
            if count < 1 or at + count > len(offsets):
                raise self._fault("a payload frame fills ranges that were not named")
            if not self._more():
                raise self._fault("a payload frame is missing")
            hit("unit.write.between_frames")
            if count == 1:
                self._receive_one(arena[offsets[at] : offsets[at] + sizes[at]])
            else:
                self._receive_many(arena, offsets[at : at + count], sizes[at : at + count])
            at += count
        if at != len(offsets) or self._more():
            raise self._fault("there are more ranges or payload frames than frame_ranges tells")

    def _more(self) -> bool:
        return bool(self._router.getsockopt(zmq.RCVMORE))

    def _receive_one(self, target: memoryview) -> None:
        """Straight into the arena. A longer frame is cut off by ZMQ at the end of the range."""
        received = self._router.recv_into(target)
        if received != len(target):
            raise self._fault(f"a payload frame has {received} bytes for a range of {len(target)}")

    def _receive_many(self, arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
        frame = self._router.recv(copy=False).buffer
        if len(frame) != sum(sizes):
            raise self._fault(f"a payload frame has {len(frame)} bytes for ranges of {sum(sizes)}")
        scatter(arena, frame, offsets, sizes)

    def offer(self, session: int, nbytes: int) -> Offer:
        """Warm memory, sent without copying."""
        return Offer(data=self._memory.take(max(1, nbytes))[:nbytes])

    def settle(self, session: int, tag: bytes) -> bool:
        """Frames are nobody's memory."""
        return False

    def forget(self, session: int) -> None:
        """Nothing is kept of a session."""

    def step(self) -> float | None:
        """Nothing is ever under way."""
        return None

    def close(self) -> None:
        """Memory goes when nothing refers to it."""


def scatter(arena: memoryview, payload: memoryview, offsets: list[int], sizes: list[int]) -> None:
    """Copy the payload, which has their bytes, into the ranges one after another."""
    at = 0
    for offset, size in zip(offsets, sizes, strict=True):
        arena[offset : offset + size] = payload[at : at + size]
        at += size
