"""Messages whose bytes are pulled in chunks, from their source or from a relay. For the I/O thread only."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dataplane.core.buffer_pool import BufferPool
from workers.messages.deliveries import Arrival, MessageId, Posting
from workers.messages.relays import RELAY_S, Later, Relays
from workers.messages.wire import Answer, Pull, Relay, WantMessage
from workers.transport.pickling import Bytes, fresh

CHUNK_BYTES = 4 << 20
CHUNKS_AHEAD = 4
"""Values in memory of another host are requested in chunks, this many at a time."""

Reply = Callable[[bytes, Answer], None]
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Fetch:
    """A message whose bytes are being pulled. posting: None once its receive gave up: the message is queued again,
    and its bytes still arrive. relay: the relay they are pulled from, None for the source; passed_on: other receivers
    may pull the bytes, so they must stay unchanged; missing: requested bytes by their start; watch: number of the
    latest timer that checks for progress."""

    posting: Posting | None
    arrival: Arrival
    staging: Bytes
    relay: Relay | None
    passed_on: bool
    asked: int = 0
    got: int = 0
    watch: int = 0
    missing: dict[int, int] = field(default_factory=dict)


class Fetches(dict[MessageId, Fetch]):
    """The current fetches. reply: sends a request to the source, along a message's route; ask: sends one to a relay,
    False if that fails; later: schedules a call in the I/O thread."""

    def __init__(
        self, pool: BufferPool, relays: Relays, *, reply: Reply, ask: Callable[[Relay, WantMessage], bool], later: Later
    ) -> None:
        super().__init__()
        self._pool = pool
        self._relays = relays
        self._reply = reply
        self._ask = ask
        self._later = later

    def begin(self, posting: Posting | None, arrival: Arrival) -> None:
        """Pull the bytes of a message for a receive, or for other receivers if they are forwarded."""
        post = arrival.post
        staging = fresh(post.nbytes, self._pool)
        passed_on = self._relays.begin(post, staging)
        if posting is None and not passed_on:
            return
        fetch = Fetch(posting, arrival, staging, post.relay, passed_on)
        self[arrival.id] = fetch
        for _ in range(CHUNKS_AHEAD):
            self.ask_for_more(fetch)
        self._watch(fetch)

    def join(self, posting: Posting, arrival: Arrival) -> None:
        """Attach a receive to a message that is already being pulled."""
        fetch = self[arrival.id]
        fetch.posting = posting
        self._watch(fetch)

    def ask_for_more(self, fetch: Fetch) -> None:
        nbytes = min(CHUNK_BYTES, fetch.staging.size - fetch.asked)
        if nbytes > 0:
            start, fetch.asked = fetch.asked, fetch.asked + nbytes
            fetch.missing[start] = nbytes
            self._ask_for(fetch, start, nbytes)

    def _ask_for(self, fetch: Fetch, start: int, nbytes: int) -> None:
        post, relay = fetch.arrival.post, fetch.relay
        if relay is None:
            pull = Pull(stream=post.stream, number=post.number, start=start, nbytes=nbytes)
            self._reply(fetch.arrival.route, pull)
            return
        want = WantMessage(
            source=post.source,
            incarnation=post.incarnation,
            serial=post.serial,
            stream=post.stream,
            number=post.number,
            asker=post.receiver,
            receiver=relay.incarnation,
            start=start,
            nbytes=nbytes,
        )
        if not self._ask(relay, want):
            self.turn_to_source(fetch)

    def turn_to_source(self, fetch: Fetch) -> None:
        if fetch.relay is not None:
            fetch.relay = None
            for start, nbytes in fetch.missing.items():
                self._ask_for(fetch, start, nbytes)

    def _watch(self, fetch: Fetch) -> None:
        """Switch from a relay to the source if no bytes arrive for a while, early enough for a receive near its
        deadline. Replaces an earlier watch, which was for another receive."""
        if fetch.relay is None:
            return
        fetch.watch += 1
        left_s = math.inf if fetch.posting is None else fetch.posting.deadline - time.monotonic()
        look = partial(self._look_at, fetch, fetch.watch, fetch.got)
        self._later(min(RELAY_S * fetch.relay.depth, left_s / 4), look)

    def _look_at(self, fetch: Fetch, watch: int, got: int) -> None:
        if fetch.relay is None or fetch.watch != watch or self.get(fetch.arrival.id) is not fetch:
            return
        if fetch.got > got:
            self._watch(fetch)
            return
        source = fetch.arrival.post.source
        _log.warning("Relay %s sent no bytes of a message of %s; pulling from the source", fetch.relay.worker, source)
        self.turn_to_source(fetch)
