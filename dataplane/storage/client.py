"""A client's connection to one storage unit: the handshake, which selects shared memory or ZMQ, and the ZMQ calls."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from dataplane.core.addresses import boot_id
from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.core.failpoints import failpoint
from dataplane.core.in_flight import InFlight
from dataplane.core.inner_slice import InnerSlice
from dataplane.core.zmq_io import Waker
from dataplane.errors import CallTimeoutError, ClientClosedError, InvalidRequestError, StorageUnitError
from dataplane.ledger.commands import UnitInfo
from dataplane.protocol.auth import Ticket
from dataplane.protocol.fd_limits import enough_for
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.endpoints import candidates
from dataplane.storage.mapped_arena import MappedArena
from dataplane.storage.session_lock import SessionLock
from dataplane.storage.transport.connection import Wire, WireLostError, WireSilentError
from dataplane.storage.transport.interface import ArrivedPayload, ClientPayloads, ClientTransport, SentPayload
from dataplane.storage.transport.read_plans import ReadPlan, ReadRequest, Received, inner_to_pb, plan_read, plan_slices
from dataplane.storage.transport.request_chunks import Buffer, Bytes, WriteChunk, plan_write
from dataplane.storage.transport.zmq import ClientFrames

log = logging.getLogger(__name__)

WINDOW = 4
"""Write requests of one call in flight; each end queues up to WINDOW * CHUNK_BYTES for each calling thread."""
READ_WINDOW = 2
"""Read requests of one call in flight; each end queues up to READ_WINDOW * READ_BYTES for each calling thread."""
IDLE_WIRES = 8
"""Maximum number of idle sockets that are kept for later calls."""
CLOSE_WAIT_S = 30.0
LET_GO_S = 10.0  # after each such wait for a buffer, an error is logged


class _PendingRead(NamedTuple):
    """A request of a read in flight, with its id at the unit. request: None for a Settle."""

    call: int
    request: ReadRequest | None


class UnitConnection:
    """A connection to one storage unit. Thread-safe.

    The constructor sets `local` to whether `arena` may be used. `write` and `read` always use sockets, one for each
    call in flight. Each call also holds a lock of its own (`call`), by which `close` waits for it (see `InFlight`).

    token: the service's secret; the connection presents the ticket derived from it for the unit's epoch.
    lock: the session's lock, acquired before the session was opened. With None or force_remote, `local` is False.
    context: the ZMQ context to use; `close` leaves it open. By default the connection creates a context.
    memory: the pool from which reads take their buffers; by default each read allocates new memory.
    transport: the payload transport to use instead of ZMQ frames, if the unit supports it.

    The constructor waits up to `timeout_s` for each reply, at one endpoint after another. It raises StorageUnitError
    (no endpoint answers), CallTimeoutError, AuthenticationError, ProtocolVersionError, ServiceRestartedError (the unit
    has another epoch) and SessionExpiredError (this session is fenced).
    """

    def __init__(
        self,
        info: UnitInfo,
        *,
        session: int,
        lock: SessionLock | None = None,
        token: str | None = None,
        force_remote: bool = False,
        timeout_s: float = 10.0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        memory: BufferPool | None = None,
        transport: ClientTransport | None = None,
    ) -> None:
        self.info = info
        self.local = False
        self.arena: MappedArena | None = None
        self._session = session
        self._ticket = Ticket.of(token, info.arena_path, info.epoch)
        self._owner = os.getpid()
        self._memory = BufferPool(0) if memory is None else memory
        self._context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._transport = transport
        self._frames = ClientFrames()  # for payloads that `_payloads` could not transfer, too
        self._payloads: ClientPayloads = self._frames  # the selected transport
        self._idle: list[Wire] = []  # sockets without a call, kept for later calls
        self._guard = threading.Lock()  # of `_idle`, `_wires` and `_closed`
        self._in_flight = InFlight()
        self._closing = threading.RLock()
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()  # all sockets, also those of calls in flight
        self._closed = False
        self._endpoint = info.endpoints[-1] if info.endpoints else "nowhere"  # until `_connect` selects one
        with enough_for(self._endpoint):
            self._wake = Waker()  # its `fd` is readable once calls must end
        try:
            self._connect(None if force_remote else lock, timeout_s)
        except BaseException:
            self.close()
            raise

    # --- handshake ----------------------------------------------------------------------------------------------

    def _connect(self, lock: SessionLock | None, timeout_s: float) -> None:
        """Try the endpoints in order until a handshake succeeds. Stay remote without a lock or on another host."""
        own_boot_id = boot_id()
        same_host = own_boot_id == self.info.host  # `host` is the boot id of the machine of the unit
        endpoints = candidates(self.info.endpoints, same_host=same_host)
        if not endpoints:
            raise self._unreachable("this process can reach none of its endpoints; start the unit with a --host for it")
        attach = pb.Attach(lock_path=str(lock.path) if lock and same_host else "", boot_id=own_boot_id)
        for number, endpoint in enumerate(endpoints, 1):
            self._endpoint = endpoint
            try:
                self._handshake(attach, timeout_s)
                return
            except (StorageUnitError, CallTimeoutError):
                if number == len(endpoints):
                    raise
                log.info("Storage unit %d does not answer at %s; trying its next endpoint", self.info.unit, endpoint)

    def _handshake(self, attach: pb.Attach, timeout_s: float) -> None:
        """Attach the session, `_prove` the mapping of the arena if the unit asks, and select the payload transport."""
        with (call := threading.Lock()), self._wire("attach", timeout_s, call) as wire:
            header = self._new_header(wire)
            header.attach.CopyFrom(attach)
            wire.send(header, held=[])
            challenge = wire.receive(header.call, time.monotonic() + timeout_s).challenge
            if challenge.local:
                self._prove(wire, challenge, timeout_s)
            elif attach.lock_path:
                log.info("Session %d uses storage unit %d remotely: %s", self._session, self.info.unit, challenge.why)
        # A local session does not send its payloads.
        if self._transport is not None and challenge.HasField("engine") and not self.local:
            engine, closing = challenge.engine, lambda: self._closed
            self._payloads = self._transport.payloads_for(engine, self._endpoint, closing=closing)

    def _prove(self, wire: Wire, challenge: pb.Challenge, timeout_s: float) -> None:
        """Map the arena and prove it to the unit. If it cannot be mapped or the unit rejects the proof, stay remote."""
        try:
            arena = MappedArena.open(challenge.arena_path, cookie=challenge.cookie)
        except (OSError, ValueError) as error:
            log.info("Session %d uses storage unit %d remotely: %s", self._session, self.info.unit, error)
            return
        header = self._new_header(wire)
        header.proof.seen = arena.header(challenge.offset, challenge.length)
        failpoint("attach.before_proof")
        wire.send(header, held=[])
        try:
            wire.receive(header.call, time.monotonic() + timeout_s)
        except InvalidRequestError as error:
            log.warning("Session %d uses storage unit %d remotely: %s", self._session, self.info.unit, error)
            arena.close()
            return
        failpoint("attach.proven")
        self.arena = arena
        self.local = True

    # --- the remote connection ----------------------------------------------------------------------------------------

    def write(
        self,
        offsets: Sequence[int],
        buffers: Sequence[Buffer | Sequence[Buffer]],
        *,
        reservation: int,
        timeout_s: float,
    ) -> None:
        """Write `buffers[k]` (one C-contiguous buffer, or a list of consecutive ones) at `offsets[k]` of the arena.

        reservation: the id of the Allocate call that reserved the space.

        Returns when the unit has stored all bytes. Large buffers are sent without a copy; when the call returns or
        raises, ZMQ no longer refers to them. `timeout_s` is the longest wait for each reply of the unit. Raises
        CallTimeoutError, StorageUnitError, SessionExpiredError, ServiceRestartedError, ClientClosedError. After any
        error the unit may still execute requests that were sent: do not free the space before `stop_put` returns.
        """
        held: list[zmq.MessageTracker] = []  # of the frames that ZMQ may still refer to
        waiting: deque[SentPayload] = deque()  # the requests without a reply, oldest first
        try:
            with (call := threading.Lock()), self._wire("write", timeout_s, call) as wire:
                for chunk in plan_write(offsets, buffers):
                    while len(waiting) >= WINDOW:  # a reply may add a request
                        self._receive_written(wire, waiting, reservation, held, timeout_s)
                    waiting.append(self._send_write(wire, chunk, reservation, held, self._payloads))
                while waiting:
                    self._receive_written(wire, waiting, reservation, held, timeout_s)
        except BaseException as error:
            # ZMQ releases frames that an interrupt kept from being sent only when nothing refers to them.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            while waiting:
                waiting.popleft().done()
            _wait_until_released(held)

    def _send_write(
        self,
        wire: Wire,
        chunk: WriteChunk,
        reservation: int,
        held: list[zmq.MessageTracker],
        payloads: ClientPayloads,
    ) -> SentPayload:
        """Send a write request, with its payload by the transport `payloads`. `held` as in `Wire.send`."""
        header = self._new_header(wire)
        header.write.offsets.extend(chunk.offsets)
        header.write.sizes.extend(chunk.sizes)
        header.write.reservation = reservation
        return payloads.send(wire, header, chunk, held=held)

    def _receive_written(
        self,
        wire: Wire,
        waiting: deque[SentPayload],
        reservation: int,
        held: list[zmq.MessageTracker],
        timeout_s: float,
    ) -> None:
        """Wait for the reply to the oldest of the `waiting` requests. If the unit could not fetch its payload, send it
        again in frames, as the newest request."""
        reply = wire.receive(waiting[0].call, time.monotonic() + timeout_s)
        sent = waiting.popleft()  # after the wait, in which `write` would release it on an error
        sent.done()
        if reply.WhichOneof("outcome") == "not_fetched":
            self._payloads.not_fetched(reply.not_fetched.why)
            waiting.append(self._send_write(wire, sent.chunk, reservation, held, self._frames))

    def stop_put(self, reservation: int, timeout_s: float) -> None:
        """Abort a put whose `write` failed. After this returns, the unit rejects every write of the reservation,
        requests in flight included. Uses another socket than the failed write, whose socket is closed.

        Raises the errors of `write`, CallTimeoutError after `timeout_s`. After an error the put may or may not be
        aborted.
        """
        with (call := threading.Lock()), self._wire("abort of a put", timeout_s, call) as wire:
            header = self._new_header(wire)
            header.stop.reservation = reservation
            wire.send(header, held=[])
            reply = wire.receive(header.call, time.monotonic() + timeout_s)
            if reply.WhichOneof("outcome") != "stopped":
                raise WireLostError(f"the unit replied {reply.WhichOneof('outcome')}, expected stopped")

    def read(
        self,
        offsets: npt.ArrayLike | Sequence[int],
        sizes: npt.ArrayLike | Sequence[int],
        *,
        columns: Sequence[int] | None = None,
        timeout_s: float,
    ) -> Received:
        """Read each range [offsets[i], offsets[i] + sizes[i]) of the arena; each arrives contiguous.

        columns: the number of ranges of column 0, 1, ...; each column has a separate buffer. Ranges may touch,
        overlap or repeat; within a column, shared bytes are transferred once. `timeout_s` and errors as in `write`.
        """
        within = self.info.capacity_bytes
        plan = plan_read(np.asarray(offsets, np.int64), np.asarray(sizes, np.int64), within=within, columns=columns)
        return self._execute_plan(plan, timeout_s)

    def read_slices(
        self,
        offsets: npt.NDArray[np.int64],
        elements: npt.NDArray[np.int64],
        inner: InnerSlice,
        *,
        timeout_s: float,
    ) -> Received:
        """Read the part `inner` of each of the `elements[i]` elements that begin at byte `offsets[i]` of the arena.
        Only these bytes are transferred, into one buffer, in this order. `timeout_s` and errors as in `write`."""
        return self._execute_plan(plan_slices(offsets, elements, inner, within=self.info.capacity_bytes), timeout_s)

    def _execute_plan(self, plan: ReadPlan, timeout_s: float) -> Received:
        """Make the requests of a plan, several at a time."""
        if len(plan.requests) == 1:
            return self._read_whole(plan, timeout_s)  # saves the copy out of the frame
        buffers = [self._buffer(nbytes) for nbytes in plan.buffers]
        with (call := threading.Lock()), self._wire("read", timeout_s, call) as wire:
            pending: deque[_PendingRead] = deque()
            for request in plan.requests:
                # A loop, because a reply may make another request necessary, which joins `pending`.
                while len(pending) >= READ_WINDOW:
                    self._copy_payload(wire, pending, buffers, timeout_s)
                pending.append(self._send_read(wire, request, self._payloads))
            while pending:
                self._copy_payload(wire, pending, buffers, timeout_s)
        return Received(buffers=buffers, which=plan.which, offsets=plan.offsets, shared=False)

    def _read_whole(self, plan: ReadPlan, timeout_s: float) -> Received:
        """Execute a read of a single request, without a copy if its payload arrives in a frame."""
        (request,) = plan.requests
        with (call := threading.Lock()), self._wire("read", timeout_s, call) as wire:
            pending = deque([self._send_read(wire, request, self._payloads)])
            frame: Bytes | None = None
            while pending:
                arrived = self._next_payload(wire, pending, timeout_s)
                if arrived is not None:  # None: see `_next_payload`
                    frame = self._copied_if_temporary(arrived)
        assert frame is not None
        edges = [0, *itertools.accumulate(plan.buffers)]
        buffers = [frame[first:last] for first, last in itertools.pairwise(edges)]
        return Received(buffers=buffers, which=plan.which, offsets=plan.offsets, shared=True)

    def _send_read(self, wire: Wire, request: ReadRequest, payloads: ClientPayloads) -> _PendingRead:
        """Send a read request whose payload may be returned by the transport `payloads`."""
        header = self._new_header(wire)
        header.read.offsets.extend(request.offsets)
        header.read.sizes.extend(request.sizes)
        if request.inner is not None:
            header.read.inner.CopyFrom(inner_to_pb(request.inner))
        payloads.set_fetch(header.read, request.nbytes)
        wire.send(header, held=[])
        return _PendingRead(header.call, request)

    def _next_payload(self, wire: Wire, pending: deque[_PendingRead], timeout_s: float) -> ArrivedPayload | None:
        """Receive the reply to the oldest request of `pending` and return its payload. Send the Settle of the
        payload, if it has one; it joins `pending`. Return None for the reply to a Settle, and for a payload that could
        not be fetched; this one is requested again in frames, as the newest request."""
        call, request = pending.popleft()
        reply = wire.receive(call, time.monotonic() + timeout_s)
        if request is None:
            return None
        arrived = self._receive_payload(wire, reply, request)
        try:
            if arrived.settle is not None:  # also for a payload that was not fetched, to release its slot
                header = self._new_header(wire)
                header.settle.CopyFrom(arrived.settle)
                wire.send(header, held=[])
                pending.append(_PendingRead(header.call, request=None))
            if arrived.data is None:
                pending.append(self._send_read(wire, request, self._frames))
        except BaseException:
            arrived.done()
            raise
        if arrived.data is None:
            arrived.done()
            return None
        return arrived

    def _receive_payload(self, wire: Wire, reply: pb.BulkReply, request: ReadRequest) -> ArrivedPayload:
        return self._payloads.receive(wire, reply, request.nbytes)

    def _copy_payload(self, wire: Wire, pending: deque[_PendingRead], buffers: list[Bytes], timeout_s: float) -> None:
        """Receive the payload of the oldest request and copy it from its frame or slot into `buffers`."""
        request = pending[0].request
        arrived = self._next_payload(wire, pending, timeout_s)
        if arrived is None or arrived.data is None or request is None:
            return  # a reply to a Settle, or a payload that is requested again
        try:
            position = 0
            for number, first, last in request.targets:
                buffers[number][first:last] = arrived.data[position : position + last - first]
                position += last - first
        finally:
            arrived.done()

    def _copied_if_temporary(self, arrived: ArrivedPayload) -> Bytes | None:
        """Return the payload, as a copy if its memory is valid only until `done`, which is then called."""
        if arrived.lasting or arrived.data is None:
            return arrived.data
        try:
            copy = self._buffer(len(arrived.data))
            copy[...] = arrived.data
            return copy
        finally:
            arrived.done()

    def _buffer(self, nbytes: int) -> Bytes:
        return self._memory.take(nbytes) if nbytes >= FROM_BYTES else np.empty(nbytes, np.uint8)

    def _new_header(self, wire: Wire) -> pb.BulkRequest:
        return wire.request(session=self._session, epoch=self.info.epoch)

    # --- sockets ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _wire(self, what: str, timeout_s: float, call: threading.Lock) -> Iterator[Wire]:
        """Yield a socket for one call. It is kept for later calls if the call succeeds, otherwise closed. call: the
        lock that the caller holds (see `InFlight`). what, timeout_s: the call's name and timeout, for its errors."""
        if os.getpid() != self._owner:
            raise ClientClosedError(why="it was created before fork(); create one in the child process")
        if not self._in_flight.enter(call):
            raise ClientClosedError
        wire: Wire | None = None
        try:
            wire = self._borrow()
            yield wire
            sound, wire = wire, None  # the call succeeded; `finally` closes other sockets
            self._give_back(sound)
        except WireLostError as error:
            raise self._unreachable(f"{what}: {error}") from error
        except WireSilentError as error:
            peer = f"storage unit {self.info.unit} at {self._endpoint}"
            raise CallTimeoutError(what=f"{what} of rows", waited_s=timeout_s, peer=peer) from error
        finally:
            if wire is not None:
                wire.close()
            self._in_flight.leave(call)

    def _borrow(self) -> Wire:
        """Return an idle socket that is still connected, or open a new one."""
        while True:
            with self._guard:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                curve_key = self.info.curve_key
                with enough_for(self._endpoint):
                    wire = Wire(
                        self._context, self._endpoint, wake=self._wake.fd, ticket=self._ticket, curve_key=curve_key
                    )
                with self._guard:
                    self._wires.add(wire)
                return wire
            if wire.idle_and_sound:
                return wire
            wire.close()

    def _give_back(self, wire: Wire) -> None:
        """Keep a socket for later calls, or close it if enough are idle or `close` was called."""
        with self._guard:
            if not self._closed and len(self._idle) < IDLE_WIRES:
                self._idle.append(wire)
                return
        wire.close()

    def _unreachable(self, why: str) -> StorageUnitError:
        return StorageUnitError(unit=self.info.unit, endpoint=self._endpoint, why=why)

    def close(self) -> None:
        """Reject new calls, end calls in flight with ClientClosedError, close the sockets, and release the arena's
        mappings (returned arrays keep theirs). Blocks until the calls have ended, for at most `CLOSE_WAIT_S`.
        Idempotent; it can be repeated after an interrupt. In a forked child, only mark the connection as closed."""
        if os.getpid() != self._owner:
            self._closed = True
            return
        with self._closing:  # one thread frees it
            self._close()

    def _close(self) -> None:
        """See `close`."""
        with self._guard:
            self._closed = True
        self._in_flight.shut()
        self._wake.wake()
        active = self._in_flight.wait(CLOSE_WAIT_S)  # the number of calls that have not ended
        with self._guard:
            # With no call in flight, sockets that an interrupt left behind are closed too.
            wires = self._idle if active else list(self._wires)
            self._idle = []
        for wire in wires:
            wire.close()
        if self.arena is not None:
            self.arena.close()
        if active:
            log.error("Calls to storage unit %d are still in flight; their sockets are left open", self.info.unit)
            return
        self._wake.close()
        if self._owns_context:
            self._context.destroy()

    def __enter__(self) -> UnitConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait_until_released(held: list[zmq.MessageTracker]) -> None:
    """Wait until ZMQ refers to none of these buffers. ZMQ releases a buffer once its frame is sent or its socket is
    closed, so the wait is short. An interrupt is raised only afterwards."""
    interrupt: BaseException | None = None
    while held:
        try:
            held[-1].wait(LET_GO_S)
            held.pop()
        except zmq.NotDone:
            log.error("ZMQ still refers to a buffer after %.0f s; the write waits for its release", LET_GO_S)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
