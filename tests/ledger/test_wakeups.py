"""What ends a wait that is judged by what changed: one test for each thing that has to be noticed."""

from __future__ import annotations

import pytest

from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids

KIB = 1024


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
    located = client.number
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
