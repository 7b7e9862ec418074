"""Large values of a broadcast to many hosts: receivers forward them, so that the source sends them to few.

Only bytes are forwarded. The source sends the header to every receiver and gets its answers, as between any two
workers, so order, deadlines and errors do not depend on a third worker. The first receiver on each host may forward:
`FAN_OUT` hosts pull the values from the source, each further host pulls them from an earlier host, and the other
receivers on a host pull them from its first. If a receiver gets no bytes for a while, because its relay died, hangs
or has no free memory, it pulls the missing bytes from the source, which keeps them until all receivers have them.
`Backlog` counts the bytes of messages that a worker keeps for others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dataplane.core.addresses import split_address
from workers.errors import MessageBacklogError
from workers.messages.wire import Absent, Data, PostMessage, Relay, WantMessage
from workers.transport.pickling import Bytes

RECEIVERS_FROM = 8
"""The source sends a broadcast directly to each receiver if there are fewer."""
FAN_OUT = 2
"""Number of hosts that pull from the source, and from each relay."""
RELAY_S = 1.0
"""A receiver that gets no chunk from a relay at depth n within n times this pulls from the source. So the receivers
next to a failed relay switch first, and continue to serve the receivers behind them."""
KEEP_S = 5.0
"""Forwarded values are kept this long after their last use."""

Reply = Callable[[bytes, Data | Absent, Bytes | None], None]
Schedule = Callable[[float, Callable[[], None]], None]


class Backlog:
    """Bytes of messages that are sent and not received yet, or forwarded. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting = 0
        self._guard = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that are kept now."""
        return self._waiting

    def admit(self, nbytes: int, what: str) -> None:
        """Count `nbytes` until `free`. `MessageBacklogError`, which names the operation `what`, if they would exceed
        the limit."""
        with self._guard:
            if self._waiting + nbytes > self._limit:
                raise MessageBacklogError(
                    what=what, nbytes=nbytes, waiting_bytes=self._waiting, limit_bytes=self._limit
                )
            self._waiting += nbytes

    def free(self, nbytes: int) -> None:
        with self._guard:
            self._waiting -= nbytes


class Tree:
    """The tree of receivers in one broadcast, built as the source sends. here: the source's host; `_first`: the first
    receiver on each other host."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._first: dict[str, Relay] = {}

    def place(self, worker: str, incarnation: int, endpoint: str) -> tuple[Relay | None, bool]:
        """Add the next receiver. Return the relay that it pulls from, None for the source, and whether others may pull
        from this receiver."""
        host = split_address(endpoint)[0]
        if host == self._here:  # it can read the source's memory
            return None, False
        if host in self._first:
            return self._first[host], False
        # The hosts form a tree in the order of their first receivers: host n pulls from host n // FAN_OUT - 1.
        number = len(self._first)
        above = None if number < FAN_OUT else list(self._first.values())[number // FAN_OUT - 1]
        depth = 1 if above is None else above.depth + 1
        self._first[host] = Relay(worker, incarnation, endpoint, depth)
        return above, True


@dataclass
class _Forwarded:
    """Values that are forwarded. memory: for all of their bytes; last_used: time of the last chunk or request; chunks:
    number of bytes of each arrived chunk by its start; waiting: requests (with the routes to answer on) for chunks that
    have not arrived, by start."""

    memory: Bytes
    last_used: float
    chunks: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, list[tuple[bytes, WantMessage]]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return sum(self.chunks.values()) == self.memory.size


Key = tuple[str, int, int]
"""Identifies the values of one broadcast: source, its incarnation, and serial."""


class Relays:
    """The values that this worker forwards. For the I/O thread only. backlog: counts them; reply: sends an answer along
    a route; schedule: calls a function after some seconds.

    `_forwarded`: the values that are here or arrive; `_latest`: by source, the incarnation and serial of its latest
    message whose values may be forwarded; `_early`: the requests that arrived before the message with their values.
    """

    def __init__(self, backlog: Backlog, reply: Reply, schedule: Schedule) -> None:
        self._backlog = backlog
        self._reply = reply
        self._schedule = schedule
        self._forwarded: dict[Key, _Forwarded] = {}
        self._latest: dict[str, tuple[int, int]] = {}
        self._early: dict[Key, list[tuple[bytes, WantMessage]]] = {}

    def record_message(self, post: PostMessage) -> list[tuple[bytes, WantMessage]]:
        """Record a message whose values may be forwarded. Return the requests for them that arrived earlier."""
        this = post.incarnation, post.serial
        self._latest[post.source] = max(this, self._latest.get(post.source, this))
        return self._early.pop(_values_key(post), [])

    def keep_early(self, route: bytes, want: WantMessage) -> bool:
        """Keep a request whose message may still arrive, for at most `RELAY_S`. Return False if the message, or a later
        one of that source, has arrived already."""
        if (want.incarnation, want.serial) <= self._latest.get(want.source, (-1, -1)):
            return False
        if _values_key(want) not in self._early:
            self._early[_values_key(want)] = []
            self._schedule(RELAY_S, partial(self._refuse_early, _values_key(want)))
        self._early[_values_key(want)].append((route, want))
        return True

    def _refuse_early(self, key: Key) -> None:
        """Refuse the requests that still wait for the message with their values."""
        for route, want in self._early.pop(key, []):
            self.refuse(route, want)

    def begin(self, post: PostMessage, memory: Bytes) -> bool:
        """Prepare to receive the values of `post` into `memory`. Return whether they are forwarded and so must stay
        unchanged: not if this worker is no relay for them, or if the backlog has no space."""
        if not post.passes_on:
            return False
        try:
            self._backlog.admit(memory.size, f"forwarding a broadcast of {post.source}")
        except MessageBacklogError:
            return False
        self.drop(_values_key(post))  # what an earlier fetch of the same values left
        self._forwarded[_values_key(post)] = _Forwarded(memory, time.monotonic())
        self._schedule(KEEP_S, partial(self._check_idle, _values_key(post)))
        return True

    def record_chunk(self, post: PostMessage, start: int, nbytes: int) -> None:
        """Record a chunk that has arrived, and serve the requests for it."""
        values = self._forwarded.get(_values_key(post))
        if values is not None:
            values.chunks[start] = nbytes
            values.last_used = time.monotonic()
            for route, want in values.waiting.pop(start, ()):
                self._serve(values, route, want)

    def serve_or_wait(self, route: bytes, want: WantMessage) -> bool:
        """Answer a request now, or once its chunk has arrived. Return False if this worker does not forward the
        values."""
        values = self._forwarded.get(_values_key(want))
        if values is None:
            return False
        values.last_used = time.monotonic()
        # If all chunks are here and none starts there, `_serve` refuses the request.
        if want.start in values.chunks or values.is_complete:
            self._serve(values, route, want)
        else:
            values.waiting.setdefault(want.start, []).append((route, want))
        return True

    def _serve(self, values: _Forwarded, route: bytes, want: WantMessage) -> None:
        """Send the requested chunk. Refuse a request for anything but an arrived chunk."""
        if values.chunks.get(want.start) != want.nbytes:
            self.refuse(route, want)
            return
        data = Data(
            stream=want.stream,
            sequence=want.sequence,
            source=want.source,
            incarnation=want.incarnation,
            receiver=want.asker,
            start=want.start,
        )
        self._reply(route, data, values.memory[want.start : want.start + want.nbytes])

    def refuse(self, route: bytes, want: WantMessage) -> None:
        """Answer that the receiver has to pull from the source."""
        self._reply(route, Absent(stream=want.stream, sequence=want.sequence, source=want.source), None)

    def drop(self, key: Key) -> None:
        """Stop forwarding these values, and refuse the waiting requests for them."""
        values = self._forwarded.pop(key, None)
        if values is not None:
            self._backlog.free(values.memory.size)
            for requests in values.waiting.values():
                for route, want in requests:
                    self.refuse(route, want)

    def drop_incomplete(self, post: PostMessage) -> None:
        """Stop forwarding values that will not arrive completely."""
        values = self._forwarded.get(_values_key(post))
        if values is not None and not values.is_complete:
            self.drop(_values_key(post))

    def drop_all(self) -> None:
        self._early.clear()
        for key in list(self._forwarded):
            self.drop(key)

    def _check_idle(self, key: Key) -> None:
        """Stop forwarding complete values that were not used for `KEEP_S`. Others, also incomplete ones, are checked
        again later."""
        values = self._forwarded.get(key)
        if values is None:
            return
        left_s = values.last_used + KEEP_S - time.monotonic()
        if values.is_complete and left_s <= 0:
            self.drop(key)
        else:
            self._schedule(left_s if left_s > 0 else KEEP_S, partial(self._check_idle, key))


def _values_key(message: PostMessage | WantMessage) -> Key:
    """Return the key that identifies the values of one broadcast."""
    return message.source, message.incarnation, message.serial
