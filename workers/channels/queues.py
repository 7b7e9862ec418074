"""The state of a broker: queues, waiting requests and leased items. No sockets, threads or clock.

Each key has a first-in-first-out queue. Puts wait in one line while the queue is full, gets in another while it is
empty. The items that a get receives are leased. An acknowledgement removes them; a negative one, or the end of the
client, returns them to their place at the front. The first batch in line collects items as they arrive, so a batch
may be heavier than the queue is long, and later batches wait until it is complete. Requests for memory wait in a
third line of each queue. A request for more memory than is free does not block other queues, whose requests may
overtake it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from workers.channels import wire
from workers.channels.wire import NOWHERE

Client = int
Effects = list[tuple[Client, wire.AnyAnswer]]
"""Answers and the clients that receive them, in this order."""
MAX_PREALLOCATED_BYTES = 16 << 20
"""Larger spaces are not preallocated."""
PREALLOCATE_BELOW_SHARE = 0.25
"""Nothing is preallocated while more than this share of the memory is in use."""


@dataclass(slots=True)
class Stored:
    """A stored item. position: in the order of all puts; space_bytes: the reserved bytes, at least the item's
    (0 if the item carries its bytes)."""

    item: wire.Item
    weight: float
    position: int
    space_bytes: int


def position_of(stored: Stored) -> int:
    """Return the sort key that keeps items in the order of their puts."""
    return stored.position


@dataclass(slots=True, eq=False)
class OpenPut:
    """A put that waits for a free place. preallocate_bytes: see `wire.Put`."""

    client: Client
    request_id: int
    queue: Queue
    stored: Stored
    preallocate_bytes: int


@dataclass(slots=True, eq=False)
class OpenGet:
    """A waiting get. target: the weight of its batch, None for one item; taken: the collected items of the batch;
    weight: the sum of their weights."""

    client: Client
    request_id: int
    queue: Queue
    target: float | None
    taken: list[Stored] = field(default_factory=list)
    weight: float = 0.0


@dataclass(slots=True, eq=False)
class SpaceWait:
    """A request that waits for memory."""

    client: Client
    request_id: int
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
    """State of a client: its reserved spaces with their bytes, and its open requests by id."""

    spaces: dict[int, int] = field(default_factory=dict)
    open: dict[int, OpenPut | OpenGet | SpaceWait | ItemLease] = field(default_factory=dict)


class ItemMemory(Protocol):
    """Space for the bytes of items."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    def take(self, nbytes: int) -> int | None: ...

    def give(self, space: int, nbytes: int) -> None: ...


class Broker:
    """The queues of all channels of a broker. `join`, `leave` and `apply` return the answers to send. A request may be
    answered by a later call.

    memory: space for the bytes of items. Small items carry their bytes in their messages; these carried bytes may be as
    many as the memory's, beyond that puts wait. `_queues_waiting`: the queues with requests that wait for memory;
    `_queues_over_limit`: the queues whose first put waits until there are fewer carried bytes. Both are ordered sets.
    `_last_position`: that of the newest item in the order of all puts. `_carried_bytes`: number of carried bytes of
    all stored and leased items; `_outgoing`: the answers that the present call returns.
    """

    def __init__(self, memory: ItemMemory) -> None:
        self._memory = memory
        self._carried_bytes = 0
        self._last_position = 0
        self._channels: dict[str, ChannelQueues] = {}
        self._clients: dict[Client, HeldItems] = {}
        self._queues_waiting: dict[Queue, None] = {}
        self._queues_over_limit: dict[Queue, None] = {}
        self._outgoing: Effects = []

    @property
    def channels(self) -> int:
        """Number of channels that have not ended."""
        return len(self._channels)

    # --- requests

    def join(self, client: Client) -> None:
        """Add a client."""
        self._clients[client] = HeldItems()

    def leave(self, client: Client) -> Effects:
        """Remove a client: drop its waiting requests and return its unacknowledged items to their queues."""
        state = self._clients.pop(client)
        queues: dict[Queue, None] = {}
        for record in state.open.values():
            queues[record.queue] = None
            self._undo_request(record)  # all of them before a queue is served, so that this client gets no items
        for space, nbytes in state.spaces.items():
            self._memory.give(space, nbytes)
        self._serve_all(queues)
        return self._take_answers()

    def apply(self, client: Client, request: wire.AnyRequest) -> Effects:
        """Apply a request. ValueError if it violates the protocol."""
        match request:
            case wire.Put():
                self._put(client, request)
            case wire.Get():
                self._get(client, request)
            case wire.AckItems():
                self._ack(client, request)
            case wire.NackItems():
                self._nack(client, request)
            case wire.Reserve():
                self._reserve(client, request)
            case wire.ReleaseSpace():
                self._release(client, request.space)
            case wire.Cancel():
                self._cancel(client, request.request_id)
            case wire.Count():
                self._count(client, request)
            case wire.Peek():
                self._peek(client, request)
            case wire.Create():
                if request.channel not in self._channels:
                    self._channels[request.channel] = ChannelQueues(request.channel, request.maxsize)
                self._answer(client, wire.BrokerDone(request.request_id))
            case wire.RouteKey():
                self._route(client, request)
            case wire.Close():
                self._close(request.channel)
                self._answer(client, wire.BrokerDone(request.request_id))
            case _:
                raise ValueError(f"{type(request).__name__} is not a request to the state of a broker")
        return self._take_answers()

    def reserved_bytes(self, client: Client, item: wire.Item) -> int:
        """Return the size of the space that `client` reserved for an item that it is about to put. ValueError if the
        space is not reserved for it, or is too small."""
        nbytes = self._clients[client].spaces.get(item.space)
        if nbytes is None or not 0 < item.nbytes <= nbytes:
            raise ValueError(f"{item.nbytes} bytes at {item.space} are not reserved for this client")
        return nbytes

    def _take_answers(self) -> Effects:
        out, self._outgoing = self._outgoing, []
        return out

    def _answer(self, client: Client, answer: wire.AnyAnswer) -> None:
        self._outgoing.append((client, answer))

    # --- puts

    def _put(self, client: Client, request: wire.Put) -> None:
        """Store the item, or let the put wait for a place (with `nowait`: Full). In a closed channel answer Closed."""
        item = request.item
        space_bytes = 0
        if item.space != NOWHERE:
            space_bytes = self.reserved_bytes(client, item)
            del self._clients[client].spaces[item.space]  # the space belongs to the item from now on
        self._last_position += 1
        stored = Stored(item, request.weight, self._last_position, space_bytes)
        channel = self._channels.get(request.channel)
        if channel is None or channel.closed:
            self._free_space(stored)
            self._answer(client, wire.Closed(request.request_id))
            self._serve_all(())  # the freed space may suffice for waiting requests
            return
        queue = channel.queue(request.key)
        put = OpenPut(client, request.request_id, queue, stored, request.preallocate_bytes)
        if not queue.puts and self._can_store(queue, item):
            self._store(put)
            self._serve(queue)
        elif request.nowait:
            self._free_space(stored)
            self._answer(client, wire.Full(request.request_id))
            self._serve_all((queue,))
        else:
            queue.puts.append(put)
            self._clients[client].open[request.request_id] = put
            self._serve(queue)

    def _can_store(self, queue: Queue, item: wire.Item) -> bool:
        """Return whether the item can be stored now. If only the carried bytes are too many, add the queue to
        `_queues_over_limit`."""
        if 0 < queue.channel.maxsize <= len(queue.items):
            return False
        carried = len(item.body)
        # A single item is stored even if it exceeds the limit.
        if carried and self._carried_bytes and self._carried_bytes + carried > self._memory.capacity_bytes:
            self._queues_over_limit[queue] = None
            return False
        return True

    def _store(self, put: OpenPut) -> None:
        """Store the item of the put. Answer the put, if possible with space for the client's next one."""
        put.queue.items.append(put.stored)
        self._carried_bytes += len(put.stored.item.body)
        self._answer(put.client, wire.BrokerDone(put.request_id, self._preallocate(put.client, put.preallocate_bytes)))

    def _preallocate(self, client: Client, preallocate_bytes: int) -> int:
        """Reserve and return space for the client's next put; `NOWHERE` for 0 or many bytes, or if memory is scarce."""
        memory = self._memory
        if not 0 < preallocate_bytes <= MAX_PREALLOCATED_BYTES or self._queues_waiting:
            return NOWHERE
        if memory.used_bytes + preallocate_bytes > memory.capacity_bytes * PREALLOCATE_BELOW_SHARE:
            return NOWHERE
        space = memory.take(preallocate_bytes)
        if space is None:
            return NOWHERE
        self._clients[client].spaces[space] = preallocate_bytes
        return space

    # --- gets

    def _get(self, client: Client, request: wire.Get) -> None:
        """Append the get to its queue's waiting gets, or with `nowait` answer it now, with at most one item."""
        channel = self._channels.get(request.channel)
        if channel is None:
            self._answer(client, wire.Ended(request.request_id))
            return
        queue = channel.queue(request.key)
        get = OpenGet(client, request.request_id, queue, request.target)
        if not request.nowait:
            queue.gets.append(get)
            self._clients[client].open[request.request_id] = get
        elif queue.items:
            self._lease_items(get, [queue.items.popleft()])
        elif channel.closed and not queue.leased:  # leased items could return
            self._answer(client, wire.Ended(request.request_id))
        else:
            self._answer(client, wire.Empty(request.request_id))
        self._serve(queue)

    def _lease_items(self, get: OpenGet, taken: list[Stored]) -> None:
        """Lease these items to the client, and answer the get."""
        queue = get.queue
        if len(taken) > 1:
            # An item that was returned meanwhile precedes the items that were collected before its return.
            taken.sort(key=position_of)
        queue.leased += len(taken)
        self._clients[get.client].open[get.request_id] = ItemLease(queue, taken)
        self._answer(get.client, wire.Items(get.request_id, [stored.item for stored in taken]))

    def _collect(self, get: OpenGet) -> bool:
        """Move items to `get.taken`, which stay there until the get is answered or withdrawn. Return whether it is
        complete: it has its one item, or its batch reached the target weight or would exceed it with the next item."""
        items = get.queue.items
        if get.target is None:
            if items:
                get.taken.append(items.popleft())
            return bool(get.taken)
        while items:
            weight = get.weight + items[0].weight
            if get.taken and weight > get.target:  # a heavier first item is taken alone
                return True
            get.taken.append(items.popleft())
            get.weight = weight
            if weight >= get.target:
                return True
        return False

    # --- waiting puts and gets

    def _serve(self, queue: Queue) -> None:
        """Store items of waiting puts and answer waiting gets until neither is possible; remove an unneeded queue."""
        changed = True
        while changed:
            changed = False
            while queue.puts and self._can_store(queue, queue.puts[0].stored.item):
                put = queue.puts.popleft()
                del self._clients[put.client].open[put.request_id]
                self._store(put)
                changed = True
            if queue.gets:
                get = queue.gets[0]
                count_before = len(queue.items)
                if self._collect(get) or (get.taken and self._cannot_grow(queue)):
                    queue.gets.popleft()
                    self._lease_items(get, get.taken)
                    changed = True
                changed = changed or len(queue.items) < count_before  # taken items leave places for puts
        if queue.channel.closed:
            self._end_queue(queue)
        else:
            queue.channel.remove_if_unneeded(queue)

    @staticmethod
    def _cannot_grow(queue: Queue) -> bool:
        """Return whether a batch that was begun cannot get more items, unless leased items return."""
        return queue.channel.closed and not queue.items

    def _end_queue(self, queue: Queue) -> None:
        """In a closed channel: answer the gets of an empty queue with Ended. Remove queue and channel if unneeded."""
        if not queue.items and not queue.leased:  # leased items could return
            while queue.gets:
                get = queue.gets.popleft()
                del self._clients[get.client].open[get.request_id]
                self._answer(get.client, wire.Ended(get.request_id))
        channel = queue.channel
        channel.remove_if_unneeded(queue)
        if not channel.queues:
            self._channels.pop(channel.ident, None)

    def _serve_all(self, queues: Iterable[Queue]) -> None:
        """Serve these queues, then all requests that wait for memory or for fewer carried bytes."""
        for queue in queues:
            self._serve(queue)
        self._hand_out_spaces()
        for queue in list(self._queues_over_limit):  # a copy: `_serve` may add the queue again
            if self._carried_bytes >= self._memory.capacity_bytes:
                break
            del self._queues_over_limit[queue]
            self._serve(queue)

    # --- leases and cancellation

    def _ack(self, client: Client, request: wire.AckItems) -> None:
        """Drop the items that a get received."""
        lease = self._pop_lease(client, request.request_id)
        if request.confirm:
            self._answer(client, wire.BrokerDone(request.request_id))
        lease.queue.leased -= len(lease.taken)
        self._free_items(lease.taken)
        # Usually no request waits for the freed space, and the queue need not be served.
        if lease.queue.channel.closed or self._queues_waiting or self._queues_over_limit:
            self._serve_all((lease.queue,))
        else:
            lease.queue.channel.remove_if_unneeded(lease.queue)

    def _nack(self, client: Client, request: wire.NackItems) -> None:
        """Return leased items to their places in the queue, and drop those at the positions `request.lost`."""
        lease = self._pop_lease(client, request.request_id)
        taken = lease.taken
        positions = set(request.lost)
        lost = [stored for position, stored in enumerate(taken) if position in positions]
        lease.taken = [stored for position, stored in enumerate(taken) if position not in positions]
        lease.queue.leased -= len(lost)
        self._undo_request(lease)  # returns the others
        self._free_items(lost)
        self._serve_all((lease.queue,))

    def _pop_lease(self, client: Client, request_id: int) -> ItemLease:
        """Remove and return the lease of the client's get `request_id`."""
        lease = self._clients[client].open.pop(request_id, None)
        if not isinstance(lease, ItemLease):
            raise ValueError(f"request {request_id} holds no items")
        return lease

    def _free_items(self, items: Iterable[Stored]) -> None:
        """Drop items that were stored or leased."""
        for stored in items:
            self._carried_bytes -= len(stored.item.body)
            self._free_space(stored)

    def _cancel(self, client: Client, request_id: int) -> None:
        """Cancel a request, unless it was answered already."""
        record = self._clients[client].open.get(request_id)
        if record is None or isinstance(record, ItemLease):
            return
        del self._clients[client].open[request_id]
        self._answer(client, wire.Cancelled(request_id))
        self._undo_request(record)
        self._serve_all((record.queue,))

    def _undo_request(self, record: OpenPut | OpenGet | SpaceWait | ItemLease) -> None:
        """Undo the effect of an open request on its queue: it no longer waits, and items that it took return."""
        queue = record.queue
        if isinstance(record, SpaceWait):
            self._end_wait(record)
            return
        if isinstance(record, OpenPut):
            queue.puts.remove(record)
            self._free_space(record.stored)
            return
        if isinstance(record, ItemLease):
            queue.leased -= len(record.taken)
        else:
            queue.gets.remove(record)
        if record.taken:  # they return to their places
            queue.items = deque(sorted([*record.taken, *queue.items], key=position_of))

    # --- memory

    def _free_space(self, stored: Stored) -> None:
        """Free the reserved space of an item."""
        if stored.space_bytes:
            self._memory.give(stored.item.space, stored.space_bytes)

    def _reserve(self, client: Client, request: wire.Reserve) -> None:
        """Answer with reserved space, or let the request wait for it in its queue (with `nowait`: Full). In a closed
        channel answer Closed, for an empty item or one larger than the memory TooLarge."""
        limit = self._memory.capacity_bytes
        channel = self._channels.get(request.channel)
        if channel is None or channel.closed:
            self._answer(client, wire.Closed(request.request_id))
            return
        if not 0 < request.nbytes <= limit:
            self._answer(client, wire.TooLarge(request.request_id, limit))
            return
        queue = channel.queue(request.key)
        wait = SpaceWait(client, request.request_id, queue, request.nbytes)
        granted = not queue.waits and self._give_space(wait)  # not before the queue's earlier requests
        if not granted and request.nowait:
            self._answer(client, wire.Full(request.request_id))
        elif not granted:
            queue.waits.append(wait)
            self._queues_waiting[queue] = None
            self._clients[client].open[request.request_id] = wait
        channel.remove_if_unneeded(queue)

    def _give_space(self, wait: SpaceWait) -> bool:
        """Reserve space for a request, and answer it. Return whether there was enough memory."""
        space = self._memory.take(wait.nbytes)
        if space is None:
            return False
        self._clients[wait.client].spaces[space] = wait.nbytes
        self._answer(wait.client, wire.ItemSpace(wait.request_id, space))
        return True

    def _hand_out_spaces(self) -> None:
        """Reserve space for the first waiting request of each queue, one queue after another, while there is space."""
        unavailable_bytes = self._memory.capacity_bytes + 1  # the smallest size that was not available; none yet
        turns = deque(self._queues_waiting)
        while turns:
            wait = turns.popleft().waits[0]
            if wait.nbytes >= unavailable_bytes:
                continue
            if not self._give_space(wait):
                unavailable_bytes = wait.nbytes
                continue
            del self._clients[wait.client].open[wait.request_id]
            del self._queues_waiting[wait.queue]
            self._end_wait(wait)
            # The queue's next request has its turn after those of the other queues.
            if wait.queue.waits:
                self._queues_waiting[wait.queue] = None
                turns.append(wait.queue)

    def _end_wait(self, wait: SpaceWait) -> None:
        """Remove a request from those of its queue that wait for memory."""
        queue = wait.queue
        queue.waits.remove(wait)
        if not queue.waits:
            self._queues_waiting.pop(queue, None)
            queue.channel.remove_if_unneeded(queue)

    def _release(self, client: Client, space: int) -> None:
        """Free space that the client reserved and does not use."""
        nbytes = self._clients[client].spaces.pop(space, None)
        if nbytes is None:
            raise ValueError(f"space {space} is not reserved for this client")
        self._memory.give(space, nbytes)
        self._serve_all(())

    # --- counts, routes, close

    def _count(self, client: Client, request: wire.Count) -> None:
        """Answer with the counts of a queue, which are 0 if it does not exist."""
        channel = self._channels.get(request.channel)
        queue = channel.queues.get(request.key) if channel else None
        maxsize = channel.maxsize if channel else 0
        routed = channel is not None and request.key in channel.routes
        if queue is None:
            self._answer(client, wire.Counted(request.request_id, 0, maxsize, puts=0, gets=0, leased=0, routed=routed))
        else:
            puts = len(queue.puts) + len(queue.waits)
            counts = (len(queue.items), maxsize, puts, len(queue.gets), queue.leased)
            self._answer(client, wire.Counted(request.request_id, *counts, routed))

    def _peek(self, client: Client, request: wire.Peek) -> None:
        """Answer with the first items of a queue."""
        channel = self._channels.get(request.channel)
        queue = channel.queues.get(request.key) if channel else None
        items = queue.items if queue else ()
        first = [stored.item for stored in itertools.islice(items, max(request.most, 0))]
        self._answer(client, wire.Peeked(request.request_id, len(items), first))

    def _route(self, client: Client, request: wire.RouteKey) -> None:
        """Answer with the part that stores the key, which is the wanted part if the key is new."""
        channel = self._channels.get(request.channel)
        if channel is None:
            self._answer(client, wire.Ended(request.request_id))
        else:
            self._answer(client, wire.Routed(request.request_id, channel.routes.setdefault(request.key, request.wish)))

    def _close(self, ident: str) -> None:
        """Close a channel: answer its waiting puts, also those that wait for memory, with Closed. Its gets receive the
        remaining items, then Ended."""
        channel = self._channels.get(ident)
        if channel is None:
            return
        channel.closed = True
        for queue in list(channel.queues.values()):
            for wait in list(queue.waits):
                del self._clients[wait.client].open[wait.request_id]
                self._end_wait(wait)
                self._answer(wait.client, wire.Closed(wait.request_id))
            while queue.puts:
                put = queue.puts.popleft()
                del self._clients[put.client].open[put.request_id]
                self._free_space(put.stored)
                self._answer(put.client, wire.Closed(put.request_id))
            self._serve(queue)
        if not channel.queues:
            self._channels.pop(ident, None)
        self._serve_all(())
