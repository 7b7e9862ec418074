"""Space that a session allocates ahead: each small put's commit takes its own part of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import (
    CapacityTimeoutError,
    InvalidRequestError,
    SampleExistsError,
    ServiceRestartedError,
    StaleSchemaError,
    StorageUnitError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from tests.ledger.driver import BYTES, MIB, Client, Driver, by_ids, commit_columns
from tests.ledger.fingerprint import fingerprint

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
    number = client.post(c.Preallocate(unit=1, nbytes=nbytes))
    got = client.result(number)
    assert isinstance(got, c.Preallocated), got
    return number, got.offset


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
    client.do(c.Release(located=client.number))
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


def test_parts_have_extents_of_their_own(client: Client) -> None:
    """As if each had its own commit: clearing the samples of one part frees its bytes."""
    reservation, start = allocate(client)
    names, columns = ("a", "b", "c"), commit_columns({"x": [10, 20, 30], "y": [0, 70, 1]})
    together = c.Commit(
        partition="p",
        samples=by_ids(*names),
        mode=c.Mode.UPSERT,
        reservation=reservation,
        offset=start,
        columns=columns,
        parts=(1, 0, 2),
    )
    client.call(c.Committed, together)
    assert [places(client, name)[0] - start for name in names] == [0, 64, 84]
    assert [places(client, name, "y")[0] - start for name in names[1:]] == [128, 198]
    client.do(c.Abort(reservation=reservation))
    assert client.used() == 64 + 64 + 128
    client.clear("a")
    assert client.used() == 64 + 128
    client.clear("b", "c")
    assert client.used() == 0


@pytest.mark.parametrize(("parts", "index"), [((1, 1), [0, 0]), ((2, 1), None), ((1,), None), ((3, -1), None)], ids=str)
def test_parts_have_one_value_per_sample(client: Client, parts: tuple[int, ...], index: list[int] | None) -> None:
    reservation, start = allocate(client)
    columns = commit_columns({"x": [10, 20]}, index=index)
    with pytest.raises(InvalidRequestError, match="parts"):
        client.raise_(commit(reservation, start, "a", columns=columns, samples=by_ids("a", "b"), parts=parts))
    client.call(c.Committed, commit(reservation, start, "a"))


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
    number = client.post(client.allocate({"x": [10]}))
    with pytest.raises(InvalidRequestError, match="offset"):
        client.raise_(commit(number, 0, "a"))


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
    driver = Driver(capacity=100 * 64, limits=Limits(preallocated_part=8), reserve_fraction=0.2)
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
    driver = Driver(capacity=100 * 64, limits=Limits(preallocated_part=8), reserve_fraction=0.0)
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
