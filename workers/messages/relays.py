"""Large values of a broadcast to many hosts: its receivers pass them on, so that the source sends them to few.

Only bytes take this way. That there is a message goes from the source to every receiver, as between any two workers,
and so do its answers: order, deadlines and errors do not depend on a third worker. The first receiver of each host may
pass on: `FAN_OUT` hosts pull the values from the source, each of the others from a host before it, and within a host
all others from its first. Whoever gets nothing this way for a while, as the worker before it died, stands still or has
no memory to spare, pulls what is missing from the source, which has it until everybody does.
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
"""A broadcast to fewer is sent to each by the source."""
FAN_OUT = 2
"""So many hosts pull from the source, and from each host that passes on."""
RELAY_S = 1.0
"""Whoever pulls from a host at depth n gets a part within n times that, or turns to the source: so those next to what
failed turn first, and go on to serve those behind them."""
KEEP_S = 5.0
"""What was passed on is kept so long after it was last asked for."""

Reply = Callable[[bytes, Data | Absent, Bytes | None], None]
Later = Callable[[float, Callable[[], None]], None]


class Tree:
    """Who pulls from whom in one broadcast, as the source sends it. here: the source's host."""

    def __init__(self, here: str) -> None:
        self._here = here
        self._first: dict[str, Relay] = {}

    def place(self, worker: str, incarnation: int, endpoint: str) -> tuple[Relay | None, bool]:
        """Whom the next receiver pulls from, None for the source; and whether others may pull from it."""
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
    """Values that are passed on. came: bytes of each part here, by its start; waiting: requests for other parts."""

    memory: Bytes
    used: float
    came: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, list[tuple[bytes, WantMessage]]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return sum(self.came.values()) == self.memory.size


Key = tuple[str, int, int]


class Relays:
    """What this worker passes on. For the engine's thread. backlog: counts it; reply, later: the engine's."""

    def __init__(self, backlog: Backlog, reply: Reply, later: Later) -> None:
        self._backlog = backlog
        self._reply = reply
        self._later = later
        self._kept: dict[Key, _Kept] = {}
        self._latest: dict[str, tuple[int, int]] = {}
        self._early: dict[Key, list[tuple[bytes, WantMessage]]] = {}

    def arrived(self, post: PostMessage) -> list[tuple[bytes, WantMessage]]:
        """A message whose values may be passed on is here: what was asked for of them before."""
        latest = post.incarnation, post.serial
        self._latest[post.source] = max(latest, self._latest.get(post.source, latest))
        return self._early.pop(_key(post), [])

    def is_early(self, route: bytes, want: WantMessage) -> bool:
        """Whether its message may still come: the request then waits, for `RELAY_S`."""
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
        """The values of `post` are about to come into `memory`: whether they are passed on, and so must stay as they
        come."""
        if not post.passes_on:
            return False
        try:
            self._backlog.admit(memory.size, f"passing on a broadcast of {post.source}")
        except MessageBacklogError:
            return False
        self.drop(_key(post))
        self._kept[_key(post)] = _Kept(memory, time.monotonic())
        self._later(KEEP_S, partial(self._look_after, _key(post)))
        return True

    def came(self, post: PostMessage, start: int, nbytes: int) -> None:
        """A part of them is there."""
        kept = self._kept.get(_key(post))
        if kept is not None:
            kept.came[start] = nbytes
            kept.used = time.monotonic()
            for route, want in kept.waiting.pop(start, ()):
                self._serve(kept, route, want)

    def asked(self, route: bytes, want: WantMessage) -> bool:
        """Answer, now or once it has come; False for what is not passed on here."""
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
        """Whoever asked is to turn to the source."""
        self._reply(route, Absent(stream=want.stream, number=want.number, source=want.source), None)

    def drop(self, key: Key) -> None:
        """Pass it on no longer."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._backlog.free(kept.memory.size)
            for route, want in [each for waiting in kept.waiting.values() for each in waiting]:
                self.refuse(route, want)

    def interrupted(self, post: PostMessage) -> None:
        """No more of it comes."""
        kept = self._kept.get(_key(post))
        if kept is not None and not kept.whole:
            self.drop(_key(post))

    def drop_all(self) -> None:
        self._early.clear()
        for key in list(self._kept):
            self.drop(key)

    def _look_after(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is None:
            return
        left_s = kept.used + KEEP_S - time.monotonic()
        if kept.whole and left_s <= 0:
            self.drop(key)
        else:
            self._later(left_s if left_s > 0 else KEEP_S, partial(self._look_after, key))


def _key(message: PostMessage | WantMessage) -> Key:
    """Tells the values of one broadcast from any others."""
    return message.source, message.incarnation, message.serial
