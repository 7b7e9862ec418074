"""The storage unit's bulk server: one thread that moves bytes between sockets and the arena.

The server also rejects requests of fenced sessions and of aborted puts; it makes no other decision. Every copy finishes
before the next message or order is handled, so a fenced session or an aborted put has no copy in progress. A read is
copied out of the arena before its payload is sent. A write is admitted, and then copied at once, when its whole payload
has arrived.

`Growth` grows the memory behind the unit's arena as ordered, in steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from dataplane.core.failpoints import failpoint
from dataplane.core.inner_slice import InnerSlice
from dataplane.core.limited_log import LimitedLog
from dataplane.core.ports import listens_at, listens_no_more_at
from dataplane.core.row_copy import gather
from dataplane.core.types import MAX_DIMENSIONS, PROTOCOL_VERSION
from dataplane.errors import (
    ArenaSpaceError,
    AuthenticationError,
    DataPlaneError,
    InternalError,
    ProtocolVersionError,
    ServiceRestartedError,
    StorageUnitError,
    to_wire,
)
from dataplane.ledger.commands import (
    FenceSession,
    GrowArena,
    Grown,
    SessionAlive,
    SessionAttached,
    SessionGone,
    UnitReport,
)
from dataplane.protocol.auth import KeyPair, Ticket
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.zap import Admission, Handshakes
from dataplane.protocol.zmq_frames import TLS, beginning, is_tls
from dataplane.storage.arena import Arena
from dataplane.storage.endpoints import bind
from dataplane.storage.metrics import BulkMetrics
from dataplane.storage.session_lock import lock_directories as default_lock_directories
from dataplane.storage.sessions import Sessions
from dataplane.storage.transport.interface import Fill, Offer, UnitPayloads
from dataplane.storage.transport.read_plans import inner_from_pb
from dataplane.storage.transport.request_chunks import (
    MAX_ARENA_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_REQUEST_BYTES,
    Bytes,
)
from dataplane.storage.transport.zmq import UnitFrames

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 16
"""Maximum number of messages that the thread handles before it checks its orders."""
PEER_REQUESTS = 4
"""Maximum number of queued requests of one peer. Above it, backpressure slows the peer down."""
PEER_REPLIES = 64
"""Maximum number of queued replies for one peer. A peer that ignores its window and exceeds this loses replies, so its
calls fail; the thread never waits for a peer."""
MAX_WAITING_ATTACHES = 4096
"""Maximum number of attach requests that wait until the unit has its id."""
STOP_WAIT_S = 30.0

Order = FenceSession | GrowArena


class BulkServer:
    """Serves one arena on ipc and, with `tcp_host`, on tcp (at `tcp_port`; 0: any free port).

    epoch: the epoch of the arena; requests for another epoch are rejected.
    report: called in the server's thread with each report for the ledger; must not block.
    advertise_host: the host under which remote clients reach `tcp_host`, if it differs (0.0.0.0).
    token: from which peers derive their ticket for this epoch of the arena. keys: encrypt connections with CURVE; they
    require a token. insecure: allow a `tcp_host` other than loopback without a token.
    counts: the counters of served requests. engine: an additional payload transport; the server closes it.
    lock_directories: the directories of clients' session locks; by default the arena's directory and this user's
    directory in /dev/shm.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        epoch: int,
        token: str | None,
        report: Callable[[UnitReport], None],
        insecure: bool = False,
        keys: KeyPair | None = None,
        engine: UnitPayloads | None = None,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        advertise_host: str | None = None,
        counts: BulkMetrics | None = None,
        lock_directories: Iterable[str | Path] | None = None,
    ) -> None:
        folders = default_lock_directories(arena.path.parent) if lock_directories is None else lock_directories
        self._arena = arena
        self._epoch = epoch
        self._token = token
        self._report = report
        self._keys = keys
        self._engine = engine
        self._is_guarded = insecure or token is not None  # may listen beyond loopback
        self._tcp_host = tcp_host
        self._tcp_port = tcp_port
        self._advertise_host = advertise_host
        self._sessions = Sessions(arena, lock_directories=map(Path, folders))
        self._counts = counts or BulkMetrics()
        self._malformed = LimitedLog(log)  # of malformed messages
        self._unit = 0  # see `unit`
        self._admission: Admission | None = None  # None: peers present no ticket
        self._monitor: zmq.Socket[Any] | None = None  # only where peers have to present a ticket
        self._waiting_attaches: list[tuple[bytes, pb.BulkRequest]] = []  # until the unit has its id
        self._orders: deque[Order] = deque()  # queued by `order`, not begun yet
        self._growth = Growth(arena, report)
        self._access = ArenaAccess(arena, self._fault)
        self._owner = os.getpid()  # a forked child does not stop the server
        self._thread: threading.Thread | None = None
        self._wake = -1  # an eventfd that ends the thread's wait; -1: not open
        self._wake_lock = threading.Lock()  # held to use or close `_wake`
        self._stopping = False
        self.endpoints: tuple[str, ...] = ()

    # --- from other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the sockets, set `endpoints` and start the thread. Raises PortTakenError if `tcp_port` is in use,
        ServiceUnavailableError if a socket cannot be bound for another reason, ValueError for a tcp_host other than
        loopback without token or `insecure`."""
        assert self._thread is None, "started twice"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._wake = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # 1: orders may be queued already
        try:
            self._router.linger = 0
            self._router.set(zmq.SNDHWM, PEER_REPLIES)
            self._router.set(zmq.RCVHWM, PEER_REQUESTS)
            self._router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            ticket = Ticket.of(self._token, str(self._arena.path), self._epoch)
            if ticket is not None:
                name = f"the storage unit at {self._arena.path}"
                self._admission = Admission(self._context, name, ticket, self._keys, on_refused=self._count_refused)
                self._admission.guard(self._router)  # before the router is bound
                self._monitor = self._router.get_monitor_socket(Handshakes.EVENTS)
            self._frames = UnitFrames(self._router, self._fault)
            self.endpoints = bind(
                self._router,
                self._tcp_host,
                tcp_port=self._tcp_port,
                advertise_host=self._advertise_host,
                guarded=self._is_guarded,
            )
            self._handshakes = Handshakes(self.endpoints, MAX_FRAME_BYTES)
        except BaseException:
            self._close_sockets()
            self._close_engine()
            raise
        listens_at(self.endpoints)
        self._thread = threading.Thread(target=self._run, name="tq-bulk", daemon=True)
        self._thread.start()

    @property
    def unit(self) -> int:
        """The unit's id; 0 until it is set. Attach requests wait until then."""
        return self._unit

    @unit.setter
    def unit(self, unit_id: int) -> None:
        self._unit = unit_id
        self._wake_thread()

    @property
    def attached(self) -> int:
        """The number of sessions that have mapped the arena."""
        return self._sessions.count

    @property
    def alive(self) -> bool:
        """Whether the thread runs. A thread that fails logs the error and closes its socket."""
        return self._thread is not None and self._thread.is_alive()

    def order(self, order: Order) -> None:
        """Queue an order; orders run in sequence and their outcome goes to `report`. Callable from any thread. Orders
        after `stop` are ignored."""
        self._orders.append(order)
        self._wake_thread()

    def stop(self) -> None:
        """Stop the thread and close the sockets. After this returns, the server does not access the arena. Waits up to
        `STOP_WAIT_S` for the thread, then raises InternalError. Idempotent; no-op in a forked child."""
        if self._thread is None or os.getpid() != self._owner:
            return
        self._stopping = True
        self._wake_thread()
        self._thread.join(STOP_WAIT_S)
        if self._thread.is_alive():
            raise InternalError(what=f"the bulk server did not stop within {STOP_WAIT_S:.0f} s")
        self._thread = None
        listens_no_more_at(self.endpoints)
        self._close_sockets()
        self._sessions.close()
        self._close_engine()

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _close_sockets(self) -> None:  # while the thread does not run
        if self._monitor is not None:
            if not self._router.closed:  # a thread that failed has closed it
                self._router.disable_monitor()
            self._monitor.close(linger=0)
        self._router.close()
        if self._admission is not None:
            self._admission.close()
        self._context.term()
        with self._wake_lock:  # other threads may still call `_wake_thread`
            os.close(self._wake)
            self._wake = -1

    def _wake_thread(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Handle messages and orders until `stop`."""
        try:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            if self._monitor is not None:
                poller.register(self._monitor, zmq.POLLIN)
            while not self._stopping:
                ready = self._wait(poller)
                if self._wake in ready:
                    os.eventfd_read(self._wake)  # before the orders are taken: one queued meanwhile wakes again
                self._run_guarded("orders", self._run_orders)
                if self._router in ready:
                    self._serve_messages()
                if self._monitor is not None:
                    self._handshakes.take_events(self._monitor)
                if self._growth.in_flight:
                    self._run_guarded("an order", self._growth.step)
        except BaseException:
            log.critical(
                "Bulk server of storage unit %d failed; its rows are unreachable until the unit is restarted",
                self._unit,
                exc_info=True,
            )
            self._router.close()

    def _wait(self, poller: zmq.Poller) -> dict[Any, int]:
        """Wait for messages, orders or events; return the ready sockets. Advances the engine's transfers first."""
        pause_s = None if self._engine is None else self._engine.step()  # until its next step; None: no limit
        if self._growth.in_flight:
            return dict(poller.poll(0))  # the next step of an order is due
        most_ms = None if pause_s is None else int(pause_s * 1000)  # 0 for a pause below a millisecond
        ready = dict(poller.poll(most_ms))
        if not ready and pause_s is not None and pause_s < 0.001:
            time.sleep(pause_s)  # the poll did not wait, because it counts whole milliseconds
        return ready

    def _run_guarded(self, what: str, work: Callable[[], None]) -> None:
        """Run `work`, called `what` in the log. Log its exceptions."""
        try:
            work()
        except Exception:
            log.exception("Storage unit %d: %s failed; the server continues", self._unit, what)

    def _run_orders(self) -> None:
        """Execute queued orders, or begin those to grow the arena. Answer requests that waited for the unit's
        id."""
        if self._unit and self._waiting_attaches:
            waiting, self._waiting_attaches = self._waiting_attaches, []
            for peer, request in waiting:
                self._execute_and_reply(peer, request)
        while self._orders:
            order = self._orders.popleft()
            if not isinstance(order, FenceSession):
                self._growth.begin(order)
                continue
            fenced = self._fence(order)
            self._counts.fences += fenced
            if fenced and self._engine is not None:
                self._engine.forget(order.session)
            failpoint("unit.fence.after")
            kind = SessionGone if fenced else SessionAlive
            self._report(kind(unit=order.unit, session=order.session))

    def _fence(self, order: FenceSession) -> bool:
        """Fence the session, unless a process of it may still access the arena. Return whether it is fenced. If that
        cannot be determined, log it and return False; the ledger repeats its order."""
        try:
            failpoint("unit.fence.before")
            return self._sessions.fence(order.session, order.lock_path, first=order.first, last=order.last)
        except Exception:
            text = "Storage unit %d cannot determine whether session %d still runs; it will retry"
            log.exception(text, order.unit, order.session)
            return False

    def _serve_messages(self) -> None:
        """Handle up to `MESSAGES_PER_TURN` messages."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = self._receive_header(peer)
                if request is not None:
                    self._execute_and_reply(peer, request)
            except zmq.ZMQError:
                raise  # the socket is broken, and would be ready again at once
            except Exception:
                log.exception("Storage unit %d: a message could not be handled; the server continues", self._unit)
            self._frames.drop()  # those that the request did not use

    def _receive_header(self, peer: bytes) -> pb.BulkRequest | None:
        """Receive the header of a message; None if it has none, or a malformed one, which is logged."""
        if not self._frames.more():
            return None
        header = self._router.recv()
        with contextlib.suppress(DecodeError):
            if len(header) <= MAX_HEADER_BYTES:
                return pb.BulkRequest.FromString(header)
        what = f"Storage unit {self._unit}: dropped a message that is not a valid BulkRequest"
        found = TLS if is_tls(peer) else beginning(header)
        self._malformed.write(logging.WARNING, f"{what}: {found}")
        return None

    def _execute_and_reply(self, peer: bytes, request: pb.BulkRequest, fill: Fill | None = None) -> None:
        """Execute a request and reply. fill: the fetched payload of a write, whose request is now checked again: during
        the fetch, the session may have been fenced or the put aborted."""
        verb = request.WhichOneof("verb")
        payload: Bytes | None = None
        failed: Exception | None = None
        began = time.perf_counter()
        try:
            if verb == "attach" and not self._unit:  # `_run_orders` replies once the unit has its id
                if len(self._waiting_attaches) < MAX_WAITING_ATTACHES:  # other clients time out and retry
                    self._waiting_attaches.append((peer, request))
                return
            self._admit(request)
            if verb == "write":
                fill = fill or self._collect_payload(peer, request)
                if fill is None:
                    return  # `finish` in `_collect_payload` replies after the fetch
                size = self._write(request, fill)
                self._counts.written_bytes += size
                reply = pb.BulkReply(written=pb.Written(size=size))
            else:
                reply, payload = self._execute(verb, request)
        except DataPlaneError as error:
            reply = _refusal(error)
            failed = error
        except Exception as error:
            log.exception("Storage unit %d: %s of session %d failed", self._unit, verb, request.session)
            reply = _refusal(InternalError(what=f"{verb} of rows in storage unit {self._unit}"))
            failed = error
        self._frames.drop()  # the payload of a rejected write
        reply.call = request.call
        self._send(peer, reply, payload)
        self._counts.note(verb, failed, time.perf_counter() - began)

    def _count_refused(self) -> None:  # a rejected handshake; called in the thread of `_admission`
        error = AuthenticationError(peer=f"storage unit {self._unit}", why="the token is wrong")
        self._counts.note("handshake", error, took_s=0.0)

    def _send(self, peer: bytes, reply: pb.BulkReply, payload: Bytes | None) -> None:
        """Queue a reply. Never blocks: a ROUTER drops messages for a disconnected peer or one whose queue is full."""
        self._router.send(peer, zmq.SNDMORE)
        self._router.send(reply.SerializeToString(), 0 if payload is None else zmq.SNDMORE)
        if payload is not None:
            self._router.send(payload.data, copy=False)

    def _admit(self, request: pb.BulkRequest) -> None:
        """Raise the error of a request with another protocol version or epoch, or of a fenced session."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(client_version=request.protocol_version, service_version=PROTOCOL_VERSION)
        if request.epoch != self._epoch:
            what = f"storage unit {self._unit}"
            raise ServiceRestartedError(expected_epoch=request.epoch, got_epoch=self._epoch, what=what)
        self._sessions.admit(request.session)

    def _execute(self, verb: str | None, request: pb.BulkRequest) -> tuple[pb.BulkReply, Bytes | None]:
        """Execute any verb except a write. Return the reply and its payload."""
        match verb:
            case "attach":
                failpoint("unit.attach")
                self._fence_ended()  # closes the descriptors of ended sessions before another one is opened
                return pb.BulkReply(challenge=self._challenge(request)), None
            case "proof":
                path = self._sessions.prove(request.session, request.proof.seen)
                failpoint("unit.attached")
                self._report(SessionAttached(unit=self._unit, session=request.session, lock_path=path))
                return pb.BulkReply(attached=pb.Attached()), None
            case "read":
                offer = self._read(request)
                failpoint("unit.read.copied")
                self._counts.read_bytes += len(offer.data)
                reply = pb.BulkReply(bytes=pb.ReadBytes(size=len(offer.data), source=offer.source))
                return reply, None if offer.source else offer.data  # with a source, the client fetches it
            case "settle":
                self._settle(request)
                return pb.BulkReply(settled=pb.Settled()), None
            case "stop":
                self._stop_put(request.session, request.stop.reservation)
                return pb.BulkReply(stopped=pb.Stopped()), None
            case _:
                raise self._fault("the request has no verb that this version supports; use one version at both ends")

    def _challenge(self, request: pb.BulkRequest) -> pb.Challenge:
        """Begin to attach the session. Return its challenge, with memory of the engine for the client to try."""
        challenge = self._sessions.attach(request.session, request.attach)
        if self._engine is not None:
            challenge.engine.CopyFrom(self._engine.trial)
        return challenge

    def _stop_put(self, session: int, reservation: int) -> None:
        log.info("Storage unit %d: session %d aborted put %d", self._unit, session, reservation)
        self._sessions.stop_put(session, reservation)

    def _refuse_stopped(self, request: pb.BulkRequest) -> None:
        """Raise the error of a write whose put was aborted."""
        session = request.session
        reservation = request.write.reservation
        if self._sessions.is_stopped(session, reservation):
            raise self._fault(
                f"put {reservation} of session {session} was aborted; its space may belong to another put. Put again."
            )

    def _fence_ended(self) -> None:
        for session in self._sessions.bury_dead():
            self._report(SessionGone(unit=self._unit, session=session))

    # --- bytes --------------------------------------------------------------------------------------------------

    def _collect_payload(self, peer: bytes, request: pb.BulkRequest) -> Fill | None:
        """Return the payload of a write. None: it has to be fetched first, and the write is answered afterwards."""
        write = request.write
        if not write.HasField("source"):  # it was sent in frames
            return self._frames.collect(write)
        self._refuse_stopped(request)  # an aborted put, for which nothing is fetched
        sizes = self._access.ranges(write).sizes
        if self._engine is None or write.source.size != sum(sizes):
            raise self._fault(
                f"cannot fetch a payload of {write.source.size} bytes for ranges of {sum(sizes)} bytes: the sizes "
                "differ, or this unit has no transfer engine"
            )

        def finish(fetched: Fill | str) -> None:  # a text is the reason why the fetch failed
            if isinstance(fetched, str):
                self._send(peer, pb.BulkReply(call=request.call, not_fetched=pb.NotFetched(why=fetched)), payload=None)
            else:
                self._execute_and_reply(peer, request, fill=fetched)

        return self._engine.collect(write, finish)

    def _write(self, request: pb.BulkRequest, fill: Fill) -> int:
        """Copy the payload into the ranges of the request. Return its bytes."""
        self._refuse_stopped(request)
        ranges = self._access.ranges(request.write)
        self._access.write(ranges, fill)
        return sum(ranges.sizes)

    def _read(self, request: pb.BulkRequest) -> Offer:
        """Copy the ranges into the memory of the reply; the result does not refer to the arena."""
        ranges = self._access.ranges(request.read)
        offer = self._reply_memory(request, sum(ranges.sizes))
        self._access.read(ranges, offer.data)
        return offer

    def _reply_memory(self, request: pb.BulkRequest, nbytes: int) -> Offer:
        """Return memory for the reply: an engine slot if the client requested one and one is free."""
        slot = None
        if self._engine is not None and request.read.fetch:
            slot = self._engine.offer(request.session, nbytes)
        return self._frames.offer(nbytes) if slot is None else slot

    def _settle(self, request: pb.BulkRequest) -> None:
        """Release the payload that the client has fetched. Raise if it was released earlier."""
        if self._engine is None or not self._engine.settle(request.session, request.settle.tag):
            raise self._fault("the unit released the rows of this read before the client had fetched them; read again")

    def _fault(self, why: str) -> StorageUnitError:
        return StorageUnitError(unit=self._unit, endpoint=self.endpoints[0], why=why)


def _refusal(error: DataPlaneError) -> pb.BulkReply:
    name, facts = to_wire(error)
    return pb.BulkReply(error=pb.BulkError(name=name, facts=facts))


class Growth:
    """Grow the arena. `report` receives the outcomes. Not thread-safe: used by the unit's thread only."""

    def __init__(self, arena: Arena, report: Callable[[UnitReport], None]) -> None:
        self._arena = arena
        self._report = report
        self._orders: deque[tuple[GrowArena, Iterator[int]]] = deque()  # with their remaining steps
        self._failure_logged = False  # since the last growth that succeeded

    @property
    def in_flight(self) -> bool:
        """Whether growth needs further steps."""
        return bool(self._orders)

    def begin(self, order: GrowArena) -> None:
        """Queue growth after the earlier orders."""
        self._orders.append((order, self._arena.grow_steps(order.backed_bytes)))

    def step(self) -> None:
        """Add one step of memory. The controller repeats growth that fails, so only the first of consecutive failures
        is logged."""
        order, steps = self._orders[0]
        error = None
        try:
            if next(steps, None) is not None:  # further steps may follow
                return
        except ArenaSpaceError as caught:
            error = str(caught)
            if not self._failure_logged:
                log.warning("Storage unit %d cannot grow to %d bytes: %s", order.unit, order.backed_bytes, error)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not self._failure_logged:
                log.exception("Storage unit %d cannot grow to %d bytes", order.unit, order.backed_bytes)
        self._failure_logged = error is not None
        self._orders.popleft()
        failpoint("unit.before_grown")
        backed = self._arena.backed_bytes
        self._report(Grown(unit=order.unit, backed_bytes=backed, error=error))


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
        starts = list(request.offsets)
        lengths = list(request.sizes)
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
            starts = np.array(offsets, np.int64)
            lengths = np.array(sizes, np.int64)
            gather([arena], which=None, offsets=starts, sizes=lengths, out=target)
            return
        position = 0
        for offset, size in zip(offsets, sizes, strict=True):
            run = target[position : position + size]
            if inner is None:
                run[...] = arena[offset : offset + size]
            else:
                inner.copy(arena, offset, size // inner.nbytes, run)
            position += size
