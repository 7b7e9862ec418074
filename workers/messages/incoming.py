"""Matches arrived messages and waiting receives in order. For the I/O thread only."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from dataplane.core.buffer_pool import BufferPool
from dataplane.errors import DataPlaneError, InternalError
from workers.errors import (
    GroupOptionsError,
    MessageMismatchError,
    MessageTimeoutError,
    SourceFailedError,
    WorkerLostError,
)
from workers.messages.broadcast_calls import BroadcastCalls
from workers.messages.deliveries import Arrival, Delivery, Key, MessageId, Posting
from workers.messages.fetches import Fetches, Reply
from workers.messages.options import CollectiveGroupOptions
from workers.messages.outgoing import Contact
from workers.messages.relays import Later, Relays
from workers.messages.shared_buffers import Mappings
from workers.messages.wire import (
    Absent,
    Data,
    FaultForm,
    Held,
    MessageReceived,
    ObjectForm,
    PostMessage,
    Relay,
    Settled,
    TensorForm,
    WantMessage,
    refused,
)

EAGER_BYTES = 32 << 20
"""The I/O thread copies messages up to this size at once, which avoids waking another thread first. Copying larger
ones would delay other messages."""

_Q = TypeVar("_Q")
_log = logging.getLogger(__name__)


class Incoming:
    """worker: this end's name. reply: sends an answer along a route, in the I/O thread; ask: sends a request to a
    relay, False if that fails; call, later: schedule a call in that thread; contact: returns the contact with a
    source in a stream; busy: whether this worker waits for any operation; lives: whether a source is known to be
    alive, and watched; outdated: whether a message is from or for an earlier incarnation."""

    def __init__(
        self,
        worker: str,
        mappings: Mappings,
        pool: BufferPool,
        relays: Relays,
        *,
        reply: Reply,
        ask: Callable[[Relay, WantMessage], bool],
        later: Later,
        call: Callable[[Callable[[], None]], None],
        contact: Callable[[str, bytes, CollectiveGroupOptions | None], Contact],
        forget: Callable[[str, bytes], None],
        busy: Callable[[], bool],
        lives: Callable[[str], bool],
        outdated: Callable[[PostMessage], bool],
    ) -> None:
        self._worker = worker
        self._mappings = mappings
        self._pool = pool
        self._relays = relays
        self._reply = reply
        self._call = call
        self._contact = contact
        self._forget = forget
        self._busy = busy
        self._lives = lives
        self._outdated = outdated
        self._arrivals: dict[Key, deque[Arrival]] = {}
        self._postings: dict[Key, deque[Posting]] = {}
        self._fetches = Fetches(pool, relays, reply=reply, ask=ask, later=later)
        self._unsettled: list[Arrival] = []
        self._missed: dict[Key, Exception] = {}
        self._calls = BroadcastCalls(self._postings)

    # --- receives -------------------------------------------------------------------------------------------------

    def post(self, posting: Posting, lives: bool) -> bool:
        """Match a receive with the oldest message of the source, or queue it. Return whether it waits.

        lives: whether the source is known to be the process that sent the queued messages. Otherwise the receive
        waits for `match` or `lose`: a successor of a dead source may exist, whose messages come first.
        """
        missed = self._missed.pop(posting.key, None)
        if missed is not None:
            posting.fail(missed)
            return False
        self._contact(posting.source, posting.stream, posting.options)
        if posting.stream:
            posting.number = self._calls.next(posting.key)
        self._postings.setdefault(posting.key, deque()).append(posting)
        if lives:
            self._match(posting.key)
        queued = self._postings.get(posting.key)
        return queued is not None and queued[-1] is posting

    def match(self, source: str) -> None:
        """Match receives from the source with its queued messages."""
        for key in [key for key in self._postings if key[0] == source]:
            self._match(key)

    def _match(self, key: Key) -> None:
        """Match the oldest message and receive of a key until one of them is missing. Broadcasts match by number."""
        while key in self._arrivals:
            waiting, post = self._postings.get(key), self._arrivals[key][0].post
            behind = self._calls.behind(key, post.number)
            if waiting and behind < 0:
                why = "its call failed or timed out before it could send"
                _first(self._postings, key).fail(SourceFailedError(source=post.source, why=why))
                continue
            if not waiting and behind <= 0:
                return
            arrival = _first(self._arrivals, key)
            arrival.queued = False
            self._calls.met(key, post.number)
            if behind > 0:
                self._drop(arrival)
            else:
                self._attempt(self._meet, _first(self._postings, key), arrival)

    def _attempt(self, work: Callable[[Posting, Arrival], None], posting: Posting, arrival: Arrival) -> None:
        """Call `work`. An exception fails this receive, and its message at the sender. Other messages and receives
        are not affected, including the receive of the caller."""
        try:
            work(posting, arrival)
        except Exception as defect:
            _log.exception("%s failed for its message", posting.what)
            error = InternalError(what=f"{posting.what}: {defect!r}")
            posting.fail(error)
            self._refuse(arrival, error)

    def skip(self, key: Key) -> None:
        """Drop the message of a broadcast call that failed before it could wait."""
        self._calls.next(key)
        self._drop_left(key)

    def _drop_left(self, key: Key) -> None:
        """Drop messages for calls that gave up. If other calls wait, `_match` drops them."""
        if key in self._calls and key not in self._postings:
            self._match(key)

    def settle(self) -> None:
        """Notify senders that wait for an early answer that this worker has begun to wait."""
        for arrival in self._unsettled:
            if arrival.queued and arrival.key not in self._postings:
                self._reply(arrival.route, Settled(stream=arrival.post.stream, number=arrival.post.number))
        self._unsettled.clear()

    def expire(self, now: float) -> float:
        """Fail the receives whose deadline passed, see `withdraw`. Return the next deadline. An exception at one
        receive does not affect the others."""
        for posting in [posting for posting in self._all() if posting.deadline <= now]:
            error: Exception = MessageTimeoutError(what=posting.what, waited_s=now - posting.begun)
            try:
                self.withdraw(posting)
            except Exception as defect:
                _log.exception("%s: could not give its message back", posting.what)
                error = InternalError(what=f"{posting.what}: {defect!r}")
            posting.fail(error)
        return min((posting.deadline for posting in self._all()), default=math.inf)

    def withdraw(self, posting: Posting) -> None:
        """Remove a receive that gave up. The next receive gets its message, whether it is here or still arrives; the
        message of a broadcast is dropped."""
        queued = self._postings.get(posting.key)
        if queued and posting in queued:
            queued.remove(posting)
            if not queued:
                del self._postings[posting.key]
        for fetch in self._fetches.values():
            if fetch.posting is posting:
                fetch.posting = None
                self._leave(fetch.arrival)
                self._match(posting.key)
                break
        self._drop_left(posting.key)

    def abandon(self, posting: Posting) -> None:
        """Withdraw a receive whose handle was garbage-collected. The next receive also gets a message that it had met
        and that was not taken from the handle."""
        if not posting.future.done():
            self.withdraw(posting)
            return
        arrival = None if posting.future.exception() is not None else posting.future.result().give_back()
        if arrival is None or self._outdated(arrival.post):
            return
        self._leave(arrival)
        if self._lives(posting.source):
            self._match(posting.key)

    def _leave(self, arrival: Arrival) -> None:
        """Requeue a message that its receive could not take, or drop it in a broadcast."""
        if arrival.key in self._calls:
            self._drop(arrival)
        else:
            self._requeue(arrival)

    def _requeue(self, arrival: Arrival) -> None:
        """Queue a message at its place among those of its sender, and notify the sender, which need not wait for a
        receive."""
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

    def arrive(self, route: bytes, post: PostMessage, inline: Any) -> None:
        """Match an arrived message with the receive that has waited longest for it, or queue it. ValueError if it has
        fewer bytes than its header names."""
        memory = np.frombuffer(bytearray(inline), np.uint8) if post.slab is None else self._mappings.open(post.slab)
        if memory is not None and memory.size < post.nbytes:
            raise ValueError(f"message has {memory.size} bytes, its header names {post.nbytes}")
        self._take_in(Arrival(route, post, memory, own=post.slab is None))
        if post.passes_on:
            for asker, want in self._relays.arrived(post):
                self.wanted(asker, want)

    def _take_in(self, arrival: Arrival) -> None:
        first = arrival.key not in self._arrivals
        self._arrivals.setdefault(arrival.key, deque()).append(arrival)
        arrival.queued = True
        if first:
            self._match(arrival.key)
            if not arrival.queued:
                return
        busy = self._busy()
        self._held(arrival, busy)
        if arrival.post.settling and not busy:
            self._unsettled.append(arrival)

    def data(self, data: Data, body: Any) -> None:
        """Store a chunk of a message that is being pulled. A malformed chunk fails the receive and its message."""
        key = (data.source, data.stream, data.number)
        fetch = self._fetches.get(key)
        if fetch is None or _ends(fetch.arrival.post) != _ends(data):
            return
        part = np.frombuffer(body, dtype=np.uint8)
        end, expected = data.start + part.size, fetch.missing.get(data.start, part.size)
        if not part.size or end > fetch.staging.size or part.size != expected:
            self._give_up(key, f"malformed chunk of {part.size} bytes at {data.start} of {fetch.staging.size}")
            return
        if data.start not in fetch.missing:
            # A duplicate: the chunk came from both the relay and the source.
            return
        del fetch.missing[data.start]
        fetch.staging[data.start : data.start + part.size] = part
        fetch.got += part.size
        self._relays.came(fetch.arrival.post, data.start, part.size)
        if fetch.got < fetch.staging.size:
            self._fetches.ask_for_more(fetch)
            return
        del self._fetches[key]
        fetch.arrival.memory, fetch.arrival.own = fetch.staging, not fetch.passed_on
        if fetch.posting is None:
            self._held(fetch.arrival, busy=True)
        else:
            self._attempt(self._deliver, fetch.posting, fetch.arrival)

    def absent(self, absent: Absent) -> None:
        """Pull from the source, because the relay does not forward these values."""
        fetch = self._fetches.get((absent.source, absent.stream, absent.number))
        if fetch is not None:
            self._fetches.turn_to_source(fetch)

    def wanted(self, route: bytes, want: WantMessage) -> None:
        """Serve another receiver that wants values from this one, and fetch them if it is the first to want them."""
        if self._relays.asked(route, want) or self._relays.is_early(route, want):
            return
        if self._lives(want.source):
            self._begin_for_others(want)
        if not self._relays.asked(route, want):
            self._relays.refuse(route, want)

    def _begin_for_others(self, want: WantMessage) -> None:
        for arrival in self._arrivals.get((want.source, want.stream), ()):
            post = arrival.post
            if (post.serial, post.incarnation) == (want.serial, want.incarnation):
                if post.passes_on and arrival.memory is None and arrival.id not in self._fetches:
                    self._fetches.begin(None, arrival)
                return

    def _give_up(self, key: MessageId, why: str) -> None:
        fetch = self._fetches.pop(key)
        self._relays.interrupted(fetch.arrival.post)
        error = InternalError(what=f"{self._worker}: a message from {key[0]}: {why}")
        if fetch.posting is None:
            self._keep(key[0], lambda arrival: arrival is not fetch.arrival)
        else:
            fetch.posting.fail(error)
        self._refuse(fetch.arrival, error)

    def lose(self, source: str, error: Exception) -> None:
        """Fail receives from `source`, which died or cannot be reached. Messages whose values are all here can still
        be received. Any other one stays in its place in the queue, and the receive that takes it raises `error`.
        Waiting receives raise it at once if the values of their message are incomplete, or if no message is left for
        them."""
        for key in [key for key in self._arrivals if key[0] == source]:
            for arrival in self._arrivals[key]:
                if not arrival.here:
                    arrival.lost = error
        for posting in self._interrupted(source):
            posting.fail(error)
        self.match(source)
        for key in [key for key in self._postings if key[0] == source]:
            for posting in self._postings.pop(key):
                posting.fail(error)
        if isinstance(error, WorkerLostError):
            self._calls.lost(source)

    def outdate(self, source: str, incarnation: int) -> None:
        """Discard messages of earlier incarnations of the source, whose process was restarted, and restart the
        numbering of calls."""
        self._keep(source, lambda arrival: arrival.post.incarnation >= incarnation)
        for posting in reversed(self._interrupted(source)):
            self._postings.setdefault(posting.key, deque()).appendleft(posting)
        self._calls.renewed(source)

    def _interrupted(self, source: str) -> list[Posting]:
        """Remove fetches from the source, whose bytes will not arrive. Return their receives."""
        fetches = [self._fetches.pop(key) for key in [key for key in self._fetches if key[0] == source]]
        for fetch in fetches:
            self._relays.interrupted(fetch.arrival.post)
        return [fetch.posting for fetch in fetches if fetch.posting is not None]

    def fail_all(self, error: Exception) -> None:
        """Fail everything: all sources are lost. The next receive from a source with arrived messages raises the
        error."""
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
        self._calls.clear()
        self._relays.drop_all()

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
        """Compare a message with its receive. Deliver it, fetch its values, or fail both ends."""
        if arrival.lost is not None:
            posting.fail(arrival.lost)
            return
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
        if not arrival.here:
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
        if arrival.id in self._fetches:
            self._fetches.join(posting, arrival)
            return
        try:
            self._fetches.begin(posting, arrival)
        except Exception as error:
            # Out of memory for its bytes. The next receive may find some.
            posting.fail(error)
            self._leave(arrival)

    def _deliver(self, posting: Posting, arrival: Arrival) -> None:
        """Complete a receive with its message, and copy the values out if they are small or no thread waits."""
        delivery = Delivery(posting, arrival, self._pool, lambda: self._call(lambda: self._done(arrival)))
        handed_out = posting.eager and posting.target is not None
        if posting.eager or arrival.post.nbytes <= EAGER_BYTES:
            try:
                if posting.target is None or handed_out:
                    delivery.copy()
                else:
                    delivery.take()
            except Exception as error:
                posting.fail(error)
                return
        if handed_out:
            self._held(arrival, busy=True)
        posting.future.set_result(delivery)

    def _held(self, arrival: Arrival, busy: bool) -> None:
        post, kept = arrival.post, arrival.here
        self._reply(arrival.route, Held(stream=post.stream, number=post.number, kept=kept, busy=busy))

    def _refuse(self, arrival: Arrival, error: DataPlaneError) -> None:
        self._interrupt(arrival)
        self._reply(arrival.route, refused(arrival.post, error))

    def _drop(self, arrival: Arrival) -> None:
        """Drop a message that no receive will take. Its sender treats it as received."""
        self._interrupt(arrival)
        self._done(arrival)

    def _interrupt(self, arrival: Arrival) -> None:
        if self._fetches.pop(arrival.id, None) is not None:
            self._relays.interrupted(arrival.post)

    def _done(self, arrival: Arrival) -> None:
        self._reply(arrival.route, MessageReceived(stream=arrival.post.stream, number=arrival.post.number))


def _order(arrival: Arrival) -> tuple[int, int]:
    return arrival.post.incarnation, arrival.post.number


def _ends(said: PostMessage | Data) -> tuple[int, int]:
    """Return the incarnations of the source and of the receiver."""
    return said.incarnation, said.receiver


def _fits(post: PostMessage, form: ObjectForm | TensorForm) -> bool:
    return post.form == form if isinstance(form, TensorForm) else isinstance(post.form, ObjectForm)


def _first(queues: dict[Key, deque[_Q]], key: Key) -> _Q:
    """Remove and return the first element of a queue, and remove the queue if it is empty."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first
