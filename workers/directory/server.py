"""The directory's thread: a ZMQ ROUTER, and the connections of its clients, which show whether clients are alive.

A client's connection breaks when its process dies: at once if the kernel reports it, or within seconds if only ZMQ's
heartbeats can detect it (an unreachable host; a child process that inherited the descriptor). ZMQ's own threads send
heartbeats, so a client that is busy or holds the GIL is not considered dead. A client that lost its connection has
`GRACE_S` to reconnect, unless its process runs on this host and has ended. A client that reconnects later (after a
pause, or a network failure) gets an `Unknown` reply and starts a new session.

Every process that can reach the port can register and look up. The port is inside the trust boundary of the Ray job,
like Ray's own ports.

This file also identifies this process, and checks whether a process on this host still runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from dataplane.core.addresses import boot_id, join_address, resolve_host
from dataplane.core.zmq_io import bind_tcp, poll_ms, send
from dataplane.errors import InternalError, ProtocolVersionError
from dataplane.protocol.fd_limits import OF_A_CONTEXT, allow_more
from workers.directory import wire
from workers.directory.registry import Effects, Registry, Session
from workers.directory.wire import EntryState, Process
from workers.errors import OpenFilesError
from workers.transport.encoding import encode
from workers.transport.poll_thread import PollThread
from workers.transport.zmq_sockets import Socket, end_silent, events, open_socket, poller, received

GRACE_S = 3.0
HEARTBEAT_MS = 1000
SILENCE_MS = 5000
"""Both ends send heartbeats this often, and close a connection that is silent for that long."""
_RECHECK_S = 0.05
"""How often lost clients are checked. A process closes its connections shortly before its end is visible."""

_log = logging.getLogger(__name__)


@dataclass
class _Client:
    """A client's session. fd: the connection of its last `OpenDirectory`, None after that connection has ended, which
    was at `lost_at`."""

    process: wire.Process
    version: int
    fd: int | None = None
    lost_at: float = 0.0


class Directory:
    """A directory that a thread serves until `close`. `address` is "host:port".

    It keeps a connection to each client, so it raises this process's limit of open files to the hard limit.

    `_clients`: the sessions that were not dropped; `_connected_fds`: the descriptors of the present connections. After
    the construction only the thread uses them.
    """

    @classmethod
    def serve(cls, host: str = "127.0.0.1") -> Directory:
        """Bind a free port of `host`, which clients must be able to reach. OSError if this machine does not have
        that address, `OpenFilesError` if this process has reached its limit of open files."""
        allow_more()
        with OpenFilesError.of("serving a job's directory", least=OF_A_CONTEXT):
            return cls(host)

    def __init__(self, host: str) -> None:
        """Use `serve`."""
        self._context: zmq.Context[Socket] = zmq.Context()
        self._registry = Registry()
        self._clients: dict[Session, _Client] = {}
        self._connected_fds: set[int] = set()
        try:
            self._socket = open_socket(self._context, zmq.ROUTER)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self.address = join_address(host, self._bind(host))
            sources = poller(self._socket, self._monitor)
            self._thread = PollThread(
                "tq-directory", sources, self._on_events, self._on_thread_end, timeout_ms=self._timeout_ms
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free the port. Connections of clients end. Blocks until the thread has stopped.
        Idempotent."""
        self._thread.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bind(self, host: str) -> int:
        """Bind a free port of `host` and return it."""
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a client's new connection replaces its old one
        self._socket.set(zmq.BACKLOG, 4096)
        end_silent(self._socket, HEARTBEAT_MS, SILENCE_MS)
        return bind_tcp(self._socket, resolve_host(host))

    def _on_events(self, _: object) -> None:
        for step in (self._handle_messages, self._expire, self._drop_lost_clients):
            self._run_step(step)

    def _on_thread_end(self, defect: BaseException | None) -> None:
        if defect is not None:
            _log.error("Directory thread failed; its clients lose their connections", exc_info=defect)
        self._context.destroy(linger=0)

    def _run_step(self, step: Callable[[], None]) -> None:
        """Run one step. An error is logged and does not affect the other steps."""
        try:
            step()
        except Exception:
            _log.exception("Directory failed in %s", step.__name__)

    def _expire(self) -> None:
        self._send_replies(self._registry.expire(time.monotonic()))

    def _timeout_ms(self) -> int | None:
        """Return the time until the next lookup expires or lost clients are checked, None if there are neither."""
        times_s: list[float] = []
        expiry = self._registry.next_expiry()
        if expiry is not None:
            times_s.append(expiry - time.monotonic())
        if any(client.fd is None for client in self._clients.values()):
            times_s.append(_RECHECK_S)
        return poll_ms(min(times_s)) if times_s else None

    def _handle_messages(self) -> None:
        """Handle all received messages. Ends of connections are processed before each message, because the kernel
        reuses descriptors. The last messages of a connection may be received after its end."""
        self._track_connections()
        for session, request, frames in received(self._socket, wire.decode_request, "the directory"):
            self._track_connections()
            try:
                self._handle_request(session, int(frames[0].get(zmq.SRCFD)), request)
            except Exception as error:
                _log.exception("Directory failed on request %r", request)
                self._reply_error(session, request, error)

    def _reply_error(self, session: Session, request: wire.Request, error: Exception) -> None:
        """Reply with an internal error to a request that failed. `OpenDirectory`, which has no id, gets none."""
        if not isinstance(request, wire.OpenDirectory):
            internal = InternalError(what=f"{type(request).__name__}: {error!r}")
            self._send_replies([(session, wire.failed(request.request_id, internal))])

    def _handle_request(self, session: Session, fd: int, request: wire.Request) -> None:
        """Handle one request of a client. fd: the descriptor of the connection on which it came. The `OpenDirectory` of
        a dropped session gets an `Unknown` reply, a request of a client with another version an error."""
        client = self._clients.get(session)
        if isinstance(request, wire.OpenDirectory):
            if client is None and request.known:
                self._send_replies([(session, wire.Unknown("it was silent for too long"))])
            client = self._clients.setdefault(session, _Client(request.process, request.version))
            # Not connected: the connection has ended before this message of it was read.
            client.fd = fd if fd in self._connected_fds else None
            client.lost_at = time.monotonic()
            return
        if client is None:
            return  # sent before the connection broke: the client repeats it after its `OpenDirectory`
        if client.version != wire.VERSION:
            error = ProtocolVersionError(client_version=client.version, service_version=wire.VERSION)
            self._send_replies([(session, wire.failed(request.request_id, error))])
            return
        self._send_replies(self._apply(session, request))

    def _apply(self, session: Session, request: wire.Request) -> Effects:
        """Apply a request to the registry. Return the replies to send."""
        now = time.monotonic()
        match request:
            case wire.RegisterProcess():
                # The name of a process whose connection has ended is free at once, without `GRACE_S`: drop its session
                # before the registration.
                owner = self._registry.owner(request.kind, request.name)
                if owner is not None and owner in self._clients and self._clients[owner].fd is None:
                    self._send_replies(self._drop_session(owner))
                return self._registry.register(session, request)
            case wire.Lookup():
                return self._registry.lookup(session, request, now)
            case wire.End():
                return self._registry.end(session, request)
            case wire.Listing():
                return self._registry.listing(session, request)
            case wire.LeaveJob():
                del self._clients[session]  # the end of its connection then means nothing
                effects = self._registry.leave(session, EntryState.ENDED, "it was closed")
                return [*effects, (session, wire.Found(request.request_id))]
            case _:
                raise AssertionError(request)

    def _track_connections(self) -> None:
        """Record accepted connections and remove ended ones, also from the sessions of their clients."""
        for event, fd in events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._connected_fds.add(fd)
                continue
            self._connected_fds.discard(fd)
            for client in self._clients.values():
                if client.fd == fd:
                    client.fd, client.lost_at = None, time.monotonic()

    def _drop_lost_clients(self) -> None:
        """Drop the sessions of clients that are certainly dead, or that did not reconnect in time."""
        now = time.monotonic()
        for session, client in list(self._clients.items()):
            if client.fd is None and (now - client.lost_at >= GRACE_S or has_ended(client.process)):
                self._send_replies(self._drop_session(session))

    def _drop_session(self, session: Session) -> Effects:
        """Remove a client. Its entries become LOST: return the replies for the sessions that watch or await them."""
        client = self._clients.pop(session)
        why = f"its process {client.process.pid} died" if has_ended(client.process) else "its connection broke"
        return self._registry.leave(session, EntryState.LOST, why)

    def _send_replies(self, effects: Effects) -> None:
        for session, reply in effects:
            send(self._socket, (session, encode(reply)))


def this_host() -> str:
    """Return a string that is equal in two processes only if they share the boot of a kernel and the pid namespace."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def this_process() -> Process:
    return Process(host=this_host(), pid=os.getpid(), started=_state(os.getpid())[1])


def has_ended(process: Process) -> bool:
    """Return whether the process has certainly ended. False for a process of another host, whose state is unknown
    here, and if this process lacks the permission to look."""
    try:
        if process.host != this_host():
            return False
        state, started = _state(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    # "Z" and "X" are dead processes. With another start time, the pid is that of another process.
    return state in "ZX" or started != process.started


def _state(pid: int) -> tuple[str, int]:
    """Return the kernel's state letter of the process, and its start time in clock ticks since the boot."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The fields follow the command's name, which is in parentheses and may contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()  # from field 3, the state; the start time is field 22 (see proc(5))
    return fields[0], int(fields[19])
