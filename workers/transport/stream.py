"""The client side of a message stream, used by one thread at a time, and the address of its server. Every wait has a
deadline."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.core.addresses import boot_id, split_address
from dataplane.core.zmq_io import poll_ms
from workers.transport.framing import MAX_ANSWER_BYTES, READ_BYTES, Message, Splitter, send_some

SILENT_S = 10.0
"""Whenever bytes were sent or received, the deadline of a transfer is extended to at least this time from then on."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""TCP options: probes after 5 s of silence, every 2 s, 3 times."""
UNSENT_MS = 15_000
"""TCP closes a connection whose sent data is not acknowledged within this time."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """host: boot id of the machine; name: of the abstract Unix socket on that machine; address: "host:port" for
    clients on other machines; token: the secret that clients present. None of them may contain spaces."""

    host: str
    name: str
    address: str
    token: str

    def __str__(self) -> str:
        return " ".join((self.host, self.name, self.address, self.token))

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse an endpoint. ValueError if the text is malformed."""
        words = text.split(" ")
        if len(words) != 4:
            raise ValueError("not the endpoint of a server: expected host, name, address and token separated by spaces")
        return cls(host=words[0], name=words[1], address=words[2], token=words[3])


class StreamSilentError(TimeoutError):
    """The deadline passed."""


class StreamLostError(ConnectionError):
    """The other end closed the stream or died."""


def tune(sock: socket.socket) -> None:
    """Make the socket nonblocking. For TCP, send small messages at once, and detect a vanished machine within about
    15 s."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_MS)


class Stream:
    """A connection to a stream server. Every method raises `StreamLostError` once the other end has closed it. `until`
    is a time of `time.monotonic`. `_splitter`: bytes that were read and not returned yet; `_poll`: polls for
    incoming data."""

    def __init__(self, sock: socket.socket) -> None:
        tune(sock)
        self.sock = sock
        self._splitter = Splitter(MAX_ANSWER_BYTES)
        self._poll = self.poller()

    @classmethod
    def connect(cls, endpoint: Endpoint, within_s: float) -> Stream:
        """Connect through a Unix socket on the same host, otherwise over TCP, each within `within_s` seconds. OSError
        if no server listens."""
        if endpoint.host == boot_id():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(within_s)
                sock.connect("\0" + endpoint.name)  # an abstract socket, which has no file
                return cls(sock)
            except ConnectionRefusedError:
                # The server may be in another network namespace of this machine, so TCP is tried next.
                sock.close()
            except BaseException:
                sock.close()
                raise
        return cls(socket.create_connection(split_address(endpoint.address), within_s))

    def send(self, buffers: Sequence[bytes | memoryview], until: float) -> None:
        """Send all of `buffers`. Raises `StreamSilentError` at the time `until`, or after `SILENT_S`
        without progress if that is later; the stream cannot be used afterwards."""
        pending = deque([memoryview(buffer) for buffer in buffers if len(buffer)])
        while pending:
            try:
                send_some(self.sock, pending)
            except BlockingIOError:
                self._wait_for(select.POLLOUT, until)
                continue
            except OSError as error:
                raise StreamLostError(str(error)) from error
            until = max(until, time.monotonic() + SILENT_S)

    @property
    def local(self) -> bool:
        """Whether this is a Unix socket, which can carry file descriptors."""
        return self.sock.family == socket.AF_UNIX

    def poller(self) -> select.poll:
        """Return a poller of this stream for incoming data."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return poller

    def first(self, until: float) -> tuple[Message, list[int]]:
        """Receive the first message and the file descriptors sent with it; the caller closes them."""
        self.wait(until)
        data, fds, _, _ = socket.recv_fds(self.sock, READ_BYTES, maxfds=1)
        try:
            if not data:
                raise StreamLostError("the other end closed the connection")
            self._splitter.feed(data)
            return self.receive(until), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def receive(self, until: float) -> Message:
        """Receive the next message. Read its payload with `receive_into` before the next call.
        Raises `StreamSilentError` at the time `until`; no data is lost then."""
        while True:
            message = self._splitter.next()
            if message is not None:
                return message
            self.wait(until)
            self._splitter.feed(self._read() or b"")  # None: there was nothing to read after all

    def arrived(self) -> Message | None:
        """Return the next message if it has arrived, else None. Reads from the socket at most once."""
        message = self._splitter.next()
        if message is None:
            data = self._read()
            if data:
                self._splitter.feed(data)
                message = self._splitter.next()
        return message

    def receive_into(self, target: memoryview, until: float) -> None:
        """Read the payload of the last message into the given buffer, whole or in consecutive
        parts. Raises `StreamSilentError` at the time `until`, or after `SILENT_S` without data if
        that is later."""
        left = self._splitter.rest(target)  # bytes that were read together with the message
        while left:
            try:
                count = self.sock.recv_into(left)
            except BlockingIOError:
                self.wait(until)
                continue
            except OSError as error:
                raise StreamLostError(str(error)) from error
            if not count:
                raise StreamLostError("the other end closed the connection")
            left = left[count:]
            until = max(until, time.monotonic() + SILENT_S)

    def skip(self, nbytes: int, until: float) -> None:
        """Read `nbytes` bytes of the last message's payload and drop them. until: as in `receive_into`."""
        scratch = memoryview(bytearray(min(nbytes, READ_BYTES)))
        while nbytes:
            window = scratch[:nbytes]
            self.receive_into(window, until)
            until = max(until, time.monotonic() + SILENT_S)  # as in `receive_into`, which extends only its own
            nbytes -= len(window)

    def wait(self, until: float) -> None:
        """Wait until data can be read. Raises `StreamSilentError` at `until`."""
        left_s = until - time.monotonic()
        if not self._poll.poll(poll_ms(left_s)):
            raise StreamSilentError

    def check(self) -> None:
        """Raise if the other end has closed the stream. Data that has arrived stays unread."""
        self._read(max_bytes=1, flags=socket.MSG_PEEK)

    def shut(self) -> None:
        """Close the stream from another thread: its user gets `StreamLostError`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _wait_for(self, event: int, until: float) -> None:
        """Wait for an event of `select.poll`. Raises `StreamSilentError` at `until`."""
        poller = select.poll()
        poller.register(self.sock, event)
        if not poller.poll(poll_ms(until - time.monotonic())):
            raise StreamSilentError

    def _read(self, max_bytes: int = READ_BYTES, flags: int = 0) -> bytes | None:
        """Read and return the available bytes, at most `max_bytes`; None if there are none. flags: for `recv`."""
        try:
            data = self.sock.recv(max_bytes, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamLostError(str(error)) from error
        if not data:
            raise StreamLostError("the other end closed the connection")
        return data
