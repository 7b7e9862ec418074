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
from workers.messages.shared_buffers import Mappings
from workers.messages.wire import CollectiveGroupOptions, ObjectForm, PostMessage, TensorForm
from workers.transport.pickling import Bytes, Unpacked, copy_into, copy_tensor, unpack

EAGER_BYTES = 32 << 20
"""The I/O thread copies messages up to this size at once, which avoids waking another thread first. Copying larger
ones would delay other messages."""
Key = tuple[str, bytes]
"""Messages queue by source and stream."""
MessageId = tuple[str, bytes, int]
"""Source, stream and sequence number of a message, unique while the source's process runs."""


@dataclass(eq=False)
class Arrival:
    """A message whose header has arrived.

    route: where its answers are sent; memory: its values, None before they are fetched and after they are taken; own:
    whether only this process has that memory; queued: no receive has taken the message yet; lost: set if its sender
    was lost before the values were fetched, and raised by the receive that takes the message; unpacked: its values,
    if they came by collectives; skeleton: of a message with an offer.
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
        return self.post.source, self.post.stream, self.post.sequence

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the messages of its key."""
        return self.post.incarnation, self.post.sequence


@dataclass(eq=False)
class Posting:
    """A waiting receive. target: of recv_tensor, None for recv; form: what it expects; device: the accelerator on
    which tensors of recv arrive, if any; ready: the accelerator's event to wait for before target is written, or None;
    eager: no thread waits yet, so the I/O thread copies messages of any size; begun, deadline: on the monotonic clock;
    future: gets the delivery or the error; sequence: of its message, in a broadcast, otherwise -1."""

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
    sequence: int = -1

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
    """A message and the receive that was matched with it. The first thread that needs the values copies them out, once,
    and notifies the sender.

    Afterwards this refers to neither posting nor arrival, so received values are freed with their last reference, not
    by a garbage collection.

    `_pending`: None once the values were copied out, or dropped; `_values`: those of an object, None for a tensor.
    """

    def __init__(self, posting: Posting, arrival: Arrival, pool: BufferPool, notify_sender: Callable[[], None]) -> None:
        """notify_sender: tells the sender that it may reuse its memory."""
        self.form = arrival.post.form
        self._nbytes = arrival.post.nbytes
        self._pending: tuple[Posting, Arrival, Callable[[], None]] | None = (posting, arrival, notify_sender)
        self._pool = pool
        self._guard = threading.Lock()
        self._values: Unpacked | None = None

    def complete(self, posting: Posting) -> None:
        """Complete the receive, or fail it. Copy the values out first if they are small or no thread waits."""
        if posting.eager or self._nbytes <= EAGER_BYTES:
            try:
                self.take()
            except Exception as error:
                posting.fail(error)
                return
        posting.future.set_result(self)

    def take(self) -> Unpacked | None:
        """Return the values for `recv` to load, or None for `recv_tensor`, whose target then has them."""
        with self._guard:
            if self._pending is not None:
                posting, arrival, _ = self._pending
                try:
                    self._values = self._copy(posting, arrival)
                finally:  # after a failure nobody can receive them
                    self._end()
            return self._values

    def discard(self) -> None:
        """Drop the values if they were not copied out: the receive has no caller."""
        with self._guard:
            self._end()

    def _end(self) -> None:
        if self._pending is not None:
            posting, arrival, notify_sender = self._pending
            posting.target = self._pending = arrival.memory = None
            notify_sender()

    def _copy(self, posting: Posting, arrival: Arrival) -> Unpacked | None:
        """Write the values into the target, or return those of an object, in memory of this process."""
        if posting.ready is not None:
            posting.ready.synchronize()
        if posting.target is None:
            if arrival.unpacked is not None:
                return arrival.unpacked
            layout = arrival.post.layout
            memory = _memory(arrival)
            return unpack(layout, memory, self._pool, own=arrival.own, device=posting.device)
        if arrival.unpacked is not None:
            copy_tensor(posting.target, arrival.unpacked.tensors[0])
        else:
            copy_into(posting.target, arrival.post.layout, _memory(arrival))
        return None


def _memory(arrival: Arrival) -> Bytes:
    assert arrival.memory is not None, arrival.id
    return arrival.memory
