"""Records of a broker: queues of items, waiting requests and leases."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from workers.channels import wire

Client = int


@dataclass(slots=True)
class Stored:
    """A stored item. space_bytes: the reserved bytes, at least the item's."""

    item: wire.Item
    weight: float
    place: int
    space_bytes: int


@dataclass(slots=True, eq=False)
class OpenPut:
    """A put that waits for a free place."""

    client: Client
    number: int
    queue: Queue
    stored: Stored
    want: int


@dataclass(slots=True, eq=False)
class OpenGet:
    """A waiting get. taken: the collected items of its batch; weight: their rounded sum; rounded_off: the rounding
    error."""

    client: Client
    number: int
    queue: Queue
    target: float | None
    taken: list[Stored] = field(default_factory=list)
    weight: float = 0.0
    rounded_off: float = 0.0

    def weight_with(self, more: float) -> tuple[float, float]:
        """Return `weight` and `rounded_off` with `more` added. Their sum is that of all weights, rounded once."""
        total = self.weight + more
        if total == inf:
            return total, 0.0
        larger, smaller = (self.weight, more) if self.weight >= more else (more, self.weight)
        return total, self.rounded_off + (smaller - (total - larger))


@dataclass(slots=True, eq=False)
class RoomWait:
    """A request that waits for memory."""

    client: Client
    number: int
    queue: Queue
    nbytes: int


@dataclass(slots=True, eq=False)
class ItemLease:
    """Items that a get received and has not acknowledged."""

    queue: Queue
    taken: list[Stored]


@dataclass(slots=True, eq=False)
class Queue:
    """The queue of one key. leased: number of items that getters received and have not acknowledged."""

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
    """The queues of a channel. routes: the parts of a distributed channel by key; the first part has all keys, any
    other part only its own."""

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
        """Remove a queue that has no items and no requests."""
        if self.queues.get(queue.key) is queue and not queue.needed:
            del self.queues[queue.key]


@dataclass(slots=True)
class HeldItems:
    """State of a client: its reserved spaces with their bytes, and its open requests by number."""

    spaces: dict[int, int] = field(default_factory=dict)
    open: dict[int, OpenPut | OpenGet | RoomWait | ItemLease] = field(default_factory=dict)
