"""Draining a unit, in the ledger: what it gets no more, what is found on it, and which cells are moved."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import (
    CapacityTimeoutError,
    DrainError,
    InvalidRequestError,
    PartitionDroppedError,
    RequestTooLargeError,
)
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.samples.drain import Drains
from tests.ledger.driver import BYTES, MIB, Client, Driver, by_ids, handles
from tests.ledger.fingerprint import fingerprint

KIB = 1024


def two_units(*, capacity: int = MIB, **settings: object) -> tuple[Driver, Client]:
    driver = Driver(units=2, capacity=capacity, reserve_fraction=0.0, **settings)
    client = driver.client()
    client.register()
    return driver, client


def find(client: Client, unit: int = 1, **more: object) -> tuple[int, c.FoundCells]:
    call_id = client.post(c.FindCells(unit=unit, **more))
    found = client.result(call_id)
    assert isinstance(found, c.FoundCells), found
    return call_id, found


def reserve(client: Client, found: c.FoundCells, **more: object) -> int:
    sizes = c.ColumnSizes(name=found.field, sizes=found.lengths * found.spec.unit_bytes)
    settings = {"on_full": c.OnFull.REJECT, **more}
    call_id = client.post(c.Allocate(partition=found.partition, columns=(sizes,), update=True, moving=True, **settings))
    got = client.result(call_id)
    if isinstance(got, Exception):
        raise got
    return call_id


def switch(found: c.FoundCells, located: int, reservation: int, unit: int = 1, **more: object) -> c.Move:
    facts = {
        "partition": found.partition,
        "field": found.field,
        "unit": unit,
        "rows": found.rows,
        "generations": found.generations,
        "index": found.index,
        "offsets": found.offsets,
        "lengths": found.lengths,
        "located": located,
        "reservation": reservation,
    }
    return c.Move(**{**facts, **more})


def move_page(client: Client, unit: int = 1, **more: object) -> c.Moved:
    located, found = find(client, unit, **more)
    return client.call(c.Moved, switch(found, located, reserve(client, found), unit))


def places(client: Client, *ids: str, field: str = "x") -> list[tuple[int, int, int]]:
    located = client.locate(by_ids(*ids), (field,))
    (cells,) = located.fields
    client.do(c.Release(located=client.last_call_id))
    return list(zip(cells.units.tolist(), cells.offsets.tolist(), cells.lengths.tolist(), strict=True))


def test_a_unit_that_is_drained_gets_nothing_new() -> None:
    driver, client = two_units()
    client.do(c.Drain(unit=1))
    assert [unit.draining for unit in client.stats().units] == [True, False]
    client.put(["a"], {"x": [KIB]}, unit_wish=1)
    assert places(client, "a")[0][0] == 2
    driver.apply(c.SessionAttached(unit=1, session=client.session))
    with pytest.raises(CapacityTimeoutError):
        client.raise_(c.Preallocate(unit=1, nbytes=100))
    client.do(c.Drain(unit=1, undo=True))
    client.put(["b"], {"x": [KIB]}, unit_wish=1)
    assert places(client, "b")[0][0] == 1


def test_puts_wait_for_the_units_that_are_left_and_are_told_who_is_drained() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [MIB]}, unit_wish=2)
    client.do(c.Drain(unit=1, force=True))
    waiting = client.waits(client.allocate({"x": [KIB]}, timeout_s=5.0))
    driver.tick(6.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert "storage unit 1 (unit0), which is being drained" in str(error)
    with pytest.raises(RequestTooLargeError):
        client.raise_(client.allocate({"x": [MIB, KIB]}))
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.do(c.Drain(unit=1, undo=True))
    assert isinstance(client.result(waiting), c.Allocated)


def test_the_last_unit_with_space_is_drained_only_by_force() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [KIB]}, unit_wish=2)
    client.do(c.Drain(unit=1))
    with pytest.raises(
        DrainError, match=r"storage unit 2 is not drained: no other .* has space .*\(force=True\)"
    ) as last:
        client.raise_(c.Drain(unit=2))
    assert (last.value.marked, last.value.cells, list(last.value.live)) == (False, 1, ["p"])
    assert [unit.draining for unit in client.stats().units] == [True, False]
    client.do(c.Drain(unit=1))
    client.do(c.Drain(unit=2, force=True))
    client.do(c.Drain(unit=2))
    assert [unit.draining for unit in client.stats().units] == [True, True]
    client.do(c.Drain(unit=1, undo=True))
    driver.apply(c.UnitLost(unit=1))
    client.do(c.Drain(unit=2, undo=True))
    with pytest.raises(DrainError, match="no other storage unit has space for new rows, and"):
        client.raise_(c.Drain(unit=2))


def test_units_without_space_for_new_rows_take_the_place_of_none() -> None:
    _, client = two_units()
    client.put(["a"], {"x": [MIB]}, unit_wish=2)
    with pytest.raises(DrainError, match=r"\(the others are full\)"):
        client.raise_(c.Drain(unit=1))
    client.do(c.Drain(unit=2))


def test_unknown_units_and_pages_of_nothing_are_refused() -> None:
    _, client = two_units()
    for command in (c.Drain(unit=7), c.FindCells(unit=7), c.Forget(unit=7)):
        with pytest.raises(InvalidRequestError, match=r"no storage unit 7; registered units are: 1, 2"):
            client.raise_(command)
    for wrong in ({"max_cells": 0}, {"max_bytes": 0}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}):
        with pytest.raises(InvalidRequestError):
            client.raise_(c.FindCells(unit=1, **wrong))


def test_a_moved_sample_is_the_same_sample() -> None:
    driver, client = two_units()
    put = client.put(["a", "b", "c"], {"x": [100, 0, 300], "y": [8, 8, 8]}, tags={"t": [1, 2, 3]}, unit_wish=1)
    assert client.claimed(1) == ("a",)
    before = driver.ledger.now, client.call(c.Listed, c.List(partition="p"))
    client.do(c.Drain(unit=1))
    assert [move_page(client).cells, move_page(client).cells] == [3, 3]
    assert [unit for unit, _, _ in places(client, "a", "b", "c")] == [2, 2, 2]
    assert [length for _, _, length in places(client, "a", "b", "c")] == [100, 0, 300]
    listed = client.call(c.Listed, c.List(partition="p"))
    assert (listed.ids, listed.tags[0].values) == (before[1].ids, before[1].tags[0].values)
    assert listed.generations.tolist() == put.generations.tolist()
    client.call(c.Located, c.Locate(partition="p", samples=handles(put), fields=("x", "y")))
    assert client.claimed(3, blocking=False) == ("b", "c")
    assert find(client)[1].cells == 0
    assert client.used(1) == 0
    assert client.stats().partitions[0].live_bytes == client.used(2)
    client.do(c.Forget(unit=1))
    assert [unit.unit for unit in client.stats().units] == [2]


def test_shared_values_are_moved_once_and_stay_shared() -> None:
    _, client = two_units()
    client.put(["a", "b", "c", "d"], {"x": [1000, 500]}, index=[0, 1, 0, 0], unit_wish=1)
    _, found = find(client, max_cells=1)
    assert len(found.rows) == 3, "all cells of a value are found together"
    assert found.lengths.tolist() == [1000]
    client.do(c.Drain(unit=1))
    move_page(client, max_cells=1)
    move_page(client)
    where = places(client, "a", "b", "c", "d")
    assert where[0] == where[2] == where[3] != where[1]
    assert client.used(2) == 1024 + 512


def test_pages_are_as_small_as_asked_for_but_for_one_value() -> None:
    _, client = two_units()
    client.put(["a", "b", "c", "d"], {"x": [100, 200, 300, 400]}, unit_wish=1)
    assert find(client, max_bytes=300)[1].lengths.tolist() == [100, 200]
    assert find(client, max_bytes=1)[1].lengths.tolist() == [100]
    assert find(client, max_cells=3)[1].lengths.tolist() == [100, 200, 300]
    client.put(["a", "b"], {"y": [1, 1]}, unit_wish=1)
    assert find(client, partition="p", field="y")[1].field == "y"
    assert find(client, partition="q", field="z")[1].field == "x"
    _, found = find(client)
    assert (found.cells, found.live) == (6, {"p": client.used(1)})


def test_what_was_written_or_cleared_meanwhile_is_left_alone() -> None:
    _, client = two_units()
    client.put(["a", "b", "c", "d"], {"x": [1000] * 4}, unit_wish=1)
    client.do(c.Drain(unit=1))
    located, found = find(client)
    call_id = reserve(client, found)
    client.put(["a"], {"x": [1000]})
    written = places(client, "a")
    client.clear("b", "c")
    client.put(["c"], {"x": [1000]})
    born_again = places(client, "c")
    moved = client.call(c.Moved, switch(found, located, call_id))
    assert (moved.cells, moved.skipped) == (1, 3)
    assert (places(client, "a"), places(client, "c")) == (written, born_again)
    assert client.used(1) == 0, "nothing lives there, and nobody reads there"
    assert client.used(2) == 2 * 1024 + 1088, "space for what was not moved went back"


def test_a_reader_keeps_the_old_bytes_until_it_releases_them() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [1000]}, unit_wish=1)
    reader = driver.client("reader")
    reader.locate(by_ids("a"))
    client.do(c.Drain(unit=1))
    move_page(client)
    call_id = client.waits(c.FindCells(unit=1, timeout_s=5.0))
    assert client.used(1) == 1024
    reader.do(c.Release(located=1))
    found = client.result(call_id)
    assert isinstance(found, c.FoundCells)
    assert (found.cells, found.pinned_bytes) == (0, 0)
    assert client.used(1) == 0


def test_finding_waits_for_puts_that_have_space_there() -> None:
    driver, client = two_units()
    other = driver.client("other")
    reserved = other.post(other.allocate({"x": [100]}, unit_wish=1))
    client.do(c.Drain(unit=1))
    call_id = client.waits(c.FindCells(unit=1, timeout_s=5.0))
    column = c.CommitColumn(name="x", spec=BYTES, lengths=np.array([100]))
    other.call(
        c.Committed,
        c.Commit(partition="p", samples=by_ids("a"), mode=c.Mode.UPSERT, reservation=reserved, columns=(column,)),
    )
    found = client.result(call_id)
    assert isinstance(found, c.FoundCells)
    assert found.rows.tolist() == [0]
    client.do(c.Release(located=call_id))
    other.post(other.allocate({"x": [100]}, unit_wish=1))
    move_page(client)
    assert isinstance(other.result(other.last_call_id), c.Allocated), "elsewhere"


def test_finding_ends_at_its_deadline_and_says_who_is_there() -> None:
    driver, client = two_units()
    other = driver.client("slow writer")
    other.post(other.allocate({"x": [100]}, unit_wish=1))
    call_id = client.waits(c.FindCells(unit=1, timeout_s=5.0))
    driver.tick(5.5)
    found = client.result(call_id)
    assert isinstance(found, c.FoundCells)
    assert (found.reserved, found.reserved_bytes, found.cells) == (1, 128, 0)
    assert "slow writer" in found.holders[0]
    gone = client.waits(c.FindCells(unit=1, timeout_s=5.0))
    driver.apply(c.DropUnit(unit=1))
    assert isinstance(client.result(gone), InvalidRequestError)


def test_budgets_do_not_count_what_is_moved_and_nobody_is_evicted_for_it() -> None:
    _, client = two_units()
    client.register(budget_bytes=4096, when_full=c.WhenFull.EVICT_OLDEST)
    client.put(["a", "b"], {"x": [2048, 2048]}, unit_wish=1)
    client.do(c.Drain(unit=1))
    assert move_page(client).cells == 2
    stats = client.stats().partitions[0]
    assert (stats.used_bytes, stats.peak_used_bytes, stats.live, stats.evicted_unconsumed) == (4096, 4096, 2, 0)


def test_moves_may_take_the_reserve_and_wait_behind_every_update() -> None:
    driver = Driver(units=2, capacity=64 * KIB, reserve_fraction=0.5)
    client, other = driver.client(), driver.client("other")
    client.register()
    client.put(["a"], {"x": [24 * KIB]}, unit_wish=1)
    client.put(["b"], {"x": [20 * KIB]}, unit_wish=2)
    client.put(["c"], {"x": [12 * KIB]}, unit_wish=2)
    client.do(c.Drain(unit=1, force=True))
    assert move_page(client).cells == 1
    client.do(c.Drain(unit=1, undo=True))
    client.put(["d"], {"x": [24 * KIB]}, unit_wish=1)
    client.do(c.Drain(unit=1, force=True))
    located, found = find(client)
    with pytest.raises(CapacityTimeoutError):
        reserve(client, found)
    sizes = c.ColumnSizes(name="x", sizes=found.lengths)
    move = client.waits(c.Allocate(partition="p", columns=(sizes,), update=True, moving=True))
    update = other.waits(other.allocate({"x": [20 * KIB]}, update=True))
    client.clear("b")
    assert isinstance(other.result(update), c.Allocated)
    assert client.result(move) is None
    client.clear("a")
    assert isinstance(client.result(move), c.Allocated)
    client.call(c.Moved, switch(found, located, move))
    assert places(client, "d")[0][0] == 2


def test_a_move_waits_for_updates_that_wait_behind_one_whose_budget_is_used_up() -> None:
    client = Driver(capacity=64 * KIB, reserve_fraction=0.0).client()
    client.register(budget_bytes=40 * KIB)
    client.register("q")
    client.put(["a"], {"x": [30 * KIB]})
    client.put(["b"], {"x": [30 * KIB]}, partition="q")
    large = client.waits(client.allocate({"x": [12 * KIB]}, update=True))
    small = client.waits(client.allocate({"x": [8 * KIB]}, update=True))
    move = client.waits(client.allocate({"x": [2 * KIB]}, "q", update=True, moving=True))
    client.do(c.Abort(reservation=large))
    assert (client.result(small), client.result(move)) == (None, None)
    client.do(c.Abort(reservation=small))
    assert isinstance(client.result(move), c.Allocated)


def test_the_error_of_a_move_does_not_blame_the_budget() -> None:
    client = Driver(capacity=64 * KIB, reserve_fraction=0.0).client()
    client.register(budget_bytes=60 * KIB)
    client.put(["a"], {"x": [60 * KIB]})
    with pytest.raises(CapacityTimeoutError) as caught:
        client.raise_(client.allocate({"x": [8 * KIB]}, update=True, moving=True, on_full=c.OnFull.REJECT))
    assert (caught.value.budget_bytes, caught.value.free_bytes) == (None, 4 * KIB)


def test_a_waiting_move_holds_up_no_put() -> None:
    driver, client = two_units(capacity=64 * KIB)
    other = driver.client("other")
    client.put(["a"], {"x": [40 * KIB]}, unit_wish=1)
    client.put(["b"], {"x": [40 * KIB]}, unit_wish=2)
    client.do(c.Drain(unit=1))
    _, found = find(client)
    sizes = c.ColumnSizes(name="x", sizes=found.lengths)
    client.waits(c.Allocate(partition="p", columns=(sizes,), update=True, moving=True))
    other.put(["c"], {"x": [KIB]}, update=False)
    other.put(["b"], {"x": [KIB]}, mode=c.Mode.UPDATE, update=True)


def test_a_move_that_makes_no_sense_changes_nothing_and_frees_its_space() -> None:
    _, client = two_units()
    client.put(["a", "b"], {"x": [100, 200]}, unit_wish=1)
    client.do(c.Drain(unit=1))
    before = places(client, "a", "b")
    located, found = find(client)
    for wrong in (
        {"generations": found.generations[:1]},
        {"index": found.index + 1},
        {"offsets": found.offsets[:1]},
        {"located": located + 1},
        {"rows": np.zeros(2, np.int64)},
        {"field": "y"},
        {"lengths": found.lengths[:1]},
    ):
        with pytest.raises(InvalidRequestError):
            client.raise_(switch(found, wrong.pop("located", located), reserve(client, found), **wrong))
        assert client.unit(2).reserved_bytes == 0
    put = client.post(client.allocate({"x": [100, 200]}))
    with pytest.raises(InvalidRequestError, match="for a move"):
        client.raise_(switch(found, located, put))
    call_id = reserve(client, found)
    with pytest.raises(InvalidRequestError, match="made for a move"):
        client.raise_(c.Commit(partition="p", samples=by_ids("a"), mode=c.Mode.UPSERT, reservation=call_id))
    with pytest.raises(InvalidRequestError, match="requires update=True and one column"):
        client.raise_(client.allocate({"x": [1], "y": [1]}, update=True, moving=True))
    assert places(client, "a", "b") == before


def test_a_partition_that_was_dropped_has_nothing_moved() -> None:
    _, client = two_units()
    client.put(["a"], {"x": [100]}, unit_wish=1)
    located, found = find(client)
    call_id = reserve(client, found)
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register()
    client.put(["a"], {"x": [100]}, unit_wish=2)
    with pytest.raises(PartitionDroppedError):
        client.raise_(switch(found, located, call_id))
    assert client.unit(2).reserved_bytes == 0


def test_the_unit_that_cells_were_moved_to_is_gone() -> None:
    driver, client = two_units()
    client.put(["a"], {"x": [100]}, unit_wish=1)
    client.do(c.Drain(unit=1))
    located, found = find(client)
    call_id = reserve(client, found)
    driver.apply(c.UnitLost(unit=2))
    got = client.raw(switch(found, located, call_id))
    assert type(got).__name__ == "StorageUnitError"
    assert places(client, "a")[0][0] == 1


def test_dropping_a_unit_that_is_not_empty_wants_force() -> None:
    _, client = two_units()
    client.put(["a"], {"x": [100]}, unit_wish=1)
    with pytest.raises(InvalidRequestError, match="drain it"):
        client.raise_(c.Forget(unit=1))
    client.do(c.Forget(unit=1, force=True))
    assert client.stats().partitions[0].live == 0


def test_a_withdrawn_find_pins_nothing() -> None:
    _, client = two_units()
    client.put(["a"], {"x": [100]}, unit_wish=1)
    located, _ = find(client)
    client.do(c.Release(located=located))
    client.clear("a")
    assert client.used(1) == 0


def test_drains_and_moves_replay_and_go_on_from_an_image() -> None:
    driver, client = two_units()
    other = driver.client("other")
    other.post(other.allocate({"x": [100]}, unit_wish=1))
    client.put(["a", "b"], {"x": [100, 200]}, index=[0, 1], unit_wish=1)
    client.do(c.Drain(unit=1))
    move_page(client)
    client.waits(c.FindCells(unit=1, timeout_s=50.0))
    sizes = c.ColumnSizes(name="x", sizes=np.array([2 * MIB]))
    assert isinstance(client.raw(c.Allocate(partition="p", columns=(sizes,), update=True, moving=True)), Exception)
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
    again = Ledger.restored(driver.ledger.image())
    assert fingerprint(again) == fingerprint(driver.ledger)
    out = again.apply(c.Tick(now=60.0))
    assert [type(o.result) for o in out if isinstance(o, c.Answer)] == [c.FoundCells]


def test_only_cells_that_the_finding_pinned_are_moved() -> None:
    """A row of no bytes that was written again looks the same, and so does one that another call pinned."""
    _, client = two_units()
    client.put(["a", "b"], {"x": [0, 100]}, unit_wish=1)
    located, found = find(client)
    client.put(["a"], {"x": [0]}, mode=c.Mode.UPDATE, update=True, unit_wish=1)
    moved = client.call(c.Moved, switch(found, located, reserve(client, found)))
    assert (moved.cells, moved.skipped) == (1, 1)
    client.put(["c"], {"x": [100]}, unit_wish=1)
    other = client.post(c.Locate(partition="p", samples=by_ids("b"), fields=("x",)))
    located, found = find(client)
    moved = client.call(c.Moved, switch(found, other, reserve(client, found)))
    assert (moved.cells, moved.skipped) == (0, 2)


def test_who_waits_for_a_unit_is_not_looked_after_when_something_happens_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, client = two_units()
    reserved = client.post(client.allocate({"x": [100]}, unit_wish=1))
    looks = []
    monkeypatch.setattr(
        Drains,
        "_live_extents_on",
        lambda drains, unit, honest=Drains._live_extents_on: looks.append(unit.unit_id) or honest(drains, unit),
    )
    call_id = client.waits(c.FindCells(unit=1, timeout_s=5.0))
    for name in ("a", "b", "a"):
        client.put([name], {"x": [100]}, unit_wish=2)
        client.locate(by_ids(name))
        client.do(c.Release(located=client.last_call_id))
    client.clear("a", "b")
    assert looks == []
    assert client.result(call_id) is None
    client.do(c.Abort(reservation=reserved))
    assert looks == [1]
    assert isinstance(client.result(call_id), c.FoundCells)
