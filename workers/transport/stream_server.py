"""The server side of message streams: one thread serves all connections, Unix and TCP."""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from dataplane.core.addresses import boot_id, join_address, resolve_host
from dataplane.core.zmq_io import poll_ms
from workers.transport.framing import READ_BYTES, Message, Splitter, send_some
from workers.transport.poll_thread import PollThread
from workers.transport.stream import Endpoint, tune

log = logging.getLogger(__name__)

BACKLOG = 1024
RETRY_S = 1.0
"""Delay before another attempt to accept connections without free descriptors, unless a connection ends before."""
READS_PER_TURN = 8
"""How many times one connection is read before the others get their turn."""


class Payload(NamedTuple):
    """The buffer for a message's payload, and the function to call when it is complete."""

    target: memoryview
    whole: Callable[[], None]


class Connection:
    """One client. ident: its descriptor, unique among open connections; out: the bytes to send; watched: the events to
    wait for; splitter: received bytes that belong to no message or payload yet; payload: of the message that is being
    received, None between messages; left: the part of its buffer that is not filled yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ident = sock.fileno()
        self.splitter = Splitter()
        self.out: deque[memoryview] = deque()
        self.watched: int = select.EPOLLIN
        self.payload: Payload | None = None
        self.left = memoryview(b"")

    @property
    def local(self) -> bool:
        """Whether the client is on this host and can receive file descriptors."""
        return self.sock.family == socket.AF_UNIX

    def send_with(self, first: bytes, fd: int) -> None:
        """Send the first message of this connection together with a file descriptor."""
        socket.send_fds(self.sock, [first], [fd])


@dataclass(frozen=True)
class Service:
    """The functions of a server, all called in its thread. take: a message arrived; returns where to store its payload,
    or None if it has none; an exception from it closes that connection (ValueError: the message was malformed). left: a
    connection was closed. ended: the server has stopped, by `thread.close` or by an internal error."""

    take: Callable[[Connection, Message], Payload | None]
    left: Callable[[int], None]
    ended: Callable[[BaseException | None], None]


class StreamServer:
    """Serves from `thread.start` to `thread.close`. name: of its thread and of its Unix socket; host: the name or
    address to bind for clients on other machines, which is also what they connect to; token: the secret that
    `endpoint` passes on to clients, and that the service requires of them; clients: what the log calls the clients.
    OSError if the host cannot be bound."""

    def __init__(self, name: str, host: str, token: str, service: Service, *, clients: str) -> None:
        self._service = service
        self._clients_label = clients
        self._connections: dict[int, Connection] = {}
        self._listeners: dict[int, socket.socket] = {}  # by descriptor
        self._paused_until: float | None = None  # accepting is paused until this time
        with contextlib.ExitStack() as undo:
            self._epoll = select.epoll()
            undo.callback(self._close_all)
            self.endpoint = self._listen(name, host, token)
            # The server is also the thread's poller: `register` and `poll` use epoll.
            self.thread = PollThread(name, self, self._on_events, self._on_thread_end, timeout_ms=self._timeout_ms)
            undo.pop_all()

    def _listen(self, name: str, host: str, token: str) -> Endpoint:
        """Open a Unix socket with a unique name and a TCP socket on any free port. Return their endpoint."""
        name = f"{name}-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners[local.fileno()] = local
        local.bind("\0" + name)  # an abstract socket, which has no file
        ip = resolve_host(host)
        remote = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        self._listeners[remote.fileno()] = remote
        remote.bind((ip, 0))
        for listener in self._listeners.values():
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self.register(listener.fileno(), select.EPOLLIN)
        address = join_address(host, remote.getsockname()[1])
        # Clients compare the boot id with theirs; `host` is only part of the address.
        return Endpoint(host=boot_id(), name=name, address=address, token=token)

    # --- a poller, for `PollThread`

    def register(self, fd: int, events: int, /) -> None:
        self._epoll.register(fd, events)

    def poll(self, timeout_ms: int | None, /) -> Any:
        return self._epoll.poll(None if timeout_ms is None else timeout_ms / 1000)

    # --- the thread

    def _on_events(self, ready: Sequence[tuple[int, int]]) -> None:
        """Handle (descriptor, events) of each socket with events."""
        for fd, events in ready:
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd in self._connections:  # else it is the waker's, or was dropped in this turn
                self._serve(self._connections[fd], events)
        self._resume_accepting()

    def _on_thread_end(self, error: BaseException | None) -> None:
        self._close_all()
        self._service.ended(error)

    def _close_all(self) -> None:
        """Close all sockets and the epoll descriptor. The service is not called."""
        for connection in self._connections.values():
            connection.sock.close()
        for listener in self._listeners.values():
            listener.close()
        self._connections.clear()
        self._listeners.clear()
        self._epoll.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. After an error, such as no free descriptor, accepting pauses."""
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has gone
            return
        except OSError as error:
            self._pause_accepting(error)
            return
        try:
            tune(sock)
            connection = Connection(sock)
            self._epoll.register(connection.ident, connection.watched)
        except OSError as error:
            log.warning("Cannot serve a new connection of %s: %s", self._clients_label, error)
            sock.close()
            return
        self._connections[connection.ident] = connection

    def _pause_accepting(self, error: OSError) -> None:
        """Stop polling the listening sockets for a while. Otherwise a pending connection that cannot be accepted
        would wake the thread all the time."""
        if self._paused_until is None:
            log.warning("Cannot accept connections of %s, will retry: %s", self._clients_label, error)
            for fd in self._listeners:
                self._epoll.unregister(fd)
        self._paused_until = time.monotonic() + RETRY_S

    def _resume_accepting(self) -> None:
        """Poll the listening sockets again if their pause is over."""
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)

    def _timeout_ms(self) -> int | None:
        return None if self._paused_until is None else poll_ms(self._paused_until - time.monotonic())

    def _serve(self, connection: Connection, events: int) -> None:
        """Send and receive on a connection that has these epoll events. Any error closes this connection only."""
        try:
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT:  # data, or an error that the read raises
                self._read(connection)
        except OSError as error:
            log.debug("A connection of %s was lost: %s", self._clients_label, error)
            self.drop(connection.ident)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("Closed a connection of %s after a malformed message: %s", self._clients_label, error)
            self.drop(connection.ident)
        except Exception:
            log.exception("Failed on a message of %s, closed the connection", self._clients_label)
            self.drop(connection.ident)

    def drop(self, ident: int) -> None:
        """Close a connection and notify the service. A no-op for a closed one."""
        connection = self._connections.pop(ident, None)
        if connection is None:
            return
        self._epoll.unregister(ident)
        connection.sock.close()
        if self._paused_until is not None:
            self._paused_until = 0.0  # a descriptor is free now: resume at the end of this turn
        connection.out.clear()
        connection.payload, connection.left = None, memoryview(b"")
        try:
            self._service.left(ident)
        except Exception:
            log.exception("Failed to clean up after a connection of %s", self._clients_label)

    # --- in

    def _read(self, connection: Connection) -> None:
        """Read up to `READS_PER_TURN` times, into the current payload or into the splitter. If more data remains, epoll
        reports the connection again."""
        for _ in range(READS_PER_TURN):
            if connection.payload is not None and not self._receive_payload(connection):
                return  # the rest of the payload has not arrived yet
            try:
                data = connection.sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("the client closed the connection")
            connection.splitter.feed(data)
            self._take_messages(connection)
            if len(data) < READ_BYTES and connection.payload is None:
                return  # nothing more has arrived; the rest of a payload is read by the next turn of this loop

    def _take_messages(self, connection: Connection) -> None:
        """Pass complete messages to the service, up to one whose payload has not arrived yet."""
        while connection.payload is None:
            message = connection.splitter.next()
            if message is None:
                return
            connection.payload = payload = self._service.take(connection, message)
            if payload is not None:
                # The splitter may already have bytes of the payload; `left` is the part still to be received.
                connection.left = connection.splitter.rest(payload.target)
                if not connection.left:  # the whole payload came with the message
                    self._receive_payload(connection)  # completes it, so that the next message can be taken
            if connection.ident not in self._connections:
                return  # the service has dropped the connection

    def _receive_payload(self, connection: Connection) -> bool:
        """Receive the rest of the payload as far as it has arrived. If it is complete, call its `whole` and return
        True."""
        while connection.left:
            try:
                count = connection.sock.recv_into(connection.left)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("the client closed the connection")
            connection.left = connection.left[count:]
        payload, connection.payload = connection.payload, None
        assert payload is not None
        payload.whole()
        return True

    # --- out

    def send(self, ident: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Queue the message for the open connection `ident` and send as much as the socket takes now. Never blocks."""
        connection = self._connections[ident]
        was_blocked = bool(connection.out)
        connection.out.extend(map(memoryview, buffers))
        if not was_blocked:  # else `_serve` sends when the socket takes more
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        """Send as much of the queued bytes as the socket takes. Wait for EPOLLOUT only while bytes remain."""
        while connection.out:
            try:
                send_some(connection.sock, connection.out)
            except BlockingIOError:
                self._watch(connection, select.EPOLLIN | select.EPOLLOUT)
                return
        self._watch(connection, select.EPOLLIN)

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched != events:
            self._epoll.modify(connection.ident, events)
            connection.watched = events
