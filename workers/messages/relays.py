"""Large values of a broadcast to many hosts: receivers forward them, so that the source sends them to few.

Only bytes are forwarded. The source sends the header to every receiver and gets its answers, as between any two
workers, so order, deadlines and errors do not depend on a third worker. The first receiver on each host may forward:
`FAN_OUT` hosts pull the values from the source, each further host pulls them from an earlier host, and the other
receivers on a host pull them from its first. If a receiver gets no bytes for a while, because its relay died, hangs
or has no free memory, it pulls the missing bytes from the source, which keeps them until all receivers have them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dataplane.core.addresses import split_address
from workers.errors import MessageBacklogError
from workers.messages.backlog import Backlog
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
Later = Callable[[float, Callable[[], None]], None]


class Tree:
    """The tree of receivers in one broadcast, built as the source sends. here: the source's host."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._first: dict[str, Relay] = {}

    def place(self, worker: str, incarnation: int, endpoint: str) -> tuple[Relay | None, bool]:
        """Add the next receiver. Return the relay to pull from, None for the source, and whether others may pull from
        it."""
        host = split_address(endpoint)[0]
        if host == self._here:
            return None, False
        if host in self._first:
            return self._first[host], False
        number = len(self._first)
        above = None if number < FAN_OUT else list(self._first.values())[number // FAN_OUT - 1]
        depth = 1 if above is None else above.depth + 1
        self._first[host] = Relay(worker, incarnation, endpoint, depth)
        return above, True


@dataclass
class _Kept:
    """Values that are forwarded. came: bytes of each arrived chunk by its start; waiting: requests for other
    chunks."""

    memory: Bytes
    used: float
    came: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, list[tuple[bytes, WantMessage]]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return sum(self.came.values()) == self.memory.size


Key = tuple[str, int, int]


class Relays:
    """The values that this worker forwards. For the I/O thread only. backlog: counts them; reply, later: of the I/O
    thread."""

    def __init__(self, backlog: Backlog, reply: Reply, later: Later) -> None:
        self._backlog = backlog
        self._reply = reply
        self._later = later
        self._kept: dict[Key, _Kept] = {}
        self._latest: dict[str, tuple[int, int]] = {}
        self._early: dict[Key, list[tuple[bytes, WantMessage]]] = {}

    def arrived(self, post: PostMessage) -> list[tuple[bytes, WantMessage]]:
        """Record a message whose values may be forwarded. Return the requests for them that arrived earlier."""
        latest = post.incarnation, post.serial
        self._latest[post.source] = max(latest, self._latest.get(post.source, latest))
        return self._early.pop(_key(post), [])

    def is_early(self, route: bytes, want: WantMessage) -> bool:
        """Whether the message of a request may still arrive. The request then waits for `RELAY_S`."""
        if (want.incarnation, want.serial) <= self._latest.get(want.source, (-1, -1)):
            return False
        if _key(want) not in self._early:
            self._early[_key(want)] = []
            self._later(RELAY_S, partial(self._give_up, _key(want)))
        self._early[_key(want)].append((route, want))
        return True

    def _give_up(self, key: Key) -> None:
        for route, want in self._early.pop(key, []):
            self.refuse(route, want)

    def begin(self, post: PostMessage, memory: Bytes) -> bool:
        """Prepare to receive the values of `post` into `memory`. Return whether they are forwarded and so must stay
        unchanged."""
        if not post.passes_on:
            return False
        try:
            self._backlog.admit(memory.size, f"forwarding a broadcast of {post.source}")
        except MessageBacklogError:
            return False
        self.drop(_key(post))
        self._kept[_key(post)] = _Kept(memory, time.monotonic())
        self._later(KEEP_S, partial(self._check_idle, _key(post)))
        return True

    def came(self, post: PostMessage, start: int, nbytes: int) -> None:
        """Record a chunk that has arrived, and serve the requests for it."""
        kept = self._kept.get(_key(post))
        if kept is not None:
            kept.came[start] = nbytes
            kept.used = time.monotonic()
            for route, want in kept.waiting.pop(start, ()):
                self._serve(kept, route, want)

    def asked(self, route: bytes, want: WantMessage) -> bool:
        """Answer a request now, or once its chunk has arrived. Return False for values that are not forwarded
        here."""
        kept = self._kept.get(_key(want))
        if kept is None:
            return False
        kept.used = time.monotonic()
        if want.start in kept.came or kept.whole:
            self._serve(kept, route, want)
        else:
            kept.waiting.setdefault(want.start, []).append((route, want))
        return True

    def _serve(self, kept: _Kept, route: bytes, want: WantMessage) -> None:
        if kept.came.get(want.start) != want.nbytes:
            self.refuse(route, want)
            return
        data = Data(
            stream=want.stream,
            number=want.number,
            source=want.source,
            incarnation=want.incarnation,
            receiver=want.asker,
            start=want.start,
        )
        self._reply(route, data, kept.memory[want.start : want.start + want.nbytes])

    def refuse(self, route: bytes, want: WantMessage) -> None:
        """Answer that the receiver has to pull from the source."""
        self._reply(route, Absent(stream=want.stream, number=want.number, source=want.source), None)

    def drop(self, key: Key) -> None:
        """Stop forwarding these values."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._backlog.free(kept.memory.size)
            for route, want in [each for waiting in kept.waiting.values() for each in waiting]:
                self.refuse(route, want)

    def interrupted(self, post: PostMessage) -> None:
        """Stop forwarding values that will not arrive completely."""
        kept = self._kept.get(_key(post))
        if kept is not None and not kept.whole:
            self.drop(_key(post))

    def drop_all(self) -> None:
        self._early.clear()
        for key in list(self._kept):
            self.drop(key)

    def _check_idle(self, key: Key) -> None:
        """Stop forwarding complete values that were not used for `KEEP_S`. Otherwise check again later."""
        kept = self._kept.get(key)
        if kept is None:
            return
        left_s = kept.used + KEEP_S - time.monotonic()
        if kept.whole and left_s <= 0:
            self.drop(key)
        else:
            self._later(left_s if left_s > 0 else KEEP_S, partial(self._check_idle, key))


def _key(message: PostMessage | WantMessage) -> Key:
    """Return the key that identifies the values of one broadcast."""
    return message.source, message.incarnation, message.serial
