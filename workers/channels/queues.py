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
from typing import Protocol

from workers.channels import wire
from workers.channels.records import (
    ChannelQueues,
    Client,
    HeldItems,
    ItemLease,
    OpenGet,
    OpenPut,
    Queue,
    RoomWait,
    Stored,
)
from workers.channels.wire import NOWHERE

Effects = list[tuple[Client, wire.AnyAnswer]]
"""Answers and the clients that receive them, in this order."""

AHEAD_BYTES = 16 << 20
"""Larger spaces are not preallocated."""
AHEAD_SHARE = 0.25
"""Nothing is preallocated while more than this share of the memory is in use."""


class ItemMemory(Protocol):
    """Space for the bytes of items."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    def take(self, nbytes: int) -> int | None: ...

    def give(self, space: int, nbytes: int) -> None: ...


class Broker:
    """Every method returns the answers to send. A request may be answered by a later call.

    memory: space for the bytes of items. Items that carry their own bytes may hold as many again; beyond that, puts
    wait. `_waiting`: the queues whose requests for memory wait; `_starved`: the queues whose first put waits for fewer
    carried bytes.
    """

    def __init__(self, memory: ItemMemory) -> None:
        self._memory = memory
        self._carried_bytes = 0
        self._puts = 0
        self._channels: dict[str, ChannelQueues] = {}
        self._clients: dict[Client, HeldItems] = {}
        self._waiting: dict[Queue, None] = {}
        self._starved: dict[Queue, None] = {}
        self._out: Effects = []

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
        gone = self._clients.pop(client)
        touched: dict[Queue, None] = {}
        for each in gone.open.values():
            touched[each.queue] = None
            self._withdraw(each)
        for space, nbytes in gone.spaces.items():
            self._memory.give(space, nbytes)
        self._settle(touched)
        return self._answers()

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
                self._cancel(client, request.number)
            case wire.Count():
                self._count(client, request)
            case wire.Peek():
                self._peek(client, request)
            case wire.Create():
                if request.channel not in self._channels:
                    self._channels[request.channel] = ChannelQueues(request.channel, request.maxsize)
                self._answer(client, wire.BrokerDone(request.number))
            case wire.RouteKey():
                self._route(client, request)
            case wire.Close():
                self._close(request.channel)
                self._answer(client, wire.BrokerDone(request.number))
            case _:
                raise ValueError(f"{type(request).__name__} is not a request to the state of a broker")
        return self._answers()

    def space_of(self, client: Client, item: wire.Item) -> int:
        """Return the bytes that `client` reserved for an item that it is about to put. ValueError if the space is not
        its own."""
        nbytes = self._clients[client].spaces.get(item.space)
        if nbytes is None or not 0 < item.nbytes <= nbytes:
            raise ValueError(f"{item.nbytes} bytes at {item.space} are not reserved for this client")
        return nbytes

    def _answers(self) -> Effects:
        out, self._out = self._out, []
        return out

    def _answer(self, client: Client, answer: wire.AnyAnswer) -> None:
        self._out.append((client, answer))

    # --- puts

    def _put(self, client: Client, request: wire.Put) -> None:
        """Store the item, or let the put wait for a free place."""
        item, space_bytes = request.item, 0
        if item.space != NOWHERE:
            space_bytes = self.space_of(client, item)
            del self._clients[client].spaces[item.space]
        self._puts += 1
        stored = Stored(item, request.weight, self._puts, space_bytes)
        channel = self._channels.get(request.channel)
        if channel is None or channel.closed:
            self._drop(stored)
            self._answer(client, wire.Closed(request.number))
            self._settle(())
            return
        queue = channel.queue(request.key)
        put = OpenPut(client, request.number, queue, stored, request.want)
        if not queue.puts and self._fits(queue, item):
            self._take_in(put)
            self._serve(queue)
        elif request.nowait:
            self._drop(stored)
            self._answer(client, wire.Full(request.number))
            self._settle((queue,))
        else:
            queue.puts.append(put)
            self._clients[client].open[request.number] = put
            self._serve(queue)

    def _fits(self, queue: Queue, item: wire.Item) -> bool:
        """Return whether the item can be stored now. If only its carried bytes are too many, note the queue in
        `_starved`."""
        if 0 < queue.channel.maxsize <= len(queue.items):
            return False
        carried = len(item.body)
        if carried and 0 < self._carried_bytes > self._memory.capacity_bytes - carried:
            self._starved[queue] = None
            return False
        return True

    def _take_in(self, put: OpenPut) -> None:
        """Store the item of the put, and answer the put."""
        put.queue.items.append(put.stored)
        self._carried_bytes += len(put.stored.item.body)
        self._answer(put.client, wire.BrokerDone(put.number, self._preallocate(put.client, put.want)))

    def _preallocate(self, client: Client, want: int) -> int:
        """Preallocate space for the client's next put. Return `NOWHERE` if memory is scarce."""
        memory = self._memory
        if not 0 < want <= AHEAD_BYTES or self._waiting:
            return NOWHERE
        if memory.used_bytes + want > memory.capacity_bytes * AHEAD_SHARE:
            return NOWHERE
        space = memory.take(want)
        if space is None:
            return NOWHERE
        self._clients[client].spaces[space] = want
        return space

    # --- gets

    def _get(self, client: Client, request: wire.Get) -> None:
        channel = self._channels.get(request.channel)
        if channel is None:
            self._answer(client, wire.Ended(request.number))
            return
        queue = channel.queue(request.key)
        get = OpenGet(client, request.number, queue, request.target)
        if not request.nowait:
            queue.gets.append(get)
            self._clients[client].open[request.number] = get
        elif queue.items:
            self._hand_out(get, [queue.items.popleft()])
        elif channel.closed and not queue.leased:
            self._answer(client, wire.Ended(request.number))
        else:
            self._answer(client, wire.Empty(request.number))
        self._serve(queue)

    def _hand_out(self, get: OpenGet, taken: list[Stored]) -> None:
        """Lease these items to the client, and answer the get."""
        queue = get.queue
        if len(taken) > 1:
            # An item that was returned meanwhile precedes the items that were collected before its return.
            taken.sort(key=_place)
        queue.leased += len(taken)
        self._clients[get.client].open[get.number] = ItemLease(queue, taken)
        self._answer(get.client, wire.Items(get.number, [each.item for each in taken]))

    def _collect(self, get: OpenGet) -> bool:
        """Move items to `get.taken`, which stay there until the get is answered or withdrawn. Return whether it is
        complete: it has its one item, or its batch reached the target weight or would exceed it with the next item."""
        items = get.queue.items
        if get.target is None:
            if items:
                get.taken.append(items.popleft())
            return bool(get.taken)
        while items:
            weight, rounded_off = get.weight_with(items[0].weight)
            if get.taken and weight + rounded_off > get.target:
                return True
            get.taken.append(items.popleft())
            get.weight, get.rounded_off = weight, rounded_off
            if weight + rounded_off >= get.target:
                return True
        return False

    # --- the lines

    def _serve(self, queue: Queue) -> None:
        """Advance the lines of puts and gets as far as possible."""
        moved = True
        while moved:
            moved = False
            while queue.puts and self._fits(queue, queue.puts[0].stored.item):
                put = queue.puts.popleft()
                del self._clients[put.client].open[put.number]
                self._take_in(put)
                moved = True
            if queue.gets:
                get, before = queue.gets[0], len(queue.items)
                if self._collect(get) or (get.taken and self._no_more(queue)):
                    queue.gets.popleft()
                    self._hand_out(get, get.taken)
                    moved = True
                moved = moved or len(queue.items) < before
        if queue.channel.closed:
            self._end(queue)
        else:
            queue.channel.forget(queue)

    @staticmethod
    def _no_more(queue: Queue) -> bool:
        """Whether a batch that was begun is as large as it will get, unless leased items return."""
        return queue.channel.closed and not queue.items

    def _end(self, queue: Queue) -> None:
        """Answer the waiting gets of a closed channel's empty queue with Ended, and forget the queue."""
        if not queue.items and not queue.leased:
            while queue.gets:
                get = queue.gets.popleft()
                del self._clients[get.client].open[get.number]
                self._answer(get.client, wire.Ended(get.number))
        channel = queue.channel
        channel.forget(queue)
        if not channel.queues:
            self._channels.pop(channel.ident, None)

    def _settle(self, queues: Iterable[Queue]) -> None:
        """Serve these queues, then the requests that wait for memory."""
        for queue in queues:
            self._serve(queue)
        self._hand_out_spaces()
        for queue in list(self._starved):
            if self._carried_bytes >= self._memory.capacity_bytes:
                break
            del self._starved[queue]
            self._serve(queue)

    # --- leases and cancellation

    def _ack(self, client: Client, request: wire.AckItems) -> None:
        lease = self._lease(client, request.number)
        if request.confirm:
            self._answer(client, wire.BrokerDone(request.number))
        lease.queue.leased -= len(lease.taken)
        self._forget(lease.taken)
        if lease.queue.channel.closed or self._waiting or self._starved:
            self._settle((lease.queue,))
        else:
            lease.queue.channel.forget(lease.queue)

    def _nack(self, client: Client, request: wire.NackItems) -> None:
        """Return leased items to their places, and drop those that the client lost."""
        lease = self._lease(client, request.number)
        taken, lost = lease.taken, set(request.lost)
        lease.taken = [stored for place, stored in enumerate(taken) if place not in lost]
        lease.queue.leased -= len(taken) - len(lease.taken)
        self._withdraw(lease)
        self._forget(stored for place, stored in enumerate(taken) if place in lost)
        self._settle((lease.queue,))

    def _lease(self, client: Client, number: int) -> ItemLease:
        """Remove and return the lease of the client's get `number`."""
        lease = self._clients[client].open.pop(number, None)
        if not isinstance(lease, ItemLease):
            raise ValueError(f"request {number} holds no items")
        return lease

    def _forget(self, items: Iterable[Stored]) -> None:
        """Drop items that were stored or leased."""
        for stored in items:
            self._carried_bytes -= len(stored.item.body)
            self._drop(stored)

    def _cancel(self, client: Client, number: int) -> None:
        """Cancel a request, unless it was answered already."""
        found = self._clients[client].open.get(number)
        if found is None or isinstance(found, ItemLease):
            return
        del self._clients[client].open[number]
        self._answer(client, wire.Cancelled(number))
        self._withdraw(found)
        self._settle((found.queue,))

    def _withdraw(self, found: OpenPut | OpenGet | RoomWait | ItemLease) -> None:
        """Undo the effect of an open request on its queue."""
        queue = found.queue
        if isinstance(found, RoomWait):
            self._end_wait(found)
            return
        if isinstance(found, OpenPut):
            queue.puts.remove(found)
            self._drop(found.stored)
            return
        if isinstance(found, ItemLease):
            queue.leased -= len(found.taken)
        else:
            queue.gets.remove(found)
        if found.taken:
            queue.items = deque(sorted([*found.taken, *queue.items], key=_place))

    # --- memory

    def _drop(self, stored: Stored) -> None:
        """Free the reserved space of an item."""
        if stored.space_bytes:
            self._memory.give(stored.item.space, stored.space_bytes)

    def _reserve(self, client: Client, request: wire.Reserve) -> None:
        limit, channel = self._memory.capacity_bytes, self._channels.get(request.channel)
        if channel is None or channel.closed:
            self._answer(client, wire.Closed(request.number))
            return
        if not 0 < request.nbytes <= limit:
            self._answer(client, wire.TooLarge(request.number, limit))
            return
        queue = channel.queue(request.key)
        wait = RoomWait(client, request.number, queue, request.nbytes)
        if not queue.waits and self._give_space(wait):
            pass
        elif request.nowait:
            self._answer(client, wire.Full(request.number))
        else:
            queue.waits.append(wait)
            self._waiting[queue] = None
            self._clients[client].open[request.number] = wait
        channel.forget(queue)

    def _give_space(self, wait: RoomWait) -> bool:
        """Reserve space for a waiting request. Return whether there was enough."""
        space = self._memory.take(wait.nbytes)
        if space is None:
            return False
        self._clients[wait.client].spaces[space] = wait.nbytes
        self._answer(wait.client, wire.ItemSpace(wait.number, space))
        return True

    def _hand_out_spaces(self) -> None:
        """Give space to the first request of each queue's line, one queue after another, as far as there is space."""
        too_much = self._memory.capacity_bytes + 1
        turns = deque(self._waiting)
        while turns:
            wait = turns.popleft().waits[0]
            if wait.nbytes >= too_much:
                continue
            if not self._give_space(wait):
                too_much = wait.nbytes
                continue
            del self._clients[wait.client].open[wait.number]
            del self._waiting[wait.queue]
            self._end_wait(wait)
            if wait.queue.waits:
                self._waiting[wait.queue] = None
                turns.append(wait.queue)

    def _end_wait(self, wait: RoomWait) -> None:
        queue = wait.queue
        queue.waits.remove(wait)
        if not queue.waits:
            self._waiting.pop(queue, None)
            queue.channel.forget(queue)

    def _release(self, client: Client, space: int) -> None:
        nbytes = self._clients[client].spaces.pop(space, None)
        if nbytes is None:
            raise ValueError(f"space {space} is not reserved for this client")
        self._memory.give(space, nbytes)
        self._settle(())

    # --- counts, routes, close

    def _count(self, client: Client, request: wire.Count) -> None:
        channel = self._channels.get(request.channel)
        queue = channel.queues.get(request.key) if channel else None
        maxsize = channel.maxsize if channel else 0
        routed = channel is not None and request.key in channel.routes
        if queue is None:
            self._answer(client, wire.Counted(request.number, 0, maxsize, 0, 0, 0, routed))
        else:
            puts = len(queue.puts) + len(queue.waits)
            counts = (len(queue.items), maxsize, puts, len(queue.gets), queue.leased)
            self._answer(client, wire.Counted(request.number, *counts, routed))

    def _peek(self, client: Client, request: wire.Peek) -> None:
        channel = self._channels.get(request.channel)
        queue = channel.queues.get(request.key) if channel else None
        items = queue.items if queue else ()
        first = [stored.item for stored in itertools.islice(items, max(request.most, 0))]
        self._answer(client, wire.Peeked(request.number, len(items), first))

    def _route(self, client: Client, request: wire.RouteKey) -> None:
        channel = self._channels.get(request.channel)
        if channel is None:
            self._answer(client, wire.Ended(request.number))
        else:
            self._answer(client, wire.Routed(request.number, channel.routes.setdefault(request.key, request.wish)))

    def _close(self, ident: str) -> None:
        channel = self._channels.get(ident)
        if channel is None:
            return
        channel.closed = True
        for queue in list(channel.queues.values()):
            for wait in list(queue.waits):
                del self._clients[wait.client].open[wait.number]
                self._end_wait(wait)
                self._answer(wait.client, wire.Closed(wait.number))
            while queue.puts:
                put = queue.puts.popleft()
                del self._clients[put.client].open[put.number]
                self._drop(put.stored)
                self._answer(put.client, wire.Closed(put.number))
            self._serve(queue)
        if not channel.queues:
            self._channels.pop(ident, None)
        self._settle(())


def _place(stored: Stored) -> int:
    return stored.place
