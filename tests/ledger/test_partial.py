"""Groups that never get whole: released or dropped when the ledger's clock says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import ClaimTimeoutError, InvalidRequestError
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver
from tests.profiles import budget

RELEASE, DROP = c.Partial.RELEASE, c.Partial.DROP


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client()
    client.register(tasks=("train", "score"))
    return client


def put(client: Client, *names: str) -> None:
    """Samples whose group is their first letter."""
    client.put(names, {"x": [1] * len(names)}, tags={"group": [name[0] for name in names]})


def groups(client: Client, size: int, policy: c.Partial, **more: object) -> c.Claim:
    return client.claim(size, ["x"], group_size=2, partial_after_s=5.0, partial=policy, **more)


def test_a_partial_group_is_released_when_its_oldest_sample_is_old(driver: Driver, client: Client) -> None:
    put(client, "a0")
    driver.tick(3.0)
    put(client, "b0")
    waiting = client.waits(groups(client, 2, RELEASE))
    assert driver.ledger.next_deadline() is not None
    driver.tick(4.9)
    assert client.result(waiting) is None
    assert driver.ledger.next_deadline() == 5.0
    driver.tick(5.0)
    assert client.claimed_by(waiting) == ("a0",)
    put(client, "b1")
    assert client.claimed(2, ["x"], group_size=2) == ("b0", "b1")


def test_released_groups_stand_among_whole_ones_and_count_as_one(driver: Driver, client: Client) -> None:
    put(client, "a0", "b0", "b1", "c0")
    driver.tick(5.0)
    put(client, "c1", "d0")
    assert client.call(c.Claimed, groups(client, 6, RELEASE)).ids == ("a0", "b0", "b1", "c0", "c1")
    assert client.call(c.Claimed, groups(client, 2, RELEASE, blocking=False)).ids == ()


def test_a_group_is_partial_while_fields_are_missing(driver: Driver, client: Client) -> None:
    client.put(["a0", "a1"], tags={"group": ["a", "a"]})
    client.put(["a1"], {"x": [1]})
    waiting = client.waits(groups(client, 2, RELEASE))
    driver.tick(5.0)
    assert client.claimed_by(waiting) == ("a1",)
    late = client.waits(groups(client, 2, RELEASE))
    client.put(["a0"], {"x": [1]})
    assert client.claimed_by(late) == ("a0",)


def test_a_partial_group_is_dropped_counted_and_reported(driver: Driver, client: Client) -> None:
    put(client, "a0", "b0", "b1")
    client.put(["c0", "c1"], tags={"group": ["c", "c"]})
    waiting = client.waits(groups(client, 4, DROP, timeout_s=60.0))
    driver.tick(4.9)
    assert client.stats().partitions[0].live == 5
    driver.tick(5.0)
    assert client.call(c.Listed, c.List(partition="p")).ids == ("b0", "b1")
    assert client.stats().partitions[0].dropped == 3
    assert client.result(waiting) is None
    put(client, "d0", "d1")
    got = client.result(waiting)
    assert isinstance(got, c.Claimed)
    assert (got.ids, got.dropped) == (("b0", "b1", "d0", "d1"), ("a0", "c0", "c1"))
    assert client.call(c.Claimed, groups(client, 2, DROP, blocking=False)).dropped == ()


def test_what_a_claim_does_not_want_it_does_not_drop(driver: Driver, client: Client) -> None:
    client.put(["a0", "b0", "c0"], {"x": [1] * 3}, tags={"group": ["a", "b", "c"], "split": [1, 2, 2]})
    client.put(["d0"], tags={"group": ["d"]})
    client.put(["e0"], tags={"split": [1]})
    driver.tick(9.0)
    where = (c.Predicate(tag="split", op="==", value=1),)
    got = client.call(c.Claimed, groups(client, 2, DROP, blocking=False, where=where))
    assert (got.ids, got.dropped) == ((), ("a0", "d0"))


def test_claimed_members_are_not_dropped(driver: Driver, client: Client) -> None:
    put(client, "a0", "a1", "a2")
    assert client.claimed(2) == ("a0", "a1")
    driver.tick(5.0)
    assert client.call(c.Claimed, groups(client, 2, DROP, blocking=False)).dropped == ("a2",)
    assert client.call(c.Listed, c.List(partition="p")).ids == ("a0", "a1")


@pytest.mark.parametrize(("policy", "tail"), [(RELEASE, ("a0", "a1", "b0")), (DROP, ("a0", "a1"))])
def test_a_tail_waits_for_its_partial_groups(
    driver: Driver, client: Client, policy: c.Partial, tail: tuple[str, ...]
) -> None:
    put(client, "a0", "a1")
    driver.tick(2.0)
    put(client, "b0")
    client.do(c.Seal(partition="p"))
    waiting = client.waits(groups(client, 8, policy))
    driver.tick(6.9)
    assert client.result(waiting) is None
    driver.tick(7.0)
    assert client.claimed_by(waiting) == tail
    assert client.call(c.Claimed, groups(client, 8, policy)).ids == ()
    assert client.call(c.Consumption, c.CheckConsumption(partition="p", tasks=("train",))).consumed


def test_a_wake_for_a_claim_that_has_left_or_a_partition_that_is_gone_does_no_harm(
    driver: Driver, client: Client
) -> None:
    put(client, "a0")
    waiting = client.waits(groups(client, 2, DROP, timeout_s=1.0))
    driver.tick(1.0)
    assert isinstance(client.result(waiting), ClaimTimeoutError)
    driver.tick(5.0)
    assert client.call(c.Listed, c.List(partition="p")).ids == ("a0",)
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    driver.tick(50.0)


def test_shares_count_released_groups(driver: Driver, client: Client) -> None:
    put(client, "a0", "b0", "b1", "c0")
    driver.tick(5.0)
    put(client, "d0")
    got = [client.call(c.Claimed, groups(client, 4, RELEASE, dp_rank=r, dp_world=2, step=0)).ids for r in range(2)]
    assert got == [("a0",), ("b0", "b1")]


@pytest.mark.parametrize("bad", [{"partial_after_s": 1.0}, {"partial_after_s": -1.0, "group_size": 2}])
def test_malformed_policies_are_refused(client: Client, bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="partial_after_s"):
        client.raise_(client.claim(2, **bad))


@budget(150)
@given(
    puts=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([0.0, 1.0, 3.0])), max_size=14),
    taken=st.integers(0, 3),
    size=st.integers(1, 3),
)
def test_what_is_dropped_as_a_loop_would_find_it(puts: list[tuple[int, bool, float]], taken: int, size: int) -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    samples = []
    for number, (group, produced, pause) in enumerate(puts):
        driver.tick(driver.now + pause)
        name = f"s{number}"
        client.put([name], {"x": [1]} if produced else None, tags={"group": [group]})
        samples.append((name, group, produced, driver.now))
    gone = client.claimed(taken, blocking=False) if taken else ()
    expected = []
    for group in range(4):
        members = [s for s in samples if s[1] == group and s[0] not in gone]
        if members and sum(s[2] for s in members) < size and members[0][3] + 4.0 <= driver.now:
            expected += [s[0] for s in members]
    command = client.claim(size, ["x"], group_size=size, partial_after_s=4.0, partial=DROP, blocking=False)
    got = client.call(c.Claimed, command)
    assert sorted(got.dropped) == sorted(expected)
    assert not set(got.dropped) & set(client.call(c.Listed, c.List(partition="p")).ids)
    assert got.dropped == tuple(sorted(got.dropped, key=lambda name: int(name[1:])))
