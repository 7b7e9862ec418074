"""Space: admission, the reserve, waiting in line, growing, several units."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import (
    CallCancelledError,
    CapacityTimeoutError,
    InvalidRequestError,
    PartitionDroppedError,
    PartitionNotFoundError,
    RequestTooLargeError,
)
from dataplane.ledger import commands as c
from tests.ledger.driver import MIB, Client, Driver

KIB = 1024


def small(**settings: object) -> tuple[Driver, Client]:
    """One arena of 10 KiB, 2 KiB of it in reserve."""
    driver = Driver(capacity=10 * KIB, **{"reserve_fraction": 0.2, **settings})  # type: ignore[arg-type]
    client = driver.client()
    client.register()
    return driver, client


def test_new_rows_leave_the_reserve_to_updates() -> None:
    _, client = small()
    client.put(["a"], {"x": [8 * KIB]})
    new = client.waits(client.allocate({"x": [64]}))
    client.put(["a"], {"y": [KIB]}, mode=c.Mode.UPDATE, update=True)
    assert client.result(new) is None
    client.clear("a")
    assert isinstance(client.result(new), c.Allocated)


def test_space_for_updates_makes_no_new_rows() -> None:
    _, client = small()
    with pytest.raises(InvalidRequestError, match="reserved space for updates"):
        client.put(["a"], {"x": [64]}, update=True)
    assert client.used() == 0


def test_first_come_first_served_within_a_class_and_classes_do_not_block_each_other() -> None:
    _, client = small()
    client.put(["a"], {"x": [8 * KIB]})
    large = client.waits(client.allocate({"x": [6 * KIB]}))
    little = client.waits(client.allocate({"x": [64]}))
    update = client.post(client.allocate({"x": [64]}, update=True))
    assert isinstance(client.result(update), c.Allocated)
    client.do(c.Abort(reservation=update))
    assert client.result(little) is None
    client.clear("a")
    assert isinstance(client.result(large), c.Allocated)
    assert isinstance(client.result(little), c.Allocated)


def test_what_can_never_fit_is_refused_at_once() -> None:
    driver, client = small()
    with pytest.raises(RequestTooLargeError) as caught:
        client.raise_(client.allocate({"x": [8 * KIB + 1]}))
    assert caught.value.limit_bytes == 8 * KIB
    client.raw(client.allocate({"x": [9 * KIB]}, update=True))
    driver.add_unit(name="more", capacity=10 * KIB)
    client.waits(client.allocate({"x": [4 * KIB] * 4}))
    with pytest.raises(RequestTooLargeError, match="largest value"):
        client.raise_(client.allocate({"x": [9 * KIB]}))


def test_rejecting_instead_of_waiting_names_the_holders() -> None:
    _, client = small()
    client.put(["a"], {"x": [6 * KIB]})
    client.raw(client.allocate({"x": [2 * KIB]}))
    with pytest.raises(CapacityTimeoutError) as caught:
        client.raise_(client.allocate({"x": [64]}, on_full=c.OnFull.REJECT))
    assert caught.value.holders == [
        ("partition 'p' (1 samples, 1 not claimed by 'train')", 6 * KIB),
        ("reservations of session 1 (client, live)", 2 * KIB),
    ]
    assert caught.value.free_bytes == 0


def test_a_wait_for_space_times_out_and_the_next_in_line_is_served() -> None:
    driver, client = small()
    client.put(["a"], {"x": [6 * KIB]})
    first = client.waits(client.allocate({"x": [4 * KIB]}, timeout_s=5.0))
    second = client.waits(client.allocate({"x": [KIB]}))
    driver.tick(5.0)
    error = client.result(first)
    assert isinstance(error, CapacityTimeoutError)
    assert error.wanted_bytes == 4 * KIB
    assert error.waited_s == 5.0
    assert isinstance(client.result(second), c.Allocated)


def test_abort_of_a_parked_call_ends_it_and_serves_the_next() -> None:
    _, client = small()
    client.put(["a"], {"x": [6 * KIB]})
    first = client.waits(client.allocate({"x": [4 * KIB]}))
    second = client.waits(client.allocate({"x": [KIB]}))
    client.do(c.Abort(reservation=first))
    assert isinstance(client.result(first), CallCancelledError)
    assert isinstance(client.result(second), c.Allocated)


def test_dropping_the_partition_ends_waits_for_space() -> None:
    _, client = small()
    client.register("other")
    client.put(["a"], {"x": [8 * KIB]}, partition="other")
    waiting = client.waits(client.allocate({"x": [64]}))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert isinstance(client.result(waiting), PartitionDroppedError)


@pytest.mark.parametrize(
    "bad",
    [
        {"columns": (c.ColumnSizes(name="x", sizes=np.array([-1])),)},
        {"columns": (c.ColumnSizes(name="x", sizes=np.array([1])),) * 2},
        {"columns": (c.ColumnSizes(name="x", sizes=np.array([1 << 62, 1 << 62])),)},
        {"columns": (), "timeout_s": -1.0},
        {"columns": (c.ColumnSizes(name="", sizes=np.array([1])),)},
    ],
)
def test_malformed_requests_are_refused(bad: dict[str, object]) -> None:
    _, client = small()
    with pytest.raises(InvalidRequestError):
        client.raise_(c.Allocate(partition="p", **bad))  # type: ignore[arg-type]
    with pytest.raises(PartitionNotFoundError):
        client.raise_(client.allocate({"x": [1]}, partition="none"))


def test_refusing_or_parking_looks_into_sessions_that_missed_a_heartbeat() -> None:
    driver, client = small()
    quiet = driver.client("quiet", attach=[1])
    quiet.raw(quiet.allocate({"x": [8 * KIB]}))
    driver.tick(2.5)
    waiting = client.waits(client.allocate({"x": [64]}))
    assert driver.fences() == [(1, quiet.session)]
    driver.apply(c.SessionGone(unit=1, session=quiet.session))
    assert isinstance(client.result(waiting), c.Allocated)


# --- growing


def grows(driver: Driver) -> list[tuple[int, int]]:
    return [(o.unit, o.backed_bytes) for o in driver.take_orders() if isinstance(o, c.GrowArena)]


def test_an_arena_grows_ahead_of_demand_and_puts_wait_for_it() -> None:
    driver = Driver(units=0)
    client = driver.client()
    client.register()
    driver.add_unit(capacity=1024 * MIB, backed=0)
    assert grows(driver) == [(1, 128 * MIB)]
    waiting = client.waits(client.allocate({"x": [MIB]}))
    assert grows(driver) == []
    driver.apply(c.Grown(unit=1, backed_bytes=128 * MIB))
    assert isinstance(client.result(waiting), c.Allocated)
    assert grows(driver) == [(1, 256 * MIB)]
    large = client.waits(client.allocate({"x": [700 * MIB]}))
    assert grows(driver) == [(1, 828 * MIB)]
    driver.apply(c.Grown(unit=1, backed_bytes=828 * MIB))
    assert isinstance(client.result(large), c.Allocated)
    assert client.unit().unbacked_bytes == 196 * MIB


def test_a_put_that_does_not_wait_for_space_waits_for_an_arena_that_grows() -> None:
    driver = Driver(units=0, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    driver.add_unit(capacity=100 * MIB, backed=0)
    first = client.waits(client.allocate({"x": [80 * MIB]}, on_full=c.OnFull.REJECT))
    second = client.waits(client.allocate({"x": [80 * MIB]}, on_full=c.OnFull.REJECT))
    driver.apply(c.Grown(unit=1, backed_bytes=100 * MIB))
    assert isinstance(client.result(first), c.Allocated)
    assert isinstance(client.result(second), CapacityTimeoutError)


FULL = "the arena needs 9 bytes in /dev/shm, which has 5 free."


def stuck() -> tuple[Driver, Client, int]:
    """A put that waits for an arena that cannot grow."""
    driver = Driver(units=0, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    driver.add_unit(capacity=1024 * MIB, backed=64 * MIB)
    waiting = client.waits(client.allocate({"x": [100 * MIB]}, timeout_s=4.5))
    driver.take_orders()
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, error=FULL))
    return driver, client, waiting


def test_an_arena_that_cannot_grow_is_asked_again_as_long_as_somebody_waits() -> None:
    driver, client, waiting = stuck()
    assert grows(driver) == []
    assert driver.ledger.next_deadline() == 1.0
    driver.tick(1.0)
    assert grows(driver) == [(1, 164 * MIB)]
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, error=FULL))
    driver.tick(2.0)
    assert grows(driver) == [(1, 164 * MIB)]
    driver.apply(c.Grown(unit=1, backed_bytes=164 * MIB))
    assert isinstance(client.result(waiting), c.Allocated)
    client.raw(client.allocate({"x": [32 * MIB]}))


def test_who_waits_in_vain_for_an_arena_is_told_what_it_lacks() -> None:
    driver, client, waiting = stuck()
    driver.tick(4.5)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert error.arena == f"Storage unit 1 cannot grow: {FULL}"
    assert error.free_bytes == 64 * MIB
    driver.take_orders()
    client.raw(client.allocate({"x": [64 * MIB]}))
    driver.tick(20.0)
    assert grows(driver) == []
    with pytest.raises(RequestTooLargeError):
        client.raise_(client.allocate({"x": [1025 * MIB]}))


def test_who_waits_in_vain_for_a_unit_that_does_not_answer_is_told_so() -> None:
    driver = Driver(units=0, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    driver.add_unit(capacity=1024 * MIB, backed=64 * MIB)
    driver.tick(1.0)
    waiting = client.waits(client.allocate({"x": [100 * MIB]}, timeout_s=10.0))
    driver.tick(4.9)
    assert client.unit().problem == ""
    driver.tick(11.0)
    why = "it has not answered for 11 s; its process may be stopped, or its machine too busy"
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert str(error).endswith(f"Storage unit 1 cannot grow: {why}. Fix the cause, or clear consumed samples.")
    assert client.unit().problem == why
    driver.apply(c.Grown(unit=1, backed_bytes=164 * MIB))
    assert client.unit().problem == ""


def test_a_put_that_does_not_wait_tries_an_arena_that_could_not_grow_once() -> None:
    driver, client, waiting = stuck()
    client.do(c.Abort(reservation=waiting))
    with pytest.raises(CapacityTimeoutError, match="9 bytes in /dev/shm, which has 5 free"):
        client.raise_(client.allocate({"x": [100 * MIB]}, on_full=c.OnFull.REJECT))
    driver.tick(1.0)
    trying = client.waits(client.allocate({"x": [100 * MIB]}, on_full=c.OnFull.REJECT))
    assert grows(driver) == [(1, 164 * MIB)]
    driver.apply(c.Grown(unit=1, backed_bytes=64 * MIB, error=FULL))
    assert isinstance(client.result(trying), CapacityTimeoutError)


def test_a_put_before_any_unit_waits_for_one() -> None:
    driver = Driver(units=0)
    client = driver.client()
    client.register()
    waiting = client.waits(client.allocate({"x": [64]}))
    driver.add_unit()
    assert isinstance(client.result(waiting), c.Allocated)


# --- several units


def two_hosts() -> tuple[Driver, Client]:
    driver = Driver(units=0, reserve_fraction=0.0)
    driver.add_unit(name="far", host="far", capacity=20 * KIB)
    driver.add_unit(name="near", host="here", capacity=10 * KIB)
    client = driver.client(host="here")
    client.register()
    return driver, client


def where(client: Client, command: c.Allocate) -> list[tuple[int, int, int, int]]:
    got = client.call(c.Allocated, command)
    return [(p.column, p.first, p.last, p.unit) for p in got.placements]


def test_the_wish_then_attached_then_same_host_then_the_emptiest() -> None:
    driver, client = two_hosts()
    assert where(client, client.allocate({"x": [64]}, unit_wish=1)) == [(0, 0, 1, 1)]
    assert where(client, client.allocate({"x": [64]})) == [(0, 0, 1, 2)]
    stranger = driver.client(host="elsewhere")
    assert where(stranger, stranger.allocate({"x": [64]})) == [(0, 0, 1, 1)]
    attached = driver.client(host="elsewhere", attach=[2])
    assert where(attached, attached.allocate({"x": [64]})) == [(0, 0, 1, 2)]
    assert where(client, client.allocate({"x": [12 * KIB]})) == [(0, 0, 1, 1)]


def test_a_put_that_fits_no_single_unit_is_spread() -> None:
    _, client = two_hosts()
    got = where(client, client.allocate({"x": [8 * KIB], "y": [4 * KIB] * 4, "z": [4 * KIB]}))
    assert got == [(0, 0, 1, 2), (1, 0, 4, 1), (2, 0, 1, 1)]
    assert where(client, client.allocate({"x": [64] * 32})) == [(0, 0, 32, 2)]
    waiting = client.waits(client.allocate({"x": [64]}))
    client.do(c.Abort(reservation=1 + 1))
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_lost_unit_gets_nothing_new() -> None:
    driver, client = two_hosts()
    driver.apply(c.UnitLost(unit=2))
    assert where(client, client.allocate({"x": [64]}, unit_wish=2)) == [(0, 0, 1, 1)]


def test_failing_to_place_takes_nothing() -> None:
    _, client = small(reserve_fraction=0.0)
    client.put(["s0"], {"x": [9 * KIB + 512]})
    client.waits(client.allocate({"x": [256], "y": [256], "z": [256]}))
    assert client.used() == 9 * KIB + 512
    client.clear("s0")
    assert client.used() == 768
