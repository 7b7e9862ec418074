"""Claims: cursors, waiting, tails, groups, leases, confirmation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import FieldSpec
from dataplane.errors import (
    CallCancelledError,
    ClaimTimeoutError,
    InvalidRequestError,
    LimitError,
    PartitionNotFoundError,
    StaleSampleError,
    TaskNotFoundError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.claims import samplers
from dataplane.ledger.claims.samplers import Picked, shares, single, whole_groups
from dataplane.ledger.commands import Claim, Predicate, WhyBlocked
from dataplane.ledger.state.tasks import kind_of
from tests.ledger.driver import Client, Driver, by_ids
from tests.profiles import budget


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


def test_claiming_the_unready_rest_lets_the_tail_out(client: Client) -> None:
    client.put(["a", "b", "c"])
    client.put(["a"], {"x": [1]})
    client.do(c.Seal(partition="p"))
    first = client.waits(client.claim(2, ["x"]))
    second = client.waits(client.claim(2, ["x", "y"]))
    assert client.claimed(2, order=c.Order.FRESHEST) == ("c", "b")
    assert client.claimed_by(first) == ("a",)
    assert client.claimed_by(second) == ()


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
    other.watermark = other.last_call_id
    assert not driver.ledger._state.sessions[other.session].unconfirmed
    other.watermark = None
    client.put(["d", "e"])
    other.watermark = other.last_call_id + 1
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
    other.watermark = other.last_call_id + 1
    assert other.claimed(1) == ("a",)
    answered = other.last_call_id
    waiting = client.waits(client.claim(1))
    other.do(c.Unclaim(claimed=answered))
    assert client.claimed_by(waiting) == ("a",)
    other.last_call_id += 1
    unseen = other.last_call_id
    client.put(["b"])
    other.do(c.Unclaim(claimed=unseen))
    other.post(other.claim(1), call_id=unseen)
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


# --- Strategies of claims, without a server: what they pick, and to which rank they deal it.


FEW = budget(200)
LENGTHS = st.lists(st.integers(0, 4000), max_size=70)


def int64s(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@FEW
@given(st.lists(st.integers(-1, 5), max_size=40), st.integers(1, 4), st.integers(0, 6))
def test_whole_groups_as_a_loop_would_pick_them(names: list[int], size: int, wanted: int) -> None:
    numbers: dict[int, int] = {}
    groups = [numbers.setdefault(name, len(numbers)) if name >= 0 else -1 for name in names]
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        if group >= 0:
            members.setdefault(group, []).append(place)
    whole = [places[:size] for places in members.values() if len(places) >= size][:wanted]
    picked = whole_groups(int64s(groups), size, wanted)
    assert picked.positions.tolist() == [position for positions in whole for position in positions]
    assert picked.units.tolist() == [unit for unit, places in enumerate(whole) for _ in places]
    assert picked.amount == len(whole)
    assert picked.first(1).positions.tolist() == (whole[0] if whole else [])


@pytest.mark.parametrize("name", samplers.SAMPLERS)
@FEW
@given(lengths=LENGTHS, ranks=st.integers(1, 9), size=st.integers(1, 3), known=st.booleans())
def test_every_strategy_deals_whole_units_in_equal_numbers(
    name: str, lengths: list[int], ranks: int, size: int, known: bool
) -> None:
    units = np.arange(len(lengths)) // size
    picked = Picked(np.arange(len(lengths)), units)
    dealt = shares(name, picked, ranks, np.array(lengths, float) if known else None)
    assert len(dealt) == len(lengths)
    of_unit = {(unit, rank) for unit, rank in zip(units.tolist(), dealt.tolist(), strict=True)}
    assert len(of_unit) == picked.amount, "a group was split"
    counts = np.bincount([rank for _, rank in of_unit], minlength=ranks)
    assert len(counts) == ranks
    assert counts.max() - counts.min() <= 1


def test_who_gets_what() -> None:
    picked = single(6)
    assert shares("sequential", picked, 4, None).tolist() == [0, 0, 1, 1, 2, 3]
    assert shares("rank-aware", picked, 4, None).tolist() == [0, 1, 2, 3, 0, 1]
    assert shares("length-balanced", picked, 2, None).tolist() == [0, 0, 0, 1, 1, 1]
    assert shares("length-balanced", picked, 2, np.array([9.0, 1, 1, 1, 1, 7])).tolist() == [0, 1, 1, 0, 0, 1]


def test_unknown_lengths_deal_in_order() -> None:
    lengths = np.array([5.0, float("nan"), 1.0, 1.0])
    assert shares("length-balanced", single(4), 2, lengths).tolist() == [0, 0, 1, 1]


@FEW
@given(lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=70), ranks=st.integers(1, 8))
def test_balanced_sums_differ_by_less_than_the_longest(lengths: list[int], ranks: int) -> None:
    lengths = lengths[: len(lengths) // ranks * ranks] or [0] * ranks
    dealt = shares("length-balanced", single(len(lengths)), ranks, np.array(lengths, float))
    sums = np.bincount(dealt, weights=lengths, minlength=ranks)
    assert sums.max() - sums.min() <= max(lengths)


def test_log_normal_lengths_are_balanced_well() -> None:
    lengths = np.random.default_rng(3).lognormal(6.5, 0.8, 512).round()
    sums = np.bincount(shares("length-balanced", single(512), 8, lengths), weights=lengths)
    assert sums.max() / sums.mean() <= 1.01


def test_defaults() -> None:
    assert samplers.default(grouped=False, shared=False) == "sequential"
    assert samplers.default(grouped=True, shared=False) == "group-n"
    assert samplers.default(grouped=True, shared=True) == "length-balanced"


# --- What tells kinds of waiting claims apart.


READY_INDEX: Any = SimpleNamespace(task=SimpleNamespace(name="train"), fields=("x",))
COMMON: dict[str, Any] = {"partition": "p", "task": "train", "fields": ("x",), "batch_size": 2}
OTHER: dict[str, dict[str, Any]] = {
    "where": {"where": (Predicate(tag="reward", op=">", value=0.5),)},
    "group_by": {"group_by": "prompt", "group_size": 2},
    "group_size": {"group_size": 4},
    "max_lag": {"max_lag": 0},
    "version_tag": {"version_tag": "version", "max_lag": 1},
}
"""By option that decides which samples a claim takes: terms on which it waits for others than its neighbour does."""


def test_there_are_terms_of_every_option_that_decides() -> None:
    assert set(OTHER) == set(WhyBlocked.__struct_fields__) - {"partition", "task", "fields"}


@pytest.mark.parametrize("option", OTHER)
def test_claims_on_other_terms_are_of_another_kind(option: str) -> None:
    terms = OTHER[option]
    rest = {name: value for name, value in terms.items() if name != option}
    assert kind_of(READY_INDEX, Claim(**COMMON, **terms)) != kind_of(READY_INDEX, Claim(**COMMON, **rest))


# --- Groups that never get whole: released or dropped when the ledger's clock says so.


RELEASE, DROP = c.Partial.RELEASE, c.Partial.DROP


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
