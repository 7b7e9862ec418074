"""The storage unit's bulk server: one thread that moves bytes between sockets and the arena, and refuses who must be.

It decides nothing else. Every copy ends before the next message or order is looked at, so that a fenced session, or a
stopped put, has no copy under way: reads leave the arena before their payload begins to travel, writes are admitted
when all of it is there, and taken in one go.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from dataplane.core.failpoints import hit
from dataplane.core.listeners import listens_at, listens_no_more_at
from dataplane.core.row_copy import gather
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    AuthenticationError,
    DataPlaneError,
    InternalError,
    ProtocolVersionError,
    ServiceRestartedError,
    StorageUnitError,
    to_wire,
)
from dataplane.ledger.commands import FenceSession, Input, SessionAlive, SessionAttached, SessionGone
from dataplane.protocol.curve import ServerKeys
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.proof import Ticket
from dataplane.protocol.unauthenticated import Unauthenticated
from dataplane.protocol.zap import Admission
from dataplane.storage.arena import Arena
from dataplane.storage.arena_orders import ArenaOrder, ArenaOrders
from dataplane.storage.endpoints import bind
from dataplane.storage.metrics import BulkCounts
from dataplane.storage.session_lock import lock_directories as default_lock_directories
from dataplane.storage.sessions import Sessions
from dataplane.storage.transport.interface import Fill, Offer, UnitPayloads
from dataplane.storage.transport.request_chunks import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_REQUEST_BYTES, Bytes
from dataplane.storage.transport.zmq import UnitFrames

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 16
"""After so many messages the thread looks at its orders."""
PEER_REQUESTS = 4
"""Requests of one peer that may wait here. Beyond that its socket slows it down."""
PEER_REPLIES = 64
"""Replies that may wait for one peer. One that asks for more without taking them, so keeps no window, loses replies
and gives up; the thread never waits for it."""
FEW_RANGES = 64
"""More than these are copied by one vectorised gather."""
EARLY = 4096
"""Clients that may attach before the unit has its number, and wait for it."""
STOP_WAIT_S = 30.0

Order = FenceSession | ArenaOrder


class BulkServer:
    """Serves one arena on ipc and, with `tcp_host`, on tcp (at `tcp_port`; 0: any free one).

    report: called in the server's thread with what the unit has to tell the ledger; must hand it over and return.
    advertise_host: the name that remote clients reach `tcp_host` by, where it is not that itself (0.0.0.0).
    token: the secret whose ticket for this epoch of the arena peers show; "admit" may give it later.
    insecure: with neither token nor keys, `tcp_host` may be other than loopback.
    keys: peers talk CURVE.
    counts: what is served is counted there.
    engine: where payloads may also be fetched by, closed with the server.
    lock_directories: where clients' session locks may be; the arena's directory and this user's in /dev/shm by default.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        epoch: int,
        token: str | None,
        report: Callable[[Input], None],
        insecure: bool = False,
        keys: ServerKeys | None = None,
        engine: UnitPayloads | None = None,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        advertise_host: str | None = None,
        counts: BulkCounts | None = None,
        lock_directories: Iterable[str | Path] | None = None,
    ) -> None:
        folders = default_lock_directories(arena.path.parent) if lock_directories is None else lock_directories
        self._arena = arena
        self._epoch = epoch
        self._token = token
        self._report = report
        self._keys = keys
        self._engine = engine
        self._is_guarded = insecure or token is not None or keys is not None
        self._tcp_host = tcp_host
        self._tcp_port = tcp_port
        self._advertise_host = advertise_host
        self._sessions = Sessions(arena, lock_directories=map(Path, folders))
        self._counts = counts or BulkCounts()
        self._unit = 0
        self._admission: Admission | None = None
        self._monitor: zmq.Socket[Any] | None = None  # where peers have to show a ticket
        self._early: list[tuple[bytes, pb.BulkRequest]] = []
        self._orders: deque[Order] = deque()
        self._arena_orders = ArenaOrders(arena, report)
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._wake_lock = threading.Lock()
        self._stopping = False
        self.endpoints: tuple[str, ...] = ()

    # --- from other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind and serve. `endpoints` are set when it returns. Raises ServiceUnavailableError if nothing can be bound,
        ValueError for a tcp_host beyond loopback that nothing guards."""
        assert self._thread is None, "started twice"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._wake = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._router.linger = 0
            self._router.set(zmq.SNDHWM, PEER_REPLIES)
            self._router.set(zmq.RCVHWM, PEER_REQUESTS)
            self._router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            if self._token is not None or self._keys is not None:
                name = f"the storage unit at {self._arena.path}"
                self._admission = Admission(self._context, name, self._keys, on_refused=self._count_refused)
                self._admission.guard(self._router)
                self.admit(self._token)
                self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._frames = UnitFrames(self._router, self._fault)
            self.endpoints = bind(
                self._router,
                self._tcp_host,
                tcp_port=self._tcp_port,
                advertise_host=self._advertise_host,
                guarded=self._is_guarded,
            )
            self._unauthenticated = Unauthenticated(self.endpoints, MAX_FRAME_BYTES, curve=self._keys is not None)
        except BaseException:
            self._close_sockets()
            self._close_engine()
            raise
        listens_at(self.endpoints)
        self._thread = threading.Thread(target=self._run, name="tq-bulk", daemon=True)
        self._thread.start()

    @property
    def unit(self) -> int:
        """The unit's number; 0 until it is set. Clients that attach before then wait."""
        return self._unit

    @unit.setter
    def unit(self, number: int) -> None:
        self._unit = number
        self._kick()

    def admit(self, token: str | None) -> None:
        """From now on peers show the ticket that this secret makes; "" or None: nobody is let in. From any thread; does
        nothing in a unit with neither token nor keys."""
        if self._admission is not None:
            self._admission.admit(Ticket.of(token, str(self._arena.path), str(self._epoch)))

    @property
    def attached(self) -> int:
        """How many sessions have mapped the arena."""
        return self._sessions.count

    @property
    def alive(self) -> bool:
        """Whether the thread serves. Should it die, its log says why and its peers find the socket closed."""
        return self._thread is not None and self._thread.is_alive()

    def order(self, order: Order) -> None:
        """Do this soon, in order; the outcome goes to `report`. From any thread; after `stop` it is ignored."""
        self._orders.append(order)
        self._kick()

    def stop(self) -> None:
        """Answer nobody any more; the thread has ended when this returns, and touches the arena no more. Idempotent;
        in a forked child it does nothing."""
        if self._thread is None or os.getpid() != self._owner:
            return
        self._stopping = True
        self._kick()
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

    def _close_sockets(self) -> None:
        if self._monitor is not None:
            if not self._router.closed:  # as it is where the thread died
                self._router.disable_monitor()
            self._monitor.close(linger=0)
        self._router.close()
        if self._admission is not None:
            self._admission.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    def _kick(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            if self._monitor is not None:
                poller.register(self._monitor, zmq.POLLIN)
            while not self._stopping:
                ready = self._wait(poller)
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._guarded("orders", self._obey)
                if self._router in ready:
                    self._serve_some()
                if self._monitor is not None:
                    self._unauthenticated.take_events(self._monitor)
                    self._unauthenticated.hang_up()
                if self._arena_orders.in_flight:
                    self._guarded("an order", self._arena_orders.step)
        except BaseException:
            log.critical("the bulk server of unit %d died; its rows cannot be reached", self._unit, exc_info=True)
            self._router.close()

    def _wait(self, poller: zmq.Poller) -> dict[Any, int]:
        """What is there to do. Goes on with transfers meanwhile."""
        pause_s = None if self._engine is None else self._engine.step()
        if self._arena_orders.in_flight:
            return dict(poller.poll(0))
        most_ms = None if pause_s is None else int(pause_s * 1000)
        ready = dict(poller.poll(self._unauthenticated.pause_ms(most_ms)))
        if not ready and pause_s is not None and pause_s < 0.001:
            time.sleep(pause_s)
        return ready

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("unit %d: %s failed; the server goes on", self._unit, what)

    def _obey(self) -> None:
        if self._unit and self._early:
            early, self._early = self._early, []
            for peer, request in early:
                self._answer(peer, request)
        while self._orders:
            order = self._orders.popleft()
            if not isinstance(order, FenceSession):
                self._arena_orders.begin(order)
                continue
            gone = self._fenced(order)
            self._counts.fences += gone
            if gone and self._engine is not None:
                self._engine.forget(order.session)
            hit("unit.fence.after")
            self._report((SessionGone if gone else SessionAlive)(unit=order.unit, session=order.session))

    def _fenced(self, order: FenceSession) -> bool:
        """Whether nothing of the session can touch the arena any more. Where that cannot be told it may live: the
        ledger asks again."""
        try:
            hit("unit.fence.before")
            return self._sessions.fence(order.session, order.lock_path, first=order.first, last=order.last)
        except Exception:
            log.exception("unit %d cannot tell whether session %d lives; it will look again", order.unit, order.session)
            return False

    def _serve_some(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = self._header()
                if request is not None:
                    self._answer(peer, request)
            except zmq.ZMQError:
                raise  # the socket is broken, and would be ready again at once
            except Exception:
                log.exception("unit %d: failed on a message; the server goes on", self._unit)
            self._drain()

    def _header(self) -> pb.BulkRequest | None:
        if not self._more():
            return None
        header = self._router.recv()
        try:
            if len(header) <= MAX_HEADER_BYTES:
                return pb.BulkRequest.FromString(header)
        except DecodeError:
            pass
        log.warning("unit %d: dropped a message that is no BulkRequest", self._unit)
        return None

    def _more(self) -> bool:
        """Whether the message under way has further frames. (The attribute `rcvmore` costs three times as much.)"""
        return bool(self._router.getsockopt(zmq.RCVMORE))

    def _drain(self) -> None:
        while self._more():
            self._router.recv(copy=False)

    def _answer(self, peer: bytes, request: pb.BulkRequest, fill: Fill | None = None) -> None:
        """fill: the payload of a write, fetched meanwhile; everything is looked at again."""
        verb = request.WhichOneof("verb")
        payload: Bytes | None = None
        failed: Exception | None = None
        began = time.perf_counter()
        try:
            if verb == "attach" and not self._unit:
                if len(self._early) < EARLY:  # who is one too many asks again
                    self._early.append((peer, request))
                return
            self._admit(request)
            if verb == "write":
                fill = fill or self._collected(peer, request)
                if fill is None:
                    return
                size = self._write(request, fill)
                self._counts.written_bytes += size
                reply = pb.BulkReply(written=pb.Written(size=size))
            else:
                reply, payload = self._perform(verb, request)
        except DataPlaneError as error:
            reply, failed = _refusal(error), error
        except Exception as error:
            log.exception("unit %d: %s of session %d failed", self._unit, verb, request.session)
            reply, failed = _refusal(InternalError(what=f"bulk {verb} in storage unit {self._unit}")), error
        self._drain()
        reply.call = request.call
        self._send(peer, reply, payload)
        self._counts.note(verb, failed, time.perf_counter() - began)

    def _count_refused(self) -> None:
        error = AuthenticationError(peer=f"storage unit {self._unit}", why="the token is wrong")
        self._counts.note("handshake", error, 0.0)

    def _send(self, peer: bytes, reply: pb.BulkReply, payload: Bytes | None) -> None:
        """Never waits: a ROUTER drops what is for a peer that is gone or whose queue is full."""
        self._router.send(peer, zmq.SNDMORE)
        self._router.send(reply.SerializeToString(), 0 if payload is None else zmq.SNDMORE)
        if payload is not None:
            self._router.send(payload.data, copy=False)

    def _admit(self, request: pb.BulkRequest) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(client_version=request.protocol_version, service_version=PROTOCOL_VERSION)
        if request.epoch != self._epoch:
            raise ServiceRestartedError(
                expected_epoch=request.epoch, got_epoch=self._epoch, what=f"storage unit {self._unit}"
            )
        self._sessions.admit(request.session)

    def _perform(self, verb: str | None, request: pb.BulkRequest) -> tuple[pb.BulkReply, Bytes | None]:
        match verb:
            case "attach":
                hit("unit.attach")
                self._bury_dead()
                return pb.BulkReply(challenge=self._challenge(request)), None
            case "proof":
                path = self._sessions.prove(request.session, request.proof.seen)
                hit("unit.attached")
                self._report(SessionAttached(unit=self._unit, session=request.session, lock_path=path))
                return pb.BulkReply(attached=pb.Attached()), None
            case "read":
                offer = self._read(request)
                hit("unit.read.copied")
                self._counts.read_bytes += len(offer.data)
                reply = pb.BulkReply(bytes=pb.ReadBytes(size=len(offer.data), source=offer.source))
                return reply, None if offer.source else offer.data
            case "settle":
                self._settle(request)
                return pb.BulkReply(settled=pb.Settled()), None
            case "stop":
                self._stop_put(request.session, request.stop.reservation)
                return pb.BulkReply(stopped=pb.Stopped()), None
            case _:
                raise self._fault("the request has no verb that this unit knows")

    def _challenge(self, request: pb.BulkRequest) -> pb.Challenge:
        challenge = self._sessions.attach(request.session, request.attach)
        if self._engine is not None:
            challenge.engine.CopyFrom(self._engine.trial)
        return challenge

    def _stop_put(self, session: int, reservation: int) -> None:
        log.info("unit %d: session %d gave up put %d", self._unit, session, reservation)
        self._sessions.stop_put(session, reservation)

    def _refuse_stopped(self, request: pb.BulkRequest) -> None:
        session, reservation = request.session, request.write.reservation
        if self._sessions.is_stopped(session, reservation):
            raise self._fault(f"put {reservation} of session {session} was stopped: its space may be another's by now")

    def _bury_dead(self) -> None:
        for session in self._sessions.bury_dead():
            self._report(SessionGone(unit=self._unit, session=session))

    # --- bytes --------------------------------------------------------------------------------------------------

    def _collected(self, peer: bytes, request: pb.BulkRequest) -> Fill | None:
        """The payload of a write; None if it has to be fetched first, and the write is answered then."""
        write = request.write
        if not write.HasField("source"):
            return self._frames.collect(write, lambda _: None)
        self._refuse_stopped(request)
        _, sizes = self._ranges(write.offsets, write.sizes)
        if self._engine is None or write.source.size != sum(sizes):
            raise self._fault(f"a payload of {write.source.size} bytes cannot be fetched here for {sum(sizes)}")

        def later(fetched: Fill | str) -> None:
            if isinstance(fetched, str):
                self._send(peer, pb.BulkReply(call=request.call, not_fetched=pb.NotFetched(why=fetched)), None)
            else:
                self._answer(peer, request, fetched)

        return self._engine.collect(write, later)

    def _write(self, request: pb.BulkRequest, fill: Fill) -> int:
        self._refuse_stopped(request)
        offsets, sizes = self._ranges(request.write.offsets, request.write.sizes)
        fill(self._arena.data.data, offsets, sizes)
        if self._arena.fsynced:
            try:
                self._arena.force(offsets, sizes)
            except OSError as error:
                raise self._fault(str(error)) from error
        return sum(sizes)

    def _read(self, request: pb.BulkRequest) -> Offer:
        """A copy: nothing refers to the arena when this returns."""
        offsets, sizes = self._ranges(request.read.offsets, request.read.sizes)
        offer = self._offer(request, sum(sizes))
        if len(offsets) > FEW_RANGES:
            gather([self._arena.data], None, np.array(offsets, np.int64), np.array(sizes, np.int64), offer.data)
            return offer
        at = 0
        for offset, size in zip(offsets, sizes, strict=True):
            offer.data[at : at + size] = self._arena.data[offset : offset + size]
            at += size
        return offer

    def _offer(self, request: pb.BulkRequest, nbytes: int) -> Offer:
        """Memory for the reply, of a slot if the client asks for it and there is one."""
        wanted = self._engine if request.read.fetch else None
        return (wanted and wanted.offer(request.session, nbytes)) or self._frames.offer(request.session, nbytes)

    def _settle(self, request: pb.BulkRequest) -> None:
        if self._engine is None or not self._engine.settle(request.session, request.settle.tag):
            raise self._fault("what was to be fetched for a read has been taken back: it took too long")

    def _ranges(self, offsets: Iterable[int], sizes: Iterable[int]) -> tuple[list[int], list[int]]:
        """The ranges, all of them within what is backed."""
        starts, lengths = list(offsets), list(sizes)
        if len(starts) != len(lengths):
            raise self._fault(f"{len(starts)} offsets for {len(lengths)} sizes")
        backed = self._arena.backed_bytes
        for start, length in zip(starts, lengths, strict=True):
            if start + length > backed:
                raise self._fault(f"bytes {start} to {start + length} are outside the {backed} backed")
        if sum(lengths) > MAX_REQUEST_BYTES:
            raise self._fault(f"a request of {sum(lengths):,} bytes; at most {MAX_REQUEST_BYTES:,} are taken")
        return starts, lengths

    def _fault(self, why: str) -> StorageUnitError:
        return StorageUnitError(unit=self._unit, endpoint=self.endpoints[0], why=why)


def _refusal(error: DataPlaneError) -> pb.BulkReply:
    name, facts = to_wire(error)
    return pb.BulkReply(error=pb.BulkError(name=name, facts=facts))
