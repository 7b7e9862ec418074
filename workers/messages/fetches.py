"""Messages whose bytes are pulled in chunks, from their source or from a relay. For the I/O thread only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dataplane.core.buffer_pool import BufferPool
from workers.messages.collectives import CollectiveGroup
from workers.messages.deliveries import Arrival, MessageId, Posting
from workers.messages.relays import RELAY_S, Relays, Schedule
from workers.messages.wire import Answer, Data, Pull, Relay, WantMessage, incarnations
from workers.transport.pickling import Bytes, fresh

CHUNK_BYTES = 4 << 20
CHUNKS_AHEAD = 4
"""Values in memory of another host are requested in chunks, this many at a time."""

NO_BYTES = np.empty(0, np.uint8)

Reply = Callable[[bytes, Answer], None]
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Fetch:
    """A message whose bytes are being pulled. posting: None once its receive gave up: the message is queued again,
    and its bytes still arrive. staging: memory for all bytes; relay: the relay they are pulled from, None for the
    source; forwarded: other receivers may pull the bytes, so they must stay unchanged; requested_bytes,
    received_bytes: counts; requested: sizes of the chunks that were requested and have not arrived, by start; watch:
    number of the latest timer that checks for progress; group: the process group by which the values come, if any."""

    posting: Posting | None
    arrival: Arrival
    staging: Bytes
    relay: Relay | None
    forwarded: bool
    requested_bytes: int = 0
    received_bytes: int = 0
    watch: int = 0
    requested: dict[int, int] = field(default_factory=dict)
    collective: CollectiveGroup | None = None


class Fetches(dict[MessageId, Fetch]):
    """The current fetches, by their messages. relays: told which bytes it may forward; reply: sends a request to the
    source, along a message's route; ask_relay: sends one to a relay, False if that fails; schedule: calls a function in
    the I/O thread after some seconds; request_transfer: asks the source for a transfer by collectives."""

    def __init__(
        self,
        pool: BufferPool,
        relays: Relays,
        *,
        reply: Reply,
        ask_relay: Callable[[Relay, WantMessage], bool],
        schedule: Schedule,
        request_transfer: Callable[[Fetch], None],
    ) -> None:
        super().__init__()
        self._pool = pool
        self._relays = relays
        self._reply = reply
        self._ask_relay = ask_relay
        self._schedule = schedule
        self._request_transfer = request_transfer

    def begin(self, posting: Posting | None, arrival: Arrival) -> None:
        """Pull the bytes of a message for a receive, from its relay if it names one. posting None: only for other
        workers that receive it; does nothing if the bytes cannot be forwarded."""
        post = arrival.post
        if post.offer is not None:
            fetch = self[arrival.id] = Fetch(posting, arrival, NO_BYTES, None, forwarded=False)
            self._request_transfer(fetch)
            return
        staging = fresh(post.nbytes, self._pool)
        forwarded = self._relays.begin(post, staging)
        if posting is None and not forwarded:
            return
        fetch = Fetch(posting, arrival, staging, post.relay, forwarded)
        self[arrival.id] = fetch
        self._request_first_chunks(fetch)

    def pull_instead(self, fetch: Fetch) -> None:
        """Pull the bytes of a message with an offer, which are in the source's host memory now."""
        fetch.staging = fresh(fetch.arrival.post.nbytes, self._pool)
        self._request_first_chunks(fetch)

    def _request_first_chunks(self, fetch: Fetch) -> None:
        for _ in range(CHUNKS_AHEAD):
            self.request_chunk(fetch)
        self._watch(fetch)

    def join(self, posting: Posting, arrival: Arrival) -> None:
        """Attach a receive to a message that is already being pulled."""
        fetch = self[arrival.id]
        fetch.posting = posting
        self._watch(fetch)  # again, because the timer depends on the receive's deadline

    def store_chunk(self, chunk: Data, body: Any) -> Fetch | None:
        """Store a chunk, and return its fetch if that completes it. ValueError for a malformed chunk."""
        fetch = self.get((chunk.source, chunk.stream, chunk.sequence))
        if fetch is None or incarnations(fetch.arrival.post) != incarnations(chunk):
            return None  # the chunk of an earlier message
        received = np.frombuffer(body, dtype=np.uint8)
        end, expected = (
            chunk.start + received.size,
            fetch.requested.get(chunk.start, received.size),
        )  # a duplicate: any size
        if not received.size or end > fetch.staging.size or received.size != expected:
            raise ValueError(f"malformed chunk of {received.size} bytes at {chunk.start} of {fetch.staging.size}")
        if chunk.start not in fetch.requested:  # a duplicate: it came from both the relay and the source
            return None
        del fetch.requested[chunk.start]
        fetch.staging[chunk.start : chunk.start + received.size] = received
        fetch.received_bytes += received.size
        self._relays.record_chunk(fetch.arrival.post, chunk.start, received.size)
        if fetch.received_bytes < fetch.staging.size:
            self.request_chunk(fetch)
            return None
        fetch.arrival.memory, fetch.arrival.own = fetch.staging, not fetch.forwarded
        return fetch

    def request_chunk(self, fetch: Fetch) -> None:
        """Request the next chunk, if any is left."""
        nbytes = min(CHUNK_BYTES, fetch.staging.size - fetch.requested_bytes)
        if nbytes > 0:
            start, fetch.requested_bytes = fetch.requested_bytes, fetch.requested_bytes + nbytes
            # Recorded first: if the relay cannot be reached, all recorded chunks are requested from the source.
            fetch.requested[start] = nbytes
            self._send_request(fetch, start, nbytes)

    def _send_request(self, fetch: Fetch, start: int, nbytes: int) -> None:
        """Request these bytes from the relay, or from the source if there is none or it cannot be reached."""
        post = fetch.arrival.post
        relay = fetch.relay
        if relay is None:
            pull = Pull(stream=post.stream, sequence=post.sequence, start=start, nbytes=nbytes)
            self._reply(fetch.arrival.route, pull)
            return
        want = WantMessage(
            source=post.source,
            incarnation=post.incarnation,
            serial=post.serial,
            stream=post.stream,
            sequence=post.sequence,
            asker=post.receiver,
            receiver=relay.incarnation,
            start=start,
            nbytes=nbytes,
        )
        if not self._ask_relay(relay, want):
            self.pull_from_source(fetch)  # requests these bytes, too: they are recorded in `fetch.requested`

    def pull_from_source(self, fetch: Fetch) -> None:
        """Stop using the relay, if there is one: request its outstanding chunks again from the source, and from now on
        all others there."""
        if fetch.relay is not None:
            fetch.relay = None
            for start, nbytes in fetch.requested.items():
                self._send_request(fetch, start, nbytes)

    def _watch(self, fetch: Fetch) -> None:
        """Start a timer that switches from the relay to the source if no bytes arrive, early enough for a receive near
        its deadline. Replaces the previous timer."""
        if fetch.relay is None:
            return
        fetch.watch += 1
        # A quarter of the time that the receive has left, so that the rest suffices for the source.
        left_s = math.inf if fetch.posting is None else fetch.posting.deadline - time.monotonic()
        check = partial(self._check_progress, fetch, fetch.watch, fetch.received_bytes)
        self._schedule(min(RELAY_S * fetch.relay.depth, left_s / 4), check)

    def _check_progress(self, fetch: Fetch, watch: int, received_bytes: int) -> None:
        """Handle the timer number `watch`: use the source if the fetch has only the `received_bytes` of the timer's
        start."""
        if fetch.relay is None or fetch.watch != watch or self.get(fetch.arrival.id) is not fetch:
            return  # the timer was replaced, or is no longer needed
        if fetch.received_bytes > received_bytes:
            self._watch(fetch)
            return
        source = fetch.arrival.post.source
        _log.warning("Relay %s sent no bytes of a message of %s; pulling from the source", fetch.relay.worker, source)
        self.pull_from_source(fetch)
