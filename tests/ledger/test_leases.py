"""Leases: each belongs to one claim, by the row; what is on lease is not consumed; what is over leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import InvalidRequestError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from dataplane.ledger.state.tasks import SLACK
from tests.ledger.driver import Client, Driver, by_ids, part_of
from tests.ledger.fingerprint import fingerprint

ABC = ["a", "b", "c"]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    made = driver.client()
    made.register()
    return made


def leased(client: Client, count: int, lease_s: float = 10.0, **more: object) -> c.Claimed:
    return client.call(c.Claimed, client.claim(count, lease_s=lease_s, **more))


def consumed(client: Client) -> bool:
    return client.call(c.Consumption, c.CheckConsumption(partition="p", tasks=("train",))).consumed


# --- a lease belongs to one claim


def test_a_late_nack_leaves_what_others_have_consumed(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    late = leased(client, 2, lease_s=1.0)
    driver.tick(1.0)
    again = leased(client, 1)
    assert (again.ids, client.claimed(1)) == (("a",), ("b",))
    client.ack(again)
    with pytest.raises(StaleSampleError, match="its lease ended") as caught:
        client.nack(late)
    assert (caught.value.positions, caught.value.total) == ([0, 1], 2)
    assert client.claimed(2, blocking=False) == ()


def test_of_two_claims_of_one_session_only_the_one_that_has_the_lease_acknowledges(
    driver: Driver, client: Client
) -> None:
    client.put(["a"])
    late = leased(client, 1, lease_s=1.0)
    driver.tick(1.0)
    rightful = leased(client, 1)
    for attempt in (client.ack, client.nack, lambda got: client.extend(got, lease_s=50.0)):
        with pytest.raises(StaleSampleError):
            attempt(late)
    assert client.ack(rightful) == ()
    assert client.claimed(1, blocking=False) == ()


def test_whoever_has_the_meta_of_a_claim_settles_it(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    got, other = leased(client, 2), driver.client("other")
    other.ack(got, "a")
    other.nack(got, "b")
    assert client.claimed(2, blocking=False) == ("b",)


def test_what_was_acknowledged_is_not_given_back(client: Client) -> None:
    client.put(["a", "b"])
    got = leased(client, 2)
    client.ack(got, "a")
    with pytest.raises(StaleSampleError) as caught:
        client.nack(got)
    assert caught.value.positions == [0]
    assert client.claimed(2, blocking=False) == ("b",)


def test_giving_back_what_came_back_by_itself_is_no_error(driver: Driver, client: Client) -> None:
    client.put(["a"])
    got = leased(client, 1, lease_s=1.0)
    driver.tick(1.0)
    assert client.nack(got) == ()
    assert client.claimed(1, blocking=False) == ("a",)


def test_a_claim_without_a_lease_is_given_back_and_neither_acknowledged_nor_extended(client: Client) -> None:
    client.put(["a"])
    got = client.call(c.Claimed, client.claim(1))
    with pytest.raises(StaleSampleError):
        client.ack(got)
    with pytest.raises(StaleSampleError):
        client.extend(got, lease_s=1.0)
    client.nack(got)
    assert client.claimed(1, blocking=False) == ("a",)


def test_without_claims_a_nack_takes_back_all_but_what_is_on_lease(client: Client) -> None:
    client.put(ABC)
    assert client.claimed(1) == ("a",)
    client.ack(leased(client, 1))
    leased(client, 1)
    with pytest.raises(StaleSampleError) as caught:
        client.do(c.Nack(partition="p", task="train", samples=by_ids(*ABC)))
    assert caught.value.samples == ["c"]
    assert client.claimed(3, blocking=False) == ("a", "b")


def test_there_is_a_claim_for_each_sample(client: Client) -> None:
    client.put(["a", "b"])
    got = leased(client, 2)
    with pytest.raises(InvalidRequestError, match="1 claim ids for 2 samples"):
        client.do(c.Ack(partition="p", task="train", samples=part_of(got)["samples"], claims=np.array([got.claim])))
    with pytest.raises(InvalidRequestError, match="named twice"):
        client.do(c.Ack(partition="p", task="train", samples=by_ids("a", "a"), claims=np.array([got.claim] * 2)))


def test_a_look_is_no_claim(client: Client) -> None:
    client.put(["a"])
    assert client.call(c.Claimed, client.claim(1, peek=True)).claim == 0
    assert client.call(c.Claimed, client.claim(1)).claim > 0


# --- by the row


@pytest.mark.parametrize("again", [False, True])
def test_what_was_cleared_meanwhile_is_told_and_holds_up_nothing(client: Client, again: bool) -> None:
    client.put(ABC)
    got = leased(client, 3)
    client.clear("b")
    if again:
        client.put(["b"])
    assert client.extend(got, lease_s=20.0) == (1,)
    assert client.ack(got, "a", "b") == (1,)
    assert client.nack(got, "b", "c") == (0,)
    assert client.claimed(3, blocking=False) == (("c", "b") if again else ("c",))


def test_what_another_has_by_now_is_named_after_the_rest_was_done(driver: Driver, client: Client) -> None:
    client.put(ABC)
    got = leased(client, 3)
    client.nack(got, "b")
    assert client.claimed(1) == ("b",)
    client.clear("a")
    with pytest.raises(StaleSampleError) as caught:
        client.nack(got)
    assert (caught.value.positions, caught.value.task) == ([1], "train")
    assert client.claimed(3, blocking=False) == ("c",)


def test_of_one_claim_each_part_has_its_own_end(driver: Driver, client: Client) -> None:
    client.put(ABC)
    got = leased(client, 3, lease_s=10.0)
    client.extend(got, "b", lease_s=20.0)
    client.extend(got, "c", lease_s=5.0)
    for now, back in ((4.9, ()), (5.0, ("c",)), (9.9, ()), (10.0, ("a",)), (19.9, ()), (20.0, ("b",))):
        deadline = driver.ledger.next_deadline()
        assert deadline is not None
        assert deadline <= now or not back
        driver.tick(now)
        assert client.claimed(3, blocking=False) == back


# --- what is on lease is not consumed


def test_what_is_on_lease_is_not_consumed(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    client.do(c.Seal(partition="p"))
    got = leased(client, 2)
    waiting = client.waits(client.claim(1, timeout_s=100.0))
    assert not consumed(client)
    client.ack(got, "a")
    assert not consumed(client)
    driver.tick(10.0)
    assert client.claimed_by(waiting) == ("b",)
    assert consumed(client)


@pytest.mark.parametrize("how", ["ack", "clear"])
def test_the_end_comes_when_the_last_lease_is_settled(client: Client, how: str) -> None:
    client.put(["a", "b"])
    client.do(c.Seal(partition="p"))
    got = leased(client, 2)
    waiting = client.waits(client.claim(1))
    client.clear("a")
    assert client.result(waiting) is None
    if how == "ack":
        client.ack(got, "b")
    else:
        client.clear("b")
    assert client.claimed_by(waiting) == ()
    assert consumed(client)


@pytest.mark.parametrize(("how", "claimed"), [("ack", 5), ("nack", 2), ("clear", 2), ("end", 2)])
def test_of_rows_that_are_settled_together_each_counts(driver: Driver, client: Client, how: str, claimed: int) -> None:
    client.put([*"abcde"])
    client.do(c.Seal(partition="p"))
    got = leased(client, 5, lease_s=10.0)
    if how == "end":
        client.extend(got, *"acd", lease_s=1.0)
        driver.tick(1.0)
    elif how == "clear":
        client.clear(*"acd")
    else:
        {"ack": client.ack, "nack": client.nack}[how](got, *"acd")
    (task,) = client.stats().partitions[0].tasks
    assert (task.leased, task.claimed) == (2, claimed)
    client.ack(got, "b", "e")
    (task,) = client.stats().partitions[0].tasks
    assert (task.leased, task.claimed) == (0, claimed)
    assert consumed(client) == (how in ("ack", "clear"))


def test_a_tail_waits_for_leases_that_it_could_take_and_for_no_others(client: Client) -> None:
    client.put(ABC, tags={"kind": ["x", "y", "x"]})
    client.do(c.Seal(partition="p"))
    leased(client, 1)
    wanted = {kind: (c.Predicate(tag="kind", op="==", value=kind),) for kind in "xy"}
    waiting = client.waits(client.claim(2, where=wanted["x"]))
    assert client.claimed(2, where=wanted["y"]) == ("b",)
    assert client.result(waiting) is None


def test_a_share_under_lease_that_nobody_came_for_is_not_consumed(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    client.do(c.Seal(partition="p"))
    share = {"dp_world": 2, "dp_rank": 0, "sampler": "sequential"}
    client.ack(leased(client, 2, step=0, **share))
    waiting = client.waits(client.claim(2, lease_s=10.0, step=1, **share))
    assert not consumed(client)
    driver.tick(10.0)
    assert client.claimed_by(waiting) == ("b",)


def test_a_share_without_a_lease_is_consumed_whether_its_rank_came_or_not(client: Client) -> None:
    client.put(["a", "b"])
    client.do(c.Seal(partition="p"))
    share = {"dp_world": 2, "dp_rank": 0, "sampler": "sequential"}
    assert client.claimed(2, step=0, **share) == ("a",)
    assert client.claimed(2, step=1, **share) == ()
    assert consumed(client)


# --- what is over leaves nothing


def test_settled_leases_keep_no_partition_and_wake_nobody(driver: Driver, client: Client) -> None:
    before = len(driver.ledger.image())
    for number in range(20):
        client.put([f"s{number}.{i}" for i in range(200)])
        got = leased(client, 200, lease_s=1e6)
        if number % 2:
            client.ack(got)
        client.do(c.Register(partition="p", fields={}, num_samples=None, tasks=("train",)))
        client.call(c.Cleared, c.Clear(partition="p", samples=None))
        client.register()
    state = driver.ledger._state
    assert (state.leases.open, state.leases.ends) == ({}, [])
    assert len(driver.ledger.image()) < before + 20_000


def test_settled_leases_of_a_living_partition_are_forgotten(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    kept = leased(client, 1, lease_s=1.0)
    for _ in range(4 * SLACK):
        client.nack(leased(client, 1, lease_s=1e6))
        client.extend(kept, lease_s=1.0)
    leases = driver.ledger._state.leases
    assert list(leases.open) == [kept.claim]
    assert len(leases.ends) <= 2 + SLACK
    assert driver.ledger.next_deadline() == 1.0


def test_held_shares_and_waits_for_groups_keep_no_dropped_partition(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], tags={"group": ["x", "y"]})
    client.claimed(2, dp_world=2, dp_rank=0, step=0)
    client.put(["c"], tags={"group": ["z"]})
    client.waits(client.claim(2, group_size=2, partial_after_s=5.0, timeout_s=50.0))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    state = driver.ledger._state
    assert not state.leases.open
    assert [name for _, _, name in state.wakes] == ["p"]
    client.register()
    client.put(["a"], tags={"group": ["x"]})
    waiting = client.waits(client.claim(2, group_size=2, partial_after_s=8.0, timeout_s=50.0))
    driver.tick(5.0)
    assert client.result(waiting) is None
    driver.tick(8.0)
    assert client.claimed_by(waiting) == ("a",)


def test_leases_of_a_task_that_was_left_out_end_with_it(driver: Driver, client: Client) -> None:
    client.put(["a"])
    leased(client, 1, lease_s=1e6)
    client.register(tasks=("other",))
    assert not driver.ledger._state.leases.open


def test_an_image_has_the_leases(driver: Driver, client: Client) -> None:
    client.put(ABC)
    got = leased(client, 3)
    client.extend(got, "b", lease_s=20.0)
    again = Ledger.restored(driver.ledger.image())
    assert fingerprint(again) == fingerprint(driver.ledger)
    driver.ledger = again
    client.ack(got, "a")
    driver.tick(10.0)
    assert client.claimed(3, blocking=False) == ("c",)


# --- columns that nobody has


def test_fields_and_tags_go_with_the_last_sample_that_has_them(driver: Driver, client: Client) -> None:
    client.register(fields=("x",))
    for number in range(20):
        client.put(["a"], {"x": [1], f"f{number}": [1]}, tags={f"t{number}": [1], "kept": [2]})
        client.put(["b"], {"x": [1]}, tags={"kept": [3]})
        client.clear("a")
        client.put([], {f"none{number}": []})
    partition = driver.ledger._state.partitions["p"]
    assert (list(partition.fields), list(partition.tags.columns)) == (["x"], ["kept"])
    client.clear("b")
    assert (list(partition.fields), list(partition.tags.columns)) == (["x"], [])


def test_tags_are_counted_by_sample(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], tags={"t": [1, 2]})
    twice = c.TagColumn(name="u", values=(1, 2), positions=np.array([0, 0]))
    for _ in range(2):
        client.do(c.SetTags(partition="p", samples=by_ids("a"), tags=(c.TagColumn(name="t", values=(3,)), twice)))
    columns = driver.ledger._state.partitions["p"].tags.columns
    assert {name: tag.count for name, tag in columns.items()} == {"t": 2, "u": 1}
    client.clear("a")
    assert {name: tag.count for name, tag in driver.ledger._state.partitions["p"].tags.columns.items()} == {"t": 1}


# --- tags that are no lengths


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1, -0.5, 1.5, 2.0, 10**400, 1 << 54, "long", True, None]
)
def test_a_number_of_tokens_is_one(client: Client, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="not a number of tokens"):
        client.put(["a"], tags={"input_lengths": [value]})
    client.put(["a"], tags={"input_lengths": [4]})
    with pytest.raises(InvalidRequestError, match="not a number of tokens"):
        client.do(
            c.SetTags(partition="p", samples=by_ids("a"), tags=(c.TagColumn(name="input_lengths", values=(value,)),))
        )
    assert client.claimed(1, dp_world=1, dp_rank=0, step=0) == ("a",)


def test_other_tags_that_no_float_can_hold_harm_nobody(client: Client) -> None:
    client.put(["a", "b"], tags={"weight_version": [10**400, float("-inf")]})
    client.claimed(1, where=(c.Predicate(tag="weight_version", op=">", value=0.5),), peek=True)
    assert client.stats().partitions[0].tasks[0].lag is None
    with pytest.raises(InvalidRequestError, match="4096 bits"):
        client.put(["c"], tags={"weight_version": [1 << 5000]})
