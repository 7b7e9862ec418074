"""The thread of a worker's messages: its sockets, its clock, and what it learns of its peers."""

from __future__ import annotations

import collections
import contextlib
import enum
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq

from dataplane.control.waker import Waker
from dataplane.errors import InternalError
from dataplane.host import join_address, resolve_host, split_address
from dataplane.warm import WarmMemory
from workers.address import WorkerAddress
from workers.directory import DirectoryClient, Entry, Facts, Kind
from workers.errors import MessengerClosedError, WorkerLostError
from workers.messages import wire
from workers.messages.incoming import Incoming, Posting
from workers.messages.outgoing import Outgoing, Sending, Snapshot
from workers.messages.slabs import Mappings, Slabs
from workers.messages.wire import Data, Forget, Post, Pull
from workers.messages.work import forbid_waiting

KEEP_BYTES = 1 << 30
"""Memory of received tensors that were dropped, kept for the next ones, at most."""
_JOIN_S = 10.0
_LINGER_MS = 1000
_LONGEST_MS = 1 << 30
_FRAMES: dict[type[wire.Request], int] = {Post: 2, Data: 1, Forget: 0}
"""How many follow the head of each."""

_log = logging.getLogger(__name__)


class _Known(enum.Enum):
    """What is known of a peer."""

    NOTHING = enum.auto()
    ASKED = enum.auto()
    LIVES = enum.auto()


@dataclass
class _Peer:
    known: _Known = _Known.NOTHING
    incarnation: int = 0
    link: zmq.Socket[bytes] | None = None


class Engine:
    """Runs until `close`. `submit_*`, `call` and `settled` are for any thread; the rest is its own thread's.

    host: an address of this host that peers reach; its port is the directory entry's endpoint. lookup_s: how long a
    peer may take to be registered, at least.
    """

    def __init__(
        self,
        address: WorkerAddress,
        directory: DirectoryClient,
        slabs: Slabs,
        mappings: Mappings,
        *,
        host: str,
        facts: Facts,
        lookup_s: float,
    ) -> None:
        self.name = address.get_name()
        self._directory = directory
        self._slabs = slabs
        self._mappings = mappings
        self._lookup_s = lookup_s
        self._peers: dict[str, _Peer] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_numbers = itertools.count()
        self._next_expiry = math.inf
        self._leaving: list[Future[None]] = []
        self._closing = False
        self._ended: Exception | None = None
        self._warm = WarmMemory(KEEP_BYTES)
        self.outgoing = Outgoing(self.name, self._transmit, self._later)
        self.incoming = Incoming(
            self.name,
            mappings,
            self._warm,
            reply=self._reply,
            call=self.call,
            contact=self.outgoing.contact,
            forget=self.outgoing.forget,
            busy=self._busy,
        )
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._unsubscribe = directory.subscribe(self._gone)
        try:
            entry = directory.register_worker(address, self._bind(host), facts)
        except BaseException:
            self._unsubscribe()
            self._context.destroy(linger=0)
            self._waker.close()
            raise
        self.incarnation = self.outgoing.incarnation = entry.incarnation
        self._thread = threading.Thread(target=self._run, name=f"tq-messages-{self.name}", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------------------------------

    def call(self, work: Callable[[], None]) -> None:
        """Have the engine's thread do it, in the order of calls."""
        self._calls.append(work)
        self._waker.wake()
        if self._ended is not None:
            self._work()

    def submit_send(self, sendings: list[Sending]) -> None:
        """Send; each one's future tells how it went."""
        self.call(partial(self._send, sendings))

    def submit_recv(self, posting: Posting) -> None:
        """Receive; its future tells what came."""
        self.call(partial(self._recv, posting))

    def settled(self) -> Future[None]:
        """Done once this end can go away without harm to what it sent."""
        future: Future[None] = Future()
        self.call(lambda: self._leaving.append(future))
        return future

    def close(self) -> None:
        """End the thread and give everything back; whoever waits gets `MessengerClosedError`. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(_JOIN_S)
        self._unsubscribe()
        self._waker.close()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _bind(self, host: str) -> str:
        ip = resolve_host(host)
        self._router.set(zmq.SNDHWM, 0)
        self._router.set(zmq.RCVHWM, 0)
        self._router.set(zmq.LINGER, _LINGER_MS)
        if ":" in ip:
            self._router.set(zmq.IPV6, 1)
        self._router.bind(f"tcp://[{ip}]:*" if ":" in ip else f"tcp://{ip}:*")
        port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return join_address(ip, port)

    def _run(self) -> None:
        forbid_waiting()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)
        error: Exception = MessengerClosedError(worker=self.name)
        try:
            while not self._closing:
                ready = self._poller.poll(self._patience_ms())
                self._waker.clear()
                self._work()
                for source, _ in ready:
                    if source is self._router:
                        self._hear()
                    elif source is not self._waker.fd and not isinstance(source, int):
                        self._hear_answers(source)
                self._ring()
                if self._leaving and self.outgoing.settled:
                    self._let_go()
        except Exception as defect:
            _log.exception("the messages of worker %s ended by a defect", self.name)
            error = InternalError(what=f"the messages of worker {self.name} ended by a defect: {defect!r}")
        finally:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._ended = error
        self.outgoing.fail_all(error)
        self.incoming.fail_all(error)
        self._mappings.close()
        self._warm.drop()
        self._context.destroy(linger=_LINGER_MS)
        self._work()
        self._let_go()

    def _let_go(self) -> None:
        for future in self._leaving:
            future.set_result(None)
        self._leaving.clear()

    def _work(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._calls.popleft()()

    def _patience_ms(self) -> int | None:
        moment = min(self._next_expiry, self._timers[0][0] if self._timers else math.inf)
        if moment == math.inf:
            return None
        return min(max(int((moment - time.monotonic()) * 1000) + 1, 0), _LONGEST_MS)

    def _ring(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if self._next_expiry <= now:
            self._next_expiry = min(self.outgoing.expire(now), self.incoming.expire(now))

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_numbers), work))

    def _busy(self) -> bool:
        return self.incoming.waiting or self.outgoing.waiting

    # --- operations -----------------------------------------------------------------------------------------------

    def _send(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            if self._ended is not None:
                sending.fail(self._ended)
                sending.snapshot.release()
                continue
            self.outgoing.contact(sending.to, sending.stream, sending.options)
            self.outgoing.queue(sending)
            self._next_expiry = min(self._next_expiry, sending.deadline)
            self._meet(sending.to, sending.deadline)
        if self._ended is None:
            self.incoming.settle()

    def _recv(self, posting: Posting) -> None:
        if self._ended is not None:
            posting.fail(self._ended)
            return
        self._next_expiry = min(self._next_expiry, posting.deadline)
        lives = self._peer(posting.source).known is _Known.LIVES
        if self.incoming.post(posting, lives):
            self._meet(posting.source, posting.deadline)
        self.incoming.settle()

    # --- peers ----------------------------------------------------------------------------------------------------

    def _peer(self, name: str) -> _Peer:
        return self._peers.setdefault(name, _Peer())

    def _meet(self, name: str, deadline: float) -> None:
        """See to it that the peer is known, and that this end is told of its death; then send what is for it."""
        peer = self._peer(name)
        if peer.known is _Known.LIVES:
            self.outgoing.flush(name)
        elif peer.known is _Known.NOTHING:
            peer.known = _Known.ASKED
            wait_s = max(self._lookup_s, deadline - time.monotonic())
            asked = self._directory.ask(Kind.WORKER, name, wait_s)
            asked.add_done_callback(lambda future: self.call(lambda: self._found(name, future)))

    def _found(self, name: str, future: Future[tuple[Entry, ...]]) -> None:
        if self._ended is not None:
            return
        peer = self._peer(name)
        error = future.exception()
        if isinstance(error, Exception):
            peer.known = _Known.NOTHING
            self._lose(name, error)
            return
        (entry,) = future.result()
        self._renew(name, peer, entry.incarnation)
        peer.known = _Known.LIVES
        self._connect(peer, entry.endpoints[0])
        self.outgoing.flush(name)
        self.incoming.match(name)

    def _connect(self, peer: _Peer, endpoint: str) -> None:
        host, port = split_address(endpoint)
        link = peer.link = self._context.socket(zmq.DEALER)
        link.set(zmq.SNDHWM, 0)
        link.set(zmq.RCVHWM, 0)
        link.set(zmq.LINGER, _LINGER_MS)
        if ":" in host:
            link.set(zmq.IPV6, 1)
            host = f"[{host}]"
        link.connect(f"tcp://{host}:{port}")
        self._poller.register(link, zmq.POLLIN)

    def _gone(self, entry: Entry) -> None:
        if entry.kind is Kind.WORKER:
            self.call(lambda: self._bury(entry))

    def _bury(self, entry: Entry) -> None:
        peer = self._peers.get(entry.name)
        if self._ended is None and peer is not None and peer.incarnation == entry.incarnation:
            self._forget(peer)
            self._lose(entry.name, WorkerLostError(worker=entry.name, why=entry.why))

    def _renew(self, name: str, peer: _Peer, incarnation: int) -> None:
        """A peer of that incarnation lives: what is known of one before is over."""
        if peer.incarnation == incarnation:
            return
        lived, peer.incarnation = peer.known is _Known.LIVES, incarnation
        self.incoming.outdate(name, incarnation)
        if lived:
            self._forget(peer)
            self.outgoing.lose(name, WorkerLostError(worker=name, why="it was started anew"))
            if self.incoming.waits_for(name):
                self._meet(name, 0.0)

    def _forget(self, peer: _Peer) -> None:
        peer.known = _Known.NOTHING
        if peer.link is not None:
            self._poller.unregister(peer.link)
            peer.link.close(linger=0)
            peer.link = None

    def _lose(self, name: str, error: Exception) -> None:
        self.outgoing.lose(name, error)
        self.incoming.lose(name, error)

    # --- frames ---------------------------------------------------------------------------------------------------

    def _transmit(self, name: str, post: Post, snapshot: Snapshot) -> None:
        link = self._peer(name).link
        assert link is not None, name
        link.send_multipart((wire.encode(post), snapshot.skeleton, snapshot.inline))

    def _reply(self, route: bytes, answer: wire.Answer) -> None:
        if self._ended is None:
            self._router.send_multipart((route, wire.encode(answer)))

    def _hear(self) -> None:
        while True:
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                request = wire.decode_request(frames[0].buffer if frames else b"")
                if len(frames) - 1 != _FRAMES[type(request)]:
                    raise msgspec.DecodeError(f"{type(request).__name__} with {len(frames) - 1} frames")
            except msgspec.DecodeError as error:
                _log.warning("worker %s dropped a message that is none of ours: %s", self.name, error)
                continue
            self._take(route.bytes, request, frames[1:])

    def _take(self, route: bytes, request: wire.Request, frames: list[zmq.Frame]) -> None:
        match request:
            case Post():
                peer = self._peer(request.source)
                if request.incarnation < peer.incarnation:
                    return
                self._renew(request.source, peer, request.incarnation)
                self.incoming.arrive(route, request, frames[0].bytes, frames[1].buffer)
            case Data():
                self.incoming.data(request, frames[0].buffer)
            case Forget():
                self._mappings.forget(request.inodes)

    def _hear_answers(self, link: zmq.Socket[Any]) -> None:
        name = next((name for name, peer in self._peers.items() if peer.link is link), None)
        while name is not None and not link.closed:
            try:
                answer = wire.decode_answer(link.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if isinstance(answer, Pull):
                self._serve(name, answer, link)
            else:
                self.outgoing.answered(name, answer)
        self._say_forgotten()

    def _serve(self, name: str, pull: Pull, link: zmq.Socket[Any]) -> None:
        sending = self.outgoing.asked(name, pull)
        if sending is None or sending.snapshot.slab is None:
            return
        part: Any = sending.snapshot.slab.memory[pull.start : pull.start + pull.nbytes]
        data = Data(stream=pull.stream, number=pull.number, source=self.name, start=pull.start)
        link.send(wire.encode(data), zmq.SNDMORE)
        link.send(part, copy=False)

    def _say_forgotten(self) -> None:
        inodes = self._slabs.forgotten()
        if inodes:
            message = wire.encode(Forget(inodes=inodes))
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.send(message)
