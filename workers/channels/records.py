"""What a broker keeps: queues of items, requests that wait, and what was handed out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from workers.channels import wire

Client = int


@dataclass(slots=True)
class Stored:
    """space_bytes: how much was reserved for it, at least what it has."""

    item: wire.Item
    weight: float
    place: int
    space_bytes: int


@dataclass(slots=True, eq=False)
class OpenPut:
    """A put that waits for a place."""

    client: Client
    number: int
    queue: Queue
    stored: Stored
    want: int


@dataclass(slots=True, eq=False)
class OpenGet:
    """A get that waits; taken: what it has collected of its batch; weight: of that, rounded, and `rounded_off`."""

    client: Client
    number: int
    queue: Queue
    target: float | None
    taken: list[Stored] = field(default_factory=list)
    weight: float = 0.0
    rounded_off: float = 0.0

    def weight_with(self, more: float) -> tuple[float, float]:
        """The two, with `more`: their sum is that of all weights, as if it had been rounded once."""
        total = self.weight + more
        if total == inf:
            return total, 0.0
        larger, smaller = (self.weight, more) if self.weight >= more else (more, self.weight)
        return total, self.rounded_off + (smaller - (total - larger))


@dataclass(slots=True, eq=False)
class RoomWait:
    """A request for memory that waits for it."""

    client: Client
    number: int
    queue: Queue
    nbytes: int


@dataclass(slots=True, eq=False)
class ItemLease:
    """What a get was given, until it is acknowledged."""

    queue: Queue
    taken: list[Stored]


@dataclass(slots=True, eq=False)
class Queue:
    """leased: how many items are with those who got them."""

    channel: ChannelQueues
    key: bytes
    items: deque[Stored] = field(default_factory=deque)
    puts: deque[OpenPut] = field(default_factory=deque)
    gets: deque[OpenGet] = field(default_factory=deque)
    waits: deque[RoomWait] = field(default_factory=deque)
    leased: int = 0

    @property
    def needed(self) -> bool:
        return bool(self.items or self.puts or self.gets or self.waits or self.leased)


@dataclass(slots=True, eq=False)
class ChannelQueues:
    """routes: which part of a distributed channel has a key; the first part has them all, each other part its own."""

    ident: str
    maxsize: int
    closed: bool = False
    queues: dict[bytes, Queue] = field(default_factory=dict)
    routes: dict[bytes, int] = field(default_factory=dict)

    def queue(self, key: bytes) -> Queue:
        found = self.queues.get(key)
        if found is None:
            found = self.queues[key] = Queue(self, key)
        return found

    def forget(self, queue: Queue) -> None:
        """Keep nothing of a queue that nobody needs."""
        if self.queues.get(queue.key) is queue and not queue.needed:
            del self.queues[queue.key]


@dataclass(slots=True)
class HeldItems:
    """By a client: spaces (their bytes), and requests by number."""

    spaces: dict[int, int] = field(default_factory=dict)
    open: dict[int, OpenPut | OpenGet | RoomWait | ItemLease] = field(default_factory=dict)
