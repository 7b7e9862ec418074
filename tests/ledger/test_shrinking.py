"""Memory given back: what the ledger takes out of use, and which reports count."""

from __future__ import annotations

import pytest

from dataplane.errors import CapacityTimeoutError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.shrink import PAGE_BYTES
from tests.ledger.driver import MIB, Client, Driver
from tests.ledger.fingerprint import fingerprint

KIB = 1024


def large_unit(*, backed: int = 64 * MIB, capacity: int = 256 * MIB) -> tuple[Driver, Client]:
    driver = Driver(units=0, reserve_fraction=0.0)
    driver.add_unit(capacity=capacity, backed=backed)
    client = driver.client()
    client.register()
    driver.take_orders()
    return driver, client


def shrinks(driver: Driver) -> list[tuple[int, int, int]]:
    return [(o.unit, o.number, o.backed_bytes) for o in driver.take_orders() if isinstance(o, c.ShrinkArena)]


def grows(driver: Driver) -> list[int]:
    return [o.backed_bytes for o in driver.take_orders() if isinstance(o, c.GrowArena)]


def offer(driver: Driver, **facts: object) -> None:
    first = next(item for item in driver.log if isinstance(item, c.AddUnit))
    values = {name: getattr(first, name) for name in first.__struct_fields__}
    driver.apply(c.AddUnit(**{**values, "unit": 1, **facts}))


def given(client: Client, number: int) -> list[tuple[int, int, str]]:
    got = client.result(number)
    assert isinstance(got, c.Shrunken), got
    return [(one.given_bytes, one.backed_bytes, one.error) for one in got.units]


def test_what_is_free_above_the_highest_used_byte_goes_back_in_whole_pages() -> None:
    driver, client = large_unit()
    client.put(["a"], {"x": [100]})
    client.put(["b"], {"x": [100]})
    client.clear("a")
    driver.take_orders()
    number = client.waits(c.Shrink())
    assert shrinks(driver) == [(1, 1, PAGE_BYTES)]
    assert client.unit().unbacked_bytes == 256 * MIB - PAGE_BYTES
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=PAGE_BYTES))
    assert given(client, number) == [(64 * MIB - PAGE_BYTES, PAGE_BYTES, "")]
    assert client.call(c.Shrunken, c.Shrink()).given_bytes == 0


def test_space_that_is_being_given_up_is_handed_to_nobody_until_the_unit_has() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink())
    assert shrinks(driver) == [(1, 1, 0)]
    waiting = client.waits(client.allocate({"x": [KIB]}))
    assert grows(driver) == []
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0))
    assert grows(driver) == [64 * MIB]
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, shrinks=1))
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_unit_that_does_not_give_memory_back_is_told_of() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink(timeout_s=1.0))
    waiting = client.waits(client.allocate({"x": [KIB]}, timeout_s=20.0))
    driver.tick(20.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert "Storage unit 1 cannot grow: it has not answered for 20 s" in str(error)
    assert client.unit().problem.startswith("it has not answered for 20 s")
    driver.apply(c.UnitLost(unit=1))
    assert client.unit().problem == ""
    offer(driver, backed_bytes=64 * MIB)
    assert client.unit().problem == ""
    driver.tick(26.0)
    assert client.unit().problem.startswith("it has not answered for 6 s")


def test_growth_that_was_under_way_does_not_count() -> None:
    driver, client = large_unit()
    client.raw(client.allocate({"x": [60 * MIB]}))
    assert grows(driver) == [128 * MIB]
    client.waits(c.Shrink())
    assert shrinks(driver) == [(1, 1, 60 * MIB)]
    driver.apply(c.Grown(unit=1, backed_bytes=128 * MIB))
    assert client.unit().unbacked_bytes == 196 * MIB
    waiting = client.waits(client.allocate({"x": [40 * MIB]}))
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=60 * MIB))
    driver.apply(c.Grown(unit=1, backed_bytes=128 * MIB))
    assert client.result(waiting) is None
    driver.apply(c.Grown(unit=1, backed_bytes=124 * MIB, shrinks=1))
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_unit_that_was_lost_before_it_shrank_is_ordered_again() -> None:
    driver, client = large_unit()
    number = client.waits(c.Shrink())
    driver.apply(c.UnitLost(unit=1))
    assert given(client, number) == [(0, 0, "its connection to the controller was lost")]
    driver.take_orders()
    offer(driver, backed_bytes=64 * MIB, shrinks=0)
    assert client.unit().free_bytes == 0
    assert shrinks(driver) == [(1, 1, 0)]
    waiting = client.waits(client.allocate({"x": [KIB]}))
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0))
    assert grows(driver) == [64 * MIB]
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, shrinks=1))
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_unit_that_was_lost_after_it_shrank_is_believed() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink())
    driver.apply(c.UnitLost(unit=1))
    driver.take_orders()
    offer(driver, backed_bytes=0, shrinks=1)
    assert [type(order) for order in driver.take_orders()] == [c.UnitAdded, c.GrowArena]


def test_a_new_run_of_a_unit_that_shrank_long_ago_loses_nothing() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink())
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0))
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, shrinks=1))
    client.raw(client.allocate({"x": [60 * MIB]}))
    driver.apply(c.UnitLost(unit=1))
    driver.take_orders()
    offer(driver, backed_bytes=64 * MIB, epoch=2)
    assert shrinks(driver) == [(1, 1, 64 * MIB)]
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=64 * MIB))
    client.raw(client.allocate({"x": [4 * MIB]}))


def test_the_controller_lives_again_while_a_unit_shrinks() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink())
    driver.ledger = driver.ledger.restored(driver.ledger.image())
    driver.apply(c.Restarted(epoch=8, reserve_fraction=0.0, heartbeat_s=2.0, session_timeout_s=20.0))
    driver.take_orders()
    offer(driver, backed_bytes=64 * MIB)
    assert shrinks(driver) == [(1, 1, 0)]


def test_several_ask_at_once() -> None:
    driver, client = large_unit()
    other = driver.client()
    space = client.post(client.allocate({"x": [MIB]}))
    first = client.waits(c.Shrink())
    client.do(c.Abort(reservation=space))
    second = other.waits(c.Shrink())
    assert shrinks(driver) == [(1, 1, MIB), (1, 2, 0)]
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=MIB))
    assert given(client, first)[0][0] == 63 * MIB
    assert other.result(second) is None
    driver.apply(c.Shrunk(unit=1, number=2, backed_bytes=0))
    assert given(other, second)[0][0] == MIB


def test_a_unit_that_does_not_answer_or_cannot_is_named() -> None:
    driver, client = large_unit()
    late = client.waits(c.Shrink(timeout_s=3.0))
    driver.tick(3.0)
    assert given(client, late) == [(0, 0, "no answer within 3.0 s")]
    again = client.waits(c.Shrink())
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0, error="Operation not supported"))
    assert given(client, again) == [(0, 0, "Operation not supported")]
    driver.apply(c.UnitLost(unit=1))
    lost = client.call(c.Shrunken, c.Shrink())
    assert [(one.name, one.error) for one in lost.units] == [("u", "it is not connected")]
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        client.raise_(c.Shrink(timeout_s=-1.0))


def test_dropping_the_unit_ends_the_wait() -> None:
    driver, client = large_unit()
    number = client.waits(c.Shrink())
    driver.apply(c.DropUnit(unit=1, force=True))
    assert given(client, number)[0][2]
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0))


def test_who_stops_waiting_leaves_nothing() -> None:
    driver, client = large_unit()
    client.waits(c.Shrink())
    client.do(c.Bye())
    driver.apply(c.Shrunk(unit=1, number=1, backed_bytes=0))
    assert not driver.ledger._state.shrinkers
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
