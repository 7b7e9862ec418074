"""The seam between the bulk protocol and how its payloads travel: in ZMQ frames (`in_frames`), or fetched by transfer
engine (`by_engine`).

Requests and replies are the same on both, on ZMQ sockets, and so is everything that decides: sessions, epochs, fences,
stopped puts, bounds, windows, deadlines. The client's half and the unit's are apart; each is used by one connection, or
one unit, and either end may send any payload in frames instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.connection import Wire
from dataplane.storage.transport.request_chunks import Bytes, WriteChunk


def nothing() -> None:
    """There is nothing to give back."""


@dataclass(frozen=True, kw_only=True)
class SentPayload:
    """A write request under way. `done` is to be called once, when it was answered or its call has failed."""

    call: int
    chunk: WriteChunk
    done: Callable[[], None] = nothing


@dataclass(frozen=True, kw_only=True)
class ArrivedPayload:
    """The payload of a read.

    data: None: it is to be asked for again, in frames. lasting: the bytes stay for as long as anything refers to them;
    else only until `done` is called, which is to be done once. settle: what is to be told to the unit, whose answer
    says that the bytes are whole.
    """

    data: Bytes | None
    lasting: bool = False
    settle: pb.Settle | None = None
    done: Callable[[], None] = nothing


class ClientPayloads(Protocol):
    """The client's half, of one connection. Thread-safe."""

    def send(
        self, wire: Wire, header: pb.BulkRequest, chunk: WriteChunk, *, held: list[zmq.MessageTracker]
    ) -> SentPayload:
        """Queue the write request that `header` is, with its payload. `held` and errors as in `Wire.send`."""

    def not_fetched(self, why: str) -> None:
        """The unit did not get at a payload."""

    def ask(self, request: pb.ReadRanges, nbytes: int) -> None:
        """Say in the request how its payload of `nbytes` may come."""

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """The payload of the reply just received. Blocks for a bounded time; errors as in `Wire.payload`."""


class ClientTransport(Protocol):
    """What a client's connections have in common. Thread-safe."""

    def to(self, unit: pb.Memory, endpoint: str, *, closing: Callable[[], bool]) -> ClientPayloads:
        """The half of the connection to a unit that answers at `endpoint` and may be tried by `unit`. closing: whether
        the connection's calls are to end."""

    def close(self) -> None:
        """When no connection uses it any more. Idempotent."""


Fill = Callable[[memoryview, list[int], list[int]], None]
"""Puts a payload that the unit has into ranges (arena, offsets, sizes), once."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Memory for the payload of a reply. source: where the client is to fetch it; None: it is sent as a frame."""

    data: Bytes
    source: pb.Memory | None = None


class UnitPayloads(Protocol):
    """The unit's half, of one bulk server, used by its thread alone. trial: what clients may fetch to find out whether
    they can."""

    trial: pb.Memory

    def collect(self, write: pb.WriteRanges, later: Callable[[Fill | str], None]) -> Fill | None:
        """The payload of a write. None: it has to be fetched first; then `step` calls `later`, with why if that fails.
        Raises StorageUnitError."""

    def offer(self, session: int, nbytes: int) -> Offer | None:
        """Memory for a payload that a session is to get; None: there is none now."""

    def settle(self, session: int, tag: bytes) -> bool:
        """The session is done with what it was offered; whether that was still there."""

    def forget(self, session: int) -> None:
        """The session is fenced: what it was offered is no longer for it."""

    def step(self) -> float | None:
        """Go on with what is under way; in how many seconds to do so again, None: when there is more."""

    def close(self) -> None:
        """Touch no memory any more."""
