"""Compaction in the ledger: for whom it is ordered, what moves, and what becomes of it whatever happens meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.core.types import Checksums
from dataplane.errors import CapacityTimeoutError, SampleNotFoundError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.samples import compaction
from tests.ledger.driver import Client, Driver, by_ids
from tests.ledger.fingerprint import fingerprint

KIB = 1024


def fragmented(rows: int = 10, **settings: object) -> tuple[Driver, Client]:
    """Samples of 1 KiB in an arena that they fill, of which every second went."""
    driver = Driver(capacity=rows * KIB, reserve_fraction=0.0, **settings)
    client = driver.client()
    client.register()
    for i in range(rows):
        client.put([f"s{i}"], {"x": [KIB]})
    client.clear(*[f"s{i}" for i in range(0, rows, 2)])
    driver.take_orders()
    return driver, client


def want(client: Client, nbytes: int = 2 * KIB, **more: object) -> int:
    return client.waits(client.allocate({"x": [nbytes]}, **more))


def orders(driver: Driver) -> list[c.CompactArena]:
    return [order for order in driver.take_orders() if isinstance(order, c.CompactArena)]


def order_of(driver: Driver, to: float = 0.0) -> c.CompactArena:
    """The one that follows from looking."""
    driver.tick(to)
    (order,) = orders(driver)
    return order


def ranges(order: c.CompactArena) -> list[tuple[int, int, int]]:
    return list(zip(order.sources.tolist(), order.targets.tolist(), order.sizes.tolist(), strict=True))


def done(driver: Driver, order: c.CompactArena, error: str | None = None) -> list[c.Output]:
    return driver.apply(c.Compacted(unit=order.unit, number=order.number, error=error))


def place(client: Client, name: str, field: str = "x") -> int:
    located = client.locate(by_ids(name), (field,))
    client.do(c.Release(located=client.number))
    return int(located.fields[0].offsets[0])


def lengths(client: Client, name: str) -> int:
    located = client.locate(by_ids(name))
    client.do(c.Release(located=client.number))
    return int(located.fields[0].lengths[0])


def granted(client: Client, number: int) -> int:
    """Where the put's only value is to lie."""
    got = client.result(number)
    assert isinstance(got, c.Allocated), got
    return got.placements[0].offset


def free(driver: Driver) -> list[tuple[int, int]]:
    return driver.ledger.free_ranges(1)


def test_a_put_that_waits_for_a_larger_piece_gets_one() -> None:
    driver, client = fragmented()
    waiting = want(client)
    assert driver.ledger.next_deadline() == 0.0
    order = order_of(driver)
    assert ranges(order) == [(KIB, 2 * KIB, KIB)]
    assert client.result(waiting) is None
    done(driver, order)
    assert granted(client, waiting) == 0
    assert place(client, "s1") == 2 * KIB
    client.do(c.Abort(reservation=waiting))
    assert client.used() == 5 * KIB
    assert client.stats().partitions[0].live_bytes == 5 * KIB
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)


def test_a_put_that_is_to_be_refused_is_when_others_take_what_the_compaction_would_have_left_it() -> None:
    driver, client = fragmented()
    other = driver.client("other")
    other.register("q")
    want(client)
    order_of(driver)
    refused = want(client, 4 * KIB, on_full=c.OnFull.REJECT)
    other.call(c.Allocated, other.allocate({"x": [KIB]}, "q"))
    assert client.result(refused) is None
    other.call(c.Allocated, other.allocate({"x": [KIB]}, "q"))
    assert isinstance(client.result(refused), CapacityTimeoutError)


def test_nothing_is_looked_for_while_nobody_waits_for_a_larger_piece() -> None:
    driver, client = fragmented()
    driver.tick(0.0)
    assert not orders(driver)
    assert driver.ledger.next_deadline() == 2.0, "only the session is looked into"
    want(client, 6 * KIB)
    driver.tick(0.1)
    assert not orders(driver), "bytes are missing"
    assert driver.ledger.next_deadline() == 1.1


def test_a_put_keeps_its_own_deadline() -> None:
    driver, client = fragmented()
    waiting = want(client, timeout_s=1.5)
    order = order_of(driver)
    driver.tick(1.5)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert error.facts["fragments"] > 0
    assert not orders(driver)
    done(driver, order)
    assert client.used() == 5 * KIB
    assert sum(size for _, size in free(driver)) == 5 * KIB


def test_meanwhile_others_are_served_with_what_is_left() -> None:
    driver, client = fragmented()
    waiting = want(client)
    order = order_of(driver)
    client.put(["little"], {"x": [40]})
    rejecting = client.post(client.allocate({"x": [5 * KIB - 64]}, on_full=c.OnFull.REJECT))
    assert client.result(rejecting) is None, "there may be space in a moment"
    done(driver, order)
    assert granted(client, waiting) == 0
    assert isinstance(client.result(rejecting), CapacityTimeoutError)


def test_rows_that_are_read_are_not_chosen() -> None:
    driver, client = fragmented()
    reader = driver.client("reader")
    reader.locate(by_ids("s1", "s3", "s5"))
    want(client)
    assert ranges(order_of(driver)) == [(7 * KIB, 0, KIB)]


def test_while_all_rows_are_read_nothing_moves() -> None:
    driver, client = fragmented()
    reader = driver.client("reader")
    reader.locate(by_ids(*[f"s{i}" for i in range(1, 10, 2)]))
    located = reader.number
    waiting = want(client)
    driver.tick(0.0)
    assert not orders(driver)
    reader.do(c.Release(located=located))
    order = order_of(driver, 1.0)
    done(driver, order)
    assert granted(client, waiting) == 0


def test_who_began_to_read_meanwhile_keeps_the_old_bytes() -> None:
    driver, client = fragmented()
    reader = driver.client("reader")
    waiting = want(client)
    order = order_of(driver)
    assert reader.locate(by_ids("s1")).fields[0].offsets.tolist() == [KIB]
    view = reader.number
    done(driver, order)
    assert place(client, "s1") == 2 * KIB
    assert client.result(waiting) is None
    assert all(not start <= KIB < start + size for start, size in free(driver))
    reader.do(c.Release(located=view))
    assert granted(client, waiting) == 0


@pytest.mark.parametrize("what", ["clear", "overwrite", "again", "drop"])
def test_cells_that_are_not_there_any_more_do_not_come_back(what: str) -> None:
    driver, client = fragmented()
    client.register("other")
    waiting = want(client, partition="other")
    order = order_of(driver)
    at = None
    if what == "overwrite":
        client.put(["s1"], {"x": [100]}, update=True)
        at = place(client, "s1")
    elif what == "drop":
        client.call(c.Cleared, c.Clear(partition="p", samples=None))
    else:
        client.clear("s1")
    if what == "again":
        client.put(["s1"], {"x": [100]})
        at = place(client, "s1")
    assert all(not start < 2 * KIB for start, _ in free(driver)) or what == "drop", "the unit reads there"
    done(driver, order)
    if at is None:
        with pytest.raises(Exception, match=r"s1|'p'") as caught:
            place(client, "s1")
        assert what == "drop" or isinstance(caught.value, SampleNotFoundError)
    else:
        assert place(client, "s1") == at
    granted(client, waiting)
    client.do(c.Abort(reservation=waiting))
    assert client.used() == {"clear": 4 * KIB, "drop": 0}.get(what, 4 * KIB + 128)


def test_a_report_counts_once_and_only_of_the_order_that_stands() -> None:
    driver, client = fragmented()
    waiting = want(client)
    order = order_of(driver)
    driver.apply(c.Compacted(unit=1, number=order.number + 1))
    driver.apply(c.Compacted(unit=7, number=order.number))
    assert client.result(waiting) is None
    done(driver, order)
    granted(client, waiting)
    before = fingerprint(driver.ledger)
    done(driver, order)
    assert fingerprint(driver.ledger) == before


def test_copies_that_failed_are_not_used_and_it_is_tried_again() -> None:
    driver, client = fragmented()
    waiting = want(client)
    first = order_of(driver)
    out = done(driver, first, "OSError: the disk is full")
    assert any(isinstance(each, c.Notice) and "the disk is full" in each.text for each in out)
    assert place(client, "s1") == KIB
    assert client.used() == 5 * KIB
    driver.tick(0.5)
    assert not orders(driver)
    second = order_of(driver, 1.0)
    assert (first.number, second.number) == (1, 2)
    done(driver, second)
    granted(client, waiting)


def test_the_order_stands_until_the_unit_has_reported_it() -> None:
    driver, client = fragmented()
    waiting = want(client)
    order = order_of(driver)
    driver.apply(c.UnitLost(unit=1))
    driver.tick(1.0)
    assert not orders(driver)
    assert client.used() == 7 * KIB, "what it reads, and where it writes, is nobody's"
    driver.add_unit(name="unit0", capacity=10 * KIB, epoch=1)
    (again,) = orders(driver)
    assert (again.number, ranges(again)) == (order.number, ranges(order))
    driver.add_unit(name="unit0", capacity=10 * KIB, epoch=2)
    (again,) = orders(driver)
    assert (again.number, ranges(again)) == (order.number, ranges(order))
    done(driver, again)
    assert granted(client, waiting) == 0


def test_it_goes_on_in_the_next_run_of_the_service() -> None:
    driver, client = fragmented()
    waiting = want(client)
    order = order_of(driver)
    driver.ledger = Ledger.restored(driver.ledger.image())
    driver.apply(c.Restarted(epoch=8, reserve_fraction=0.0, heartbeat_s=2.0, session_timeout_s=20.0))
    driver.take_orders()
    driver.add_unit(name="unit0", capacity=10 * KIB, unit=1)
    (again,) = orders(driver)
    assert (again.number, ranges(again)) == (order.number, ranges(order))
    done(driver, again)
    assert granted(client, waiting) == 0


def test_numbers_go_on_after_those_that_the_unit_has_carried_out() -> None:
    driver, client = fragmented()
    driver.apply(c.UnitLost(unit=1))
    driver.add_unit(name="unit0", capacity=10 * KIB, compactions=41)
    want(client)
    assert order_of(driver).number == 42


def test_a_unit_that_is_dropped_takes_its_order_along() -> None:
    driver, client = fragmented()
    waiting = want(client)
    order = order_of(driver)
    driver.apply(c.DropUnit(unit=1, force=True))
    done(driver, order)
    driver.add_unit(name="new", capacity=10 * KIB)
    granted(client, waiting)


def test_units_that_are_drained_or_that_compare_checksums_are_left_alone() -> None:
    driver, client = fragmented(checksums=Checksums.ALWAYS)
    want(client)
    client.do(c.Drain(unit=1, force=True))
    driver.tick(0.0)
    assert not orders(driver)
    client.do(c.Drain(unit=1, undo=True))
    driver.ledger._state.units[1].checking = True
    driver.tick(1.0)
    assert not orders(driver)
    driver.ledger._state.units[1].checking = False
    order = order_of(driver, 2.0)
    driver.ledger._state.units[1].checking = True
    done(driver, order)
    assert place(client, "s1") == KIB, "damage that is found belongs to where it was looked for"


def test_values_of_several_puts_shared_trimmed_and_empty() -> None:
    driver = Driver(capacity=32 * 64, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    client.put(["a", "b", "c", "d"], {"x": [64, 64, 0, 64], "y": [8, 8, 8, 8]})
    client.put(["e", "f", "g"], {"x": [128, 64]}, index=[0, 1, 0])
    client.put(["h"], {"x": [64]})
    client.put(["rest"], {"x": [12 * 64]})
    client.put(["end"], {"x": [10 * 64]})
    client.clear("b", "a", "f", "rest")
    sizes = {name: lengths(client, name) for name in "cdegh"}
    waiting = want(client, 14 * 64)
    order = order_of(driver)
    assert ranges(order) == [(256, 0, 128), (448, 1152, 64)]
    done(driver, order)
    assert [place(client, name) for name in "degh"] == [128, 0, 0, 1152]
    assert {name: lengths(client, name) for name in "cdegh"} == sizes
    assert granted(client, waiting) == 256
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
    client.do(c.Abort(reservation=waiting))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert client.used() == 0


def test_a_piece_that_is_too_much_for_one_order_grows_order_by_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MOST_BYTES", KIB)
    driver, client = fragmented(20)
    waiting = want(client, 5 * KIB)
    count = 0
    while client.result(waiting) is None:
        order = order_of(driver, driver.now)
        assert order.sizes.sum() <= KIB
        done(driver, order)
        count += 1
    assert count > 1


def test_a_value_that_fits_nowhere_else_stays() -> None:
    driver = Driver(capacity=10 * KIB, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [2 * KIB]})
    client.put(["large"], {"x": [5 * KIB]})
    client.put(["b"], {"x": [3 * KIB]})
    client.clear("a", "b")
    want(client, 4 * KIB)
    before = free(driver)
    driver.tick(0.0)
    assert not orders(driver)
    assert free(driver) == before


def test_columns_are_split_where_no_piece_takes_them_whole() -> None:
    driver = Driver(capacity=16 * KIB, reserve_fraction=0.0)
    client = driver.client()
    client.register()
    client.put(["x0"], {"x": [2 * KIB]})
    client.put(["m0", "m1", "m2"], {"x": [KIB] * 3})
    client.put(["x1"], {"x": [2 * KIB]})
    client.put(["m3"], {"x": [6 * KIB]})
    client.put(["x2"], {"x": [2 * KIB]})
    client.put(["m4"], {"x": [KIB]})
    client.clear("x0", "x1", "x2")
    driver.client("reader").locate(by_ids("m4"))
    waiting = want(client, 3 * KIB)
    order = order_of(driver)
    assert ranges(order) == [(2 * KIB, 5 * KIB, 2 * KIB), (4 * KIB, 13 * KIB, KIB)]
    done(driver, order)
    assert granted(client, waiting) == 0
    assert [place(client, name) for name in ("m0", "m1", "m2")] == [5 * KIB, 6 * KIB, 13 * KIB]
    client.clear("m0")
    client.clear("m2")
    assert place(client, "m1") == 6 * KIB


def test_bytes_are_never_copied_over_others() -> None:
    driver, client = fragmented(40)
    for size in (2, 3, 5):
        waiting = want(client, size * KIB)
        order = order_of(driver, driver.now)
        held = np.concatenate([order.sources, order.targets])
        assert len(np.unique(held)) == len(held)
        done(driver, order)
        granted(client, waiting)


def test_what_is_under_way_is_in_the_image() -> None:
    driver, client = fragmented()
    want(client)
    order_of(driver)
    again = Ledger.restored(driver.ledger.image())
    assert fingerprint(again) == fingerprint(driver.ledger)
