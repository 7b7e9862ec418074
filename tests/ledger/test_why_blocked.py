"""Why a claim waits: facts, and one sentence made of them."""

from __future__ import annotations

import pytest

from dataplane.errors import ClaimTimeoutError, InvalidRequestError, TaskNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.claims.why_blocked import sentence
from dataplane.ledger.state.partition import WRITERS
from tests.ledger.driver import Client, Driver, by_ids


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client("driver")
    client.register(fields=("x", "reward"), num_samples=8)
    return client


def why(client: Client, *fields: str, **more: object) -> c.Blocked:
    return client.call(c.Blocked, c.WhyBlocked(partition="p", task="train", fields=fields, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("group_size", 0), ("group_size", -2), ("max_lag", -1)])
def test_terms_that_a_claim_refuses_are_refused(client: Client, name: str, value: int) -> None:
    for command in (c.WhyBlocked, c.Claim):
        more = {} if command is c.WhyBlocked else {"batch_size": 4, "blocking": False, "timeout_s": 0.0}
        item = command(partition="p", task="train", fields=(), **{name: value}, **more)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=rf"{name}={value}: must"):
            client.raise_(item)


def test_fields_nobody_declared_and_fields_nobody_produced(client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]})
    facts = why(client, "x", "reward", "ghost")
    assert (facts.undeclared, facts.unproduced) == (("ghost",), ("reward",))
    assert facts.lacking == {"ghost": 2, "reward": 2, "x": 0}
    assert "no client declared or produced field 'ghost'" in facts.why
    assert "no client has produced field 'reward' for any live sample" in facts.why
    assert "2 of 8 samples have been put" in facts.why


def test_producers_that_wait_for_space_are_named_first(driver: Driver, client: Client) -> None:
    client.register("other")
    rollout, judge = driver.client("rollout", attach=[1]), driver.client("judge", attach=[1])
    client.put(["a"], {"x": [driver.ledger._state.units[1].limit(update=False) // 64 * 64]})
    assert why(client, "ghost").why.startswith("no client declared or produced field 'ghost'")
    driver.tick(10.0)
    rollout.waits(rollout.allocate({"x": [64]}))
    rollout.waits(rollout.allocate({"x": [64]}, partition="other"))
    driver.tick(12.5)
    facts = why(client, "ghost")
    assert (facts.waiting_puts, facts.waiting_puts_s, facts.waiting_writers) == (1, 2.5, ("rollout",))
    assert facts.why.startswith("1 put waits for space (for 2.5 s, by 'rollout'): producers continue once")
    judge.waits(judge.allocate({"x": [64]}))
    told = why(client, "ghost").why
    assert told.startswith("2 puts wait for space (the longest for 2.5 s, by 'rollout', 'judge'): ")
    assert told.index("wait for space") < told.index("no client declared")
    waiting = client.waits(client.claim(1, ["ghost"], timeout_s=1.0))
    driver.tick(13.6)
    error = client.result(waiting)
    assert isinstance(error, ClaimTimeoutError)
    assert error.waiting_puts == 2
    assert "were ready: 2 puts wait for space" in str(error)


def test_who_wrote_last_what_and_when(driver: Driver, client: Client) -> None:
    rollout, reward, judge = (driver.client(name, attach=[1]) for name in ("rollout", "reward", "judge"))
    driver.tick(10.0)
    reward.put(["a"], {"reward": [1]})
    driver.tick(12.0)
    rollout.put(["a", "b"], {"x": [1, 1]})
    driver.tick(13.0)
    judge.do(c.SetTags(partition="p", samples=by_ids("a"), tags=(c.TagColumn(name="ok", values=(True,)),)))
    driver.apply(c.SessionGone(unit=1, session=reward.session))
    driver.tick(14.5)
    facts = why(client, "x", "reward")
    told = [(writer.name, writer.ago_s, writer.live, writer.fields) for writer in facts.writers]
    assert told == [("judge", 1.5, True, ()), ("rollout", 2.5, True, ("x",)), ("reward", 4.5, False, ("reward",))]
    assert "last writes: 'judge' 1.5 s ago, 'rollout' 2.5 s ago (field 'x'), 'reward' 4.5 s ago" in facts.why
    assert facts.why.endswith("(field 'reward'), session ended")


def test_writers_remembered_are_few_but_a_fields_own_is_kept(driver: Driver, client: Client) -> None:
    first = driver.client("first")
    first.put(["a"], {"x": [1]})
    for number in range(WRITERS + 3):
        driver.tick(driver.now + 1)
        driver.client(f"w{number}").put([f"s{number}"])
    assert len(driver.ledger._state.partitions["p"].writers) == WRITERS
    names = [writer.name for writer in why(client, "x").writers]
    assert names == [f"w{WRITERS + 2 - i}" for i in range(5)] + ["first"]


def test_each_predicate_says_how_many_it_turns_away(client: Client) -> None:
    client.put(["a", "b", "c", "d"], {"x": [1] * 4}, tags={"std": [0.0, 0.5, 0.0, 0.1], "weight_version": [1, 1, 5, 5]})
    client.put(["e"], {"x": [1]})
    client.do(c.SetVersion(partition="p", version=6))
    facts = why(client, "x", where=(c.Predicate(tag="std", op=">", value=0.0),), max_lag=2)
    assert (facts.ready, facts.matching, facts.version) == (5, 1, 6)
    assert facts.filtered == {"std > 0.0": 3, "weight_version >= 4": 3}
    assert "of those, 3 fail std > 0.0, 3 fail weight_version >= 4; 1 fulfil all conditions" in facts.why


def test_groups_whole_and_partial(client: Client) -> None:
    client.put(["a0", "a1", "b0", "c0"], {"x": [1] * 4}, tags={"group": ["a", "a", "b", "c"]})
    client.put(["c1"], tags={"group": ["c"]})
    client.put(["none"], {"x": [1]})
    facts = why(client, "x", group_size=2)
    assert (facts.groups, facts.partial_groups, facts.partial) == (1, 2, {"b": 1, "c": 1})
    assert "1 groups are whole, 2 partial ('b' has 1 ready, 'c' has 1 ready)" in facts.why
    assert (why(client, "x").groups, why(client, "x").partial_groups) == (None, None)


def test_claimed_leased_and_held(client: Client) -> None:
    client.put([f"s{i}" for i in range(6)])
    client.claimed(1)
    client.claimed(1, lease_s=5.0)
    client.claimed(4, dp_rank=0, dp_world=2, step=0)
    facts = why(client)
    assert (facts.unclaimed, facts.claimed, facts.leased, facts.held) == (0, 6, 1, 2)
    assert "6 are claimed, 1 of them on lease, 2 of them held for their ranks" in facts.why


def test_a_timeout_has_the_same_facts(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]}, tags={"n": [1, 2]})
    where = (c.Predicate(tag="n", op=">", value=1),)
    waiting = client.waits(client.claim(2, ["x", "reward"], where=where, timeout_s=3.0, group_size=2))
    driver.tick(3.0)
    error = client.result(waiting)
    assert isinstance(error, ClaimTimeoutError)
    facts = why(client, "x", "reward", where=where, group_size=2)
    for name in facts.__struct_fields__:
        told, expected = getattr(error, name), getattr(facts, name)
        if name == "writers":
            assert [one["name"] for one in told] == [one.name for one in expected] == ["driver"]
        elif name == "ready":
            assert told == facts.matching
        else:
            assert told == (list(expected) if isinstance(expected, tuple) else expected), name
    assert facts.why in str(error)
    assert sentence(facts) == facts.why


def test_asking_changes_nothing_and_is_checked(driver: Driver, client: Client) -> None:
    client.put(["a"])
    client.call(c.Blocked, c.WhyBlocked(partition="p", task="train"))
    interests = len(driver.ledger._state.partitions["p"].interests)
    why(client, "x", group_size=2)
    assert len(driver.ledger._state.partitions["p"].interests) == interests
    with pytest.raises(TaskNotFoundError):
        client.call(c.Blocked, c.WhyBlocked(partition="p", task="none"))
    with pytest.raises(InvalidRequestError):
        why(client, where=(c.Predicate(tag="n", op="~", value=1),))
