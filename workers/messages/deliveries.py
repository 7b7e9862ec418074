"""Arrived messages, waiting receives, and their matches. For the I/O thread only, except `Delivery`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataplane.core.buffer_pool import BufferPool
from workers.messages.options import CollectiveGroupOptions
from workers.messages.shared_buffers import Mappings
from workers.messages.wire import ObjectForm, PostMessage, TensorForm
from workers.transport.pickling import Bytes, Unpacked, copy_into, copy_tensor, unpack

EAGER_BYTES = 32 << 20
"""The I/O thread copies messages up to this size at once, which avoids waking another thread first. Copying larger
ones would delay other messages."""
Key = tuple[str, bytes]
"""Messages queue by source and stream."""
MessageId = tuple[str, bytes, int]
"""Source, stream and number of a message, unique while the source's process runs."""


@dataclass(eq=False)
class Arrival:
    """A message whose header has arrived.

    route: where its answers are sent; memory: its values, None before they are fetched and after they are taken; own:
    whether only this process has that memory; queued: no receive has taken the message yet; lost: set if its sender
    was lost before the values were fetched, and raised by the receive that takes the message; unpacked: its values,
    if they came by collectives, or were copied out of memory for a receive whose handle was garbage-collected;
    skeleton: of a message with an offer.
    """

    route: bytes
    post: PostMessage
    memory: Bytes | None
    own: bool
    queued: bool = False
    lost: Exception | None = None
    unpacked: Unpacked | None = None
    skeleton: bytes = b""

    @classmethod
    def of(cls, route: bytes, post: PostMessage, inline: Any, mappings: Mappings) -> Arrival:
        """Return an arrived message; parameters as in `Incoming.arrive`. ValueError if it has too few bytes."""
        memory = np.frombuffer(bytearray(inline), np.uint8) if post.slab is None else mappings.open(post.slab)
        skeleton_only = post.slab is None and post.offer is not None
        expected = post.nbytes - post.layout.skeleton_from if skeleton_only else post.nbytes
        if memory is not None and memory.size < expected:
            raise ValueError(f"message has {memory.size} bytes, its header names {expected}")
        if memory is not None and skeleton_only:
            return cls(route, post, None, own=True, skeleton=memory.tobytes())
        return cls(route, post, memory, own=post.slab is None)

    @property
    def complete(self) -> bool:
        """Whether its values are in this process."""
        return self.memory is not None or self.unpacked is not None

    @property
    def key(self) -> Key:
        return self.post.source, self.post.stream

    @property
    def id(self) -> MessageId:
        return self.post.source, self.post.stream, self.post.number

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the messages of its key."""
        return self.post.incarnation, self.post.number


@dataclass(eq=False)
class Posting:
    """A waiting receive. target: of recv_tensor, None for recv; form: what it expects; device: the accelerator on
    which tensors of recv arrive, if any; ready: the accelerator's event to wait for before target is written, or None;
    eager: no thread waits yet, so the I/O thread copies messages of any size; begun, deadline: on the monotonic clock;
    future: gets the delivery or the error; number: of its message, in a broadcast, otherwise -1."""

    source: str
    stream: bytes
    options: CollectiveGroupOptions | None
    target: Tensor | None
    form: ObjectForm | TensorForm
    device: torch.device | None
    ready: Any
    eager: bool
    what: str
    begun: float
    deadline: float
    future: Future[Delivery] = field(default_factory=Future)
    number: int = -1

    @property
    def key(self) -> Key:
        return self.source, self.stream

    def accepts(self, post: PostMessage) -> bool:
        """Whether the receive expects a message of this form. `recv` accepts an object with or without a payload."""
        return post.form == self.form if isinstance(self.form, TensorForm) else isinstance(post.form, ObjectForm)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Delivery:
    """A message and the receive that was matched with it. The first thread that needs the values copies them out, once.
    The message is received once they are taken; until then it can be given back.

    Afterwards this refers to neither posting nor arrival, so received values are freed with their last reference, not
    by a garbage collection.

    `_pending`: None once the message was taken or given back, or its values could not be copied; `_copied`: whether the
    values are in the target or in `_values`, which is None for a tensor.
    """

    def __init__(self, posting: Posting, arrival: Arrival, pool: BufferPool, notify_sender: Callable[[], None]) -> None:
        """notify_sender: tells the sender that it may reuse its memory."""
        self.form = arrival.post.form
        self._nbytes = arrival.post.nbytes
        self._pending: tuple[Posting, Arrival, Callable[[], None]] | None = (posting, arrival, notify_sender)
        self._pool = pool
        self._guard = threading.Lock()
        self._copied = False
        self._values: Unpacked | None = None

    def complete(self, posting: Posting, send_held: Callable[[], None]) -> None:
        """Complete the receive, or fail it. Copy the values out first if they are small or no thread waits. send_held:
        called if the receipt is reported only later, by `take`, so that the send need not wait for it. That is for a
        tensor with `async_op`: until the caller has observed the end, the next receive may get the message."""
        revocable = posting.eager and posting.target is not None
        if posting.eager or self._nbytes <= EAGER_BYTES:
            try:
                if posting.target is None or revocable:
                    self.copy()  # of an object: also notifies its sender
                else:
                    self.take()
            except Exception as error:
                posting.fail(error)
                return
        if revocable:
            send_held()
        posting.future.set_result(self)

    def copy(self) -> None:
        """Copy the values out, and notify the sender of an object. The sender of a tensor is notified by `take`, and
        keeps the values until then: those in the target cannot be given back, as its owner may overwrite them."""
        with self._guard:
            self._copy()

    def take(self) -> Unpacked | None:
        """Return the values for `recv` to load, or None for `recv_tensor`, whose target then has them. Notifies the
        sender."""
        with self._guard:
            self._copy()
            if self._pending is not None:
                posting, arrival, notify_sender = self._pending
                self._pending = None
                # The sender of an object was notified by `_copy`.
                if posting.target is not None:
                    posting.target = arrival.memory = None
                    notify_sender()
            return self._values

    def give_back(self) -> Arrival | None:
        """Return the message with its values for another receive, or None if it was taken or could not be copied."""
        with self._guard:
            if self._pending is None:
                return None
            posting, arrival, _ = self._pending
            posting.target = self._pending = self._values = None
            return arrival

    def _copy(self) -> None:
        """Copy the values out, once, and notify the sender of an object. Under `_guard`."""
        if self._pending is None or self._copied:
            return
        posting, arrival, notify_sender = self._pending
        try:
            if posting.ready is not None:
                posting.ready.synchronize()
            if posting.target is None:
                self._values = arrival.unpacked = self._unpack(posting, arrival)
            elif arrival.unpacked is not None:
                copy_tensor(posting.target, arrival.unpacked.tensors[0])
            else:
                copy_into(posting.target, arrival.post.layout, _memory(arrival))
            self._copied = True
        except BaseException:
            self._pending = None
            raise
        finally:
            # The values of a tensor stay in the arrival until `take`: until then `give_back` returns them. After a
            # failure nobody can receive them.
            if self._pending is None or posting.target is None:
                arrival.memory = None
                notify_sender()

    def _unpack(self, posting: Posting, arrival: Arrival) -> Unpacked:
        """Return the values of an object, in memory of this process."""
        if arrival.unpacked is not None:
            return arrival.unpacked
        layout, memory = arrival.post.layout, _memory(arrival)
        return unpack(layout, memory, self._pool, own=arrival.own, device=posting.device)


def _memory(arrival: Arrival) -> Bytes:
    assert arrival.memory is not None, arrival.id
    return arrival.memory
