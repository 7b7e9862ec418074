"""Space made by letting samples go: which, how many, and who is told."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.config import DataPlaneConfig
from dataplane.errors import (
    CapacityTimeoutError,
    InvalidRequestError,
    LimitError,
    RequestTooLargeError,
    SampleNotFoundError,
    StaleSampleError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import NOTICE_S, Pressure
from dataplane.ledger.encoding.messages import decode, encode
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tombstones import REMEMBERED
from dataplane.ledger.state.units import Unit
from tests.ledger.driver import BYTES, Client, Driver, by_ids, commit_columns, handles
from tests.ledger.fingerprint import fingerprint

KIB = 1024


def evicting(policy: str = "evict", *, budget: int | None = 8 * KIB, capacity: int = 64, **more: object) -> Client:
    """Partition p of one task, whose budget is 8 KiB in an arena of 64."""
    client = Driver(capacity=capacity * KIB, reserve_fraction=0.0).client()
    client.register(budget_bytes=budget, when_full=c.WhenFull(policy), **more)
    return client


def consume(client: Client, count: int, **more: object) -> None:
    """For good: the consumer's next call confirms it."""
    consumer = client.driver.client("consumer")
    consumer.claimed(count, timeout_s=0.0, **more)
    consumer.stats()


def live(client: Client) -> tuple[str, ...]:
    return client.call(c.Listed, c.List(partition="p")).ids


def part(client: Client) -> c.PartitionStats:
    return next(found for found in client.stats().partitions if found.partition == "p")


def fill(client: Client, count: int = 8) -> c.Committed:
    """Samples of a KiB, each a put of its own."""
    return [client.put([f"s{i}"], {"x": [KIB]}) for i in range(count)][-1]


@pytest.mark.parametrize(("kib", "count"), [(1, 1), (2, 3), (5, 7)])
def test_consumed_samples_go_oldest_first_and_less_than_twice_as_many_as_needed(kib: int, count: int) -> None:
    client = evicting()
    fill(client)
    consume(client, 8)
    got = client.call(c.Allocated, client.allocate({"x": [kib * KIB]}))
    assert got.evicted == ()
    assert live(client) == tuple(f"s{i}" for i in range(count, 8))
    stats = part(client)
    assert (stats.evicted, stats.evicted_unconsumed) == (count, 0)
    assert stats.used_bytes == (8 - count + kib) * KIB


def test_consumed_samples_go_where_they_do_not_suffice() -> None:
    client = evicting()
    fill(client)
    consume(client, 2)
    waiting = client.waits(client.allocate({"x": [3 * KIB]}))
    assert live(client) == ("s2", "s3", "s4", "s5", "s6", "s7")
    consume(client, 1)
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client) == ("s3", "s4", "s5", "s6", "s7")


def test_a_sample_is_consumed_when_every_task_has_claimed_it() -> None:
    client = evicting(tasks=("score", "train"))
    fill(client)
    consume(client, 4)
    waiting = client.waits(client.allocate({"x": [KIB]}))
    consume(client, 2, task="score")
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client)[0] == "s1"


def test_without_tasks_nothing_is_consumed() -> None:
    client = evicting(tasks=())
    fill(client)
    client.waits(client.allocate({"x": [KIB]}))


def test_leased_samples_stay_until_they_are_acknowledged() -> None:
    client = evicting()
    fill(client)
    meta = client.call(c.Claimed, client.claim(4, timeout_s=0.0, lease_s=60.0))
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.ack(meta)
    assert isinstance(client.result(waiting), c.Allocated)


def test_rows_of_one_put_go_as_parts_of_it_come_back() -> None:
    client = evicting()
    client.put([f"s{i}" for i in range(128)], {"x": [64] * 128})
    consume(client, 100)
    client.call(c.Allocated, client.allocate({"x": [KIB]}))
    assert live(client)[0] == "s100"
    assert part(client).used_bytes == 28 * 64 + KIB


def test_a_whole_put_goes_together_if_it_is_unconsumed() -> None:
    client = evicting("evict_oldest")
    client.put([f"a{i}" for i in range(64)], {"x": [64] * 64})
    client.put([f"b{i}" for i in range(64)], {"x": [64] * 64})
    got = client.call(c.Allocated, client.allocate({"x": [KIB]}))
    assert got.evicted == tuple(f"a{i}" for i in range(64))
    assert live(client) == tuple(f"b{i}" for i in range(64))


def test_full_units_evict_too_but_only_from_the_put_s_own_partition() -> None:
    client = evicting(budget=None, capacity=8)
    client.register("other")
    fill(client, 4)
    client.put(["b"], {"x": [4 * KIB]}, partition="other")
    client.claimed(1, partition="other", timeout_s=0.0)
    waiting = client.waits(client.allocate({"x": [KIB]}))
    consume(client, 2)
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client) == ("s1", "s2", "s3")
    assert client.call(c.Listed, c.List(partition="other")).ids == ("b",)


def test_who_waits_for_memory_does_not_get_what_others_make_for_themselves() -> None:
    client = evicting(budget=None, capacity=8)
    client.register("other")
    fill(client)
    theirs = client.waits(client.allocate({"x": [2 * KIB]}, "other"))
    mine = client.waits(client.allocate({"x": [KIB]}))
    consume(client, 2)
    assert isinstance(client.result(mine), c.Allocated)
    assert client.result(theirs) is None
    assert live(client)[0] == "s1"


def test_fragments_too_small_for_one_value_are_made_larger() -> None:
    client = evicting(budget=None, capacity=8)
    fill(client)
    client.clear("s1", "s3")
    consume(client, 6)
    got = client.call(c.Allocated, client.allocate({"x": [2 * KIB]}))
    assert live(client) == ("s5", "s6", "s7")
    assert got.placements[0].offset == 0


def test_updates_evict_what_is_consumed_and_nothing_else() -> None:
    client = evicting("evict_oldest")
    fill(client)
    client.waits(client.allocate({"y": [KIB]}, update=True))
    consume(client, 1)
    assert live(client)[0] == "s1"
    assert part(client).evicted_unconsumed == 0


# --- samples that were not consumed


def test_unconsumed_samples_go_by_policy_after_the_consumed_ones_and_never_silently() -> None:
    client = evicting("evict_oldest")
    fill(client, 7)
    meta = client.put(["late"], {"x": [KIB]})
    client.call(c.Claimed, client.claim(3, timeout_s=0.0, order=c.Order.FRESHEST))
    client.stats()
    got = client.call(c.Allocated, client.allocate({"x": [5 * KIB]}))
    assert got.evicted == ("s0", "s1")
    assert live(client) == ("s2", "s3", "s4")
    stats = part(client)
    assert (stats.evicted, stats.evicted_unconsumed) == (3, 2)
    (notice,) = [o for o in client.driver.take_orders() if isinstance(o, c.Notice) and "evicted" in o.text]
    assert "partition 'p' is full: samples evicted so far before all of its tasks had consumed them: 2" in notice.text
    with pytest.raises(SampleNotFoundError, match=r"1 of them were evicted") as caught:
        client.locate(by_ids("s0", "never"))
    assert caught.value.evicted == 1
    with pytest.raises(StaleSampleError, match=r"1 of them were evicted") as stale:
        client.locate(handles(meta))
    assert stale.value.evicted == 1


def test_a_sample_that_lives_again_was_not_evicted() -> None:
    client = evicting("evict_oldest")
    fill(client)
    client.put(["new"], {"x": [KIB]})
    client.put(["s0"], {"x": [KIB]})
    client.clear("s0")
    with pytest.raises(SampleNotFoundError) as caught:
        client.locate(by_ids("s0", "s1"))
    assert caught.value.evicted == 1


def test_unconsumed_samples_stay_where_it_would_not_suffice() -> None:
    client = evicting("evict_oldest")
    fill(client, 6)
    client.raw(client.allocate({"x": [2 * KIB]}))
    got = client.call(c.Claimed, client.claim(2, timeout_s=0.0, lease_s=60.0))
    waiting = client.waits(client.allocate({"x": [5 * KIB]}))
    assert len(live(client)) == 6
    client.put(["s9"], tags={"t": [1]})
    assert client.result(waiting) is None
    client.nack(got, "s0")
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client) == ("s1", "s9")


def test_the_log_hears_of_it_now_and_then() -> None:
    client = evicting("evict_oldest")
    fill(client, 12)
    client.driver.tick(NOTICE_S)
    fill(client, 12)
    assert len([o for o in client.driver.take_orders() if isinstance(o, c.Notice) and "evicted" in o.text]) == 2


def test_what_is_remembered_is_bounded() -> None:
    client = evicting("evict_oldest", budget=KIB)
    for first in range(0, 2 * REMEMBERED, 1024):
        ids = [f"s{i}" for i in range(first, first + 1024)]
        client.put(ids, {"x": [1] * 1024})
    generations = client.driver.ledger._state.partitions["p"].evicted.generations
    assert len(generations) == REMEMBERED
    assert f"s{2 * REMEMBERED - 1025}" in generations
    assert part(client).evicted_unconsumed == 2 * REMEMBERED - 1024


def test_preallocated_space_evicts_at_its_commit_and_spares_what_it_updates() -> None:
    driver = Driver(capacity=4 << 20, reserve_fraction=0.0)
    client = driver.client(attach=[1])
    client.register(budget_bytes=2 * KIB, when_full=c.WhenFull.EVICT_OLDEST)
    space = client.post(c.Preallocate(unit=1, nbytes=16 * KIB))
    got = client.result(space)
    assert isinstance(got, c.Preallocated)
    client.put(["a"], {"x": [KIB]})
    client.put(["b"], {"x": [KIB]})
    commit = c.Commit(
        partition="p",
        samples=by_ids("a", "n"),
        mode=c.Mode.UPSERT,
        reservation=space,
        offset=got.offset,
        columns=commit_columns({"x": [100, 200]}),
    )
    assert client.call(c.Committed, commit).evicted == ("b",)
    assert live(client) == ("a", "n")
    assert part(client).used_bytes == 320


def test_eviction_wakes_claims_that_can_get_no_more() -> None:
    client = evicting("evict_oldest", num_samples=9)
    fill(client)
    waiting = client.waits(client.claim(2, ["y"]))
    for i in range(8, 17):
        client.put([f"s{i}"], {"x": [KIB]})
    client.put(by_ids("s16"), {"y": [0]}, mode=c.Mode.UPDATE)
    assert client.result(waiting) is None
    client.put(by_ids("s15"), {"y": [0]}, mode=c.Mode.UPDATE)
    assert client.claimed_by(waiting) == ("s15", "s16")


def test_evictions_replay_and_are_in_the_image() -> None:
    client = evicting("evict_oldest", tasks=("score", "train"))
    rng = np.random.default_rng(5)
    for i in range(60):
        client.put([f"s{i}.{k}" for k in range(3)], {"x": rng.integers(1, 900, 3).tolist()})
        if i % 3 == 0:
            consume(client, 2, task="score")
            consume(client, 2, task="train")
    driver = client.driver
    assert part(client).evicted_unconsumed > 0
    assert part(client).used_bytes <= 8 * KIB
    assert fingerprint(driver.replay()) == fingerprint(driver.ledger)
    assert fingerprint(driver.ledger.restored(driver.ledger.image())) == fingerprint(driver.ledger)


def test_a_wait_that_eviction_cannot_end_names_who_has_not_consumed() -> None:
    client = evicting()
    fill(client)
    waiting = client.waits(client.allocate({"x": [KIB]}, timeout_s=1.0))
    client.driver.tick(1.0)
    error = client.result(waiting)
    assert isinstance(error, CapacityTimeoutError)
    assert error.holders == [("partition 'p' (8 samples, 8 not claimed by 'train')", 8 * KIB)]


# --- samples that puts under way name


@pytest.mark.parametrize("policy", ["evict", "evict_oldest"])
@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("by", ["ids", "handles"])
def test_a_put_does_not_evict_the_samples_that_it_names(policy: str, update: bool, by: str) -> None:
    client = evicting(policy, budget=3 * KIB)
    first = client.put(["a"], {"x": [KIB]})
    client.put(["b"], {"x": [KIB]})
    consume(client, 2)
    named = by_ids("a") if by == "ids" else handles(first)
    mode = c.Mode.UPDATE if update or by == "handles" else c.Mode.UPSERT
    written = client.put(named, {"y": [2 * KIB]}, mode=mode, update=update)
    assert (live(client), written.born, part(client).evicted_unconsumed) == (("a",), 0, 0)
    assert client.locate(by_ids("a"), ["x", "y"]).rows.tolist() == written.rows.tolist()
    client.waits(client.allocate({"z": [KIB]}, samples=by_ids("a")))
    assert live(client) == ("a",)


def test_a_put_that_names_all_there_is_waits_until_another_sample_may_go() -> None:
    client = evicting("evict_oldest", budget=2 * KIB)
    fill(client, 2)
    waiting = client.waits(client.allocate({"y": [KIB, KIB]}, samples=by_ids("s0", "s1"), timeout_s=2.0))
    client.driver.tick(2.0)
    assert isinstance(client.result(waiting), CapacityTimeoutError)
    assert len(live(client)) == 2
    rejected = client.allocate({"y": [KIB, KIB]}, samples=by_ids("s0", "s1"), on_full=c.OnFull.REJECT)
    assert isinstance(client.raw(rejected), CapacityTimeoutError)
    assert client.call(c.Allocated, client.allocate({"x": [KIB, KIB]})).evicted == ("s0", "s1")


@pytest.mark.parametrize("rows_per_put", [1, 4])
def test_a_put_protects_the_unconsumed_rows_of_the_puts_whose_samples_it_names(rows_per_put: int) -> None:
    client = evicting("evict_oldest", budget=16 * KIB)
    for first in range(0, 16, rows_per_put):
        client.put([f"s{i}" for i in range(first, first + rows_per_put)], {"x": [KIB] * rows_per_put})
    named = by_ids("s0", "s4", "s8", "s12")
    allocate = client.allocate({"x": [KIB] * 4}, samples=named, timeout_s=2.0)
    if rows_per_put == 1:
        assert client.call(c.Allocated, allocate).evicted == ("s1", "s2", "s3", "s5")
        return
    waiting = client.waits(allocate)
    client.driver.tick(2.0)
    assert isinstance(client.result(waiting), CapacityTimeoutError)
    whole = client.allocate({"x": [KIB] * 4}, samples=by_ids(*[f"s{i}" for i in range(4)]))
    assert client.call(c.Allocated, whole).evicted == ("s4", "s5", "s6", "s7")


@pytest.mark.parametrize("named", [("s0", "s1"), ("s0", "s1", "s0")])
@pytest.mark.parametrize("end", ["commit", "abort", "refused", "bye"])
def test_a_sample_that_a_put_under_way_names_is_evicted_for_no_other_until_that_ends(
    end: str, named: tuple[str, ...]
) -> None:
    client = evicting("evict_oldest", budget=3 * KIB)
    fill(client, 2)
    writer = client.driver.client("writer")
    space = writer.post(writer.allocate({"y": [KIB]}, samples=by_ids(*named)))
    assert isinstance(writer.result(space), c.Allocated)
    waiting = client.waits(client.allocate({"x": [KIB]}))
    columns = commit_columns({"y": [1000 if end == "refused" else KIB]})
    match end:
        case "abort":
            writer.do(c.Abort(reservation=space))
        case "bye":
            writer.do(c.Bye())
        case _:
            writer.raw(
                c.Commit(partition="p", samples=by_ids("s0"), mode=c.Mode.UPSERT, reservation=space, columns=columns)
            )
    assert isinstance(client.result(waiting), c.Allocated)
    assert not client.driver.ledger._state.partitions["p"].targets


def test_a_sample_that_a_put_names_while_it_waits_is_evicted_for_no_other() -> None:
    client = evicting("evict_oldest", budget=2 * KIB)
    fill(client, 2)
    first = client.waits(client.allocate({"y": [2 * KIB]}, samples=by_ids("s0"), timeout_s=1.0))
    second = client.waits(client.allocate({"y": [KIB]}, samples=by_ids("s1"), timeout_s=9.0))
    assert live(client) == ("s0", "s1")
    client.driver.tick(1.0)
    assert isinstance(client.result(first), CapacityTimeoutError)
    got = client.result(second)
    assert isinstance(got, c.Allocated)
    assert got.evicted == ("s0",)


def test_puts_under_way_keep_their_samples_when_their_partition_begins_to_evict() -> None:
    client = evicting("wait", budget=3 * KIB)
    fill(client, 2)
    open_put = client.post(client.allocate({"y": [KIB]}, samples=by_ids("s0")))
    waiting = client.waits(client.allocate({"y": [KIB]}, samples=by_ids("s1"), timeout_s=1.0))
    client.register(budget_bytes=3 * KIB, when_full=c.WhenFull.EVICT_OLDEST)
    assert (client.result(waiting), live(client)) == (None, ("s0", "s1"))
    client.do(c.Abort(reservation=open_put))
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client) == ("s0", "s1")


def test_a_put_that_cannot_wait_keeps_nothing() -> None:
    client = Driver(capacity=64 * KIB, reserve_fraction=0.0, limits=Limits(parked=0)).client()
    client.register(budget_bytes=KIB, when_full=c.WhenFull.EVICT)
    client.put(["a"], {"x": [KIB]})
    with pytest.raises(LimitError):
        client.raise_(client.allocate({"y": [KIB]}, samples=by_ids("a")))
    assert not client.driver.ledger._state.partitions["p"].targets


def test_a_put_that_ends_lets_its_samples_go_for_those_that_wait() -> None:
    client = evicting("evict_oldest", budget=2 * KIB)
    fill(client, 2)
    first = client.waits(client.allocate({"y": [2 * KIB]}, samples=by_ids("s0", "s1"), timeout_s=1.0))
    second = client.waits(client.allocate({"x": [KIB]}, timeout_s=9.0))
    client.driver.tick(1.0)
    assert isinstance(client.result(first), CapacityTimeoutError)
    got = client.result(second)
    assert isinstance(got, c.Allocated)
    assert got.evicted == ("s0",)


def test_an_update_that_fails_says_nothing_about_what_new_rows_may_evict() -> None:
    client = evicting("evict_oldest", budget=1000 * KIB, capacity=2048)
    fill(client, 1000)
    client.waits(client.allocate({"y": [KIB]}, update=True))
    got = client.call(c.Allocated, client.allocate({"x": [900 * KIB]}))
    assert len(got.evicted) == 900


# --- Budgets of partitions: what counts, who waits for whom, what is refused.


def budgeted(budget: int = 8 * KIB, policy: str = "wait", **settings: object) -> tuple[Driver, Client]:
    """Partition p with a budget in an arena of 64 KiB; nothing in reserve unless asked."""
    driver = Driver(capacity=64 * KIB, **{"reserve_fraction": 0.0, **settings})  # type: ignore[arg-type]
    client = driver.client()
    client.register(budget_bytes=budget, when_full=c.WhenFull(policy))
    client.register("other")
    return driver, client


def figures(client: Client, name: str = "p") -> c.PartitionStats:
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
    located = client.last_call_id
    client.clear("a")
    stats = figures(client)
    assert (stats.live_bytes, stats.used_bytes, stats.budget_bytes) == (0, 6 * KIB, 8 * KIB)
    waiting = client.waits(client.allocate({"x": [4 * KIB]}))
    client.do(c.Release(located=located))
    assert isinstance(client.result(waiting), c.Allocated)
    client.do(c.Abort(reservation=reserved))
    assert (figures(client).used_bytes, figures(client).peak_used_bytes) == (4 * KIB, 6 * KIB)


def test_updates_have_a_reserve_of_the_budget() -> None:
    _, client = budgeted(10 * KIB, reserve_fraction=0.2)
    client.put(["a"], {"x": [8 * KIB]})
    assert figures(client).limit_bytes == 8 * KIB
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
    assert figures(client).budget_bytes is None


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
    assert figures(client).used_bytes == 0
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
    located = client.last_call_id
    reserved = client.waits(client.allocate({"x": [KIB]}))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    client.register(budget_bytes=8 * KIB)
    assert figures(client).used_bytes == 0
    client.put(["a"], {"x": [8 * KIB]})
    client.do(c.Release(located=located))
    assert figures(client).used_bytes == 8 * KIB
    assert client.result(reserved) is not None
    assert len(driver.ledger._state.extents.accounts) == 2


def test_dropping_a_unit_gives_the_budget_back() -> None:
    driver, client = budgeted()
    client.put(["a"], {"x": [8 * KIB]})
    waiting = client.waits(client.allocate({"x": [KIB]}))
    driver.apply(c.DropUnit(unit=1, force=True))
    driver.add_unit(name="next", capacity=64 * KIB)
    assert isinstance(client.result(waiting), c.Allocated)
    assert figures(client).used_bytes == KIB


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


# --- Watermarks of units and budgets: word of it once on the way up and once on the way down, and the
# peaks.


def half(**settings: object) -> tuple[Driver, Client]:
    """An arena of 100 KiB whose watermarks are 20 and 50 percent; nothing in reserve."""
    settings = {"reserve_fraction": 0.0, "low_watermark": 0.2, "high_watermark": 0.5, **settings}
    driver = Driver(capacity=100 * KIB, **settings)  # type: ignore[arg-type]
    client = driver.client()
    client.register()
    return driver, client


def told(driver: Driver) -> list[tuple[bool, str]]:
    return [(o.warning, o.text) for o in driver.take_orders() if isinstance(o, c.Notice)]


def test_a_unit_that_fills_up_is_told_of_once_until_it_is_down_again() -> None:
    driver, client = half()
    client.put(["a"], {"x": [30 * KIB]})
    assert not told(driver)
    client.put(["b"], {"x": [20 * KIB]})
    text = "storage unit 1 (unit0) is 50% full: 51,200 of the 102,400 bytes for new rows are used"
    assert told(driver) == [(True, text)]
    assert client.unit().pressed
    client.put(["c"], {"x": [10 * KIB]})
    client.clear("a")
    client.put(["d"], {"x": [30 * KIB]})
    assert not told(driver)
    assert client.unit().pressed
    client.clear("b", "d")
    assert [warning for warning, _ in told(driver)] == [False]
    stats = client.unit()
    assert (stats.pressed, stats.used_bytes, stats.peak_used_bytes) == (False, 10 * KIB, 60 * KIB)
    report = client.stats()
    assert (report.low_watermark, report.high_watermark) == (0.2, 0.5)


def test_updates_that_take_of_the_reserve_make_it_no_more_than_full() -> None:
    driver, client = half(reserve_fraction=0.2, high_watermark=1.0)
    client.put(["a"], {"x": [70 * KIB]})
    assert not told(driver)
    client.put(["a"], {"y": [20 * KIB]}, update=True)
    text = "storage unit 1 (unit0) is 100% full: all 81,920 bytes for new rows are used, and 10,240 more"
    assert told(driver) == [(True, text)]


def test_budgets_have_watermarks_of_their_own() -> None:
    driver, client = half(reserve_fraction=0.2)
    client.register("q", budget_bytes=10 * KIB)
    client.put(["a"], {"x": [4 * KIB]}, partition="q")
    assert [text for _, text in told(driver)] == [
        "partition 'q' is 50% full: 4,096 of the 8,192 bytes of its budget for new rows are used"
    ]
    client.register("q", budget_bytes=100 * KIB)
    assert [warning for warning, _ in told(driver)] == [False]
    client.register("q", budget_bytes=5 * KIB)
    assert [warning for warning, _ in told(driver)] == [True]
    client.register("q")
    assert not client.stats().partitions[1].pressed
    client.clear("a", partition="q")
    assert not told(driver)


def test_a_dropped_partition_is_watched_no_more() -> None:
    driver, client = half()
    client.register("q", budget_bytes=10 * KIB)
    client.call(c.Cleared, c.Clear(partition="q", samples=None))
    client.put(["a"], {"x": [4 * KIB]})
    assert not driver.ledger._state.budgeted


def test_what_was_said_is_not_said_again_after_a_restart() -> None:
    driver, client = half()
    client.put(["a"], {"x": [60 * KIB]})
    driver.take_orders()
    driver.ledger = driver.ledger.restored(driver.ledger.image())
    client.put(["b"], {"x": [KIB]})
    assert not told(driver)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.4), (-0.1, 0.4), (0.5, 1.1), (0.0, 0.0)])
def test_impossible_watermarks_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        DataPlaneConfig(low_watermark=low, high_watermark=high)


def test_only_budgets_that_are_used_otherwise_now_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, client = half()
    for i in range(20):
        client.register(f"p{i}", budget_bytes=10 * KIB)
        client.put(["a"], {"x": [KIB]}, partition=f"p{i}")
    driver.judged = 0
    looked_at: list[str] = []
    judge = Pressure._update_gauge

    def look(pressure: Pressure, who: Unit | Partition, used: int, limit: int) -> None:
        looked_at.extend([who.name] if isinstance(who, Partition) else [])
        judge(pressure, who, used, limit)

    monkeypatch.setattr(Pressure, "_update_gauge", look)
    client.put(["b"], {"x": [64]})
    client.put(["b"], {"x": [64]}, partition="p3")
    client.clear("b")
    assert set(looked_at) == {"p3"}
