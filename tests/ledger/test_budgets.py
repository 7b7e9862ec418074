"""Budgets of partitions: what counts, who waits for whom, what is refused."""

from __future__ import annotations

import pytest

from dataplane.errors import CapacityTimeoutError, InvalidRequestError, RequestTooLargeError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding.journal_records import decode, encode
from tests.ledger.driver import BYTES, Client, Driver, by_ids, commit_columns, handles
from tests.ledger.fingerprint import fingerprint

KIB = 1024


def budgeted(budget: int = 8 * KIB, policy: str = "wait", **settings: object) -> tuple[Driver, Client]:
    """Partition p with a budget in an arena of 64 KiB; nothing in reserve unless asked."""
    driver = Driver(capacity=64 * KIB, **{"reserve_fraction": 0.0, **settings})  # type: ignore[arg-type]
    client = driver.client()
    client.register(budget_bytes=budget, when_full=c.WhenFull(policy))
    client.register("other")
    return driver, client


def part(client: Client, name: str = "p") -> c.PartitionStats:
    return next(found for found in client.stats().partitions if found.partition == name)


def test_a_put_waits_for_the_budget_and_others_do_not() -> None:
    _, client = budgeted()
    client.put(["a"], {"x": [6 * KIB]})
    large = client.waits(client.allocate({"x": [4 * KIB]}))
    little = client.waits(client.allocate({"x": [64]}))
    client.put(["b"], {"x": [40 * KIB]}, partition="other")
    client.clear("a")
    assert isinstance(client.result(large), c.Allocated)
    assert isinstance(client.result(little), c.Allocated)


def test_who_waits_for_a_budget_holds_up_nobody_who_waits_for_memory() -> None:
    _, client = budgeted()
    client.put(["a"], {"x": [8 * KIB]})
    client.put(["b"], {"x": [56 * KIB]}, partition="other")
    mine = client.waits(client.allocate({"x": [KIB]}))
    theirs = client.waits(client.allocate({"x": [KIB]}, "other"))
    client.clear("b", partition="other")
    assert isinstance(client.result(theirs), c.Allocated)
    assert client.result(mine) is None
    client.clear("a")
    assert isinstance(client.result(mine), c.Allocated)


def test_who_waits_for_memory_is_not_overtaken_by_a_partition_with_a_budget() -> None:
    _, client = budgeted()
    client.put(["b"], {"x": [60 * KIB]}, partition="other")
    first = client.waits(client.allocate({"x": [8 * KIB]}, "other"))
    second = client.waits(client.allocate({"x": [KIB]}))
    client.clear("b", partition="other")
    assert isinstance(client.result(first), c.Allocated)
    assert isinstance(client.result(second), c.Allocated)


def test_reservations_and_cleared_rows_that_are_read_count() -> None:
    _, client = budgeted()
    client.put(["a"], {"x": [4 * KIB]})
    reserved = client.post(client.allocate({"x": [2 * KIB]}))
    client.locate(by_ids("a"))
    located = client.number
    client.clear("a")
    stats = part(client)
    assert (stats.live_bytes, stats.used_bytes, stats.budget_bytes) == (0, 6 * KIB, 8 * KIB)
    waiting = client.waits(client.allocate({"x": [4 * KIB]}))
    client.do(c.Release(located=located))
    assert isinstance(client.result(waiting), c.Allocated)
    client.do(c.Abort(reservation=reserved))
    assert (part(client).used_bytes, part(client).peak_used_bytes) == (4 * KIB, 6 * KIB)


def test_shared_values_count_once_and_columns_in_whole_granules() -> None:
    _, client = budgeted()
    client.put([f"s{i}" for i in range(16)], {"x": [1000]}, index=[0] * 16)
    assert part(client).used_bytes == 1024


def test_trimmed_rows_give_their_part_of_the_budget_back() -> None:
    _, client = budgeted()
    client.put([f"s{i}" for i in range(8)], {"x": [1024] * 8})
    waiting = client.waits(client.allocate({"x": [4 * KIB]}))
    client.clear("s0", "s2", "s4", "s6")
    assert client.result(waiting) is None
    client.clear("s1")
    assert isinstance(client.result(waiting), c.Allocated)


def test_updates_have_a_reserve_of_the_budget() -> None:
    _, client = budgeted(10 * KIB, reserve_fraction=0.2)
    client.put(["a"], {"x": [8 * KIB]})
    assert part(client).limit_bytes == 8 * KIB
    new = client.waits(client.allocate({"x": [64]}))
    client.put(["a"], {"y": [2 * KIB]}, mode=c.Mode.UPDATE, update=True)
    more = client.waits(client.allocate({"x": [64]}, update=True))
    client.clear("a")
    assert isinstance(client.result(more), c.Allocated)
    assert isinstance(client.result(new), c.Allocated)


def test_a_put_larger_than_the_budget_is_refused_at_once() -> None:
    _, client = budgeted()
    with pytest.raises(
        RequestTooLargeError, match=r"partition 'p', which has a budget, needs 8,256 .* larger budget_bytes"
    ):
        client.raise_(client.allocate({"x": [8 * KIB + 1]}))


def test_a_put_of_no_bytes_needs_no_budget() -> None:
    _, client = budgeted(64)
    client.put(["a"], {"x": [64]})
    client.put(["b"], {"x": [0]})
    client.put(["c"], tags={"t": [1]})


def test_rejecting_tells_who_holds_the_budget() -> None:
    _, client = budgeted(policy="reject")
    client.put(["a", "b"], {"x": [2 * KIB, 2 * KIB]})
    client.claimed(1, timeout_s=0.0)
    client.raw(client.allocate({"x": [3 * KIB]}))
    client.put(["b"], {"x": [40 * KIB]}, partition="other")
    with pytest.raises(CapacityTimeoutError, match="1,024 available to this put of the 8,192 in the budget") as caught:
        client.raise_(client.allocate({"x": [2 * KIB]}))
    error = caught.value
    assert (error.partition, error.budget_bytes, error.free_bytes) == ("p", 8 * KIB, KIB)
    assert error.holders == [
        ("partition 'p' (2 samples, 1 not claimed by 'train')", 4 * KIB),
        ("reservations of session 1 (client, live)", 3 * KIB),
    ]


def test_a_wait_for_the_budget_times_out_and_tells_who_holds_it() -> None:
    driver, client = budgeted()
    client.put(["a"], {"x": [8 * KIB]})
    waiting = client.waits(client.allocate({"x": [KIB]}, timeout_s=2.0))
    assert part(client).waiting_puts == 1
    driver.tick(2.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert (error.partition, error.waited_s) == ("p", 2.0)


def test_registering_again_changes_the_budget_and_those_that_wait_are_judged_again() -> None:
    _, client = budgeted()
    client.put(["a"], {"x": [8 * KIB]})
    first = client.waits(client.allocate({"x": [4 * KIB]}))
    client.register(budget_bytes=12 * KIB)
    assert isinstance(client.result(first), c.Allocated)
    second = client.waits(client.allocate({"x": [KIB]}))
    third = client.waits(client.allocate({"x": [8 * KIB]}))
    client.register(budget_bytes=4 * KIB)
    assert client.result(second) is None
    assert client.result(third) is None
    client.register(budget_bytes=4 * KIB, when_full=c.WhenFull.REJECT)
    assert isinstance(client.result(second), CapacityTimeoutError)
    assert isinstance(client.result(third), RequestTooLargeError)
    client.register()
    assert part(client).budget_bytes is None


@pytest.mark.parametrize("budget", [0, -5, 1 << 63])
def test_impossible_budgets_are_refused(budget: int) -> None:
    _, client = budgeted()
    with pytest.raises(InvalidRequestError, match="budget_bytes="):
        client.register(budget_bytes=budget)


def ahead(client: Client, *ids: str, size: int, offset: int, reservation: int) -> c.Result | Exception:
    return client.raw(
        c.Commit(
            partition="p",
            samples=by_ids(*ids),
            mode=c.Mode.UPSERT,
            reservation=reservation,
            offset=offset,
            columns=commit_columns({"x": [size] * len(ids)}, spec=BYTES),
        )
    )


def test_preallocated_space_counts_from_the_commit_that_takes_it() -> None:
    driver = Driver(capacity=64 * KIB * 64, reserve_fraction=0.0)
    client = driver.client(attach=[1])
    client.register(budget_bytes=4 * KIB)
    space = client.post(c.Preallocate(unit=1, nbytes=16 * KIB))
    got = client.result(space)
    assert isinstance(got, c.Preallocated)
    assert part(client).used_bytes == 0
    assert isinstance(ahead(client, "a", size=3 * KIB, offset=got.offset, reservation=space), c.Committed)
    refused = ahead(client, "b", size=2 * KIB, offset=got.offset + 3 * KIB, reservation=space)
    assert isinstance(refused, CapacityTimeoutError)
    assert refused.partition == "p"
    waiting = client.waits(client.allocate({"x": [2 * KIB]}))
    assert isinstance(ahead(client, "b", size=64, offset=got.offset + 3 * KIB, reservation=space), CapacityTimeoutError)
    client.clear("a")
    assert isinstance(client.result(waiting), c.Allocated)
    assert isinstance(ahead(client, "b", size=64, offset=got.offset + 3 * KIB, reservation=space), c.Committed)


def test_what_a_dropped_partition_leaves_behind_is_not_the_next_ones() -> None:
    driver, client = budgeted()
    committed = client.put(["a"], {"x": [8 * KIB]})
    client.locate(handles(committed))
    located = client.number
    reserved = client.waits(client.allocate({"x": [KIB]}))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register(budget_bytes=8 * KIB)
    assert part(client).used_bytes == 0
    client.put(["a"], {"x": [8 * KIB]})
    client.do(c.Release(located=located))
    assert part(client).used_bytes == 8 * KIB
    assert client.result(reserved) is not None
    assert len(driver.ledger._state.extents.accounts) == 2


def test_dropping_a_unit_gives_the_budget_back() -> None:
    driver, client = budgeted()
    client.put(["a"], {"x": [8 * KIB]})
    waiting = client.waits(client.allocate({"x": [KIB]}))
    driver.apply(c.DropUnit(unit=1, force=True))
    driver.add_unit(name="next", capacity=64 * KIB)
    assert isinstance(client.result(waiting), c.Allocated)
    assert part(client).used_bytes == KIB


def test_a_budget_survives_the_log_and_the_image() -> None:
    driver, client = budgeted(policy="evict")
    client.put(["a"], {"x": [8 * KIB]})
    again = driver.ledger.restored(driver.ledger.image())
    assert fingerprint(again) == fingerprint(driver.ledger) == fingerprint(driver.replay())
    registered = next(i for i in driver.log if isinstance(i, c.Call) and isinstance(i.command, c.Register))
    copied = decode(encode(registered))
    assert isinstance(copied, c.Call)
    assert isinstance(copied.command, c.Register)
    assert (copied.command.budget_bytes, copied.command.when_full) == (8 * KIB, c.WhenFull.EVICT)


def test_a_put_that_only_waits_for_an_earlier_one_names_that() -> None:
    driver, client = budgeted()
    client.put(["b"], {"x": [60 * KIB]}, partition="other")
    first = driver.client("large")
    first.waits(first.allocate({"x": [8 * KIB]}, "other"))
    waiting = client.waits(client.allocate({"x": [64]}, "other", timeout_s=2.0))
    elsewhere = client.waits(client.allocate({"x": [64]}, timeout_s=2.0))
    rejected = client.raw(client.allocate({"x": [64]}, on_full=c.OnFull.REJECT))
    driver.tick(2.0)
    for error in (client.result(waiting), client.result(elsewhere), rejected):
        assert isinstance(error, CapacityTimeoutError)
        assert (error.behind, error.fragments) == (
            "an earlier put of 8,192 bytes into partition 'other' by session 2 (large, live)",
            0,
        )
        assert "4,096 available to this put, but queued behind an earlier put of 8,192 bytes" in str(error)
        assert "fragmented" not in str(error)
        assert "so that the earlier put finds space" in str(error)


def test_a_put_behind_one_that_waits_for_the_budget_names_that_and_the_budget() -> None:
    driver, client = budgeted()
    client.put(["a"], {"x": [6 * KIB]})
    client.waits(client.allocate({"x": [4 * KIB]}))
    waiting = client.waits(client.allocate({"x": [64]}, timeout_s=2.0))
    driver.tick(2.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert (error.partition, error.budget_bytes, error.free_bytes) == ("p", 8 * KIB, 2 * KIB)
    assert error.behind == "an earlier put of 4,096 bytes into partition 'p' by session 1 (client, live)"
    assert "register the partition with a larger budget_bytes, so that the earlier put finds space" in str(error)


def test_a_put_without_space_of_its_own_says_that() -> None:
    driver, client = budgeted()
    client.put(["a"], {"x": [6 * KIB]})
    client.waits(client.allocate({"x": [4 * KIB]}))
    waiting = client.waits(client.allocate({"x": [3 * KIB]}, timeout_s=2.0))
    driver.tick(2.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert error.behind == ""
