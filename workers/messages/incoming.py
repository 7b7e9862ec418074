"""Matches arrived messages and waiting receives in order. For the I/O thread only.

The broadcast calls of this worker are numbered, and each call gets the message of the same sequence number.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from dataplane.core.buffer_pool import BufferPool
from dataplane.errors import DataPlaneError, InternalError
from workers.errors import (
    GroupOptionsError,
    MessageMismatchError,
    MessageTimeoutError,
    SourceFailedError,
    WorkerLostError,
)
from workers.messages import wire
from workers.messages.deliveries import Arrival, Delivery, Key, Posting
from workers.messages.fetches import Fetch, Fetches, Reply
from workers.messages.outgoing import Contact
from workers.messages.relays import Relays, Schedule
from workers.messages.shared_buffers import Mappings
from workers.messages.transfers import Collectives, TransferReceiver
from workers.messages.wire import CollectiveGroupOptions, Data, PostMessage, WantMessage

_Q = TypeVar("_Q")
_log = logging.getLogger(__name__)


class Incoming:
    """The messages that this worker receives, and its waiting receives.

    worker: this end's name. reply: sends an answer along a route, in the I/O thread; ask_relay: sends a request to a
    relay, False if that fails; call, schedule: call a function in that thread, now or after some seconds; contact,
    forget: return or delete the contact with a source in a stream; is_alive: whether a source is known to be alive, and
    watched. `_arrivals`, `_postings`: queued messages and waiting receives, by source and stream; `_missed`: by key,
    the error that the next receive raises; `_fetches`: messages whose values are being pulled; transfers: those by
    collectives; `_calls`: the sequence numbers of this worker's broadcast calls."""

    def __init__(
        self,
        worker: str,
        mappings: Mappings,
        pool: BufferPool,
        relays: Relays,
        collectives: Collectives,
        *,
        reply: Reply,
        ask_relay: Callable[[wire.Relay, WantMessage], bool],
        schedule: Schedule,
        call: Callable[[Callable[[], None]], None],
        contact: Callable[[str, bytes, CollectiveGroupOptions | None], Contact],
        forget: Callable[[str, bytes], None],
        is_alive: Callable[[str], bool],
    ) -> None:
        self._worker = worker
        self._mappings = mappings
        self._pool = pool
        self._relays = relays
        self._reply = reply
        self._call = call
        self._contact = contact
        self._forget = forget
        self._is_alive = is_alive
        self._arrivals: dict[Key, deque[Arrival]] = {}
        self._postings: dict[Key, deque[Posting]] = {}
        self.transfers = TransferReceiver(
            collectives, reply, lambda id: self._fetches.get(id), self._finish_fetch, self.fail
        )
        self._fetches = Fetches(
            pool,
            relays,
            reply=reply,
            ask_relay=ask_relay,
            schedule=schedule,
            request_transfer=self.transfers.request,
        )
        self._missed: dict[Key, Exception] = {}
        self._calls = BroadcastCalls(self._postings)

    # --- receives -------------------------------------------------------------------------------------------------

    def post(self, posting: Posting, is_alive: bool) -> bool:
        """Match a receive with the oldest message of the source, or queue it. Return whether it waits.

        is_alive: whether the source is known to be the process that sent the queued messages. Otherwise the receive
        waits for `match` or `lose`: a successor of a dead source may exist, whose messages come first.
        """
        error = self._missed.pop(posting.key, None)
        if error is not None:
            posting.fail(error)
            return False
        self._contact(posting.source, posting.stream, posting.options)  # a new contact gets these options
        if posting.stream:  # a broadcast
            posting.sequence = self._calls.next_sequence(posting.key)
        self._postings.setdefault(posting.key, deque()).append(posting)
        if is_alive:
            self._match(posting.key)
        queued = self._postings.get(posting.key)
        return queued is not None and queued[-1] is posting  # whether it is still queued

    def match(self, source: str) -> None:
        """Match receives from the source with its queued messages."""
        for key in [key for key in self._postings if key[0] == source]:
            self._match(key)

    def _match(self, key: Key) -> None:
        """Match the oldest message and receive of a key until one of them is missing. Broadcasts match by
        sequence number."""
        while key in self._arrivals:
            waiting = self._postings.get(key)
            post = self._arrivals[key][0].post
            calls_behind = self._calls.calls_behind(key, post.sequence)  # 0 outside of broadcasts
            if waiting and calls_behind < 0:  # the message is for a later call: that of the oldest call will not come
                why = "its call failed or timed out before it could send"
                _pop_first(self._postings, key).fail(SourceFailedError(source=post.source, why=why))
                continue
            if not waiting and calls_behind <= 0:  # the message's call is still to come
                return
            arrival = _pop_first(self._arrivals, key)
            arrival.queued = False
            self._calls.note_matched(key, post.sequence)
            if calls_behind > 0:  # the message's call has given up
                self._drop(arrival)
            else:
                self._attempt(self._handle_match, _pop_first(self._postings, key), arrival)

    def _attempt(self, work: Callable[[Posting, Arrival], None], posting: Posting, arrival: Arrival) -> None:
        """Call `work`. An exception fails this receive, and its message at the sender. Other messages and receives
        are not affected, such as the one that the caller is just posting."""
        try:
            work(posting, arrival)
        except Exception as defect:
            _log.exception("%s failed for its message", posting.what)
            error = InternalError(what=f"{posting.what}: {defect!r}")
            posting.fail(error)
            self._refuse(arrival, error)

    def skip(self, key: Key) -> None:
        """Use up the sequence number of a broadcast call that failed before it could wait. Drop
        its message if queued."""
        self._calls.next_sequence(key)
        self._drop_abandoned_broadcasts(key)

    def _drop_abandoned_broadcasts(self, key: Key) -> None:
        """Drop a broadcast's queued messages whose calls gave up. While other calls wait, `_match` does that later."""
        if key in self._calls and key not in self._postings:
            self._match(key)

    def expire(self, now: float) -> float:
        """Withdraw and fail the receives whose deadline passed. Return the next deadline, infinity if no receive waits.
        An exception at one receive does not affect the others."""
        for posting in [posting for posting in self._all_postings() if posting.deadline <= now]:
            self.give_up(posting, MessageTimeoutError(what=posting.what, waited_s=now - posting.begun))
        return min((posting.deadline for posting in self._all_postings()), default=math.inf)

    def give_up(self, posting: Posting, error: Exception) -> None:
        """Withdraw and fail a receive."""
        try:
            self.withdraw(posting)
        except Exception as defect:
            _log.exception("%s: could not give its message back", posting.what)
            error = InternalError(what=f"{posting.what}: {defect!r}")
        posting.fail(error)

    def withdraw(self, posting: Posting) -> None:
        """Remove a receive that gave up. The next receive gets its message, whether it is here or still arrives; the
        message of a broadcast is dropped."""
        queued = self._postings.get(posting.key)
        if queued and posting in queued:
            queued.remove(posting)
            if not queued:
                del self._postings[posting.key]
        for fetch in self._fetches.values():
            if fetch.posting is posting:  # it was matched, and its message is being fetched
                fetch.posting = None
                self._requeue_or_drop(fetch.arrival)
                self._match(posting.key)
                break
        self._drop_abandoned_broadcasts(posting.key)

    def abandon(self, posting: Posting) -> None:
        """Withdraw a receive whose handle was garbage-collected or whose wait failed. A message that was delivered to
        it is gone with it."""
        if not posting.future.done():
            self.withdraw(posting)
        elif posting.future.exception() is None:
            posting.future.result().discard()

    def _requeue_or_drop(self, arrival: Arrival) -> None:
        """Requeue a message that its receive did not take. Drop that of a broadcast: its call is over."""
        if arrival.key in self._calls:
            self._drop(arrival)
        else:
            self._requeue(arrival)

    def _requeue(self, arrival: Arrival) -> None:
        """Queue a message at its place among those of its sender, whose send does not wait for another receive."""
        queue = self._arrivals.setdefault(arrival.key, deque())
        bisect.insort(queue, arrival, key=lambda each: each.order)
        arrival.queued = True
        self._send_held(arrival)

    def waits_for(self, source: str) -> bool:
        """Whether a receive from that source waits."""
        return any(posting.source == source for posting in self._all_postings())

    def _all_postings(self) -> Iterator[Posting]:
        yield from itertools.chain(*self._postings.values())
        yield from (fetch.posting for fetch in self._fetches.values() if fetch.posting is not None)

    # --- messages -------------------------------------------------------------------------------------------------

    def arrive(self, route: bytes, post: PostMessage, inline: Any) -> None:
        """Match an arrived message with the receive that has waited longest for it, or queue it. ValueError if it has
        fewer bytes than its header names. inline: its bytes if it has no slab; copied. A slab that cannot be mapped
        leaves `memory` None: the values are fetched later. Then handle the requests of other workers for its values."""
        self._match_or_queue(Arrival.of(route, post, inline, self._mappings))
        if post.passes_on:
            for asker, want in self._relays.record_message(post):
                self.handle_want(asker, want)

    def _match_or_queue(self, arrival: Arrival) -> None:
        """Queue a message. If it is the first of its queue, try to match it; if it stays queued, tell its sender so."""
        is_first = arrival.key not in self._arrivals
        self._arrivals.setdefault(arrival.key, deque()).append(arrival)
        arrival.queued = True
        if is_first:
            self._match(arrival.key)
            if not arrival.queued:
                return
        self._send_held(arrival)

    def receive_chunk(self, chunk: Data, body: Any) -> None:
        """Store a chunk of a message that is being pulled. After the last one, deliver the message, or leave it queued
        if no receive waits for it. ValueError for a malformed chunk."""
        fetch = self._fetches.store_chunk(chunk, body)
        if fetch is not None:
            self._finish_fetch(fetch)

    def _finish_fetch(self, fetch: Fetch) -> None:
        """Deliver a message that is complete now. It stays queued if no receive waits for it."""
        del self._fetches[fetch.arrival.id]
        if fetch.posting is None:
            self._send_held(fetch.arrival)
        else:
            self._attempt(self._deliver, fetch.posting, fetch.arrival)

    def use_host_values(self, values: wire.HostValues) -> None:
        """Take the values of a message with an offer from host memory."""
        arrival = self._find_incomplete(values)
        if arrival is None:
            return
        fetch = self._fetches[arrival.id]
        arrival.post = msgspec.structs.replace(arrival.post, slab=values.slab, offer=None)
        arrival.memory = self._mappings.open(values.slab)
        arrival.own = False
        if arrival.complete:
            self._finish_fetch(fetch)
        else:
            self._fetches.pull_instead(fetch)

    def handle_absent(self, absent: wire.Absent) -> None:
        """Pull from the source, because the relay does not forward these values."""
        fetch = self._fetches.get((absent.source, absent.stream, absent.sequence))
        if fetch is not None:
            self._fetches.pull_from_source(fetch)

    def handle_want(self, route: bytes, want: WantMessage) -> None:
        """Send values that another receiver requests, after fetching them if needed, or refuse the request."""
        if self._relays.serve_or_wait(route, want) or self._relays.keep_early(route, want):
            return  # answered, or kept until the chunk or the message arrives
        if self._is_alive(want.source):
            self._begin_for_others(want)
        if not self._relays.serve_or_wait(route, want):
            self._relays.refuse(route, want)

    def _begin_for_others(self, want: WantMessage) -> None:
        """Begin to fetch the wanted values if their message is queued here and no receive has begun to."""
        for arrival in self._arrivals.get((want.source, want.stream), ()):
            post = arrival.post
            if (post.serial, post.incarnation) == (want.serial, want.incarnation):
                if post.passes_on and not arrival.complete and arrival.id not in self._fetches:
                    self._fetches.begin(posting=None, arrival=arrival)
                return

    def fail(self, message: wire.ForReceiver, error: DataPlaneError) -> None:
        """Fail the message that this one is about, at both ends, unless its values are complete. The receive that takes
        it raises the error."""
        arrival = self._find_incomplete(message)
        if arrival is None:
            return
        fetch = self._fetches.get(arrival.id)
        if fetch is not None and fetch.posting is not None:
            fetch.posting.fail(error)
        if fetch is not None and fetch.collective is not None:
            fetch.collective.close(str(error))
        arrival.lost = error
        self._refuse(arrival, error)

    def _find_incomplete(self, message: wire.ForReceiver) -> Arrival | None:
        """Return the message that this one is about, if it is queued or being fetched, and its values are missing."""
        id = (message.source, message.stream, message.sequence)
        fetch = self._fetches.get(id)
        queued = self._arrivals.get(id[:2], ()) if fetch is None else [fetch.arrival]
        arrival = next((each for each in queued if each.id == id), None)
        if arrival is None or arrival.complete or arrival.lost is not None:
            return None
        same = isinstance(message, wire.Absent) or wire.incarnations(arrival.post) == wire.incarnations(message)
        return arrival if same else None

    def lose(self, source: str, error: Exception) -> None:
        """Fail receives from `source`, which died or cannot be reached. Messages whose values are all here can still
        be received. Any other one stays in its place in the queue, and the receive that takes it raises `error`.
        Waiting receives raise it at once if the values of their message are incomplete, or if no message is left for
        them."""
        for key in [key for key in self._arrivals if key[0] == source]:
            for arrival in self._arrivals[key]:
                if not arrival.complete:
                    arrival.lost = error
        for posting in self._remove_fetches(source):
            posting.fail(error)
        self.match(source)
        for key in [key for key in self._postings if key[0] == source]:
            for posting in self._postings.pop(key):
                posting.fail(error)
        if isinstance(error, WorkerLostError):  # its process has ended: a successor numbers its calls anew
            self._calls.source_lost(source)

    def outdate(self, source: str, incarnation: int) -> None:
        """Discard messages of earlier incarnations of the source, whose process was restarted, and restart the
        numbering of calls."""
        self._filter_arrivals(source, lambda arrival: arrival.post.incarnation >= incarnation)
        # The receives of incomplete messages wait again, before those that were posted later.
        for posting in reversed(self._remove_fetches(source)):
            self._postings.setdefault(posting.key, deque()).appendleft(posting)
        self._calls.source_renewed(source)

    def _remove_fetches(self, source: str) -> list[Posting]:
        """Remove fetches from the source, whose bytes will not arrive. Return their receives."""
        keys = [key for key in self._fetches if key[0] == source]
        fetches = [self._fetches.pop(key) for key in keys]
        for fetch in fetches:
            self._relays.drop_incomplete(fetch.arrival.post)
        return [fetch.posting for fetch in fetches if fetch.posting is not None]

    def fail_all(self, error: Exception) -> None:
        """Fail everything: all sources are lost. Queued messages are dropped, so the next receive from each of their
        sources raises the error."""
        self._missed.update(dict.fromkeys(self._arrivals, error))
        for posting in itertools.chain(*self._postings.values()):
            posting.fail(error)
        for fetch in self._fetches.values():
            if fetch.posting is not None:
                fetch.posting.fail(error)
        self._postings.clear()
        self._fetches.clear()
        self._arrivals.clear()
        self._calls.clear()
        self._relays.drop_all()

    def _filter_arrivals(self, source: str, is_kept: Callable[[Arrival], bool]) -> None:
        """Remove the queued messages of a source for which `is_kept` is false."""
        for key in [key for key in self._arrivals if key[0] == source]:
            for arrival in self._arrivals[key]:
                arrival.queued = is_kept(arrival)
            remaining = deque(arrival for arrival in self._arrivals[key] if arrival.queued)
            if remaining:
                self._arrivals[key] = remaining
            else:
                del self._arrivals[key]

    # --- a receive and its message ----------------------------------------------------------------------------------

    def _handle_match(self, posting: Posting, arrival: Arrival) -> None:
        """Compare a message with its receive. Deliver it, fetch its values, or fail the receive; if the two do not fit,
        fail the send, too."""
        if arrival.lost is not None:
            posting.fail(arrival.lost)
            return
        post = arrival.post
        contact = self._contact(posting.source, posting.stream, posting.options)
        if contact.options != post.options:
            if not contact.proven:  # the next operation is again the first contact
                self._forget(posting.source, posting.stream)
            theirs = str(post.options)
            ours = str(contact.options)
            posting.fail(GroupOptionsError(worker=self._worker, peer=post.source, ours=ours, theirs=theirs))
            error = GroupOptionsError(worker=post.source, peer=self._worker, ours=theirs, theirs=ours)
            self._refuse(arrival, error)
            return
        if isinstance(post.form, wire.FaultForm):
            posting.fail(SourceFailedError(source=post.source, why=post.form.why))
            self._send_received(arrival)
            return
        if not posting.accepts(post):
            self._fail_mismatch(posting, arrival)
            return
        contact.proven = True
        if not arrival.complete:
            self._fetch(posting, arrival)
        else:
            self._deliver(posting, arrival)

    def _fail_mismatch(self, posting: Posting, arrival: Arrival) -> None:
        """Fail a receive and the message that it does not accept."""
        post = arrival.post
        error = MessageMismatchError(
            sender=post.source, receiver=self._worker, sent=str(post.form), expected=str(posting.form)
        )
        posting.fail(error)
        self._refuse(arrival, error)

    def _fetch(self, posting: Posting, arrival: Arrival) -> None:
        """Begin to fetch the values of a message for its receive, or attach the receive to a fetch already begun."""
        if arrival.id in self._fetches:
            self._fetches.join(posting, arrival)
            return
        try:
            self._fetches.begin(posting, arrival)
        except Exception as error:  # out of memory for its bytes; the next receive may find some
            self._stop_fetch(arrival)
            posting.fail(error)
            self._requeue_or_drop(arrival)

    def _deliver(self, posting: Posting, arrival: Arrival) -> None:
        """Complete a receive with its message, and copy the values out if they are small or no thread waits."""
        # Any thread may take the delivery, and answers are sent in this one.
        delivery = Delivery(posting, arrival, self._pool, lambda: self._call(lambda: self._send_received(arrival)))
        delivery.complete(posting)

    def _send_held(self, arrival: Arrival) -> None:
        post = arrival.post
        self._reply(arrival.route, wire.Held(stream=post.stream, sequence=post.sequence, kept=arrival.complete))

    def _refuse(self, arrival: Arrival, error: DataPlaneError) -> None:
        self._stop_fetch(arrival)
        self._reply(arrival.route, wire.refused(arrival.post, error))

    def _drop(self, arrival: Arrival) -> None:
        """Drop a message that no receive will take. Its sender treats it as received."""
        self._stop_fetch(arrival)
        self._send_received(arrival)

    def _stop_fetch(self, arrival: Arrival) -> None:
        """End the fetch of a message, if its values are being fetched."""
        if self._fetches.pop(arrival.id, None) is not None:
            self._relays.drop_incomplete(arrival.post)

    def _send_received(self, arrival: Arrival) -> None:
        self._reply(arrival.route, wire.MessageReceived(stream=arrival.post.stream, sequence=arrival.post.sequence))


def _pop_first(queues: dict[Key, deque[_Q]], key: Key) -> _Q:
    """Remove and return the first element of a queue, and remove the queue if it is empty."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


@dataclass
class _CallSequences:
    """calls: number of calls for broadcasts of a source in a stream since the source started; next_from: the first
    call that belongs to the next process of the source's name, None while the source's present process is known."""

    calls: int = 0
    next_from: int | None = 0


class BroadcastCalls:
    """Numbers the calls of a receiver for broadcasts of each source in each stream. The source numbers its calls too,
    from its start on; if its process is replaced, `source_lost` and `source_renewed` restart the numbers here.

    waiting: the waiting receives of each stream, oldest first.
    """

    def __init__(self, waiting: Mapping[Key, Sequence[Posting]]) -> None:
        self._waiting = waiting
        self._streams: dict[Key, _CallSequences] = {}
        self._sources: set[str] = set()
        """Sources whose present process is known."""

    def __contains__(self, key: Key) -> bool:
        """Whether this worker has called for broadcasts of that stream."""
        return key in self._streams

    def next_sequence(self, key: Key) -> int:
        """Return the sequence number of a call that is made now. In a new stream, all calls belong to the
        source's next process unless its present one is known."""
        stream = self._streams.setdefault(key, _CallSequences(next_from=None if key[0] in self._sources else 0))
        stream.calls += 1
        return stream.calls - 1

    def calls_behind(self, key: Key, sequence: int) -> int:
        """Return how many calls ago the message of that sequence number was expected; negative if its
        call is still to come. 0 outside of broadcasts."""
        stream = self._streams.get(key)
        if stream is None:
            return 0
        # The next message is expected by the oldest waiting call, or else by the next call.
        waiting = self._waiting.get(key, ())
        return (waiting[0].sequence if waiting else stream.calls) - sequence

    def note_matched(self, key: Key, sequence: int) -> None:
        """Record that the call of that sequence number got a message. If the source is lost, this call
        does not belong to the next process of that name."""
        stream = self._streams.get(key)
        if stream is not None and stream.next_from is not None:
            stream.next_from = max(stream.next_from, sequence + 1)

    def source_lost(self, source: str) -> None:
        """Record that the source is lost: calls from now on belong to its next process."""
        self._sources.discard(source)
        for _, stream in self._streams_of(source):
            stream.next_from = stream.calls

    def source_renewed(self, source: str) -> None:
        """Restart the numbering for a new process of the source. Its first call is the oldest that waits, or the first
        after the loss of the previous process became known, whichever is earlier."""
        self._sources.add(source)
        for key, stream in self._streams_of(source):
            waiting = self._waiting.get(key, ())
            # None: the source was replaced without a reported loss, so all calls so far belong to its previous process.
            since_loss = stream.calls if stream.next_from is None else stream.next_from
            # Calls that wait have no message of the previous process, so they belong to the new one.
            first = min([since_loss, *(posting.sequence for posting in waiting)])
            stream.calls = stream.calls - first
            stream.next_from = None
            for posting in waiting:
                posting.sequence -= first

    def clear(self) -> None:
        """Restart the numbering of all streams."""
        self._streams.clear()

    def _streams_of(self, source: str) -> list[tuple[Key, _CallSequences]]:
        return [(key, stream) for key, stream in self._streams.items() if key[0] == source]
