"""Records of a broker: queues of items, waiting requests and leases."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from workers.channels import wire

Client = int


@dataclass(slots=True)
class Stored:
    """A stored item. place: its position in the order of all puts; space_bytes: the reserved bytes, at least the item's
    (0 if the item carries its bytes)."""

    item: wire.Item
    weight: float
    place: int
    space_bytes: int


def place_of(stored: Stored) -> int:
    """Return the sort key that keeps items in the order of their puts."""
    return stored.place


@dataclass(slots=True, eq=False)
class OpenPut:
    """A put that waits for a free place. preallocate_bytes: see `wire.Put`."""

    client: Client
    number: int
    queue: Queue
    stored: Stored
    preallocate_bytes: int


@dataclass(slots=True, eq=False)
class OpenGet:
    """A waiting get. target: the weight of its batch, None for one item; taken: the collected items of the batch;
    weight: the rounded sum of their weights; rounded_off: what the rounding removed from this sum."""

    client: Client
    number: int
    queue: Queue
    target: float | None
    taken: list[Stored] = field(default_factory=list)
    weight: float = 0.0
    rounded_off: float = 0.0

    def weight_with(self, more: float) -> tuple[float, float]:
        """Return `weight` and `rounded_off` after an item of weight `more`. The sum of both is that of all weights,
        rounded once (Neumaier's summation)."""
        total = self.weight + more
        if total == inf:  # the sum has overflowed
            return total, 0.0
        # What `total` lost by rounding is exact if it is computed from the larger summand.
        larger, smaller = (self.weight, more) if self.weight >= more else (more, self.weight)
        return total, self.rounded_off + (smaller - (total - larger))


@dataclass(slots=True, eq=False)
class SpaceWait:
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
    """The queue of one key. puts, gets: those that wait for a place or an item; waits: requests that wait for memory;
    leased: number of items that getters received and have not acknowledged."""

    channel: ChannelQueues
    key: bytes
    items: deque[Stored] = field(default_factory=deque)
    puts: deque[OpenPut] = field(default_factory=deque)
    gets: deque[OpenGet] = field(default_factory=deque)
    waits: deque[SpaceWait] = field(default_factory=deque)
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
        """Return the queue of a key, after creating it if there is none."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = Queue(self, key)
        return queue

    def remove_if_unneeded(self, queue: Queue) -> None:
        """Remove a queue that has no items and no requests."""
        if self.queues.get(queue.key) is queue and not queue.needed:
            del self.queues[queue.key]


@dataclass(slots=True)
class HeldItems:
    """State of a client: its reserved spaces with their bytes, and its open requests by number."""

    spaces: dict[int, int] = field(default_factory=dict)
    open: dict[int, OpenPut | OpenGet | SpaceWait | ItemLease] = field(default_factory=dict)
