"""Whose a slot is until its transfer is over or its payload is settled, with an engine that moves nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.storage.transport.mooncake import engine_transport
from dataplane.storage.transport.mooncake import slots as module
from dataplane.storage.transport.mooncake.engine import DONE, FAILED, PENDING
from dataplane.storage.transport.mooncake.engine_transport import UnitEngine
from dataplane.storage.transport.mooncake.slots import TAG_BYTES, Slots

SOURCE = pb.Memory(engine="peer:1", address=4096, size=10, tag=bytes(range(TAG_BYTES)))


class StillEngine:
    """`status_of` says how far each transfer is."""

    address = "here:1"

    def __init__(self) -> None:
        self.status_of: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def begin(self, peer: str, local: int, remote: int, nbytes: int) -> int:
        number = len(self.status_of) + 1
        self.status_of[number] = PENDING
        return number

    def status(self, transfer: int) -> int:
        return self.status_of[transfer]

    def close(self, *, reusable: bool = True) -> None: ...


@pytest.fixture
def engine() -> StillEngine:
    return StillEngine()


@pytest.fixture
def slots(engine: Any) -> Iterator[Slots]:
    """There are two."""
    made = Slots(engine, count=2)
    yield made
    made.close(trying=False)


@pytest.fixture
def unit(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> UnitEngine:
    monkeypatch.setattr(engine_transport, "FROM_BYTES", 1)
    return UnitEngine(slots)


def test_a_slot_given_back_during_its_transfer_is_nobodys_until_that_is_over(slots: Slots, engine: StillEngine) -> None:
    slot, other = slots.take(), slots.take()
    assert slot is not None
    assert other is not None
    slots.begin(slot, SOURCE)
    slots.give(slot)
    assert slots.take() is None
    slots.give(other)
    assert slots.take() is other
    assert slots.take() is None
    engine.status_of[1] = DONE
    assert slots.take() is slot


def test_a_slot_whose_transfer_failed_rests(slots: Slots, engine: StillEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", math.inf)
    slot, _ = slots.take(), slots.take()
    assert slot is not None
    slots.begin(slot, SOURCE)
    engine.status_of[1] = FAILED
    assert slots.fetched(slot, SOURCE) is False
    slots.give(slot)
    assert slots.take() is None
    slot.rests_until = 0.0
    assert slots.take() is slot


def test_what_came_under_another_tag_is_not_the_payload(slots: Slots, engine: StillEngine) -> None:
    slot = slots.take()
    assert slot is not None
    slots.begin(slot, SOURCE)
    assert slots.fetched(slot, SOURCE) is None
    engine.status_of[1] = DONE
    assert slots.fetched(slot, SOURCE) is False
    slot.tag = SOURCE.tag
    assert slots.fetched(slot, SOURCE) is True


def test_an_offered_slot_is_nobody_elses_until_it_is_settled(unit: UnitEngine) -> None:
    first, second = unit.offer(1, 100), unit.offer(2, 100)
    assert first is not None
    assert second is not None
    assert unit.offer(3, 100) is None
    assert not unit.settle(2, first.source.tag), "it is another session's"
    assert unit.settle(1, first.source.tag)
    again = unit.offer(3, 100)
    assert again is not None
    assert again.source.address == first.source.address
    assert not unit.settle(1, first.source.tag), "its slot has another payload"
    assert unit.settle(2, second.source.tag)
    assert unit.settle(3, again.source.tag)


def test_an_offer_is_taken_back_no_sooner_than_it_is_given_up(
    unit: UnitEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_transport, "MOST_OFFERS", 1)
    monkeypatch.setattr(engine_transport, "OFFER_S", math.inf)
    first = unit.offer(1, 100)
    assert first is not None
    assert unit.offer(2, 100) is None
    monkeypatch.setattr(engine_transport, "OFFER_S", -math.inf)
    second = unit.offer(2, 100)
    assert second is not None
    assert not unit.settle(1, first.source.tag)
    assert unit.settle(2, second.source.tag)
