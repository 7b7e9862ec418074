"""The interface between the bulk protocol and its payload transports: ZMQ frames (`zmq`), or fetches by the transfer
engine (`mooncake.engine_transport`).

Requests and replies always use ZMQ sockets. The checks of sessions, epochs, fences, aborted puts, bounds, windows and
deadlines are the same for every transport. A transport has a client half, used by one connection, and a unit half, used
by one unit. Either end may send any payload in frames instead.
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
    """Release nothing; the default of `done`."""


@dataclass(frozen=True, kw_only=True)
class SentPayload:
    """A write request in flight. Call `done` once, when the request is answered or its call has failed."""

    call: int
    chunk: WriteChunk
    done: Callable[[], None] = nothing


@dataclass(frozen=True, kw_only=True)
class ArrivedPayload:
    """The payload of a read.

    data: None: the payload did not arrive; request it again, in frames. lasting: the bytes are valid as long as a
    reference to them exists; otherwise only until `done` is called. Call `done` once. settle: a request to send to the
    unit; its reply confirms that the bytes are intact.
    """

    data: Bytes | None
    lasting: bool = False
    settle: pb.Settle | None = None
    done: Callable[[], None] = nothing


class ClientPayloads(Protocol):
    """The client half of a transport, for one connection. Thread-safe."""

    def send(
        self, wire: Wire, header: pb.BulkRequest, chunk: WriteChunk, *, held: list[zmq.MessageTracker]
    ) -> SentPayload:
        """Queue the write request `header` with its payload. `held` and errors as in `Wire.send`."""

    def not_fetched(self, why: str) -> None:
        """Handle the unit's report that it could not fetch a payload."""

    def set_fetch(self, request: pb.ReadRanges, nbytes: int) -> None:
        """Set in the request how its payload of `nbytes` may be returned."""

    def receive(self, wire: Wire, reply: pb.BulkReply, nbytes: int) -> ArrivedPayload:
        """Return the payload of the reply just received. Blocks for a bounded time; errors as in `Wire.payload`."""


class ClientTransport(Protocol):
    """The state that a client's connections share. Thread-safe."""

    def payloads_for(self, unit: pb.Memory, endpoint: str, *, closing: Callable[[], bool]) -> ClientPayloads:
        """Return the client half for the connection to the unit at `endpoint`. unit: memory to fetch in order to test
        whether the unit is reachable. closing: returns whether the connection is closing, so its calls must end."""

    def close(self) -> None:
        """Release the transport. Call it after the last connection is closed. Idempotent."""


Fill = Callable[[memoryview, list[int], list[int]], None]
"""Copies a payload that has arrived at the unit into ranges (arena, offsets, sizes). Callable once."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Memory for the payload of a reply. source: where the client fetches it; None: it is sent as a frame."""

    data: Bytes
    source: pb.Memory | None = None


class UnitPayloads(Protocol):
    """The unit half of a transport, for one bulk server; used by its thread only. trial: memory that clients fetch to
    test whether the unit is reachable."""

    trial: pb.Memory

    def collect(self, write: pb.WriteRanges, on_fetched: Callable[[Fill | str], None]) -> Fill | None:
        """Return the payload of a write. None: it has to be fetched first; `step` then calls `on_fetched` with the
        payload, or with the reason of a failure. Raises StorageUnitError."""

    def offer(self, session: int, nbytes: int) -> Offer | None:
        """Return memory for a payload that a session will fetch; None if no memory is free."""

    def settle(self, session: int, tag: bytes) -> bool:
        """Release a payload that the session has fetched. Return whether the payload was intact until now."""

    def forget(self, session: int) -> None:
        """Release the payloads offered to a session that was fenced."""

    def step(self) -> float | None:
        """Advance the transfers in flight. Return the seconds until the next step, None if no transfer is in flight."""

    def close(self) -> None:
        """Stop accessing memory."""
