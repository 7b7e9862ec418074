"""A message that came, a receive that waits, and both once they met. For the engine's thread, but for `Delivery`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataplane.core.buffer_pool import BufferPool
from workers.messages.options import CollectiveGroupOptions
from workers.messages.wire import ObjectForm, PostMessage, TensorForm
from workers.transport.pickling import Bytes, Unpacked, copy_into, unpack

Key = tuple[str, bytes]
"""Where messages queue: by source and stream."""
MessageId = tuple[str, bytes, int]
"""Source, stream and number: one message of the source's present run."""


@dataclass(eq=False)
class Arrival:
    """A message whose header has arrived.

    route: where its answers are sent; memory: its values, None before they are fetched and after they are taken; own:
    only this process has that memory; queued: no receive has taken the message yet; lost: set if its sender was lost
    before the values were fetched, and raised by the receive that takes the message; unpacked: its values as they were
    copied out for a receive whose handle nobody has any more, in place of memory."""

    route: bytes
    post: PostMessage
    memory: Bytes | None
    own: bool
    queued: bool = False
    lost: Exception | None = None
    unpacked: Unpacked | None = None

    @property
    def here(self) -> bool:
        """Whether its values are in this process."""
        return self.memory is not None or self.unpacked is not None

    @property
    def key(self) -> Key:
        return self.post.source, self.post.stream

    @property
    def id(self) -> MessageId:
        return self.post.source, self.post.stream, self.post.number


@dataclass(eq=False)
class Posting:
    """A receive that waits. target: for recv_tensor; ready: what is to be over on the GPU before target is written;
    eager: nobody waits yet, so the engine copies whatever its size; number: of the one message that it takes, in a
    broadcast."""

    source: str
    stream: bytes
    options: CollectiveGroupOptions | None
    target: Tensor | None
    form: ObjectForm | TensorForm
    device: torch.device | None
    ready: torch.cuda.Event | None
    eager: bool
    what: str
    begun: float
    deadline: float
    future: Future[Delivery] = field(default_factory=Future)
    number: int = -1

    @property
    def key(self) -> Key:
        return self.source, self.stream

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Delivery:
    """A message that met its receive: its values are copied out once, in whichever thread comes first, and it is
    received once somebody takes them. Until then it can be given back.

    Refers to neither of the two afterwards: what was received is freed when its owner drops it, not by a collector.
    """

    def __init__(self, posting: Posting, arrival: Arrival, warm: BufferPool, done: Callable[[], None]) -> None:
        """done: tells the sender that its memory is its own again."""
        self.form = arrival.post.form
        self._pending: tuple[Posting, Arrival, Callable[[], None]] | None = (posting, arrival, done)
        self._warm = warm
        self._guard = threading.Lock()
        self._copied = False
        self._values: Unpacked | None = None

    def copy(self) -> None:
        """Copy the values out. The sender of an object is told. That of a tensor is not, before it is taken: what is in
        the target cannot be given back, as its owner may write there."""
        with self._guard:
            self._copy()

    def take(self) -> Unpacked | None:
        """What `recv` is to load; None for `recv_tensor`, whose target then has the values. The sender is told."""
        with self._guard:
            self._copy()
            if self._pending is not None:
                posting, arrival, done = self._pending
                self._pending = None
                if posting.target is not None:
                    posting.target = arrival.memory = None
                    done()
            return self._values

    def give_back(self) -> Arrival | None:
        """The message with its values, for another receive; None if it was taken."""
        with self._guard:
            if self._pending is None:
                return None
            posting, arrival, _ = self._pending
            posting.target = self._pending = self._values = None
            return arrival

    def _copy(self) -> None:
        if self._pending is None or self._copied:
            return
        posting, arrival, done = self._pending
        try:
            if posting.ready is not None:
                posting.ready.synchronize()
            if posting.target is None:
                self._values = arrival.unpacked = self._unpack(posting, arrival)
            else:
                copy_into(posting.target, arrival.post.layout, _memory(arrival))
            self._copied = True
        except BaseException:
            self._pending = None
            raise
        finally:
            if self._pending is None or posting.target is None:
                arrival.memory = None
                done()

    def _unpack(self, posting: Posting, arrival: Arrival) -> Unpacked:
        if arrival.unpacked is not None:
            return arrival.unpacked
        layout, memory = arrival.post.layout, _memory(arrival)
        return unpack(layout, memory, self._warm, own=arrival.own, device=posting.device)


def _memory(arrival: Arrival) -> Bytes:
    assert arrival.memory is not None, arrival.id
    return arrival.memory
