"""Space: admission, the reserve, waiting in line, growing, several units."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import (
    CallCancelledError,
    CapacityTimeoutError,
    InvalidRequestError,
    PartitionDroppedError,
    PartitionNotFoundError,
    RequestTooLargeError,
    SampleExistsError,
    ServiceRestartedError,
    StaleSchemaError,
    StorageUnitError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from tests.ledger.driver import BYTES, MIB, Client, Driver, by_ids, commit_columns
from tests.ledger.fingerprint import fingerprint

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


# --- Space that a session allocates ahead: each small put's commit takes its own part of it.


SPACE = 1024


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client(attach=[1])
    client.register(fields=["x", "y"])
    return client


def allocate(client: Client, nbytes: int = SPACE) -> tuple[int, int]:
    """Number of the reservation, and where it begins."""
    call_id = client.post(c.Preallocate(unit=1, nbytes=nbytes))
    got = client.result(call_id)
    assert isinstance(got, c.Preallocated), got
    return call_id, got.offset


def commit(reservation: int, offset: int | None, sample: str, x: int = 10, y: int = 0, **more: Any) -> c.Commit:
    columns = commit_columns({"x": [x], **({"y": [y]} if y else {})})
    settings: dict[str, Any] = {
        "partition": "p",
        "samples": by_ids(sample),
        "mode": c.Mode.UPSERT,
        "columns": columns,
        **more,
    }
    return c.Commit(reservation=reservation, offset=offset, **settings)


def places(client: Client, sample: str, field: str = "x") -> tuple[int, int]:
    located = client.locate(by_ids(sample), [field]).fields[0]
    client.do(c.Release(located=client.last_call_id))
    return int(located.offsets[0]), int(located.lengths[0])


def test_columns_lie_one_after_another_each_from_a_granule_of_its_own(client: Client) -> None:
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start, "a", x=70, y=5))
    assert places(client, "a", "x") == (start, 70)
    assert places(client, "a", "y") == (start + 128, 5)


def test_a_kind_taken_from_a_schema_that_no_longer_names_it_is_refused(client: Client) -> None:
    reservation, start = allocate(client)
    columns = tuple(msgspec.structs.replace(column, by_schema=True) for column in commit_columns({"x": [10]}))
    with pytest.raises(StaleSchemaError, match="'x'"):
        client.raise_(commit(reservation, start, "a", columns=columns))
    client.call(c.Committed, commit(reservation, start, "a"))
    client.call(c.Committed, commit(reservation, start + 64, "b", columns=columns))


def test_parts_may_be_taken_in_any_order_and_what_is_left_goes_back_whole(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client)
    for number, part in enumerate([5, 0, 15, 7, 6]):
        client.call(c.Committed, commit(reservation, start + 64 * part, f"s{number}"))
        assert client.used() == SPACE, "taken or not, all of it is in use"
    held = sorted(driver.ledger.held_ranges())
    assert [size for _, _, size in held] == [64, 256, 64, 64, 64, 448, 64]
    client.do(c.Abort(reservation=reservation))
    assert client.used() == 5 * 64
    client.clear("s0", "s1", "s2", "s3", "s4")
    assert client.used() == 0
    assert driver.ledger.free_ranges(1) == [(0, MIB)]


def test_preallocated_space_used_up_holds_nothing_and_its_abort_is_harmless(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client, 128)
    client.call(c.Committed, commit(reservation, start, "a", x=100))
    client.do(c.Abort(reservation=reservation))
    assert places(client, "a") == (start, 100)
    client.clear("a")
    assert client.used() == 0


@pytest.mark.parametrize(("at", "x"), [(0, SPACE + 1), (SPACE, 1), (-64, 1), (32, 1), (64 * 15, 65), (None, 1)])
def test_a_commit_outside_the_space_is_refused_and_takes_nothing(client: Client, at: int | None, x: int) -> None:
    reservation, start = allocate(client)
    with pytest.raises(InvalidRequestError):
        client.raise_(commit(reservation, None if at is None else start + at, "a", x=x))
    client.call(c.Committed, commit(reservation, start, "b", x=SPACE))


def test_the_same_part_cannot_be_taken_twice(client: Client) -> None:
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start, "a"))
    with pytest.raises(InvalidRequestError, match="not within the unused part"):
        client.raise_(commit(reservation, start, "b"))


def test_a_fault_leaves_the_part_reserved(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start, "a"))
    with pytest.raises(SampleExistsError):
        client.raise_(commit(reservation, start + 64, "a", mode=c.Mode.CREATE))
    assert client.used() == SPACE
    client.call(c.Committed, commit(reservation, start + 64, "b", mode=c.Mode.CREATE))


def test_space_of_one_put_takes_no_offset(client: Client) -> None:
    call_id = client.post(client.allocate({"x": [10]}))
    with pytest.raises(InvalidRequestError, match="offset"):
        client.raise_(commit(call_id, 0, "a"))


def test_shared_values_and_rows_of_no_bytes(client: Client) -> None:
    reservation, start = allocate(client)
    columns = commit_columns({"x": [3, 4]}, index=[1, 0, 1])
    command = c.Commit(
        partition="p",
        samples=by_ids("a", "b", "c"),
        mode=c.Mode.UPSERT,
        reservation=reservation,
        offset=start,
        columns=columns,
    )
    client.call(c.Committed, command)
    assert [places(client, name) for name in "abc"] == [(start + 3, 4), (start, 3), (start + 3, 4)]
    client.call(c.Committed, commit(reservation, start + 64, "d", x=0))
    assert places(client, "d")[1] == 0
    client.call(c.Committed, commit(reservation, start + 64, "e"))


def test_only_a_session_local_to_the_unit_gets_preallocated_space(driver: Driver) -> None:
    remote = driver.client()
    with pytest.raises(InvalidRequestError, match="has not mapped the arena of unit"):
        remote.raise_(c.Preallocate(unit=1, nbytes=64))
    with pytest.raises(InvalidRequestError, match="has not mapped the arena of unit"):
        driver.client(attach=[1]).raise_(c.Preallocate(unit=9, nbytes=64))


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 63])
def test_space_of_an_impossible_size_is_refused(client: Client, nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match="bytes of preallocated space"):
        client.raise_(c.Preallocate(unit=1, nbytes=nbytes))


def test_a_large_part_is_refused_and_so_is_any_once_half_is_used() -> None:
    driver = Driver(capacity=100 * 64, limits=Limits(preallocated_divisor=8), reserve_fraction=0.2)
    client = driver.client(attach=[1])
    client.register(fields=["x"])
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=11 * 64))
    for _ in range(4):
        allocate(client, 10 * 64)
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=64))
    client.put(["a"], {"x": [40 * 64]})


def test_nobody_gets_preallocated_space_while_puts_wait_for_memory(driver: Driver, client: Client) -> None:
    # Only what is beyond the reserve waits: a little space for others is left.
    client.put(["a"], {"x": [MIB * 84 // 100]})
    client.waits(client.allocate({"x": [MIB // 4]}))
    client.clear("a")
    client.put(["b"], {"x": [64]})
    client.waits(client.allocate({"x": [MIB * 4 // 5]}))
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=64))


def test_a_put_that_waits_for_its_budget_keeps_nobody_from_preallocated_space(client: Client) -> None:
    client.register("full", budget_bytes=128)
    client.put(["a"], {"x": [64]}, partition="full")
    waiting = client.waits(client.allocate({"x": [64]}, "full"))
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start, "b"))
    assert client.result(waiting) is None
    client.clear("a", partition="full")
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_put_that_waits_for_a_larger_piece_keeps_others_from_the_bytes_it_wants_only() -> None:
    driver = Driver(capacity=100 * 64, limits=Limits(preallocated_divisor=8), reserve_fraction=0.0)
    client = driver.client(attach=[1])
    client.register(fields=["x"])
    for i in range(10):
        client.put([f"s{i}"], {"x": [10 * 64]})
    client.clear("s0", "s2", "s4", "s6", "s8", "s9")
    waiting = client.waits(client.allocate({"x": [55 * 64]}))
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=6 * 64))
    allocate(client, 5 * 64)
    assert client.result(waiting) is None


def test_space_comes_back_when_its_session_is_proven_gone(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start + 128, "a"))
    other = driver.client("other")
    driver.apply(c.SessionSilent(session=client.session))
    assert other.used() == SPACE
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert other.used() == 64
    assert places(other, "a") == (start + 128, 10)


def test_space_of_a_lost_unit_takes_nothing(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client)
    driver.apply(c.UnitLost(unit=1))
    with pytest.raises(StorageUnitError):
        client.raise_(commit(reservation, start, "a"))
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=64))
    driver.add_unit(name="unit0", epoch=2)
    with pytest.raises(ServiceRestartedError):
        client.raise_(commit(reservation, start, "a"))


def test_overflowing_lengths_are_refused(client: Client) -> None:
    reservation, start = allocate(client)
    column = c.CommitColumn(name="x", spec=BYTES, lengths=np.array([(1 << 63) - 1], np.int64))
    command = c.Commit(
        partition="p", samples=by_ids("a"), mode=c.Mode.UPSERT, reservation=reservation, offset=start, columns=(column,)
    )
    with pytest.raises(InvalidRequestError):
        client.raise_(command)


def test_the_log_of_commits_into_preallocated_space_replays(driver: Driver, client: Client) -> None:
    reservation, start = allocate(client)
    client.call(c.Committed, commit(reservation, start + 64, "a", x=100, y=3))
    client.call(c.Committed, commit(reservation, start, "b"))
    client.clear("b")
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)


# --- What ends a wait that is judged by what changed: one test for each thing that has to be noticed.


def start(**settings: object) -> tuple[Driver, Client]:
    driver = Driver(capacity=64 * KIB, reserve_fraction=0.0)
    client = driver.client()
    client.register(**settings)  # type: ignore[arg-type]
    return driver, client


def test_a_version_that_goes_back() -> None:
    _, client = start()
    client.do(c.SetVersion(partition="p", version=5))
    client.put(["a", "b"], tags={"weight_version": [1, 2]})
    waiting = client.waits(client.claim(1, max_lag=2))
    client.put(["c"], tags={"weight_version": [0]})
    client.do(c.SetVersion(partition="p", version=4))
    assert client.claimed_by(waiting) == ("b",)


def test_a_tag_that_is_set_again() -> None:
    _, client = start()
    client.put(["a", "b"], tags={"score": [0, 0]})
    waiting = client.waits(client.claim(1, where=(c.Predicate(tag="score", op=">", value=0),)))
    client.put(["c"], tags={"score": [0]})
    client.do(c.SetTags(partition="p", samples=by_ids("b"), tags=(c.TagColumn(name="score", values=(1,)),)))
    assert client.claimed_by(waiting) == ("b",)


def test_a_sample_that_changes_its_group_and_groups_that_come_after_others_went() -> None:
    _, client = start()
    client.put(["a", "b", "c"], tags={"group": [1, 2, 3]})
    waiting = client.waits(client.claim(2, group_size=2))
    client.put(["d"], tags={"group": [4]})
    client.clear("a", "d")
    client.put(["e", "f"], tags={"group": [5, 6]})
    client.do(c.SetTags(partition="p", samples=by_ids("f"), tags=(c.TagColumn(name="group", values=("six",)),)))
    assert client.result(waiting) is None
    client.do(c.SetTags(partition="p", samples=by_ids("b"), tags=(c.TagColumn(name="group", values=(3,)),)))
    assert client.claimed_by(waiting) == ("b", "c")


@pytest.mark.parametrize("partial", [c.Partial.RELEASE, c.Partial.DROP])
def test_groups_whose_time_is_over_before_enough_are_there(partial: c.Partial) -> None:
    driver, client = start()
    client.put(["a", "b"], tags={"group": [1, 2]})
    claim = client.claim(6, group_size=2, partial_after_s=1.0, partial=partial)
    waiting = client.waits(claim)
    driver.tick(1.0)
    client.put(["c", "d"], tags={"group": [3, 3]})
    client.put(["e", "f", "g", "h"], tags={"group": [4, 4, 5, 5]})
    assert isinstance(client.result(waiting), c.Claimed)


def test_a_whole_group_of_which_another_takes_a_part() -> None:
    driver, client = start(tasks=("train",))
    client.put(["a", "b", "c"], tags={"group": [1, 1, 2]})
    waiting = client.waits(client.claim(4, group_size=2, partial_after_s=1.0))
    driver.tick(0.5)
    assert client.result(waiting) is None
    client.claimed(1)
    driver.tick(1.0)
    assert client.claimed_by(waiting) == ("b", "c")


def test_the_rank_that_comes_first_deals_to_those_that_wait_on_other_terms() -> None:
    _, client = start()
    waiting = client.waits(client.claim(8, dp_rank=0, dp_world=2, step=0))
    client.put(["a", "b"])
    other = client.call(c.Claimed, client.claim(2, dp_rank=1, dp_world=2, step=0))
    assert other.ids == ("b",)
    assert type(client.result(waiting)).__name__ == "InvalidRequestError"


def full(policy: c.WhenFull, **settings: object) -> tuple[Driver, Client, Client]:
    """Eight samples of 1 KiB fill the budget, the second client's put of one more waits."""
    driver, client = start(budget_bytes=8 * KIB, when_full=policy, **settings)
    for i in range(8):
        client.put([f"s{i}"], {"x": [KIB]})
    return driver, client, driver.client()


def test_a_claim_that_is_confirmed() -> None:
    _, client, other = full(c.WhenFull.EVICT)
    waiting = other.waits(other.allocate({"x": [KIB]}))
    client.claimed(1)
    assert other.result(waiting) is None
    client.stats()
    assert isinstance(other.result(waiting), c.Allocated)


def test_a_lease_that_is_given_back() -> None:
    driver, client, other = full(c.WhenFull.EVICT_OLDEST)
    client.claimed(8, lease_s=5.0)
    waiting = other.waits(other.allocate({"x": [KIB]}))
    driver.tick(5.0)
    assert isinstance(other.result(waiting), c.Allocated)


def test_a_reader_that_is_done() -> None:
    _, client, other = full(c.WhenFull.EVICT_OLDEST)
    client.locate(by_ids(*[f"s{i}" for i in range(8)]))
    located = client.last_call_id
    waiting = other.waits(other.allocate({"x": [KIB]}))
    client.put(["elsewhere"], tags={"score": [1]})
    assert other.result(waiting) is None
    client.do(c.Release(located=located))
    assert isinstance(other.result(waiting), c.Allocated)


def test_a_sample_that_goes_leaves_others_alone_in_their_bytes() -> None:
    """Both lie in one piece, of which what is left is too much to come back."""
    driver, client = start(budget_bytes=8 * KIB, when_full=c.WhenFull.EVICT_OLDEST)
    client.put(["a", "b"], {"x": [3 * KIB, 5 * KIB]})
    client.claimed(1, lease_s=60.0)
    client.stats()
    other = driver.client()
    waiting = other.waits(other.allocate({"x": [8 * KIB]}))
    assert other.result(waiting) is None
    client.clear("a")
    assert isinstance(other.result(waiting), c.Allocated)


def test_a_unit_that_is_drained_no_more() -> None:
    """What could go lay there, and was of no use."""
    driver, client = start(when_full=c.WhenFull.EVICT_OLDEST)
    client.put(["a", "b"], {"x": [32 * KIB, 32 * KIB]})
    client.do(c.Drain(unit=1, force=True))
    driver.add_unit(name="small", capacity=KIB)
    client.register("q")
    client.post(client.allocate({"x": [KIB]}, "q"))
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.do(c.Drain(unit=1, undo=True))
    assert isinstance(client.result(waiting), c.Allocated)


def test_what_a_rejected_put_saw_is_not_held_against_a_later_one() -> None:
    _, client, other = full(c.WhenFull.EVICT)
    other.raw(other.allocate({"x": [KIB]}, on_full=c.OnFull.REJECT))
    client.claimed(1)
    client.stats()
    later = other.post(other.allocate({"x": [KIB]}))
    assert isinstance(other.result(later), c.Allocated)


def test_a_task_that_had_not_consumed_and_is_left_out() -> None:
    _, client, other = full(c.WhenFull.EVICT, tasks=("train", "score"))
    client.claimed(8)
    client.stats()
    waiting = other.waits(other.allocate({"x": [KIB]}))
    client.register(budget_bytes=8 * KIB, when_full=c.WhenFull.EVICT)
    assert isinstance(other.result(waiting), c.Allocated)


def test_another_policy() -> None:
    _, client, other = full(c.WhenFull.EVICT)
    waiting = other.waits(other.allocate({"x": [KIB]}))
    client.register(budget_bytes=8 * KIB, when_full=c.WhenFull.EVICT_OLDEST)
    assert isinstance(other.result(waiting), c.Allocated)


def test_who_held_up_others_waits_for_its_budget_now() -> None:
    """An update of its partition took some of that meanwhile."""
    _, client = start(budget_bytes=36 * KIB)
    client.register("q")
    client.put(["a"], tags={"score": [1]})
    client.put(["big"], {"x": [30 * KIB]}, partition="q")
    first = client.waits(client.allocate({"x": [35 * KIB]}))
    second = client.waits(client.allocate({"x": [KIB]}, "q"))
    update = client.post(client.allocate({"x": [2 * KIB]}, update=True))
    assert isinstance(client.result(update), c.Allocated)
    assert client.result(first) is None
    assert isinstance(client.result(second), c.Allocated)


def test_what_a_claim_drops_makes_space() -> None:
    driver, client = start(budget_bytes=2 * KIB)
    client.put(["a"], {"x": [2 * KIB]}, tags={"group": [1]})
    space = client.waits(client.allocate({"x": [KIB]}))
    claim = client.waits(client.claim(2, group_size=2, partial_after_s=1.0, partial=c.Partial.DROP))
    driver.tick(1.0)
    assert isinstance(client.result(space), c.Allocated)
    assert client.result(claim) is None
