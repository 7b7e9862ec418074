"""The storage unit's bulk server: one thread that moves bytes between sockets and the arena, and refuses who must be.

It decides nothing else. Every copy ends before the next message or order is looked at, so that a fenced session, or a
stopped put, has no copy under way: reads leave the arena before they are handed to ZMQ, writes are taken from ZMQ in
one go.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from dataplane.arena import Arena
from dataplane.bulk.endpoints import bind
from dataplane.bulk.frames import MAX_HEADER_BYTES, MAX_REQUEST_BYTES, Bytes
from dataplane.bulk.lock import lock_directories as default_lock_directories
from dataplane.bulk.sessions import Sessions
from dataplane.curve import ServerKeys
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
from dataplane.failpoints import hit
from dataplane.ledger.commands import (
    FenceSession,
    GrowArena,
    Grown,
    Input,
    SessionAlive,
    SessionAttached,
    SessionGone,
    ShrinkArena,
    Shrunk,
)
from dataplane.metrics.bulk import BulkCounts
from dataplane.pb import bulk_pb2 as pb
from dataplane.rowcopy import gather
from dataplane.types import PROTOCOL_VERSION
from dataplane.warm import WarmMemory

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
REPLY_MEMORY_BYTES = 64 << 20
"""Memory of replies that were sent, kept for the next ones."""
STOP_WAIT_S = 30.0

Order = FenceSession | GrowArena | ShrinkArena


class BulkServer:
    """Serves one arena on ipc and, with `tcp_host`, on tcp (at `tcp_port`; 0: any free one).

    report: called in the server's thread with what the unit has to tell the ledger; must hand it over and return.
    advertise_host: the name that remote clients reach `tcp_host` by, where it is not that itself (0.0.0.0).
    token: what every request must carry; with `keys`, until `admit` says otherwise.
    insecure: with neither token nor keys, `tcp_host` may be other than loopback.
    keys: only those who know the public one get a word in.
    counts: what is served is counted there.
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
        tcp_host: str | None = None,
        tcp_port: int = 0,
        advertise_host: str | None = None,
        counts: BulkCounts | None = None,
        lock_directories: Iterable[str | Path] | None = None,
    ) -> None:
        folders = default_lock_directories(arena.path.parent) if lock_directories is None else lock_directories
        self._arena = arena
        self._epoch = epoch
        self._token = (token or "").encode()
        self._report = report
        self._keys = keys
        self._is_guarded = insecure or token is not None or keys is not None
        self._tcp_host = tcp_host
        self._tcp_port = tcp_port
        self._advertise_host = advertise_host
        self._sessions = Sessions(arena, lock_directories=map(Path, folders))
        self._counts = counts or BulkCounts()
        self._unit = 0
        self._memory = WarmMemory(REPLY_MEMORY_BYTES)
        self._early: list[tuple[bytes, pb.BulkRequest]] = []
        self._orders: deque[Order] = deque()
        self._growth: deque[tuple[GrowArena, Iterator[int]]] = deque()
        self._shrinks = 0
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
            self._router.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            if self._keys is not None:
                self._keys.guard(self._router)
            self.endpoints = bind(
                self._router,
                self._tcp_host,
                tcp_port=self._tcp_port,
                advertise_host=self._advertise_host,
                guarded=self._is_guarded,
            )
        except BaseException:
            self._close_sockets()
            raise
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

    def admit(self, token: str) -> None:
        """From now on requests carry this token. From any thread; before `unit` is set, or the same again."""
        self._token = token.encode()

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
        self._close_sockets()
        self._sessions.close()

    def _close_sockets(self) -> None:
        self._router.close()
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
            while not self._stopping:
                ready = dict(poller.poll(0 if self._growth else None))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._guarded("orders", self._obey)
                if self._router in ready:
                    self._serve_some()
                if self._growth:
                    self._guarded("GrowArena", self._grow_a_step)
        except BaseException:
            log.critical("the bulk server of unit %d died; its rows cannot be reached", self._unit, exc_info=True)
            self._router.close()

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
            match self._orders.popleft():
                case FenceSession() as order:
                    gone = self._fenced(order)
                    self._counts.fences += gone
                    hit("unit.fence.after")
                    self._report((SessionGone if gone else SessionAlive)(unit=order.unit, session=order.session))
                case GrowArena() as order:
                    self._growth.append((order, self._arena.grow_steps(order.backed_bytes)))
                case ShrinkArena() as order:
                    self._shrink(order)

    def _shrink(self, order: ShrinkArena) -> None:
        """Growth that was ordered before is not wanted any more."""
        error = None
        if order.number > self._shrinks:
            self._growth.clear()
            self._shrinks = order.number
            try:
                self._arena.punch(order.backed_bytes)
            except OSError as caught:
                error = str(caught)
                log.warning("unit %d cannot give memory back: %s", self._unit, error)
        backed = self._arena.backed_bytes
        self._report(Shrunk(unit=order.unit, number=order.number, backed_bytes=backed, error=error))

    def _fenced(self, order: FenceSession) -> bool:
        """Whether nothing of the session can touch the arena any more. Where that cannot be told it may live: the
        ledger asks again."""
        try:
            hit("unit.fence.before")
            return self._sessions.fence(order.session, order.lock_path)
        except Exception:
            log.exception("unit %d cannot tell whether session %d lives; it will look again", order.unit, order.session)
            return False

    def _grow_a_step(self) -> None:
        order, steps = self._growth[0]
        error = None
        try:
            if next(steps, None) is not None:
                return
        except ArenaSpaceError as caught:
            error = str(caught)
            log.warning("unit %d cannot grow to %d bytes: %s", self._unit, order.backed_bytes, error)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            log.exception("unit %d cannot grow to %d bytes", self._unit, order.backed_bytes)
        self._growth.popleft()
        hit("unit.before_grown")
        backed = self._arena.backed_bytes
        self._report(Grown(unit=order.unit, backed_bytes=backed, error=error, shrinks=self._shrinks))

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

    def _answer(self, peer: bytes, request: pb.BulkRequest) -> None:
        verb = request.WhichOneof("verb")
        payload: Bytes | None = None
        failed: Exception | None = None
        began = time.perf_counter()
        try:
            if verb == "attach" and not self._unit:
                self._wait_for_number(peer, request)
                return
            self._admit(request)
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

    def _wait_for_number(self, peer: bytes, request: pb.BulkRequest) -> None:
        """Nobody is refused for a token that the unit does not know yet either. Who is one too many asks again."""
        if len(self._early) < EARLY:
            self._early.append((peer, request))

    def _send(self, peer: bytes, reply: pb.BulkReply, payload: Bytes | None) -> None:
        """Never waits: a ROUTER drops what is for a peer that is gone or whose queue is full."""
        self._router.send(peer, zmq.SNDMORE)
        self._router.send(reply.SerializeToString(), 0 if payload is None else zmq.SNDMORE)
        if payload is not None:
            self._router.send(payload.data, copy=False)

    def _admit(self, request: pb.BulkRequest) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(client_version=request.protocol_version, service_version=PROTOCOL_VERSION)
        if not hmac.compare_digest(request.token, self._token):
            why = "its token is wrong" if request.token else "it gave no token"
            raise AuthenticationError(peer=f"storage unit {self._unit}", why=why)
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
                return pb.BulkReply(challenge=self._sessions.attach(request.session, request.attach)), None
            case "proof":
                path = self._sessions.prove(request.session, request.proof.seen)
                hit("unit.attached")
                self._report(SessionAttached(unit=self._unit, session=request.session, lock_path=path))
                return pb.BulkReply(attached=pb.Attached()), None
            case "write":
                self._refuse_stopped(request.session, request.write.reservation)
                size = self._write(request.write)
                self._counts.written_bytes += size
                return pb.BulkReply(written=pb.Written(size=size)), None
            case "read":
                payload = self._read(request.read)
                hit("unit.read.copied")
                self._counts.read_bytes += len(payload)
                return pb.BulkReply(bytes=pb.ReadBytes(size=len(payload))), payload
            case "stop":
                self._stop_put(request.session, request.stop.reservation)
                return pb.BulkReply(stopped=pb.Stopped()), None
            case _:
                raise self._fault("the request has no verb that this unit knows")

    def _stop_put(self, session: int, reservation: int) -> None:
        log.info("unit %d: session %d gave up put %d", self._unit, session, reservation)
        self._sessions.stop_put(session, reservation)

    def _refuse_stopped(self, session: int, reservation: int) -> None:
        if self._sessions.is_stopped(session, reservation):
            raise self._fault(f"put {reservation} of session {session} was stopped: its room may be another's by now")

    def _bury_dead(self) -> None:
        for session in self._sessions.bury_dead():
            self._report(SessionGone(unit=self._unit, session=session))

    # --- bytes --------------------------------------------------------------------------------------------------

    def _write(self, request: pb.WriteRanges) -> int:
        offsets, sizes = self._ranges(request.offsets, request.sizes)
        arena = self._arena.data.data
        at = 0
        for count in request.frame_ranges:
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
        if self._arena.forced:
            try:
                self._arena.force(offsets, sizes)
            except OSError as error:
                raise self._fault(str(error)) from error
        return sum(sizes)

    def _receive_one(self, target: memoryview) -> None:
        """Straight into the arena. A longer frame is cut off by ZMQ at the end of the range."""
        received = self._router.recv_into(target)
        if received != len(target):
            raise self._fault(f"a payload frame has {received} bytes for a range of {len(target)}")

    def _receive_many(self, arena: memoryview, offsets: list[int], sizes: list[int]) -> None:
        frame = self._router.recv(copy=False).buffer
        if len(frame) != sum(sizes):
            raise self._fault(f"a payload frame has {len(frame)} bytes for ranges of {sum(sizes)}")
        at = 0
        for offset, size in zip(offsets, sizes, strict=True):
            arena[offset : offset + size] = frame[at : at + size]
            at += size

    def _read(self, request: pb.ReadRanges) -> Bytes:
        """A copy: nothing refers to the arena when this returns."""
        offsets, sizes = self._ranges(request.offsets, request.sizes)
        nbytes = sum(sizes)
        copy = self._memory.take(max(1, nbytes))[:nbytes]
        if len(offsets) > FEW_RANGES:
            gather([self._arena.data], None, np.array(offsets, np.int64), np.array(sizes, np.int64), copy)
            return copy
        at = 0
        for offset, size in zip(offsets, sizes, strict=True):
            copy[at : at + size] = self._arena.data[offset : offset + size]
            at += size
        return copy

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
