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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.core.addresses import join_address, resolve_host
from dataplane.core.wakeup import Waker, poll_ms
from dataplane.core.zmq_io import readable
from dataplane.errors import InternalError
from dataplane.protocol.fd_limits import OF_A_CONTEXT, allow_more
from workers.directory import wire
from workers.directory.process import has_ended
from workers.directory.registry import Effects, Registry, Session
from workers.directory.wire import EntryState
from workers.errors import OpenFilesError

GRACE_S = 3.0
HEARTBEAT_MS = 1000
SILENCE_MS = 5000
_LOOK_AGAIN_S = 0.05
"""A process closes its connections a little before its end can be seen."""
_JOIN_S = 10.0

_log = logging.getLogger(__name__)


@dataclass
class _Client:
    """fd: of the connection that its last Hello came over, until that ends."""

    process: wire.Process
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
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing = False
        self._registry = Registry()
        self._clients: dict[Session, _Client] = {}
        self._connected: set[int] = set()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self.address = join_address(host, self._bind(host))
        except BaseException:
            self._context.destroy(linger=0)
            self._waker.close()
            raise
        self._thread = threading.Thread(target=self._run, name="tq-directory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and free the port; clients see their connections end. Blocks for the thread. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(_JOIN_S)
        self._waker.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bind(self, host: str) -> int:
        ip = resolve_host(host)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.BACKLOG, 4096)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if ":" in ip:
            self._socket.set(zmq.IPV6, 1)
        self._socket.bind(f"tcp://[{ip}]:*" if ":" in ip else f"tcp://{ip}:*")
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker.fd):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll(self._patience_ms())
                self._waker.clear()
                for step in (self._read, self._expire, self._bury):
                    self._attempt(step)
        except Exception:
            _log.exception("the directory's thread failed; its clients will find it gone")
        finally:
            self._context.destroy(linger=0)

    def _attempt(self, step: Callable[[], None]) -> None:
        """A defect in one step leaves the others, and the directory, as they are."""
        try:
            step()
        except Exception:
            _log.exception("the directory failed at %s", step.__name__)

    def _expire(self) -> None:
        self._say(self._registry.expire(time.monotonic()))

    def _patience_ms(self) -> int | None:
        moments = [] if (expiry := self._registry.next_expiry()) is None else [expiry - time.monotonic()]
        if any(client.fd is None for client in self._clients.values()):
            moments.append(_LOOK_AGAIN_S)
        return poll_ms(min(moments)) if moments else None

    def _read(self) -> None:
        """Everything that came. What ended is looked at before each message: a descriptor's number is used again. A
        connection's last messages may come after its end."""
        self._notice_ends()
        while True:
            try:
                session, body = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except ValueError:
                _log.warning("a message of a wrong form came to the directory, and was dropped")
                continue
            self._notice_ends()
            try:
                request = wire.decode_request(body.bytes)
            except msgspec.DecodeError as error:
                _log.warning("a message that is none of ours came to the directory, and was dropped: %s", error)
                continue
            try:
                self._take(session.bytes, int(body.get(zmq.SRCFD)), request)
            except Exception as error:
                _log.exception("the directory failed on %r", request)
                self._refuse(session.bytes, request, error)

    def _refuse(self, session: Session, request: wire.Request, error: Exception) -> None:
        if not isinstance(request, wire.OpenDirectory):
            internal = InternalError(what=f"{type(request).__name__}: {error!r}")
            self._say([(session, wire.failed(request.number, internal))])

    def _take(self, session: Session, fd: int, request: wire.Request) -> None:
        client = self._clients.get(session)
        if isinstance(request, wire.OpenDirectory):
            if client is None and request.known:
                self._say([(session, wire.Unknown("it was silent for too long, and was given up"))])
            client = self._clients.setdefault(session, _Client(request.process))
            client.fd, client.lost_at = fd if fd in self._connected else None, time.monotonic()
            return
        if client is None:
            # Of before its connection broke. After its Hello it asks again.
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
        while readable(self._monitor):
            event: dict[str, Any] = dict(recv_monitor_message(self._monitor))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected.add(event["value"])
                continue
            self._connected.discard(event["value"])
            for client in self._clients.values():
                if client.fd == event["value"]:
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
            self._socket.send_multipart((session, wire.encode(reply)))
