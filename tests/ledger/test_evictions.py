"""Space made by letting samples go: which, how many, and who is told."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import CapacityTimeoutError, LimitError, SampleNotFoundError, StaleSampleError
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import NOTICE_S
from dataplane.ledger.state.tombstones import REMEMBERED
from tests.ledger.driver import Client, Driver, by_ids, commit_columns, handles
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


def test_a_claim_counts_once_its_answer_is_known_to_have_arrived() -> None:
    client = evicting()
    fill(client)
    producer = client.driver.client("producer")
    client.claimed(4, timeout_s=0.0)
    waiting = producer.waits(producer.allocate({"x": [KIB]}))
    client.stats()
    assert isinstance(producer.result(waiting), c.Allocated)


def test_leased_samples_stay_until_they_are_acknowledged() -> None:
    client = evicting()
    fill(client)
    meta = client.call(c.Claimed, client.claim(4, timeout_s=0.0, lease_s=60.0))
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.ack(meta)
    assert isinstance(client.result(waiting), c.Allocated)


def test_samples_that_are_read_stay_until_they_are_released() -> None:
    client = evicting()
    fill(client)
    client.locate(by_ids("s0", "s1"))
    located = client.number
    consume(client, 2)
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.do(c.Release(located=located))
    assert isinstance(client.result(waiting), c.Allocated)
    assert live(client)[0] == "s1"


def test_fewer_tasks_can_make_samples_consumed() -> None:
    client = evicting(tasks=("score", "train"))
    fill(client)
    consume(client, 4)
    waiting = client.waits(client.allocate({"x": [KIB]}))
    client.register(budget_bytes=8 * KIB, when_full=c.WhenFull.EVICT)
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
