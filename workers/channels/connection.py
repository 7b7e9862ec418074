"""A client's connection to a broker, and the transfer of items over it. For one thread at a time."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dataplane.core.buffer_pool import BufferPool
from workers.channels import items, wire
from workers.channels.errors import ChannelLostError, ChannelTimeoutError
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.errors import NotSerializableError
from workers.transport import pickling, waiting
from workers.transport.framing import Message
from workers.transport.pickling import Bytes, Unpacked
from workers.transport.stream import Endpoint, Stream, StreamLostError, StreamSilentError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
GRACE_S = 10.0
"""How long a broker may take to confirm a cancellation, or to read what is sent to it."""
CONFIRM_S = 30.0
"""How long a broker on another host may take to confirm an acknowledgement. The kernel reports a lost network
sooner."""
UNCONFIRMED = "the broker did not confirm the receipt of the items; they are lost, or the next getter receives them"

SendSettlement = Callable[[wire.AckItems | wire.NackItems], Future[None] | None]
"""Sends an acknowledgement to the broker. The returned future completes with the broker's confirmation; None if the
broker confirms nothing."""


class ArrivedItems:
    """Items that a get received. They belong to the broker until they are acknowledged, once.

    payload: the items' bytes that came over the network, one item after another; None if the broker's memory is mapped
    or no bytes came; send: sends the acknowledgement; missing: set if there was no memory for the bytes, which were
    then discarded. `_settle`: this `send`; `_build`: set by `acknowledge`, returns the values of the items.
    """

    def __init__(
        self,
        answer: wire.Items,
        connection: BrokerConnection,
        payload: Bytes | None,
        send: SendSettlement,
        missing: MemoryError | None = None,
    ) -> None:
        self._answer = answer
        self._connection = connection
        self._payload = payload
        self._settle = send
        self._missing = missing
        self._build: Callable[[], list[Any]] | None = None

    @property
    def request_id(self) -> int:
        """The id of the get that received the items."""
        return self._answer.request_id

    @property
    def remote(self) -> bool:
        """Whether the broker has to confirm the acknowledgement."""
        return self._connection.remote

    def take(self) -> list[Any]:
        """Acknowledge the items if that was not done yet, and build them. `NotSerializableError` if an item cannot be
        built: that item is lost, and the other items of its batch return to the queue. MemoryError if there is no
        memory for them: all items return to the queue."""
        if self._build is None:
            confirmed = self.acknowledge()
            if confirmed is not None:
                confirmed.result()
        assert self._build is not None
        return self._build()

    def acknowledge(self) -> Future[None] | None:
        """Copy the items into this process's memory and acknowledge them, once. If the broker is on another host, the
        items belong to this process when the returned future is done, within `CONFIRM_S`; before that another getter
        might receive them too. None: they belong to this process now. Raises the same errors as `take`."""
        try:
            unpacked = self._unpack()
            # A batch is built before its acknowledgement. If the connection has ended, the bytes may be another item's.
            if len(unpacked) > 1:
                self._connection.stream.check()
        except StreamLostError:
            # Sending raises the reason of the end if it is known; otherwise this error is raised.
            self._settle(wire.AckItems(self.request_id))
            raise
        except MemoryError:
            self._settle(wire.NackItems(self.request_id))
            raise
        if len(unpacked) > 1:
            # Build before the acknowledgement: if an item cannot be built, the others return to the queue.
            values = self._build_batch(unpacked)
            self._build = lambda: values
        else:
            # A single item that cannot be built is lost in any case, so its acknowledgement need not wait for that.
            self._build = lambda: [each.load() for each in unpacked]
        return self._settle(wire.AckItems(self.request_id, confirm=self.remote))

    def _build_batch(self, unpacked: list[Unpacked]) -> list[Any]:
        """Return the values of the items. If some cannot be built, remove those from the channel, return the others to
        the queue, and raise the first error."""
        values = []
        errors = {}
        for index, each in enumerate(unpacked):
            try:
                values.append(each.load())
            except NotSerializableError as error:
                errors[index] = error
        if not errors:
            return values
        self._settle(wire.NackItems(self.request_id, lost=tuple(errors)))
        first = next(iter(errors.values()))
        first.add_note(f"Items of this batch lost: {len(errors)}; returned to the channel: {len(values)}")
        raise first

    def _unpack(self) -> list[Unpacked]:
        """Return the unpacked items, in this process's memory. MemoryError if there was none for their bytes."""
        if self._missing is not None:
            raise self._missing
        unpacked = []
        offset = 0
        pool = self._connection.buffer_pool
        # own: the memory belongs to this process, so the item may refer to it.
        for item in self._answer.items:
            if item.space == NOWHERE:  # the bytes came within the message
                memory = np.frombuffer(bytearray(item.body), np.uint8)
                own = True
            elif self._payload is not None:
                memory = self._payload[offset : offset + item.nbytes]
                own = True
                offset += item.nbytes
            else:  # the bytes are in the broker's memory and must be copied
                memory = self._connection.mapped(item.space, item.nbytes)
                own = False
            unpacked.append(items.unpack(item.head, memory, pool, own=own))
        return unpacked


def acknowledgement_of(answer: object) -> Callable[[], Future[None] | None] | None:
    """Return the method that acknowledges the items of `answer`, if it has items of a broker on another host: their
    getter must wait for the confirmation. Return None for other answers."""
    return answer.acknowledge if isinstance(answer, ArrivedItems) and answer.remote else None


class BrokerConnection:
    """A connection to a broker. Connects on construction and blocks for at most `CONNECT_S`. `StreamLostError` or
    another OSError if it cannot connect.

    local: the broker's memory is mapped (until `close`); remote: it was never mapped. buffer_pool: memory for the bytes
    of received items. preallocated: space at the broker for the next put, and its bytes; `NOWHERE` if there is none.
    `_arena`: the broker's memory, None if it is not mapped; `_writing`: held while an item is copied into it; `_shut`:
    set by `shut`, after which nothing may be copied into it.
    """

    def __init__(self, endpoint: Endpoint, buffer_pool: BufferPool) -> None:
        self.buffer_pool = buffer_pool
        self.preallocated = (NOWHERE, 0)
        self._last_request_id = 0
        self._arena: Bytes | None = None
        self._writing = threading.Lock()
        self._shut = False
        self.local = False
        self.remote = True
        until = time.monotonic() + CONNECT_S
        self.stream = Stream.connect(endpoint, CONNECT_S)
        try:
            self._shake_hands(endpoint, until)
        except BaseException:
            self.stream.close()
            raise

    def _shake_hands(self, endpoint: Endpoint, until: float) -> None:
        """Introduce this client to the broker. Map the broker's memory if the broker sends its descriptor."""
        hello = wire.OpenBroker(self.next_request_id(), wire.VERSION, endpoint.token, self.stream.local)
        self.stream.send([wire.encode(hello)], until)
        message, fds = self.stream.first(until)
        try:
            answer = wire.decode_answer(message.body)
            if not isinstance(answer, wire.Welcome):
                raise StreamLostError(f"the broker refused this client: {getattr(answer, 'why', answer)}")
            self.capacity_bytes = answer.capacity_bytes
            if fds and answer.arena_bytes:
                mapping = mmap.mmap(fds[0], answer.arena_bytes)
                mapping.madvise(mmap.MADV_DONTDUMP)  # not in core dumps
                self._arena = np.frombuffer(mapping, np.uint8)[answer.data_from :]
                self.local = True
                self.remote = False
        finally:
            for fd in fds:
                os.close(fd)

    def next_request_id(self) -> int:
        """Return the id for a new request."""
        self._last_request_id += 1
        return self._last_request_id

    def mapped(self, space: int, nbytes: int) -> Bytes:
        """Return bytes of the broker's memory. `StreamLostError` after `close`."""
        arena = self._arena
        if arena is None:
            raise StreamLostError("the connection was closed")
        return arena[space : space + nbytes]

    def put(self, request: wire.Put, parcel: Parcel, until: float) -> None:
        """Send a put. Its item is in the request if the parcel is carried. Otherwise space is reserved for it: write it
        there, or send its bytes along if the broker's memory is not mapped."""
        if parcel.carried:
            self.stream.send([wire.encode(request)], until)
        elif self.local:
            with self._writing:  # `shut` waits for the copy
                if self._shut:
                    raise StreamLostError("the connection was closed")
                parcel.write(self.mapped(request.item.space, parcel.nbytes))
            self.stream.send([wire.encode(request)], until)
        else:
            self.stream.send([wire.encode(request, parcel.nbytes), *parcel.runs()], until)

    def receive_answer(self, message: Message, until: float, send: SendSettlement) -> wire.AnyAnswer | ArrivedItems:
        """Decode an answer and receive its payload, if it has one, until `until`. send: sends the acknowledgement of
        its items."""
        answer = wire.decode_answer(message.body)
        if not isinstance(answer, wire.Items):
            return answer
        payload = None
        if message.payload_bytes:
            try:
                payload = pickling.fresh(message.payload_bytes, self.buffer_pool)
            except MemoryError as error:  # raised by `acknowledge`, which returns the items to the queue
                self.stream.skip(message.payload_bytes, until)
                return ArrivedItems(answer, self, payload=None, send=send, missing=error)
            self.stream.receive_into(payload.data, until)
        return ArrivedItems(answer, self, payload, send)

    def take_preallocated(self, nbytes: int) -> int:
        """Return the preallocated space if it has `nbytes`, else `NOWHERE`. Smaller space is released."""
        space, preallocated_bytes = self.preallocated
        if space == NOWHERE:
            return NOWHERE
        self.preallocated = (NOWHERE, 0)
        if preallocated_bytes >= nbytes:
            return space
        self.stream.send([wire.encode(wire.ReleaseSpace(self.next_request_id(), space))], time.monotonic() + GRACE_S)
        return NOWHERE

    # --- one request at a time

    def ask(self, request: wire.AnyRequest, what: str, until: float) -> wire.AnyAnswer | ArrivedItems:
        """Send a request and return its answer. `ChannelTimeoutError` at `until`; the request then had no effect."""
        begun = time.monotonic()
        # Sending always gets `GRACE_S`: a request that is sent in part would end the connection.
        self.stream.send([wire.encode(request)], max(until, begun + GRACE_S))
        return self.await_answer(request.request_id, what, begun, until)

    def await_answer(self, request_id: int, what: str, begun: float, until: float) -> wire.AnyAnswer | ArrivedItems:
        """Return the answer to the request `request_id`, which was sent at `begun`. Cancel it at `until`, and raise
        `ChannelTimeoutError` if the cancellation came first."""
        while True:
            now = time.monotonic()
            try:
                message = self.stream.receive(min(until, now + waiting.LOG_EVERY_S))
                break
            except StreamSilentError:
                now = time.monotonic()
                if now >= until:
                    message = self._cancel(request_id)
                    break
                left = waiting.remaining(until - now)
                log.warning("%s: waiting for %.0f s, %s", what, now - begun, left)
        answer = self.receive_answer(message, time.monotonic() + GRACE_S, self._settle)
        if isinstance(answer, wire.Cancelled):
            raise ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun)
        return answer

    def _cancel(self, request_id: int) -> Message:
        """Cancel a request. Return the confirmation, or the answer if the broker had already sent it."""
        deadline = time.monotonic() + GRACE_S
        self.stream.send([wire.encode(wire.Cancel(request_id))], deadline)
        return self.stream.receive(deadline)

    def _settle(self, request: wire.AckItems | wire.NackItems) -> None:
        """Acknowledge or return items, and wait for the confirmation if the request wants one: `StreamLostError` if it
        does not arrive within `CONFIRM_S`."""
        self.stream.send([wire.encode(request)], time.monotonic() + GRACE_S)
        if isinstance(request, wire.AckItems) and request.confirm:
            try:
                self.stream.receive(time.monotonic() + CONFIRM_S)
            except (StreamLostError, StreamSilentError) as error:
                raise StreamLostError(UNCONFIRMED) from error

    def shut(self) -> None:
        """Make calls of another thread on this connection raise `StreamLostError`. Waits for a copy into the broker's
        memory to end, because the broker reuses the space after the connection has ended."""
        with self._writing:
            self._shut = True
            self.stream.shut()

    def close(self) -> None:
        """Close the connection. Threads that copy from the broker's memory can finish, but cannot acknowledge their
        items. The memory is unmapped after them."""
        self.local = False
        self._arena = None
        self.stream.close()


def lost_error(what: str, endpoint: Endpoint, error: BaseException) -> ChannelLostError:
    """Return the error for the request `what`, whose connection to the broker failed with `error`."""
    why = "it does not answer" if isinstance(error, StreamSilentError) else str(error) or type(error).__name__
    lost = ChannelLostError(what=what, broker=endpoint.address, why=why)
    lost.__cause__ = error
    return lost
