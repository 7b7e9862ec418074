"""Messages that came and receives that wait, brought together in order. For the engine's thread, but for `Delivery`."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dataplane.errors import DataPlaneError, InternalError
from dataplane.warm import WarmMemory
from workers.errors import GroupOptionsError, MessageMismatchError, MessageTimeoutError, SourceFailedError
from workers.messages.options import CollectiveGroupOptions
from workers.messages.outgoing import Contact
from workers.messages.slabs import Mappings
from workers.messages.wire import (
    Answer,
    Data,
    Done,
    FaultForm,
    Held,
    ObjectForm,
    Post,
    Pull,
    Settled,
    TensorForm,
    refused,
)
from workers.values import Bytes, Unpacked, copy_into, fresh, unpack

CHUNK_BYTES = 4 << 20
EAGER_BYTES = 32 << 20
"""So much the engine copies at once, which spares waking another thread first; of more, other messages would wait."""
CHUNKS_AHEAD = 4
"""Values in memory of another host are asked for in chunks, so many at a time."""

_Q = TypeVar("_Q")
Key = tuple[str, bytes]
"""Where messages queue: by source and stream."""


@dataclass(eq=False)
class Arrival:
    """A message that came. route: of its answers; memory: its bytes, None where they have to be pulled; own: of this
    process only; queued: it waits for a receive."""

    route: bytes
    post: Post
    skeleton: bytes
    memory: Bytes | None
    own: bool
    queued: bool = False

    @property
    def key(self) -> Key:
        return self.post.source, self.post.stream


@dataclass(eq=False)
class Posting:
    """A receive that waits. target: for recv_tensor; ready: what is to be over on the GPU before target is written;
    eager: nobody waits yet, so the engine copies whatever its size."""

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

    @property
    def key(self) -> Key:
        return self.source, self.stream

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Delivery:
    """A message that met its receive. `take` copies its values out, once, in whichever thread comes first.

    Refers to neither of them afterwards: what was received is given back when its owner drops it, not by a collector.
    """

    def __init__(self, posting: Posting, arrival: Arrival, warm: WarmMemory, done: Callable[[], None]) -> None:
        self.form = arrival.post.form
        self._pending: tuple[Posting, Arrival, Callable[[], None]] | None = (posting, arrival, done)
        self._warm = warm
        self._guard = threading.Lock()
        self._values: Unpacked | None = None

    def take(self) -> Unpacked | None:
        """What `recv` is to load; None for `recv_tensor`, whose target then has the values. The sender is told."""
        with self._guard:
            if self._pending is None:
                return self._values
            posting, arrival, done = self._pending
            memory, self._pending = arrival.memory, None
            assert memory is not None, posting.what
            try:
                if posting.ready is not None:
                    posting.ready.synchronize()
                if posting.target is not None:
                    copy_into(posting.target, arrival.post.segments, memory)
                else:
                    skeleton, segments = arrival.skeleton, arrival.post.segments
                    self._values = unpack(
                        skeleton, segments, memory, self._warm, own=arrival.own, device=posting.device
                    )
            finally:
                arrival.memory = None
                done()
            return self._values


@dataclass(eq=False)
class _Fetch:
    """A message whose bytes are being pulled. posting: None once the receive that began it gave up: the message is
    queued again, and its bytes still come."""

    posting: Posting | None
    arrival: Arrival
    staging: Bytes
    asked: int = 0
    got: int = 0


Reply = Callable[[bytes, Answer], None]


class Incoming:
    """worker: this end's name. reply: sends an answer along a route, in the engine's thread; call: has something done
    by that thread; contact: of a source within a stream; busy: whether this worker waits for anything."""

    def __init__(
        self,
        worker: str,
        mappings: Mappings,
        warm: WarmMemory,
        *,
        reply: Reply,
        call: Callable[[Callable[[], None]], None],
        contact: Callable[[str, bytes, CollectiveGroupOptions | None], Contact],
        forget: Callable[[str, bytes], None],
        busy: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._mappings = mappings
        self._warm = warm
        self._reply = reply
        self._call = call
        self._contact = contact
        self._forget = forget
        self._busy = busy
        self._arrivals: dict[Key, deque[Arrival]] = {}
        self._postings: dict[Key, deque[Posting]] = {}
        self._fetches: dict[tuple[str, bytes, int], _Fetch] = {}
        self._unsettled: list[Arrival] = []
        self._missed: dict[Key, Exception] = {}

    # --- receives -------------------------------------------------------------------------------------------------

    def post(self, posting: Posting, lives: bool) -> bool:
        """Meet the oldest message of the source, or wait for one. Whether it waits.

        lives: the source is known to be who sent what is queued. Otherwise the receive waits until `match` or `lose`
        tells: under the name of one that died there may be another by now, whose messages come first.
        """
        missed = self._missed.pop(posting.key, None)
        if missed is not None:
            posting.fail(missed)
            return False
        self._contact(posting.source, posting.stream, posting.options)
        self._postings.setdefault(posting.key, deque()).append(posting)
        if lives:
            self._match(posting.key)
        queued = self._postings.get(posting.key)
        return queued is not None and queued[-1] is posting

    def match(self, source: str) -> None:
        """Bring receives from the source together with what is queued of it."""
        for key in [key for key in self._postings if key[0] == source]:
            self._match(key)

    def _match(self, key: Key) -> None:
        while key in self._postings and key in self._arrivals:
            posting, arrival = _first(self._postings, key), _first(self._arrivals, key)
            arrival.queued = False
            self._meet(posting, arrival)

    def settle(self) -> None:
        """This worker began to wait: senders that hope for an answer soon are told."""
        for arrival in self._unsettled:
            if arrival.queued and arrival.key not in self._postings:
                self._reply(arrival.route, Settled(stream=arrival.post.stream, number=arrival.post.number))
        self._unsettled.clear()

    def expire(self, now: float) -> float:
        """Those whose time is over fail; a message that comes later is for the next receive. When the next one's time
        is over."""
        for posting in [posting for posting in self._all() if posting.deadline <= now]:
            self.withdraw(posting)
            posting.fail(MessageTimeoutError(what=posting.what, waited_s=now - posting.begun))
        return min((posting.deadline for posting in self._all()), default=math.inf)

    def withdraw(self, posting: Posting) -> None:
        """Nobody waits for it any more. A message that it had met, but has not been given, is for the next receive."""
        queued = self._postings.get(posting.key)
        if queued and posting in queued:
            queued.remove(posting)
            if not queued:
                del self._postings[posting.key]
        for fetch in self._fetches.values():
            if fetch.posting is posting:
                fetch.posting = None
                self._requeue(fetch.arrival)
                self._match(posting.key)
                break

    def _requeue(self, arrival: Arrival) -> None:
        """In its place among those of its sender, who need not wait for a receive."""
        queue = self._arrivals.setdefault(arrival.key, deque())
        bisect.insort(queue, arrival, key=_order)
        arrival.queued = True
        self._held(arrival, busy=True)

    @property
    def waiting(self) -> bool:
        """Whether any receive waits."""
        return bool(self._postings)

    def waits_for(self, source: str) -> bool:
        """Whether a receive from that source waits."""
        return any(posting.source == source for posting in self._all())

    def _all(self) -> Iterator[Posting]:
        yield from itertools.chain(*self._postings.values())
        yield from (fetch.posting for fetch in self._fetches.values() if fetch.posting is not None)

    # --- messages -------------------------------------------------------------------------------------------------

    def arrive(self, route: bytes, post: Post, skeleton: bytes, inline: Any) -> None:
        """A message came: it meets the receive that waits longest for it, or queues. ValueError for one that has not
        the bytes that it names."""
        memory = np.frombuffer(bytearray(inline), np.uint8) if post.slab is None else self._mappings.open(post.slab)
        if memory is not None and memory.size < post.nbytes:
            raise ValueError(f"{memory.size} bytes came of a message of {post.nbytes}")
        arrival = Arrival(route, post, skeleton, memory, own=post.slab is None)
        if arrival.key in self._postings and arrival.key not in self._arrivals:
            self._meet(_first(self._postings, arrival.key), arrival)
            if arrival.queued:
                self._match(arrival.key)
            return
        self._arrivals.setdefault(arrival.key, deque()).append(arrival)
        arrival.queued = True
        busy = self._busy()
        self._held(arrival, busy)
        if post.settling and not busy:
            self._unsettled.append(arrival)

    def data(self, data: Data, body: Any) -> None:
        """A part of a message that is being pulled. One that makes no sense fails the receive, and its message."""
        key = (data.source, data.stream, data.number)
        fetch = self._fetches.get(key)
        if fetch is None:
            return
        part = np.frombuffer(body, dtype=np.uint8)
        if not part.size or data.start + part.size > fetch.staging.size:
            self._give_up(key, f"{part.size} bytes from {data.start} of a message of {fetch.staging.size}")
            return
        fetch.staging[data.start : data.start + part.size] = part
        fetch.got += part.size
        if fetch.got < fetch.staging.size:
            self._ask(fetch)
            return
        del self._fetches[key]
        fetch.arrival.memory, fetch.arrival.own = fetch.staging, True
        if fetch.posting is None:
            self._held(fetch.arrival, busy=True)
        else:
            self._deliver(fetch.posting, fetch.arrival)

    def _give_up(self, key: tuple[str, bytes, int], why: str) -> None:
        fetch = self._fetches.pop(key)
        error = InternalError(what=f"{self._worker}: a message from {key[0]}: {why}")
        if fetch.posting is None:
            self._keep(key[0], lambda arrival: arrival is not fetch.arrival)
        else:
            fetch.posting.fail(error)
        self._refuse(fetch.arrival, error)

    def lose(self, source: str, error: Exception) -> None:
        """The source's life is over: what waits for it fails. What came whole is still there to be received."""
        self._keep(source, lambda arrival: arrival.memory is not None)
        for posting in self._interrupted(source):
            posting.fail(error)
        self.match(source)
        for key in [key for key in self._postings if key[0] == source]:
            for posting in self._postings.pop(key):
                posting.fail(error)

    def outdate(self, source: str, incarnation: int) -> None:
        """A new life of the source began: nothing of those before is received any more."""
        self._keep(source, lambda arrival: arrival.post.incarnation >= incarnation)
        for posting in reversed(self._interrupted(source)):
            self._postings.setdefault(posting.key, deque()).appendleft(posting)

    def _interrupted(self, source: str) -> list[Posting]:
        """Receives of messages from there whose bytes will not come any more; those are forgotten."""
        fetches = [self._fetches.pop(key) for key in [key for key in self._fetches if key[0] == source]]
        return [fetch.posting for fetch in fetches if fetch.posting is not None]

    def fail_all(self, error: Exception) -> None:
        """Every source is lost, with what came of it; the next receive from one of which something had come says so."""
        self._missed.update(dict.fromkeys(self._arrivals, error))
        for posting in itertools.chain(*self._postings.values()):
            posting.fail(error)
        for fetch in self._fetches.values():
            if fetch.posting is not None:
                fetch.posting.fail(error)
        self._postings.clear()
        self._fetches.clear()
        self._arrivals.clear()
        self._unsettled.clear()

    def _keep(self, source: str, wanted: Callable[[Arrival], bool]) -> None:
        for key in [key for key in self._arrivals if key[0] == source]:
            left = deque(arrival for arrival in self._arrivals[key] if wanted(arrival))
            for arrival in self._arrivals[key]:
                arrival.queued = False
            for arrival in left:
                arrival.queued = True
            if left:
                self._arrivals[key] = left
            else:
                del self._arrivals[key]

    # --- a receive and its message ----------------------------------------------------------------------------------

    def _meet(self, posting: Posting, arrival: Arrival) -> None:
        post = arrival.post
        contact = self._contact(posting.source, posting.stream, posting.options)
        if contact.options != post.options:
            if not contact.proven:
                self._forget(posting.source, posting.stream)
            theirs, ours = str(post.options), str(contact.options)
            posting.fail(GroupOptionsError(worker=self._worker, peer=post.source, ours=ours, theirs=theirs))
            error = GroupOptionsError(worker=post.source, peer=self._worker, ours=theirs, theirs=ours)
            self._refuse(arrival, error)
            return
        if isinstance(post.form, FaultForm):
            posting.fail(SourceFailedError(source=post.source, why=post.form.why))
            self._done(arrival)
            return
        if not _fits(post, posting.form):
            self._mismatch(posting, arrival)
            return
        contact.proven = True
        if arrival.memory is None:
            self._fetch(posting, arrival)
        else:
            self._deliver(posting, arrival)

    def _mismatch(self, posting: Posting, arrival: Arrival) -> None:
        post = arrival.post
        error = MessageMismatchError(
            sender=post.source, receiver=self._worker, sent=str(post.form), expected=str(posting.form)
        )
        posting.fail(error)
        self._refuse(arrival, error)

    def _fetch(self, posting: Posting, arrival: Arrival) -> None:
        post = arrival.post
        key = (post.source, post.stream, post.number)
        if key in self._fetches:
            self._fetches[key].posting = posting
            return
        try:
            staging = fresh(post.nbytes, self._warm)
        except Exception as error:
            # Memory for its bytes; there may be some for the next receive.
            posting.fail(error)
            self._requeue(arrival)
            return
        fetch = self._fetches[key] = _Fetch(posting, arrival, staging)
        for _ in range(CHUNKS_AHEAD):
            self._ask(fetch)

    def _ask(self, fetch: _Fetch) -> None:
        post = fetch.arrival.post
        nbytes = min(CHUNK_BYTES, post.nbytes - fetch.asked)
        if nbytes > 0:
            pull = Pull(stream=post.stream, number=post.number, start=fetch.asked, nbytes=nbytes)
            self._reply(fetch.arrival.route, pull)
            fetch.asked += nbytes

    def _deliver(self, posting: Posting, arrival: Arrival) -> None:
        delivery = Delivery(posting, arrival, self._warm, lambda: self._call(lambda: self._done(arrival)))
        if posting.eager or arrival.post.nbytes <= EAGER_BYTES:
            try:
                delivery.take()
            except Exception as error:
                posting.fail(error)
                return
        posting.future.set_result(delivery)

    def _held(self, arrival: Arrival, busy: bool) -> None:
        post, kept = arrival.post, arrival.memory is not None
        self._reply(arrival.route, Held(stream=post.stream, number=post.number, kept=kept, busy=busy))

    def _refuse(self, arrival: Arrival, error: DataPlaneError) -> None:
        self._fetches.pop((arrival.post.source, arrival.post.stream, arrival.post.number), None)
        self._reply(arrival.route, refused(arrival.post, error))

    def _done(self, arrival: Arrival) -> None:
        self._reply(arrival.route, Done(stream=arrival.post.stream, number=arrival.post.number))


def _order(arrival: Arrival) -> tuple[int, int]:
    return arrival.post.incarnation, arrival.post.number


def _fits(post: Post, form: ObjectForm | TensorForm) -> bool:
    return post.form == form if isinstance(form, TensorForm) else isinstance(post.form, ObjectForm)


def _first(queues: dict[Key, deque[_Q]], key: Key) -> _Q:
    """Taken off its queue, which goes with the last."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
