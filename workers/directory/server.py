"""The directory's thread: a ZMQ ROUTER, and the connections of its clients, by which it knows who lives.

A client's connection breaks when its process dies, at once where the kernel says so, within seconds where only ZMQ's
heartbeats can tell (a host that fell silent; a child that inherited the descriptor). ZMQ's own threads keep those up,
so a client that is busy, or holds its interpreter for long, is never taken for dead. Whoever lost its connection has
`GRACE_S` to come back on a new one; a process of this host that has ended is not waited for. One that comes back later
(it was stopped, or its host cut off) is told that it was given up, and counts as a new one.

Whoever can reach the port can register and look up: it is inside the trust of the Ray job, like Ray's own ports.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from dataplane.core.addresses import join_address, resolve_host
from dataplane.core.wakeup import poll_ms
from dataplane.core.zmq_io import bind_tcp, send
from dataplane.errors import InternalError, ProtocolVersionError
from dataplane.protocol.fd_limits import OF_A_CONTEXT, allow_more
from workers.directory import wire
from workers.directory.process import has_ended
from workers.directory.registry import Effects, Registry, Session
from workers.directory.wire import EntryState
from workers.errors import OpenFilesError
from workers.transport.encoding import encode
from workers.transport.poll_thread import PollThread
from workers.transport.zmq_sockets import Socket, end_silent, events, open_socket, poller, received

GRACE_S = 3.0
HEARTBEAT_MS = 1000
SILENCE_MS = 5000
_LOOK_AGAIN_S = 0.05
"""A process closes its connections a little before its end can be seen."""

_log = logging.getLogger(__name__)


@dataclass
class _Client:
    """fd: of the connection that its last `OpenDirectory` came over, until that ends."""

    process: wire.Process
    version: int
    fd: int | None = None
    lost_at: float = 0.0


class Directory:
    """A directory that is served until `close`, from a thread of its own. `address` is "host:port".

    It has a connection to each of its clients: this process may open as many files as its hard limit allows from here
    on.
    """

    @classmethod
    def serve(cls, host: str = "127.0.0.1") -> Directory:
        """Bind a free port of `host`, which clients must be able to reach. OSError if it has no such address,
        `OpenFilesError` where this process may have no more of them."""
        allow_more()
        with OpenFilesError.of("serving a job's directory", least=OF_A_CONTEXT):
            return cls(host)

    def __init__(self, host: str) -> None:
        """Use `serve`."""
        self._context: zmq.Context[Socket] = zmq.Context()
        self._registry = Registry()
        self._clients: dict[Session, _Client] = {}
        self._connected: set[int] = set()
        try:
            self._socket = open_socket(self._context, zmq.ROUTER)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self.address = join_address(host, self._bind(host))
            sources = poller(self._socket, self._monitor)
            self._thread = PollThread("tq-directory", sources, self._turn, self._over, timeout_ms=self._timeout_ms)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port; clients see their connections end. Blocks for the thread. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bind(self, host: str) -> int:
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.BACKLOG, 4096)
        end_silent(self._socket, HEARTBEAT_MS, SILENCE_MS)
        return bind_tcp(self._socket, resolve_host(host))

    def _turn(self, _: object) -> None:
        for step in (self._read, self._expire, self._bury):
            self._attempt(step)

    def _over(self, defect: BaseException | None) -> None:
        if defect is not None:
            _log.error("the directory's thread failed; its clients will find it gone", exc_info=defect)
        self._context.destroy(linger=0)

    def _attempt(self, step: Callable[[], None]) -> None:
        """A defect in one step leaves the others, and the directory, as they are."""
        try:
            step()
        except Exception:
            _log.exception("the directory failed at %s", step.__name__)

    def _expire(self) -> None:
        self._say(self._registry.expire(time.monotonic()))

    def _timeout_ms(self) -> int | None:
        moments = [] if (expiry := self._registry.next_expiry()) is None else [expiry - time.monotonic()]
        if any(client.fd is None for client in self._clients.values()):
            moments.append(_LOOK_AGAIN_S)
        return poll_ms(min(moments)) if moments else None

    def _read(self) -> None:
        """Everything that came. What ended is looked at before each message: a descriptor's number is used again. A
        connection's last messages may come after its end."""
        self._notice_ends()
        for session, request, frames in received(self._socket, wire.decode_request, "the directory"):
            self._notice_ends()
            try:
                self._take(session, int(frames[0].get(zmq.SRCFD)), request)
            except Exception as error:
                _log.exception("the directory failed on %r", request)
                self._refuse(session, request, error)

    def _refuse(self, session: Session, request: wire.Request, error: Exception) -> None:
        if not isinstance(request, wire.OpenDirectory):
            internal = InternalError(what=f"{type(request).__name__}: {error!r}")
            self._say([(session, wire.failed(request.number, internal))])

    def _take(self, session: Session, fd: int, request: wire.Request) -> None:
        client = self._clients.get(session)
        if isinstance(request, wire.OpenDirectory):
            if client is None and request.known:
                self._say([(session, wire.Unknown("it was silent for too long, and was given up"))])
            client = self._clients.setdefault(session, _Client(request.process, request.version))
            client.fd, client.lost_at = fd if fd in self._connected else None, time.monotonic()
            return
        if client is None:
            # Of before its connection broke. After its `OpenDirectory` it asks again.
            return
        if client.version != wire.VERSION:
            error = ProtocolVersionError(client_version=client.version, service_version=wire.VERSION)
            self._say([(session, wire.failed(request.number, error))])
            return
        self._say(self._answer(session, request))

    def _answer(self, session: Session, request: wire.Request) -> Effects:
        now = time.monotonic()
        match request:
            case wire.RegisterProcess():
                owner = self._registry.owner(request.kind, request.name)
                if owner is not None and owner in self._clients and self._clients[owner].fd is None:
                    self._say(self._give_up(owner))
                return self._registry.register(session, request)
            case wire.Lookup():
                return self._registry.lookup(session, request, now)
            case wire.End():
                return self._registry.end(session, request)
            case wire.Listing():
                return self._registry.listing(session, request)
            case wire.LeaveJob():
                del self._clients[session]
                effects = self._registry.leave(session, EntryState.ENDED, "it was closed")
                return [*effects, (session, wire.Found(request.number))]
            case _:
                raise AssertionError(request)

    def _notice_ends(self) -> None:
        for event, fd in events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._connected.add(fd)
                continue
            self._connected.discard(fd)
            for client in self._clients.values():
                if client.fd == fd:
                    client.fd, client.lost_at = None, time.monotonic()

    def _bury(self) -> None:
        """Those who are certainly dead, or did not come back."""
        now = time.monotonic()
        for session, client in list(self._clients.items()):
            if client.fd is None and (now - client.lost_at >= GRACE_S or has_ended(client.process)):
                self._say(self._give_up(session))

    def _give_up(self, session: Session) -> Effects:
        client = self._clients.pop(session)
        why = f"its process {client.process.pid} died" if has_ended(client.process) else "its connection broke"
        return self._registry.leave(session, EntryState.LOST, why)

    def _say(self, effects: Effects) -> None:
        for session, reply in effects:
            send(self._socket, (session, encode(reply)))
