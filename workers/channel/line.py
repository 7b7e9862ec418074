"""A client's connection to a broker, and how items get from and to it. One thread at a time."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.host import boot_id, split_address
from dataplane.warm import FROM_BYTES, WarmMemory
from workers.channel import items, wire
from workers.channel.endpoint import Endpoint
from workers.channel.errors import ChannelLostError, ChannelTimeoutError
from workers.channel.stream import Stream, StreamLostError, StreamSilentError
from workers.channel.wire import ALIGN_BYTES, NOWHERE, Message

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

CARRIED_BYTES = 16 << 10
"""Items up to this size travel within their message: cheaper than a room."""
CONNECT_S = 10.0
GRACE_S = 10.0
"""How long a broker may take to confirm what was given up."""
LOG_EVERY_S = 30.0
_PADDING = bytes(ALIGN_BYTES)


Settle = Callable[[wire.Ack | wire.Nack], None]


class Parcel(NamedTuple):
    """A value ready to go: its head, its buffers, their sizes, where each begins, and the bytes of all."""

    head: bytes
    buffers: list[memoryview]
    sizes: list[int]
    offsets: list[int]
    nbytes: int

    @classmethod
    def of(cls, value: object, what: str) -> Parcel:
        """`NotSerializableError` naming `what`."""
        head, buffers = items.encode(value, what)
        sizes = [each.nbytes for each in buffers]
        offsets, nbytes = items.layout(sizes)
        return cls(head, buffers, sizes, offsets, nbytes)

    @property
    def carried(self) -> bool:
        return self.nbytes <= CARRIED_BYTES

    def item(self, room: int) -> wire.Item:
        """`room` is not looked at where the item is carried."""
        if self.carried:
            return wire.Item(self.head, self.sizes, b"".join(self._parts()) if self.nbytes else b"")
        return wire.Item(self.head, self.sizes, b"", room, self.nbytes)

    def write(self, target: Bytes) -> None:
        """All buffers into `target`."""
        for buffer, offset in zip(self.buffers, self.offsets, strict=True):
            np.copyto(target[offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))

    def parts(self) -> list[bytes | memoryview]:
        """What to send of it where it is neither carried nor written."""
        return self._parts()

    def kept(self, memory: WarmMemory) -> Parcel:
        """The same with bytes of its own, that nobody changes."""
        if not self.nbytes:
            return self
        own = fresh(self.nbytes, memory)
        self.write(own)
        buffers = [own[offset : offset + size].data for offset, size in zip(self.offsets, self.sizes, strict=True)]
        return self._replace(buffers=buffers)

    def _parts(self) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = []
        for buffer in self.buffers:
            parts += (buffer, _PADDING[: -len(buffer) % ALIGN_BYTES])
        return parts


def fresh(nbytes: int, memory: WarmMemory) -> Bytes:
    """Bytes of this process's own."""
    return np.empty(nbytes, np.uint8) if nbytes < FROM_BYTES else memory.take(nbytes)


class Arrived:
    """Items that a get brought, still in the broker's name. `take` or `give_back`, once."""

    def __init__(self, answer: wire.Items, line: Line, payload: Bytes | None, send: Settle) -> None:
        self._answer = answer
        self._line = line
        self._payload = payload
        self._send = send

    @property
    def number(self) -> int:
        """Of the get that brought them."""
        return self._answer.number

    def take(self) -> list[Any]:
        """Copy the items into this process's memory, acknowledge them and build them. Raises what building raises."""
        try:
            held = self._copies()
        except StreamLostError:
            # What sends knows why, and says so.
            self._send(wire.Ack(self._answer.number))
            raise
        self._send(wire.Ack(self._answer.number))
        return [items.decode(item.head, buffers) for item, buffers in zip(self._answer.items, held, strict=True)]

    def give_back(self) -> None:
        self._send(wire.Nack(self._answer.number))

    def _copies(self) -> list[list[Bytes]]:
        copies, at = [], 0
        for item in self._answer.items:
            if item.room == NOWHERE:
                own = np.frombuffer(bytearray(item.body), np.uint8)
            elif self._payload is not None:
                own = self._payload[at : at + item.nbytes]
                at += item.nbytes
            else:
                own = fresh(item.nbytes, self._line.memory)
                np.copyto(own, self._line.mapped(item.room, item.nbytes))
            offsets, _ = items.layout(item.sizes)
            copies.append([own[o : o + size] for o, size in zip(offsets, item.sizes, strict=True)])
        return copies


class Line:
    """Connects at once: blocks for `CONNECT_S` at most. `StreamLostError`, or another OSError, where nothing answers.

    local: the broker's memory is mapped.
    """

    def __init__(self, endpoint: Endpoint, memory: WarmMemory) -> None:
        self.memory = memory
        self.ahead = (NOWHERE, 0)
        self._number = 0
        self._arena: Bytes | None = None
        self._writing = threading.Lock()
        self._shut = False
        self.local = False
        until = time.monotonic() + CONNECT_S
        self.stream = _connect(endpoint)
        try:
            self._shake_hands(endpoint, until)
        except BaseException:
            self.stream.close()
            raise

    def _shake_hands(self, endpoint: Endpoint, until: float) -> None:
        sock = self.stream.sock
        local = sock.family == socket.AF_UNIX
        hello = wire.Hello(self.number(), wire.VERSION, endpoint.token, local)
        self.stream.send([wire.encode(hello)], until)
        self.stream.wait(until)
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        try:
            message = self.stream.first(data, until)
            answer = wire.decode_answer(message.body)
            if not isinstance(answer, wire.Welcome):
                raise StreamLostError(f"it refused this client: {answer}")
            self.capacity_bytes = answer.capacity_bytes
            if fds and answer.arena_bytes:
                mapping = mmap.mmap(fds[0], answer.arena_bytes)
                mapping.madvise(mmap.MADV_DONTDUMP)
                self._arena = np.frombuffer(mapping, np.uint8)[answer.data_from :]
                self.local = True
        finally:
            for fd in fds:
                os.close(fd)

    def number(self) -> int:
        """A new request's."""
        self._number += 1
        return self._number

    def mapped(self, room: int, nbytes: int) -> Bytes:
        """Bytes of the broker's memory. `StreamLostError` once this is closed."""
        arena = self._arena
        if arena is None:
            raise StreamLostError("the connection was closed")
        return arena[room : room + nbytes]

    def put(self, request: wire.Put, parcel: Parcel, until: float) -> None:
        """Send `parcel`'s item, which has its room."""
        if parcel.carried:
            self.stream.send([wire.encode(request)], until)
        elif self.local:
            with self._writing:
                if self._shut:
                    raise StreamLostError("the connection was closed")
                parcel.write(self.mapped(request.item.room, parcel.nbytes))
            self.stream.send([wire.encode(request)], until)
        else:
            self.stream.send([wire.encode(request, parcel.nbytes), *parcel.parts()], until)

    def answer(self, message: Message, until: float, send: Settle) -> wire.AnyAnswer | Arrived:
        """What a message says, its payload taken."""
        answer = wire.decode_answer(message.body)
        if not isinstance(answer, wire.Items):
            return answer
        payload = None
        if message.payload_bytes:
            payload = fresh(message.payload_bytes, self.memory)
            self.stream.receive_into(payload.data, until)
        return Arrived(answer, self, payload, send)

    def take_ahead(self, nbytes: int) -> int:
        """The room that came with an answer, if it is as large as that; one that is not is given back."""
        room, have = self.ahead
        if room == NOWHERE:
            return NOWHERE
        self.ahead = (NOWHERE, 0)
        if have >= nbytes:
            return room
        self.stream.send([wire.encode(wire.Release(self.number(), room))], time.monotonic() + GRACE_S)
        return NOWHERE

    # --- one request at a time

    def ask(self, request: wire.AnyRequest, what: str, until: float) -> wire.AnyAnswer | Arrived:
        """The answer to a request, waited for until then: after that `ChannelTimeoutError`, and nothing happened."""
        begun = time.monotonic()
        self.stream.send([wire.encode(request)], max(until, begun + GRACE_S))
        return self.await_answer(request.number, what, begun, until)

    def await_answer(self, number: int, what: str, begun: float, until: float) -> wire.AnyAnswer | Arrived:
        """The answer to `number`, which was sent."""
        while True:
            now = time.monotonic()
            try:
                message = self.stream.receive(min(until, now + LOG_EVERY_S))
                break
            except StreamSilentError:
                now = time.monotonic()
                if now >= until:
                    message = self._give_up(number)
                    break
                log.warning("%s: waiting since %.0f s, another %.0f s at most", what, now - begun, until - now)
        answer = self.answer(message, time.monotonic() + GRACE_S, self._send)
        if isinstance(answer, wire.Cancelled):
            raise ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun)
        return answer

    def _give_up(self, number: int) -> Message:
        """The last word on a request that takes too long: that it was cancelled, or its answer after all."""
        grace = time.monotonic() + GRACE_S
        self.stream.send([wire.encode(wire.Cancel(number))], grace)
        return self.stream.receive(grace)

    def _send(self, request: wire.Ack | wire.Nack) -> None:
        self.stream.send([wire.encode(request)], time.monotonic() + GRACE_S)

    def shut(self) -> None:
        """From another thread: whoever uses this gets `StreamLostError`. Waits for a copy into the broker's memory to
        end, because the room is another's once the connection has ended."""
        with self._writing, contextlib.suppress(OSError):
            self._shut = True
            self.stream.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; whoever copies from its memory still may, but cannot acknowledge it any more."""
        self.local = False
        self._arena = None
        self.stream.close()


def _connect(endpoint: Endpoint) -> Stream:
    if endpoint.host == boot_id():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect("\0" + endpoint.name)
            return Stream(sock)
        except ConnectionRefusedError:
            # Also where the broker is in another network namespace of this machine.
            sock.close()
        except BaseException:
            sock.close()
            raise
    return Stream(socket.create_connection(split_address(endpoint.address), CONNECT_S))


def lost(what: str, endpoint: Endpoint, error: BaseException) -> ChannelLostError:
    why = "it does not answer" if isinstance(error, StreamSilentError) else str(error) or type(error).__name__
    return ChannelLostError(what=what, broker=endpoint.address, why=why)
