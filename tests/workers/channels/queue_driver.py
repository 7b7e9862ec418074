"""A broker without sockets, and the memory it deals out."""

from __future__ import annotations

from dataplane.ledger.state.free_space import FreeSpace
from workers.channels import wire
from workers.channels.queues import Broker, Effects

CAPACITY = 4096
KEY = b"k"


class Backed:
    """Memory that is all there."""

    def __init__(self, capacity_bytes: int = CAPACITY) -> None:
        self._space = FreeSpace(capacity_bytes)
        self._space.back(capacity_bytes)
        self.capacity_bytes = capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self._space.free_bytes

    def take(self, nbytes: int) -> int | None:
        return self._space.take(nbytes)

    def give(self, space: int, nbytes: int) -> None:
        self._space.give(space, nbytes)


class QueueDriver:
    """A broker with one channel "c" and two clients; `say` returns what was answered."""

    def __init__(self, maxsize: int = 0) -> None:
        self.memory = Backed()
        self.broker = Broker(self.memory)
        for client in (1, 2, 3):
            self.broker.join(client)
        self.broker.apply(3, wire.Create(1, "c", "c", maxsize))
        self._last_request_id = 1

    def say(self, client: int, kind: type, *fields: object, **named: object) -> tuple[int, Effects]:
        self._last_request_id += 1
        return self._last_request_id, self.broker.apply(client, kind(self._last_request_id, *fields, **named))

    def put(
        self, head: object, *, client: int = 1, weight: float = 0, nowait: bool = False, key: bytes = KEY
    ) -> Effects:
        return self.say(client, wire.Put, "c", key, wire.Item(head), weight, nowait)[1]

    def get(self, *, client: int = 2, target: float | None = None, nowait: bool = False, key: bytes = KEY) -> Effects:
        return self.say(client, wire.Get, "c", key, target, nowait)[1]

    def reserve(
        self, nbytes: int, *, client: int = 1, nowait: bool = False, key: bytes = KEY, channel: str = "c"
    ) -> Effects:
        return self.say(client, wire.Reserve, channel, key, nbytes, nowait)[1]

    def close(self) -> Effects:
        return [each for each in self.say(3, wire.Close, "c")[1] if each[0] != 3]


def heads(effects: Effects) -> list[list[object]]:
    return [[item.head for item in answer.items] for _, answer in effects if isinstance(answer, wire.Items)]


def kinds(effects: Effects) -> list[type]:
    return [type(answer) for _, answer in effects]
