"""A client's connection to one storage unit: the handshake that chooses shared memory or ZMQ, and the latter."""

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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from dataplane.core.addresses import boot_id
from dataplane.core.buffer_pool import FROM_BYTES, BufferPool
from dataplane.core.failpoints import hit
from dataplane.core.in_flight import InFlight
from dataplane.errors import CallTimeoutError, ClientClosedError, InvalidRequestError, StorageUnitError
from dataplane.ledger.commands import UnitInfo
from dataplane.protocol.fd_limits import enough_for
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.proof import Ticket
from dataplane.storage.arena import MappedArena
from dataplane.storage.endpoints import candidates
from dataplane.storage.session_lock import SessionLock
from dataplane.storage.transport.connection import Wire, WireLostError, WireSilentError
from dataplane.storage.transport.interface import ArrivedPayload, ClientPayloads, ClientTransport, SentPayload
from dataplane.storage.transport.request_chunks import (
    Buffer,
    Bytes,
    Int32s,
    Int64s,
    ReadPlan,
    ReadRequest,
    WriteChunk,
    plan_read,
    plan_write,
)
from dataplane.storage.transport.zmq import ClientFrames

log = logging.getLogger(__name__)

WINDOW = 4
"""Write requests of one call in flight: up to WINDOW * CHUNK_BYTES queued at either end for each calling thread."""
READ_WINDOW = 2
"""Read requests of one call in flight: up to READ_WINDOW * READ_BYTES likewise."""
IDLE_WIRES = 8
"""Sockets kept for the next call."""
CLOSE_WAIT_S = 30.0
LET_GO_S = 10.0


class _Asked(NamedTuple):
    """A call of a read under way. request: None for a Settle."""

    call: int
    request: ReadRequest | None


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a read brought: range i of the call begins at byte `offsets[i]` of `buffers[which[i]]` and is whole there.

    There is a buffer for each column. It holds the column's ranges by address, without gaps, shared bytes once.
    shared: the buffers are parts of one frame, aligned by chance, and any of them keeps it in memory; else they are the
    caller's own, aligned to 16 bytes.
    """

    buffers: list[Bytes]
    which: Int32s
    offsets: Int64s
    shared: bool

    def range(self, number: int, nbytes: int) -> Bytes:
        """The first `nbytes` of range `number`, not copied."""
        offset = int(self.offsets[number])
        return self.buffers[int(self.which[number])][offset : offset + nbytes] if nbytes else np.empty(0, np.uint8)


class UnitConnection:
    """Thread-safe. After the constructor returned, `local` says whether `arena` may be used; in any case `write` and
    `read` go over sockets, one for each call under way.

    token: the service's secret; the unit is shown the ticket for its epoch that is made of it.
    lock: the session's lock, held before the session was opened; None, or force_remote, never proves to be local.
    context: a ZMQ context to use, left open by `close`; by default the connection has its own.
    memory: where reads are received; by default new memory each time.
    transport: how payloads may travel but in frames, where the unit can do so too.

    The constructor takes at most `timeout_s` for each endpoint. It raises StorageUnitError (no endpoint answers),
    CallTimeoutError, AuthenticationError, ProtocolVersionError, ServiceRestartedError (the unit has another epoch) and
    SessionExpiredError (this session is fenced).
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
        self._ticket = Ticket.of(token, info.arena_path, str(info.epoch))
        self._owner = os.getpid()
        self._memory = BufferPool(0) if memory is None else memory
        self._context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._transport = transport
        self._frames = ClientFrames()
        self._payloads: ClientPayloads = self._frames
        self._idle: list[Wire] = []
        self._guard = threading.Lock()
        self._in_flight = InFlight()
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()
        self._closed = False
        self._endpoint = info.endpoints[-1] if info.endpoints else "nowhere"
        with enough_for(self._endpoint):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._connect(None if force_remote else lock, timeout_s)
        except BaseException:
            self.close()
            raise

    # --- handshake ----------------------------------------------------------------------------------------------

    def _connect(self, lock: SessionLock | None, timeout_s: float) -> None:
        here = boot_id()
        same_host = here == self.info.host
        endpoints = candidates(self.info.endpoints, same_host=same_host)
        if not endpoints:
            raise self._unreachable("it has no endpoint that this process could reach")
        attach = pb.Attach(lock_path=str(lock.path) if lock and same_host else "", boot_id=here)
        for number, endpoint in enumerate(endpoints, 1):
            self._endpoint = endpoint
            try:
                self._shake_hands(attach, timeout_s)
                return
            except (StorageUnitError, CallTimeoutError):
                if number == len(endpoints):
                    raise
                log.info("unit %d does not answer at %s; trying the next endpoint", self.info.unit, endpoint)

    def _shake_hands(self, attach: pb.Attach, timeout_s: float) -> None:
        with (call := threading.Lock()), self._wire("attach", timeout_s, call) as wire:
            header = self._header(wire)
            header.attach.CopyFrom(attach)
            wire.send(header, held=[])
            challenge = wire.receive(header.call, time.monotonic() + timeout_s).challenge
            if challenge.local:
                self._prove(wire, challenge, timeout_s)
            elif attach.lock_path:
                log.info("session %d is remote to unit %d: %s", self._session, self.info.unit, challenge.why)
        if self._transport is not None and challenge.HasField("engine") and not self.local:
            engine, closing = challenge.engine, lambda: self._closed
            self._payloads = self._transport.to(engine, self._endpoint, closing=closing)

    def _prove(self, wire: Wire, challenge: pb.Challenge, timeout_s: float) -> None:
        """Local if the arena can be mapped and the unit believes it; else remote, which is no error."""
        try:
            arena = MappedArena.open(challenge.arena_path, cookie=challenge.cookie)
        except (OSError, ValueError) as error:
            log.info("session %d is remote to unit %d: %s", self._session, self.info.unit, error)
            return
        header = self._header(wire)
        header.proof.seen = arena.header(challenge.offset, challenge.length)
        hit("attach.before_proof")
        wire.send(header, held=[])
        try:
            wire.receive(header.call, time.monotonic() + timeout_s)
        except InvalidRequestError as error:
            log.warning("session %d is remote to unit %d: %s", self._session, self.info.unit, error)
            arena.close()
            return
        hit("attach.proven")
        self.arena, self.local = arena, True

    # --- the remote connection ----------------------------------------------------------------------------------------

    def write(
        self,
        offsets: Sequence[int],
        buffers: Sequence[Buffer | Sequence[Buffer]],
        *,
        reservation: int,
        timeout_s: float,
    ) -> None:
        """Put `buffers[k]` (one C-contiguous buffer, or a list of them one after another) at `offsets[k]` of the arena.

        reservation: the number of the Allocate call that reserved the space.

        Returns when the unit has it all. Large buffers are sent from where they are; whatever happens, ZMQ has let go
        of them when this returns or raises. `timeout_s` is the longest silence of the unit. Raises CallTimeoutError,
        StorageUnitError, SessionExpiredError, ServiceRestartedError, ClientClosedError. However it fails, the unit may
        carry out later what was sent: the space must not be given back before `stop_put` returned.
        """
        held: list[zmq.MessageTracker] = []
        waiting: deque[SentPayload] = deque()
        try:
            with (call := threading.Lock()), self._wire("write", timeout_s, call) as wire:
                for chunk in plan_write(offsets, buffers):
                    if len(waiting) == WINDOW:
                        self._written(wire, waiting, reservation, held, timeout_s)
                    waiting.append(self._send(wire, chunk, reservation, held, self._payloads))
                while waiting:
                    self._written(wire, waiting, reservation, held, timeout_s)
        except BaseException as error:
            # Frames that an interrupt kept from being sent are let go of when nothing refers to them.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            while waiting:
                waiting.popleft().done()
            _wait_until_let_go(held)

    def _send(
        self,
        wire: Wire,
        chunk: WriteChunk,
        reservation: int,
        held: list[zmq.MessageTracker],
        payloads: ClientPayloads,
    ) -> SentPayload:
        header = self._header(wire)
        header.write.offsets.extend(chunk.offsets)
        header.write.sizes.extend(chunk.sizes)
        header.write.reservation = reservation
        return payloads.send(wire, header, chunk, held=held)

    def _written(
        self,
        wire: Wire,
        waiting: deque[SentPayload],
        reservation: int,
        held: list[zmq.MessageTracker],
        timeout_s: float,
    ) -> None:
        """Wait for the oldest request; what the unit could not fetch is sent again, in frames."""
        reply = wire.receive(waiting[0].call, time.monotonic() + timeout_s)
        sent = waiting.popleft()
        sent.done()
        if reply.WhichOneof("outcome") == "not_fetched":
            self._payloads.not_fetched(reply.not_fetched.why)
            waiting.append(self._send(wire, sent.chunk, reservation, held, self._frames))

    def stop_put(self, reservation: int, timeout_s: float) -> None:
        """Give up a put whose `write` failed. When this returns no byte of it lands any more: the unit refuses every
        write of the reservation, those under way included. Goes over another socket than the write, which is closed.

        Raises as `write`, CallTimeoutError after `timeout_s`; then nothing is known.
        """
        with (call := threading.Lock()), self._wire("stop of a put", timeout_s, call) as wire:
            header = self._header(wire)
            header.stop.reservation = reservation
            wire.send(header, held=[])
            reply = wire.receive(header.call, time.monotonic() + timeout_s)
            if reply.WhichOneof("outcome") != "stopped":
                raise WireLostError(f"it answered {reply.WhichOneof('outcome')} to the stop of a put")

    def read(
        self,
        offsets: npt.ArrayLike | Sequence[int],
        sizes: npt.ArrayLike | Sequence[int],
        *,
        columns: Sequence[int] | None = None,
        timeout_s: float,
    ) -> Received:
        """The bytes of each range [offsets[i], offsets[i] + sizes[i]) of the arena, whole.

        columns: how many of the ranges are of column 0, 1, ...; each column has a buffer of its own. Ranges may touch,
        overlap or repeat; within a column, shared bytes travel once. `timeout_s` and errors as in `write`.
        """
        within = self.info.capacity_bytes
        plan = plan_read(np.asarray(offsets, np.int64), np.asarray(sizes, np.int64), within=within, columns=columns)
        if len(plan.requests) == 1:
            return self._read_whole(plan, timeout_s)
        buffers = [self._buffer(nbytes) for nbytes in plan.buffers]
        with (call := threading.Lock()), self._wire("read", timeout_s, call) as wire:
            asked: deque[_Asked] = deque()
            for request in plan.requests:
                while len(asked) >= READ_WINDOW:
                    self._take(wire, asked, buffers, timeout_s)
                asked.append(self._ask(wire, request, self._payloads))
            while asked:
                self._take(wire, asked, buffers, timeout_s)
        return Received(buffers=buffers, which=plan.which, offsets=plan.offsets, shared=False)

    def _read_whole(self, plan: ReadPlan, timeout_s: float) -> Received:
        """A read that is one request: no copy at all, if it comes in a frame."""
        (request,) = plan.requests
        with (call := threading.Lock()), self._wire("read", timeout_s, call) as wire:
            asked = deque([self._ask(wire, request, self._payloads)])
            frame: Bytes | None = None
            while asked:
                arrived = self._arrived(wire, asked, timeout_s)
                frame = frame if arrived is None else self._kept(arrived)
        assert frame is not None
        edges = [0, *itertools.accumulate(plan.buffers)]
        buffers = [frame[first:last] for first, last in itertools.pairwise(edges)]
        return Received(buffers=buffers, which=plan.which, offsets=plan.offsets, shared=True)

    def _ask(self, wire: Wire, request: ReadRequest, payloads: ClientPayloads) -> _Asked:
        header = self._header(wire)
        header.read.offsets.extend(request.offsets)
        header.read.sizes.extend(request.sizes)
        payloads.ask(header.read, request.nbytes)
        wire.send(header, held=[])
        return _Asked(header.call, request)

    def _arrived(self, wire: Wire, asked: deque[_Asked], timeout_s: float) -> ArrivedPayload | None:
        """What the oldest call of `asked` brought. None if that is nothing to use: the answer to a Settle, or a payload
        that could not be fetched, and is asked for again, in frames."""
        call, request = asked.popleft()
        reply = wire.receive(call, time.monotonic() + timeout_s)
        if request is None:
            return None
        arrived = self._payload(wire, reply, request)
        try:
            if arrived.settle is not None:
                header = self._header(wire)
                header.settle.CopyFrom(arrived.settle)
                wire.send(header, held=[])
                asked.append(_Asked(header.call, None))
            if arrived.data is None:
                asked.append(self._ask(wire, request, self._frames))
        except BaseException:
            arrived.done()
            raise
        if arrived.data is None:
            arrived.done()
            return None
        return arrived

    def _payload(self, wire: Wire, reply: pb.BulkReply, request: ReadRequest) -> ArrivedPayload:
        return self._payloads.receive(wire, reply, request.nbytes)

    def _take(self, wire: Wire, asked: deque[_Asked], buffers: list[Bytes], timeout_s: float) -> None:
        """The one copy of a longer read: out of its frame or slot."""
        request = asked[0].request
        arrived = self._arrived(wire, asked, timeout_s)
        if arrived is None or arrived.data is None or request is None:
            return
        try:
            at = 0
            for number, first, last in request.places:
                buffers[number][first:last] = arrived.data[at : at + last - first]
                at += last - first
        finally:
            arrived.done()

    def _kept(self, arrived: ArrivedPayload) -> Bytes | None:
        """The payload, copied if its memory does not last."""
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

    def _header(self, wire: Wire) -> pb.BulkRequest:
        return wire.request(session=self._session, epoch=self.info.epoch)

    # --- sockets ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _wire(self, what: str, timeout_s: float, call: threading.Lock) -> Iterator[Wire]:
        """A socket for one call; kept for the next one if the call went well, else closed. call: what the caller holds
        (see `InFlight`)."""
        if os.getpid() != self._owner:
            raise ClientClosedError(why="it belongs to the process this one was forked from; open another here")
        if not self._in_flight.enter(call):
            raise ClientClosedError
        wire: Wire | None = None
        try:
            wire = self._borrow()
            yield wire
            sound, wire = wire, None
            self._give_back(sound)
        except WireLostError as error:
            raise self._unreachable(f"{what}: {error}") from error
        except WireSilentError as error:
            peer = f"storage unit {self.info.unit} at {self._endpoint}"
            raise CallTimeoutError(what=f"bulk {what}", waited_s=timeout_s, peer=peer) from error
        finally:
            if wire is not None:
                wire.close()
            self._in_flight.leave(call)

    def _borrow(self) -> Wire:
        while True:
            with self._guard:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                curve_key = self.info.curve_key
                with enough_for(self._endpoint):
                    wire = Wire(
                        self._context, self._endpoint, wake=self._wake, ticket=self._ticket, curve_key=curve_key
                    )
                with self._guard:
                    self._wires.add(wire)
                return wire
            if wire.idle_and_sound:
                return wire
            wire.close()

    def _give_back(self, wire: Wire) -> None:
        with self._guard:
            if not self._closed and len(self._idle) < IDLE_WIRES:
                self._idle.append(wire)
                return
        wire.close()

    def _unreachable(self, why: str) -> StorageUnitError:
        return StorageUnitError(unit=self.info.unit, endpoint=self._endpoint, why=why)

    def close(self) -> None:
        """Refuse new calls, end those under way with ClientClosedError, hang up, forget the mappings (arrays handed out
        keep theirs). Idempotent. A forked child only forgets."""
        if os.getpid() != self._owner:
            self._closed = True
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
        self._in_flight.shut()
        os.eventfd_write(self._wake, 1)
        left = self._in_flight.wait(CLOSE_WAIT_S)
        with self._guard:
            # Where no call is under way, with those that an interrupt left behind.
            wires, self._idle = (self._idle if left else list(self._wires)), []
        for wire in wires:
            wire.close()
        if self.arena is not None:
            self.arena.close()
        if left:
            log.error("calls to unit %d are still under way; their sockets are left open", self.info.unit)
            return
        os.close(self._wake)
        if self._owns_context:
            self._context.destroy()

    def __enter__(self) -> UnitConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait_until_let_go(held: list[zmq.MessageTracker]) -> None:
    """Wait until ZMQ refers to none of these buffers. It lets go once a frame is sent, or its socket is closed, so this
    takes no longer than its threads need; an interrupt is raised only after."""
    interrupt: BaseException | None = None
    while held:
        try:
            held[-1].wait(LET_GO_S)
            held.pop()
        except zmq.NotDone:
            log.error("ZMQ still refers to a buffer after %.0f s; the write cannot return before it lets go", LET_GO_S)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
