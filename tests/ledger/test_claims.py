"""Claims: cursors, waiting, tails, groups, leases, confirmation."""

from __future__ import annotations

import pytest

from dataplane.core.types import FieldSpec
from dataplane.errors import (
    CallCancelledError,
    ClaimTimeoutError,
    FieldNotFoundError,
    InvalidRequestError,
    LimitError,
    PartitionDroppedError,
    PartitionNotFoundError,
    StaleSampleError,
    TaskNotFoundError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from tests.ledger.driver import Client, Driver, by_ids


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client()
    client.register(tasks=("train", "score"))
    return client


def consumed(client: Client, *tasks: str) -> bool:
    return client.call(c.Consumption, c.CheckConsumption(partition="p", tasks=tasks)).consumed


def test_each_task_has_its_own_cursor_oldest_first(client: Client) -> None:
    client.put(["a", "b", "c"], {"x": [1, 1, 1]}, tags={"n": [1, 2, 3]})
    first = client.call(c.Claimed, client.claim(2, ["x"]))
    assert first.ids == ("a", "b")
    assert first.fields == ("x",)
    assert first.tags[0].values == (1, 2)
    assert client.claimed(2, ["x"], blocking=False) == ("c",)
    assert client.claimed(2, ["x"], blocking=False) == ()
    assert client.claimed(3, ["x"], task="score", order=c.Order.FRESHEST) == ("c", "b", "a")


def test_a_claim_waits_for_every_required_field(client: Client) -> None:
    made = client.put(["a", "b"], {"x": [1, 1]})
    waiting = client.waits(client.claim(2, ["x", "y"]))
    client.put(c.Samples(rows=made.rows[:1], generations=made.generations[:1]), {"y": [1]})
    assert client.result(waiting) is None
    client.put(["b"], {"y": [1]})
    assert client.claimed_by(waiting) == ("a", "b")


def test_min_batch_size_lowers_the_wait(client: Client) -> None:
    waiting = client.waits(client.claim(4, min_batch_size=2))
    client.put(["a"])
    assert client.result(waiting) is None
    client.put(["b", "c"])
    assert client.claimed_by(waiting) == ("a", "b", "c")


def test_no_required_fields_means_any_sample(client: Client) -> None:
    client.put(["a"], tags={"n": [1]})
    assert client.claimed(1) == ("a",)


def test_the_tail_of_a_complete_partition_comes_out(client: Client) -> None:
    client.register(num_samples=5)
    client.put(["a", "b", "c"], {"x": [1, 1, 1]})
    client.put(["d", "e"])
    assert client.claimed(2, ["x"]) == ("a", "b")
    waiting = client.waits(client.claim(4, ["x"]))
    client.put(["d"], {"x": [1]})
    assert client.result(waiting) is None
    client.put(["e"], {"x": [1]})
    assert client.claimed_by(waiting) == ("c", "d", "e")
    assert client.claimed(4, ["x"]) == ()
    assert consumed(client, "train")


def test_cleared_samples_count_as_born_and_a_new_register_begins_a_new_count(client: Client) -> None:
    client.register(num_samples=2)
    client.put(["a", "b"])
    client.clear("a", "b")
    assert consumed(client, "train")
    assert client.claimed(1) == ()
    client.register(num_samples=2)
    assert not consumed(client, "train")
    waiting = client.waits(client.claim(2))
    client.put(["a"])
    assert client.result(waiting) is None
    client.put(["b"])
    assert client.claimed_by(waiting) == ("a", "b")


def test_a_seal_completes(client: Client) -> None:
    client.put(["a"])
    waiting = client.waits(client.claim(8))
    client.do(c.Seal(partition="p"))
    assert client.claimed_by(waiting) == ("a",)
    assert consumed(client, "train")
    assert not consumed(client, "train", "score")


def test_clearing_the_unready_rest_lets_the_tail_out(client: Client) -> None:
    client.put(["a", "b"])
    client.put(["a"], {"x": [1]})
    client.do(c.Seal(partition="p"))
    waiting = client.waits(client.claim(2, ["x"]))
    client.clear("b")
    assert client.claimed_by(waiting) == ("a",)


def test_claiming_the_unready_rest_lets_the_tail_out(client: Client) -> None:
    client.put(["a", "b", "c"])
    client.put(["a"], {"x": [1]})
    client.do(c.Seal(partition="p"))
    first = client.waits(client.claim(2, ["x"]))
    second = client.waits(client.claim(2, ["x", "y"]))
    assert client.claimed(2, order=c.Order.FRESHEST) == ("c", "b")
    assert client.claimed_by(first) == ("a",)
    assert client.claimed_by(second) == ()


def test_unknown_names_are_refused_at_once(client: Client) -> None:
    with pytest.raises(PartitionNotFoundError):
        client.raise_(client.claim(1, partition="none"))
    with pytest.raises(TaskNotFoundError):
        client.raise_(client.claim(1, task="none"))
    with pytest.raises(TaskNotFoundError):
        consumed(client, "none")
    client.register(strict=True, fields=["x"])
    with pytest.raises(FieldNotFoundError):
        client.raise_(client.claim(1, ["y"]))


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"batch_size": 1, "min_batch_size": 2},
        {"batch_size": 1, "min_batch_size": 0},
        {"batch_size": 2, "group_size": 3},
        {"batch_size": 1, "lease_s": 0.0},
        {"batch_size": 1, "timeout_s": -1.0},
        {"batch_size": 1, "max_lag": -1},
        {"batch_size": 1, "where": (c.Predicate(tag="n", op="~", value=1),)},
        {"batch_size": 1, "where": (c.Predicate(tag="n", op="in", value=1),)},
    ],
)
def test_malformed_claims_are_refused(client: Client, bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        client.raise_(c.Claim(partition="p", task="train", fields=(), **bad))  # type: ignore[arg-type]


def test_the_timeout_names_what_is_missing_and_claims_nothing(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]})
    client.put(["b"], {"y": [1]})
    waiting = client.waits(client.claim(2, ["x", "y", "z"], timeout_s=5.0))
    assert driver.ledger.next_deadline() is not None
    driver.tick(4.9)
    assert client.result(waiting) is None
    driver.tick(5.0)
    error = client.result(waiting)
    assert isinstance(error, ClaimTimeoutError)
    assert "no client declared or produced field 'z'" in str(error)
    assert "1 lack 'y'" in str(error)
    assert client.claimed(2, ["x"]) == ("a", "b")


def test_dropping_the_partition_ends_parked_claims(client: Client) -> None:
    waiting = client.waits(client.claim(1))
    client.call(c.Cleared, c.Clear(partition="p", samples=None))
    assert isinstance(client.result(waiting), PartitionDroppedError)


def test_a_register_without_the_task_ends_its_parked_claims_and_keeps_other_cursors(client: Client) -> None:
    client.put(["a", "b"])
    assert client.claimed(1) == ("a",)
    waiting = client.waits(client.claim(1, task="score", where=(c.Predicate(tag="n", op="==", value=1),)))
    client.register(tasks=("train", "new"))
    assert isinstance(client.result(waiting), TaskNotFoundError)
    assert client.claimed(5, blocking=False) == ("b",)
    assert client.claimed(5, blocking=False, task="new") == ("a", "b")


def test_oldest_waiter_first_unless_its_client_went_quiet(driver: Driver, client: Client) -> None:
    quiet, early, late = driver.client("quiet"), driver.client("early"), driver.client("late")
    parked = [other.waits(other.claim(1)) for other in (quiet, early, late)]
    driver.tick(3.0)
    driver.apply(c.Heartbeat(session=early.session))
    driver.apply(c.Heartbeat(session=late.session))
    client.put(["a"])
    assert early.claimed_by(parked[1]) == ("a",)
    client.put(["b"])
    assert late.claimed_by(parked[2]) == ("b",)
    client.put(["c"])
    assert quiet.claimed_by(parked[0]) == ("c",)


# --- predicates and groups


def test_predicates_filter_by_tags(client: Client) -> None:
    client.put(["a", "b", "c", "d"], tags={"version": [1, 2, 3, 4]})
    client.put(["e"], tags={"other": ["x"]})

    def where(op: str, value: object) -> tuple[str, ...]:
        predicate = c.Predicate(tag="version", op=op, value=value)  # type: ignore[arg-type]
        got = client.call(c.Claimed, client.claim(9, where=(predicate,), blocking=False))
        client.nack(got)
        return got.ids

    assert where(">=", 3) == ("c", "d")
    assert where("in", (1, 4, "x")) == ("a", "d")
    assert where("!=", 2) == ("a", "c", "d")
    assert where("<", "z") == ()
    assert where("==", 2.0) == ("b",)


@pytest.mark.parametrize("order", list(c.Order))
def test_a_filter_looks_past_many_that_do_not_match(client: Client, order: c.Order) -> None:
    client.put([f"s{i}" for i in range(6000)], tags={"n": list(range(6000))})
    middle = c.Predicate(tag="n", op="in", value=(2999, 3000, 3001))
    got = client.claimed(2, where=(middle,), order=order)
    assert got == (("s2999", "s3000") if order is c.Order.OLDEST else ("s3001", "s3000"))
    assert client.claimed(2, where=(middle,), blocking=False) == (("s3001",) if got[0] == "s2999" else ("s2999",))


def test_a_tag_set_later_wakes_a_filtered_claim(client: Client) -> None:
    client.put(["a", "b"])
    keep = (c.Predicate(tag="keep", op="==", value=True),)
    waiting = client.waits(client.claim(1, where=keep))
    client.do(c.SetTags(partition="p", samples=by_ids("b"), tags=(c.TagColumn(name="keep", values=(True,)),)))
    assert client.claimed_by(waiting) == ("b",)


def test_the_tail_of_a_filtered_claim_waits_for_undecided_samples_only(client: Client) -> None:
    client.put(["a", "b", "c"])
    client.do(c.Seal(partition="p"))
    keep = (c.Predicate(tag="keep", op="==", value=True),)
    waiting = client.waits(client.claim(3, where=keep))
    column = c.TagColumn(name="keep", values=(True, False))
    client.do(c.SetTags(partition="p", samples=by_ids("a", "b"), tags=(column,)))
    assert client.result(waiting) is None
    client.do(c.SetTags(partition="p", samples=by_ids("c"), tags=(c.TagColumn(name="keep", values=(True,)),)))
    assert client.claimed_by(waiting) == ("a", "c")


def set_version(client: Client, version: int) -> None:
    client.do(c.SetVersion(partition="p", version=version))


def test_max_lag_counts_from_the_partitions_version(client: Client) -> None:
    client.put(["a", "b", "c", "d"], tags={"weight_version": [0, 1, 2, 3]})
    client.put(["e"])
    assert client.claimed(9, max_lag=0, blocking=False, task="score") == ("a", "b", "c", "d")
    set_version(client, 3)
    assert client.claimed(9, max_lag=1, blocking=False) == ("c", "d")
    set_version(client, 1)
    assert client.claimed(9, max_lag=0, blocking=False) == ("b",)
    assert [part.version for part in client.stats().partitions] == [1]


def test_a_waiting_claim_follows_the_version(client: Client) -> None:
    client.put(["a", "b"], tags={"v": [4, 5]})
    set_version(client, 10)
    waiting = client.waits(client.claim(1, max_lag=4, version_tag="v", where=(c.Predicate(tag="v", op="<", value=9),)))
    set_version(client, 8)
    assert client.claimed_by(waiting) == ("a",)


def test_a_too_old_sample_holds_up_no_tail(client: Client) -> None:
    client.put(["a", "b", "c"], tags={"weight_version": [1, 2, 3]})
    client.do(c.Seal(partition="p"))
    waiting = client.waits(client.claim(4, ["x"], max_lag=1))
    client.put(["c"], {"x": [1]})
    assert client.result(waiting) is None
    set_version(client, 4)
    assert client.claimed_by(waiting) == ("c",)


def test_a_sample_without_a_version_may_still_get_one(client: Client) -> None:
    client.put(["a", "b"], tags={"other": [1, 1]})
    client.do(c.Seal(partition="p"))
    waiting = client.waits(client.claim(2, max_lag=1))
    column = c.TagColumn(name="weight_version", values=(0, -2))
    client.do(c.SetTags(partition="p", samples=by_ids("a", "b"), tags=(column,)))
    assert client.claimed_by(waiting) == ("a",)


def test_the_version_outlives_a_register_and_is_part_of_a_steps_terms(client: Client) -> None:
    client.put(["a", "b"], tags={"weight_version": [1, 5]})
    set_version(client, 5)
    client.register()
    assert client.claimed(1, max_lag=2, dp_rank=0, dp_world=1, step=0) == ("b",)
    with pytest.raises(InvalidRequestError, match="fixed with max_lag=2; this claim has max_lag=3"):
        client.raise_(client.claim(1, max_lag=3, dp_rank=0, dp_world=1, step=0))
    with pytest.raises(PartitionNotFoundError):
        client.do(c.SetVersion(partition="none", version=1))


def test_groups_are_claimed_whole(client: Client) -> None:
    client.put(["a0", "b0", "a1", "c0"], tags={"group": ["a", "b", "a", "c"]})
    assert client.claimed(4, group_size=2, blocking=False) == ("a0", "a1")
    waiting = client.waits(client.claim(5, group_size=2))
    client.put(["b1"], tags={"group": ["b"]})
    assert client.result(waiting) is None
    client.put(["c1"], tags={"group": ["c"]})
    assert client.claimed_by(waiting) == ("b0", "b1", "c0", "c1")


def test_incomplete_groups_do_not_hold_up_the_tail(client: Client) -> None:
    client.put(["a0", "b0", "a1"], tags={"group": ["a", "b", "a"]})
    client.do(c.Seal(partition="p"))
    assert client.claimed(4, group_size=2) == ("a0", "a1")
    assert client.claimed(4, group_size=2) == ()


# --- leases, giving back, confirmation


def test_a_lease_that_ends_gives_the_samples_back(driver: Driver, client: Client) -> None:
    client.put(["a", "b"])
    got = client.call(c.Claimed, client.claim(2, lease_s=10.0))
    waiting = client.waits(client.claim(1))
    client.ack(got, "a")
    driver.tick(9.0)
    client.extend(got, "b", lease_s=5.0)
    driver.tick(13.9)
    assert client.result(waiting) is None
    driver.tick(14.0)
    assert client.claimed_by(waiting) == ("b",)
    with pytest.raises(StaleSampleError):
        client.ack(got, "b")


def test_unconfirmed_claims_of_a_dead_session_go_back_and_confirmed_ones_stay(driver: Driver, client: Client) -> None:
    client.put(["a", "b", "c"])
    other = driver.client("other", attach=[1])
    assert other.claimed(1) == ("a",)
    assert other.claimed(1) == ("b",)
    assert other.claimed(1) == ("c",)
    other.post(c.Units())
    other.watermark = other.number
    assert not driver.ledger._state.sessions[other.session].unconfirmed
    other.watermark = None
    client.put(["d", "e"])
    other.watermark = other.number + 1
    assert other.claimed(2) == ("d", "e")
    driver.apply(c.SessionGone(unit=1, session=other.session))
    assert client.claimed(5, blocking=False) == ("d", "e")


def test_what_was_nacked_and_claimed_by_another_is_not_returned_twice(driver: Driver, client: Client) -> None:
    client.put(["a"])
    first = driver.client("first", attach=[1])
    first.watermark = 1
    got = first.call(c.Claimed, first.claim(1))
    first.nack(got)
    assert client.claimed(1) == ("a",)
    driver.apply(c.SessionGone(unit=1, session=first.session))
    assert client.claimed(1, blocking=False) == ()


def test_what_was_acknowledged_stays_claimed_though_its_claim_was_never_confirmed(
    driver: Driver, client: Client
) -> None:
    client.put(["a", "b"])
    first = driver.client("first", attach=[1])
    first.watermark = 1
    got = first.call(c.Claimed, first.claim(2, lease_s=10.0))
    first.ack(got, "a")
    driver.apply(c.SessionGone(unit=1, session=first.session))
    assert client.claimed(2, blocking=False) == ("b",)


def test_unclaim_of_parked_answered_and_unseen_claims(driver: Driver, client: Client) -> None:
    other = driver.client("other")
    parked = other.waits(other.claim(1))
    other.do(c.Unclaim(claimed=parked))
    assert isinstance(other.result(parked), CallCancelledError)
    client.put(["a"])
    other.watermark = other.number + 1
    assert other.claimed(1) == ("a",)
    answered = other.number
    waiting = client.waits(client.claim(1))
    other.do(c.Unclaim(claimed=answered))
    assert client.claimed_by(waiting) == ("a",)
    other.number += 1
    unseen = other.number
    client.put(["b"])
    other.do(c.Unclaim(claimed=unseen))
    other.post(other.claim(1), number=unseen)
    assert isinstance(other.result(unseen), CallCancelledError)
    assert client.claimed(1) == ("b",)


def test_many_interests_are_tracked_in_turns() -> None:
    client = Driver(limits=Limits(interests=2)).client()
    client.register()
    waiting = [client.waits(client.claim(1, [f"f{i}"])) for i in range(3)]
    client.put(["a", "b", "c"], {"g": [1, 1, 1]})
    for i in range(5):
        assert client.claimed(1, ["g", f"other{i}"], blocking=False) == ()
    for i, name in enumerate("abc"):
        client.put([name], {f"f{i}": [1]})
        assert client.claimed_by(waiting[i]) == (name,)


def test_why_blocked_counts(client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]})
    client.put(["a"], {"y": [1]})
    client.claimed(1, ["x", "y"], lease_s=5.0)
    report = client.call(c.Blocked, c.WhyBlocked(partition="p", task="train", fields=("x", "y", "z")))
    assert (report.unclaimed, report.ready, report.claimed, report.leased) == (1, 0, 1, 1)
    assert report.lacking == {"x": 0, "y": 1, "z": 1}
    assert "'z'" in report.why


def test_named_samples_are_claimed_all_or_none_in_the_order_named(client: Client) -> None:
    client.put(["a", "b", "c"], {"x": [1, 1, 1]})
    client.put(["d"])

    def named(*ids: str) -> tuple[str, ...]:
        return client.claimed(1, ["x"], samples=by_ids(*ids), blocking=False)

    assert named("c", "a") == ("c", "a")
    assert named("a", "b") == ()
    assert named("b", "d") == ()
    assert named("b", "gone") == ()
    assert client.claimed(9, ["x"], blocking=False) == ("b",)


def test_a_claim_of_named_samples_neither_chooses_nor_waits(client: Client) -> None:
    client.put(["a"])
    with pytest.raises(InvalidRequestError, match="must be non-blocking"):
        client.call(c.Claimed, client.claim(1, samples=by_ids("a")))
    with pytest.raises(InvalidRequestError, match="without where"):
        client.call(c.Claimed, client.claim(1, samples=by_ids("a"), blocking=False, group_size=1))


def test_who_only_looks_claims_nothing(driver: Driver, client: Client) -> None:
    waiting = client.waits(client.claim(2, ["x"], peek=True))
    client.put(["a", "b"], {"x": [1, 1]})
    assert client.claimed_by(waiting) == ("a", "b")
    assert client.claimed(2, ["x"], peek=True) == ("a", "b")
    assert client.claimed(2, ["x"]) == ("a", "b")
    assert client.claimed(2, ["x"], peek=True, blocking=False) == ()
    with pytest.raises(InvalidRequestError, match="a claim with peek"):
        client.call(c.Claimed, client.claim(2, ["x"], peek=True, lease_s=1.0))


def test_extending_a_partition_keeps_what_it_has(client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]})
    assert client.claimed(1, ["x"]) == ("a",)
    client.call(c.Done, c.Seal(partition="p"))
    more = c.Register(partition="p", fields={"y": FieldSpec()}, num_samples=None, tasks=("late", "train"), extend=True)
    client.call(c.Done, more)
    described = client.call(c.Described, c.Describe(partition="p"))
    assert set(described.tasks) == {"train", "score", "late"}
    assert described.sealed
    assert {"x", "y"} <= described.fields.keys()
    assert client.claimed(1, ["x"]) == ("b",)
    assert client.claimed(2, ["x"], task="late") == ("a", "b")


def test_extending_no_partition_registers_it(driver: Driver) -> None:
    client = driver.client()
    client.call(c.Done, c.Register(partition="new", fields={}, num_samples=None, tasks=("train",), extend=True))
    assert client.call(c.Described, c.Describe(partition="new")).tasks == ("train",)


def test_extending_beyond_the_limits_changes_nothing() -> None:
    client = Driver(limits=Limits(columns=3)).client()
    client.register(tasks=("train",))
    with pytest.raises(LimitError, match="tasks"):
        client.call(c.Done, c.Register(partition="p", fields={}, num_samples=None, tasks=("a", "b", "c"), extend=True))
    assert client.call(c.Described, c.Describe(partition="p")).tasks == ("train",)
