"""The broker: one thread that holds channels' items and moves them between sockets and memory.

Clients on its host map its memory and write and read items there, so that only a few bytes pass through the thread;
others send and receive them over tcp, straight into and out of that memory. A client is one connection; when it ends,
so do its waits, and what it had not acknowledged goes to the next getter.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dataplane.core.addresses import boot_id, join_address, resolve_host
from dataplane.core.wakeup import Waker
from workers.channels import wire
from workers.channels.endpoint import Endpoint
from workers.channels.memory import DIRECTORY, ChannelMemory
from workers.channels.queues import Broker, Effects
from workers.channels.stream import READ_BYTES, tune
from workers.channels.wire import NOWHERE
from workers.errors import OpenFilesError

log = logging.getLogger(__name__)

BACKLOG = 1024
STOP_WAIT_S = 10.0
RETRY_S = 1.0
"""Where no descriptor is left for a new connection, it tries again after so long, or once a connection has ended."""
READS_PER_TURN = 8
"""So often one connection is read before the others have their turn."""


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ident = sock.fileno()
        self.local = False
        self.known = False
        self.splitter = wire.Splitter()
        self.out: deque[memoryview] = deque()
        self.put: wire.Put | None = None
        self.target = memoryview(b"")


class ChannelBroker:
    """Serves from construction to `close`, in a thread of its own.

    host: the name or address to bind for clients on other machines, and what they reach it by; by default loopback.
    capacity_bytes: memory for items, backed when needed; by default a share of what `directory` has. OSError if the
    host cannot be bound, ArenaSpaceError where the memory is not to be had, `OpenFilesError`.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", capacity_bytes: int | None = None, directory: str | Path = DIRECTORY
    ) -> None:
        self._token = secrets.token_hex(16)
        self._connections: dict[int, _Connection] = {}
        self._listeners: dict[int, socket.socket] = {}
        self._deaf_until: float | None = None
        self._owner = os.getpid()
        self._stopping = False
        self._thread: threading.Thread | None = None
        with OpenFilesError.of("a broker of channels"), contextlib.ExitStack() as undo:
            self._memory = ChannelMemory(capacity_bytes, directory=directory)
            undo.callback(self._memory.close)
            self._epoll = select.epoll()
            undo.callback(self._let_go)
            self._waker = Waker()
            undo.callback(self._waker.close)
            self._epoll.register(self._waker.fd, select.EPOLLIN)
            self.endpoint = str(self._listen(host))
            undo.pop_all()
        self._state = Broker(self._memory)
        self._thread = threading.Thread(target=self._run, name="tq-channels", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it serves. Should its thread die, its log says why and its clients' connections end."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Block until it serves no more: it was closed, or its thread died."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """End every connection and let the memory go; what is in the channels is lost. Idempotent; in a forked child
        it does nothing."""
        if self._thread is None or os.getpid() != self._owner:
            return
        self._stopping = True
        self._waker.wake()
        self._thread.join(STOP_WAIT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the broker of channels did not stop within {STOP_WAIT_S:.0f} s")
        self._thread = None
        self._waker.close()

    def __enter__(self) -> ChannelBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, host: str) -> Endpoint:
        name = f"tq-channels-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners[local.fileno()] = local
        local.bind("\0" + name)
        ip = resolve_host(host)
        remote = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        self._listeners[remote.fileno()] = remote
        remote.bind((ip, 0))
        for each in self._listeners.values():
            each.setblocking(False)
            each.listen(BACKLOG)
            self._epoll.register(each.fileno(), select.EPOLLIN)
        address = join_address(host, remote.getsockname()[1])
        return Endpoint(host=boot_id(), name=name, address=address, token=self._token)

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                for fd, events in self._epoll.poll(self._patience_s()):
                    if fd in self._listeners:
                        self._accept(self._listeners[fd])
                    elif fd in self._connections:
                        self._turn(self._connections[fd], events)
                self._hear_again()
        except BaseException:
            log.critical("the broker of channels died; their items are lost", exc_info=True)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for sock in (*(each.sock for each in self._connections.values()), *self._listeners.values()):
            sock.close()
        self._connections.clear()
        self._listeners.clear()
        self._epoll.close()
        self._memory.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._turn_deaf(error)
            return
        try:
            tune(sock)
            connection = _Connection(sock)
            self._epoll.register(connection.ident, select.EPOLLIN)
        except OSError as error:
            log.warning("cannot serve a new client of channels: %s", error)
            sock.close()
            return
        self._connections[connection.ident] = connection

    def _turn_deaf(self, error: OSError) -> None:
        """Leave new connections where they wait: to be told of them again and again would take all time."""
        if self._deaf_until is None:
            log.warning("cannot take new connections of clients of channels, and will try again: %s", error)
            for fd in self._listeners:
                self._epoll.unregister(fd)
        self._deaf_until = time.monotonic() + RETRY_S

    def _hear_again(self) -> None:
        if self._deaf_until is not None and time.monotonic() >= self._deaf_until:
            self._deaf_until = None
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)

    def _patience_s(self) -> float | None:
        return None if self._deaf_until is None else max(0.0, self._deaf_until - time.monotonic())

    def _turn(self, connection: _Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT:
                self._read(connection)
        except OSError as error:
            log.debug("a client of channels is gone: %s", error)
            self._drop(connection)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("ended the connection of a client of channels that made no sense: %s", error)
            self._drop(connection)
        except Exception:
            log.exception("failed on a message of a client of channels, and ended its connection")
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.ident, None) is None:
            return
        self._epoll.unregister(connection.ident)
        connection.sock.close()
        if self._deaf_until is not None:
            self._deaf_until = 0.0
        connection.out.clear()
        connection.target = memoryview(b"")
        if connection.known:
            try:
                self._answer(self._state.leave(connection.ident))
            except Exception:
                log.exception("failed to take back what a client of channels had")

    # --- in

    def _read(self, connection: _Connection) -> None:
        for _ in range(READS_PER_TURN):
            if connection.put is not None and not self._receive_payload(connection):
                return
            try:
                data = connection.sock.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("it closed the connection")
            connection.splitter.feed(data)
            self._take_messages(connection)
            if len(data) < READ_BYTES and connection.put is None:
                return

    def _take_messages(self, connection: _Connection) -> None:
        while connection.put is None:
            message = connection.splitter.next()
            if message is None:
                return
            request = wire.decode_request(message.body)
            if not connection.known:
                self._greet(connection, request)
            elif message.payload_bytes:
                self._expect_payload(connection, request, message.payload_bytes)
            else:
                self._answer(self._state.apply(connection.ident, request))
            if connection.ident not in self._connections:
                return

    def _greet(self, connection: _Connection, request: wire.AnyRequest) -> None:
        if not isinstance(request, wire.OpenBroker) or not hmac.compare_digest(
            request.token.encode(), self._token.encode()
        ):
            raise ValueError("it did not say the token")
        if request.version != wire.VERSION:
            self._send(connection, [wire.encode(wire.Rejected(request.number, f"the broker speaks {wire.VERSION}"))])
            return
        connection.known = True
        self._state.join(connection.ident)
        connection.local = request.local and connection.sock.family == socket.AF_UNIX
        memory = self._memory
        mapped_bytes = memory.nbytes if connection.local else 0
        welcome = wire.Welcome(request.number, memory.capacity_bytes, mapped_bytes, memory.nbytes - len(memory.data))
        if connection.local:
            socket.send_fds(connection.sock, [wire.encode(welcome)], [memory.fd])
        else:
            self._send(connection, [wire.encode(welcome)])

    def _expect_payload(self, connection: _Connection, request: wire.AnyRequest, nbytes: int) -> None:
        if not isinstance(request, wire.Put) or request.item.room == NOWHERE or request.item.nbytes != nbytes:
            raise ValueError("it sent bytes that belong to no item")
        self._state.room_of(connection.ident, request.item)
        connection.put = request
        connection.target = self._memory.data.data[request.item.room : request.item.room + nbytes]
        known = connection.splitter.rest(nbytes)
        connection.target[: len(known)] = known
        connection.target = connection.target[len(known) :]
        if not len(connection.target):
            self._receive_payload(connection)

    def _receive_payload(self, connection: _Connection) -> bool:
        """Whether the payload is whole now."""
        while len(connection.target):
            try:
                count = connection.sock.recv_into(connection.target)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("it closed the connection")
            connection.target = connection.target[count:]
        request, connection.put = connection.put, None
        assert request is not None
        self._answer(self._state.apply(connection.ident, request))
        return True

    # --- out

    def _answer(self, effects: Effects) -> None:
        """One that cannot be answered has its connection ended; the others are answered."""
        for client, answer in effects:
            connection = self._connections.get(client)
            if connection is None:
                continue
            try:
                self._say(connection, answer)
            except OSError as error:
                log.debug("a client of channels is gone: %s", error)
                # Its end is noticed, and dealt with, when its socket is read.
            except Exception:
                log.exception("failed on an answer to a client of channels, and ended its connection")
                self._drop(connection)

    def _say(self, connection: _Connection, answer: wire.AnyAnswer) -> None:
        payload: list[memoryview] = []
        if not connection.local and isinstance(answer, wire.Items):
            data = self._memory.data.data
            payload = [data[i.room : i.room + i.nbytes] for i in answer.items if i.room != NOWHERE]
        self._send(connection, [wire.encode(answer, sum(map(len, payload))), *payload])

    def _send(self, connection: _Connection, parts: Sequence[bytes | memoryview]) -> None:
        """Never blocks; what the socket does not take now waits for it."""
        if connection.out:
            connection.out.extend(map(memoryview, parts))
            return
        if len(parts) == 1:
            try:
                sent = connection.sock.send(parts[0])
            except BlockingIOError:
                sent = 0
            if sent == len(parts[0]):
                return
            connection.out.append(memoryview(parts[0])[sent:])
        else:
            connection.out.extend(map(memoryview, parts))
        self._flush(connection)
        if connection.out:
            self._epoll.modify(connection.ident, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: _Connection) -> None:
        out = connection.out
        while out:
            try:
                sent = connection.sock.sendmsg(list(out)[:64])
            except BlockingIOError:
                return
            while out and sent >= len(out[0]):
                sent -= len(out.popleft())
            if sent:
                out[0] = out[0][sent:]
        self._epoll.modify(connection.ident, select.EPOLLIN)
