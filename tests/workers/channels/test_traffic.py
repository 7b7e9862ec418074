"""A broker's queues under clients that put, get, cancel and die, in any order."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.workers.channels.queue_driver import CAPACITY, Backed
from workers.channels import wire
from workers.channels.queues import Broker, Effects


class Traffic(RuleBasedStateMachine):
    """Clients put, get, acknowledge, give back, cancel and die; no item is lost, doubled or out of order."""

    KEYS = (b"a", b"b")
    MAXSIZE = 3

    def __init__(self) -> None:
        super().__init__()
        self.memory = Backed()
        self.broker = Broker(self.memory)
        self.clients: set[int] = set()
        self.next_client = 0
        self.last_request_id = 1
        self.requests: dict[tuple[int, int], tuple[str, bytes, int]] = {}
        self.leases: dict[tuple[int, int], tuple[bytes, list[int]]] = {}
        self.granted: dict[int, deque[tuple[int, int]]] = {}
        self.accepted: dict[bytes, set[int]] = {key: set() for key in self.KEYS}
        self.acknowledged: set[int] = set()
        self.closed = False
        self.add_client()
        self.tell(0, wire.Create(0, "c", "c", self.MAXSIZE))

    def tell(self, client: int, request: object) -> None:
        self.hear(self.broker.apply(client, request))

    def hear(self, effects: Effects) -> None:
        for client, answer in effects:
            assert client in self.clients
            kind, key, item = self.requests.pop((client, answer.request_id), ("other", b"", -1))
            match answer:
                case wire.Items():
                    assert kind == "get"
                    places = [int(each.head) for each in answer.items]
                    assert places == sorted(places)
                    self.leases[(client, answer.request_id)] = (key, places)
                case wire.BrokerDone() if kind == "put":
                    self.accepted[key].add(item)
                case wire.ItemSpace():
                    self.granted.setdefault(client, deque()).append((answer.space, item))
                case wire.Ended():
                    assert self.closed
                    assert self.left(key) == set()

    def left(self, key: bytes) -> set[int]:
        """Items of a key that were taken in and not acknowledged."""
        return self.accepted[key] - self.acknowledged

    def new_request_id(self) -> int:
        self.last_request_id += 1
        return self.last_request_id

    @rule()
    def add_client(self) -> None:
        if len(self.clients) < 4:
            self.clients.add(self.next_client)
            self.broker.join(self.next_client)
            self.next_client += 1

    @rule(data=st.data(), key=st.sampled_from(KEYS), weight=st.integers(0, 3), nowait=st.booleans())
    def put(self, data: st.DataObject, key: bytes, weight: int, nowait: bool) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        request_id = self.new_request_id()
        item = wire.Item(request_id)
        granted = self.granted.get(client)
        if granted:
            item.space, item.nbytes = granted.popleft()
        self.requests[(client, request_id)] = ("put", key, request_id)
        self.tell(client, wire.Put(request_id, "c", key, item, weight, nowait))

    @rule(data=st.data(), key=st.sampled_from(KEYS), batch=st.none() | st.integers(0, 5), nowait=st.booleans())
    def get(self, data: st.DataObject, key: bytes, batch: int | None, nowait: bool) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        request_id = self.new_request_id()
        self.requests[(client, request_id)] = ("get", key, -1)
        self.tell(client, wire.Get(request_id, "c", key, None if nowait else batch, nowait))

    @rule(
        data=st.data(),
        key=st.sampled_from(KEYS),
        nbytes=st.sampled_from([200, CAPACITY // 4, CAPACITY // 2]),
        nowait=st.booleans(),
    )
    def reserve(self, data: st.DataObject, key: bytes, nbytes: int, nowait: bool) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        request_id = self.new_request_id()
        self.requests[(client, request_id)] = ("reserve", key, nbytes)
        self.tell(client, wire.Reserve(request_id, "c", key, nbytes, nowait))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), back=st.booleans(), confirm=st.booleans())
    def settle(self, data: st.DataObject, back: bool, confirm: bool) -> None:
        client, request_id = data.draw(st.sampled_from(sorted(self.leases)))
        key, places = self.leases.pop((client, request_id))
        if not back:
            self.acknowledged.update(places)
            if confirm:
                self.requests[(client, request_id)] = ("ack", key, -1)
        self.tell(client, wire.NackItems(request_id) if back else wire.AckItems(request_id, confirm))
        assert (client, request_id) not in self.requests, "it is answered at once"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client, request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.tell(client, wire.Cancel(request_id))
        assert (client, request_id) not in self.requests

    @precondition(lambda self: len(self.clients) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        self.clients.remove(client)
        self.granted.pop(client, None)
        for owned in (self.requests, self.leases):
            for key in [key for key in owned if key[0] == client]:
                del owned[key]
        self.hear(self.broker.leave(client))

    @precondition(lambda self: self.last_request_id > 30)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.tell(next(iter(self.clients)), wire.Close(self.new_request_id(), "c"))

    @invariant()
    def nothing_is_handed_out_twice(self) -> None:
        out = [place for _, places in self.leases.values() for place in places]
        assert len(out) == len(set(out))
        assert not self.acknowledged & set(out)

    @invariant()
    def nobody_waits_for_space_that_there_is(self) -> None:
        """The first of each queue's line could not be served."""
        firsts: dict[bytes, int] = {}
        for kind, key, nbytes in self.requests.values():
            if kind == "reserve":
                firsts.setdefault(key, nbytes)
        for nbytes in firsts.values():
            space = self.memory.take(nbytes)
            if space is not None:
                self.memory.give(space, nbytes)
            assert space is None

    @invariant()
    def no_queue_is_too_long_but_by_what_came_back(self) -> None:
        for key in self.KEYS:
            ((_, counted),) = self.broker.apply(next(iter(self.clients)), wire.Count(0, "c", key))
            assert counted.size + counted.leased <= len(self.left(key))
            assert counted.gets == sum(request[:2] == ("get", key) for request in self.requests.values())
            assert counted.puts == sum(
                request[:2] in (("put", key), ("reserve", key)) for request in self.requests.values()
            )

    def teardown(self) -> None:
        """All that was taken in comes out, in order, and no memory stays in use."""
        last = self.next_client
        self.clients.add(last)
        self.broker.join(last)
        for client in sorted(self.clients - {last}):
            for owned in (self.requests, self.leases):
                for key in [key for key in owned if key[0] == client]:
                    del owned[key]
            self.clients.discard(client)
            self.hear(self.broker.leave(client))
        for key in self.KEYS:
            found: list[int] = []
            while self.left(key):
                request_id = self.new_request_id()
                self.requests[(last, request_id)] = ("get", key, -1)
                self.tell(last, wire.Get(request_id, "c", key, None, True))
                found += self.leases.pop((last, request_id))[1]
                self.acknowledged.update(found)
                self.tell(last, wire.AckItems(request_id))
            assert found == sorted(found)
        self.broker.leave(last)
        assert self.memory.used_bytes == 0


TestTraffic = Traffic.TestCase
