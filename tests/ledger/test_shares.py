"""Shares: one selection per step, fixed by the first rank to ask, a part for each rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dataplane.errors import ClaimTimeoutError, InvalidRequestError, ShareConflictError, StaleSampleError
from dataplane.ledger import Ledger, Limits
from dataplane.ledger import commands as c
from dataplane.ledger.claims.shares import HOLD_S
from dataplane.ledger.state.tasks import SLACK
from tests.ledger.driver import Client, Driver, by_ids, part_of
from tests.ledger.fingerprint import fingerprint

IDS = [f"s{i}" for i in range(8)]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client()
    client.register(tasks=("train", "score"))
    return client


def share(client: Client, rank: int, *, world: int = 2, size: int = 4, step: int = 0, **more: object) -> c.Claim:
    return client.claim(size, dp_rank=rank, dp_world=world, step=step, **more)


def ids(client: Client, rank: int, **more: object) -> tuple[str, ...]:
    return client.call(c.Claimed, share(client, rank, **more)).ids  # type: ignore[arg-type]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_first_to_ask_fixes_it_in_whatever_order_they_ask(driver: Driver, order: tuple[int, ...]) -> None:
    clients = [driver.client(f"rank{i}") for i in range(3)]
    clients[0].register()
    clients[0].put(IDS[:6], tags={"input_lengths": [9, 1, 1, 5, 4, 5]})
    got = {}
    for rank in order:
        got[rank] = ids(clients[rank], rank, world=3, size=6)
        clients[rank].put([f"later{rank}"], tags={"input_lengths": [3]})
    assert got == {0: ("s0", "s2"), 1: ("s3", "s4"), 2: ("s1", "s5")}


def test_ranks_that_wait_are_served_together_and_take_nothing_before(driver: Driver, client: Client) -> None:
    others = [driver.client(f"rank{i}") for i in range(2)]
    waiting = [other.waits(share(other, rank)) for rank, other in enumerate(others)]
    client.put(IDS[:3])
    assert client.claimed(3, blocking=False) == ("s0", "s1", "s2")
    client.do(c.Nack(partition="p", task="train", samples=by_ids("s0", "s1", "s2")))
    assert [other.result(call_id) for other, call_id in zip(others, waiting, strict=True)] == [None, None]
    client.put(["s3"])
    got = [other.claimed_by(call_id) for other, call_id in zip(others, waiting, strict=True)]
    assert got == [("s0", "s1"), ("s2", "s3")]


def test_held_shares_are_nobody_elses_until_the_hold_ends(driver: Driver, client: Client) -> None:
    client.put(IDS[:4])
    assert ids(client, 0) == ("s0", "s1")
    assert client.claimed(4, blocking=False) == ()
    with pytest.raises(StaleSampleError):
        client.do(c.Nack(partition="p", task="train", samples=by_ids("s2")))
    with pytest.raises(StaleSampleError):
        client.do(c.Ack(partition="p", task="train", samples=by_ids("s2"), claims=np.array([99])))
    waiting = client.waits(client.claim(2, timeout_s=1000.0))
    driver.tick(HOLD_S - 0.1)
    assert client.result(waiting) is None
    assert driver.ledger.next_deadline() is not None
    driver.tick(HOLD_S)
    assert client.claimed_by(waiting) == ("s2", "s3")
    with pytest.raises(ShareConflictError, match="'s2', 's3' of rank 1's share of step 0"):
        client.raise_(share(client, 1))


def test_a_rank_that_comes_after_the_hold_gets_what_nobody_took(driver: Driver, client: Client) -> None:
    client.put(IDS[:4])
    ids(client, 0, lease_s=5.0)
    driver.tick(5.0)
    assert ids(client, 1) == ("s2", "s3")
    assert ids(client, 0) == ("s0", "s1")


def test_lease_s_is_the_claims_own_lease_and_the_hold_of_the_others(driver: Driver, client: Client) -> None:
    client.put(IDS[:4])
    got = client.call(c.Claimed, share(client, 0, lease_s=5.0))
    client.ack(got)
    driver.tick(5.0)
    assert client.claimed(4, blocking=False) == ("s2", "s3")


def test_asking_again_is_an_error_that_says_so(client: Client) -> None:
    client.put(IDS[:4])
    ids(client, 0)
    with pytest.raises(InvalidRequestError, match="rank 0 of 2 already got its share of step 0 of task 'train'"):
        client.raise_(share(client, 0))
    client.clear(*IDS[:4])
    with pytest.raises(InvalidRequestError, match="already got its share"):
        client.raise_(share(client, 0))


@pytest.mark.parametrize("acked", [False, True])
def test_what_was_given_back_is_handed_out_again(client: Client, acked: bool) -> None:
    client.put(IDS[:4])
    got = client.call(c.Claimed, share(client, 0, lease_s=60.0))
    if acked:
        client.ack(got, "s0")
    client.nack(got, *(["s1"] if acked else ["s0", "s1"]))
    assert ids(client, 0, lease_s=60.0) == (("s1",) if acked else ("s0", "s1"))
    with pytest.raises(InvalidRequestError, match="already got its share"):
        client.raise_(share(client, 0))


def test_what_was_given_back_and_taken_by_another_is_named(client: Client) -> None:
    client.put(IDS[:4])
    got = client.call(c.Claimed, share(client, 0))
    client.nack(got)
    assert client.claimed(1) == ("s0",)
    with pytest.raises(ShareConflictError) as caught:
        client.raise_(share(client, 0))
    assert (caught.value.samples, caught.value.rank, caught.value.step) == (["s0"], 0, 0)
    assert client.claimed(1) == ("s1",)


def test_a_client_that_died_before_it_had_its_share_leaves_it_to_its_successor(driver: Driver, client: Client) -> None:
    client.put(IDS[:4])
    dying = driver.client("dying", attach=[1])
    dying.watermark = 1
    got = ids(dying, 1)
    driver.apply(c.SessionGone(unit=1, session=dying.session))
    assert ids(client, 1) == got
    assert ids(client, 0) == ("s0", "s1")


def test_cleared_samples_are_left_out_also_when_their_slot_is_used_again(client: Client) -> None:
    client.put(IDS[:4])
    assert ids(client, 0) == ("s0", "s1")
    client.clear("s2")
    client.put(["s2"])
    assert ids(client, 1) == ("s3",)
    assert client.claimed(9, blocking=False) == ("s2",)


def test_a_share_that_was_cleared_whole_is_empty(client: Client) -> None:
    client.put(IDS[:4])
    ids(client, 0)
    client.clear("s2", "s3")
    assert ids(client, 1) == ()


def test_tasks_and_steps_have_selections_of_their_own(client: Client) -> None:
    client.put(IDS)
    assert ids(client, 0, step=1) == ("s0", "s1")
    assert ids(client, 0, step=0) == ("s4", "s5")
    assert ids(client, 0, task="score") == ("s0", "s1")
    assert ids(client, 1, step=1) == ("s2", "s3")


def test_the_tail_is_dealt_evenly_and_then_every_rank_gets_nothing(client: Client) -> None:
    client.put(IDS[:7])
    client.do(c.Seal(partition="p"))
    assert [ids(client, rank, world=4, size=4, step=0) for rank in range(4)] == [(name,) for name in IDS[:4]]
    tail = [ids(client, rank, world=4, size=4, step=1) for rank in range(4)]
    assert tail == [("s4",), ("s5",), ("s6",), ()]
    assert [ids(client, rank, world=4, size=4, step=2) for rank in range(4)] == [()] * 4
    assert ids(client, 0, world=4, size=4, step=2) == ()


def test_an_end_of_stream_is_the_same_for_every_rank(client: Client) -> None:
    client.put(IDS[:2])
    client.do(c.Seal(partition="p"))
    assert client.claimed(2) == ("s0", "s1")
    assert ids(client, 0) == ()
    client.do(c.Nack(partition="p", task="train", samples=by_ids("s0")))
    assert ids(client, 1) == ()


def test_a_claim_that_does_not_wait_fixes_nothing_too_small(client: Client) -> None:
    client.put(IDS[:3])
    assert ids(client, 0, blocking=False) == ()
    assert client.claimed(3, blocking=False) == ("s0", "s1", "s2")
    client.do(c.Nack(partition="p", task="train", samples=by_ids(*IDS[:3])))
    client.put(IDS[3:4])
    assert ids(client, 0, blocking=False) == ("s0", "s1")
    assert ids(client, 1, blocking=False) == ("s2", "s3")


def test_a_selection_above_the_least_is_cut_to_equal_shares(client: Client) -> None:
    client.put(IDS[:5])
    assert ids(client, 0, size=8, min_batch_size=2) == ("s0", "s1")
    assert ids(client, 1, size=8, min_batch_size=2) == ("s2", "s3")
    assert client.claimed(1) == ("s4",)


def test_groups_are_never_split(client: Client) -> None:
    names = [f"{group}{i}" for i in range(2) for group in "abcd"]
    client.put(names, tags={"group": [name[0] for name in names], "input_lengths": [9, 1, 1, 2, 1, 1, 1, 2]})
    got = [set(ids(client, rank, size=8, group_size=2)) for rank in range(2)]
    assert got[0] | got[1] == set(names)
    assert all({name[0] + other for other in "01"} <= one for one in got for name in one)
    assert {"a0", "a1"} <= got[0]
    assert {"c0", "c1"} <= got[0] or {"b0", "b1"} <= got[0], "the longest group goes with a short one"


def test_samplers_by_name(client: Client) -> None:
    client.put(IDS, tags={"input_lengths": [5, 1, 1, 1, 1, 1, 1, 5]})
    assert ids(client, 0, sampler="rank-aware", size=8) == ("s0", "s2", "s4", "s6")
    assert ids(client, 0, sampler="sequential", size=8, task="score") == ("s0", "s1", "s2", "s3")
    assert ids(client, 1, sampler="sequential", size=8, task="score") == ("s4", "s5", "s6", "s7")


def test_other_terms_than_the_step_was_fixed_on_are_named(driver: Driver, client: Client) -> None:
    late = driver.client("late")
    waiting = late.waits(share(late, 1, size=6, where=(c.Predicate(tag="n", op=">", value=1),)))
    client.put(IDS[:4])
    ids(client, 0)
    error = late.result(waiting)
    assert isinstance(error, InvalidRequestError)
    assert "fixed with batch_size=4, where=nothing; this claim has batch_size=6, where='n' > 1" in str(error)
    for other in ({"world": 4}, {"sampler": "rank-aware"}, {"order": c.Order.FRESHEST}, {"min_batch_size": 2}):
        with pytest.raises(InvalidRequestError, match="fixed with"):
            client.raise_(share(client, 1, **other))  # type: ignore[arg-type]
    assert ids(client, 1, timeout_s=1.0, lease_s=3.0) == ("s2", "s3")


@pytest.mark.parametrize(
    "bad",
    [
        {"dp_rank": 0, "dp_world": 2},
        {"dp_rank": 0, "step": 1},
        {"dp_world": 2, "step": 1},
        {"dp_rank": 2, "dp_world": 2, "step": 1},
        {"dp_rank": -1, "dp_world": 2, "step": 1},
        {"dp_rank": 0, "dp_world": 0, "step": 1},
        {"dp_rank": 0, "dp_world": 2, "step": -1},
        {"dp_rank": 0, "dp_world": 3, "step": 1},
        {"dp_rank": 0, "dp_world": 2, "step": 1, "group_size": 3},
        {"dp_rank": 0, "dp_world": 2, "step": 1, "min_batch_size": 1},
        {"sampler": "best"},
        {"sampler": "rank-aware"},
        {"sampler": "length-balanced"},
        {"sampler": "group-n"},
        {"sampler": "sequential", "group_size": 2},
    ],
)
def test_malformed_shares_are_refused(client: Client, bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        client.raise_(c.Claim(partition="p", task="train", fields=(), batch_size=4, **bad))  # type: ignore[arg-type]


def test_a_rank_alone_is_no_share(client: Client) -> None:
    client.put(IDS[:4])
    assert client.claimed(2, dp_rank=1) == ("s0", "s1")


def test_the_last_steps_are_remembered() -> None:
    client = Driver(limits=Limits(steps=2)).client()
    client.register()
    client.put(IDS)
    for step in range(4):
        assert ids(client, 0, size=2, step=step) == (f"s{2 * step}",)
    assert ids(client, 1, size=2, step=2) == ("s5",)
    with pytest.raises(InvalidRequestError, match="step 1 of task 'train' is too old"):
        client.raise_(share(client, 1, size=2, step=1))


def test_a_register_that_drops_the_task_drops_its_steps(driver: Driver, client: Client) -> None:
    client.put(IDS[:4])
    ids(client, 0)
    client.register(tasks=("score",))
    client.register(tasks=("train",))
    driver.tick(HOLD_S)
    assert ids(client, 1) == ("s2", "s3")


def test_a_timeout_of_a_share_names_what_the_whole_step_wants(driver: Driver, client: Client) -> None:
    client.put(IDS[:3])
    waiting = client.waits(share(client, 1, timeout_s=2.0))
    driver.tick(2.0)
    error = client.result(waiting)
    assert isinstance(error, ClaimTimeoutError)
    assert (error.wanted, error.ready) == (4, 3)


# --- Leases: each belongs to one claim, by the row; what is on lease is not consumed; what is over
# leaves nothing.


ABC = ["a", "b", "c"]


@pytest.fixture
def trainer(driver: Driver) -> Client:
    made = driver.client()
    made.register()
    return made


def leased(trainer: Client, count: int, lease_s: float = 10.0, **more: object) -> c.Claimed:
    return trainer.call(c.Claimed, trainer.claim(count, lease_s=lease_s, **more))


def consumed(trainer: Client) -> bool:
    return trainer.call(c.Consumption, c.CheckConsumption(partition="p", tasks=("train",))).consumed


# --- a lease belongs to one claim


def test_a_late_nack_leaves_what_others_have_consumed(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"])
    late = leased(trainer, 2, lease_s=1.0)
    driver.tick(1.0)
    again = leased(trainer, 1)
    assert (again.ids, trainer.claimed(1)) == (("a",), ("b",))
    trainer.ack(again)
    with pytest.raises(StaleSampleError, match="its lease ended") as caught:
        trainer.nack(late)
    assert (caught.value.positions, caught.value.total) == ([0, 1], 2)
    assert trainer.claimed(2, blocking=False) == ()


def test_of_two_claims_of_one_session_only_the_one_that_has_the_lease_acknowledges(
    driver: Driver, trainer: Client
) -> None:
    trainer.put(["a"])
    late = leased(trainer, 1, lease_s=1.0)
    driver.tick(1.0)
    rightful = leased(trainer, 1)
    for attempt in (
        trainer.ack,
        trainer.nack,
        lambda got: trainer.extend(got, lease_s=50.0),
    ):
        with pytest.raises(StaleSampleError):
            attempt(late)
    assert trainer.ack(rightful) == ()
    assert trainer.claimed(1, blocking=False) == ()


def test_what_was_acknowledged_is_not_given_back(trainer: Client) -> None:
    trainer.put(["a", "b"])
    got = leased(trainer, 2)
    trainer.ack(got, "a")
    with pytest.raises(StaleSampleError) as caught:
        trainer.nack(got)
    assert caught.value.positions == [0]
    assert trainer.claimed(2, blocking=False) == ("b",)


def test_giving_back_what_came_back_by_itself_is_no_error(driver: Driver, trainer: Client) -> None:
    trainer.put(["a"])
    got = leased(trainer, 1, lease_s=1.0)
    driver.tick(1.0)
    assert trainer.nack(got) == ()
    assert trainer.claimed(1, blocking=False) == ("a",)


def test_a_claim_without_a_lease_is_given_back_and_neither_acknowledged_nor_extended(trainer: Client) -> None:
    trainer.put(["a"])
    got = trainer.call(c.Claimed, trainer.claim(1))
    with pytest.raises(StaleSampleError):
        trainer.ack(got)
    with pytest.raises(StaleSampleError):
        trainer.extend(got, lease_s=1.0)
    trainer.nack(got)
    assert trainer.claimed(1, blocking=False) == ("a",)


def test_without_claims_a_nack_takes_back_all_but_what_is_on_lease(trainer: Client) -> None:
    trainer.put(ABC)
    assert trainer.claimed(1) == ("a",)
    trainer.ack(leased(trainer, 1))
    leased(trainer, 1)
    with pytest.raises(StaleSampleError) as caught:
        trainer.do(c.Nack(partition="p", task="train", samples=by_ids(*ABC)))
    assert caught.value.samples == ["c"]
    assert trainer.claimed(3, blocking=False) == ("a", "b")


def test_there_is_a_claim_for_each_sample(trainer: Client) -> None:
    trainer.put(["a", "b"])
    got = leased(trainer, 2)
    with pytest.raises(InvalidRequestError, match="1 claim ids for 2 samples"):
        trainer.do(c.Ack(partition="p", task="train", samples=part_of(got)["samples"], claims=np.array([got.claim])))
    with pytest.raises(InvalidRequestError, match="named twice"):
        trainer.do(c.Ack(partition="p", task="train", samples=by_ids("a", "a"), claims=np.array([got.claim] * 2)))


# --- by the row


@pytest.mark.parametrize("again", [False, True])
def test_what_was_cleared_meanwhile_is_told_and_holds_up_nothing(trainer: Client, again: bool) -> None:
    trainer.put(ABC)
    got = leased(trainer, 3)
    trainer.clear("b")
    if again:
        trainer.put(["b"])
    assert trainer.extend(got, lease_s=20.0) == (1,)
    assert trainer.ack(got, "a", "b") == (1,)
    assert trainer.nack(got, "b", "c") == (0,)
    assert trainer.claimed(3, blocking=False) == (("c", "b") if again else ("c",))


def test_what_another_has_by_now_is_named_after_the_rest_was_done(driver: Driver, trainer: Client) -> None:
    trainer.put(ABC)
    got = leased(trainer, 3)
    trainer.nack(got, "b")
    assert trainer.claimed(1) == ("b",)
    trainer.clear("a")
    with pytest.raises(StaleSampleError) as caught:
        trainer.nack(got)
    assert (caught.value.positions, caught.value.task) == ([1], "train")
    assert trainer.claimed(3, blocking=False) == ("c",)


def test_of_one_claim_each_part_has_its_own_end(driver: Driver, trainer: Client) -> None:
    trainer.put(ABC)
    got = leased(trainer, 3, lease_s=10.0)
    trainer.extend(got, "b", lease_s=20.0)
    trainer.extend(got, "c", lease_s=5.0)
    for now, back in ((4.9, ()), (5.0, ("c",)), (9.9, ()), (10.0, ("a",)), (19.9, ()), (20.0, ("b",))):
        deadline = driver.ledger.next_deadline()
        assert deadline is not None
        assert deadline <= now or not back
        driver.tick(now)
        assert trainer.claimed(3, blocking=False) == back


# --- what is on lease is not consumed


def test_what_is_on_lease_is_not_consumed(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"])
    trainer.do(c.Seal(partition="p"))
    got = leased(trainer, 2)
    waiting = trainer.waits(trainer.claim(1, timeout_s=100.0))
    assert not consumed(trainer)
    trainer.ack(got, "a")
    assert not consumed(trainer)
    driver.tick(10.0)
    assert trainer.claimed_by(waiting) == ("b",)
    assert consumed(trainer)


@pytest.mark.parametrize("how", ["ack", "clear"])
def test_the_end_comes_when_the_last_lease_is_settled(trainer: Client, how: str) -> None:
    trainer.put(["a", "b"])
    trainer.do(c.Seal(partition="p"))
    got = leased(trainer, 2)
    waiting = trainer.waits(trainer.claim(1))
    trainer.clear("a")
    assert trainer.result(waiting) is None
    if how == "ack":
        trainer.ack(got, "b")
    else:
        trainer.clear("b")
    assert trainer.claimed_by(waiting) == ()
    assert consumed(trainer)


@pytest.mark.parametrize(("how", "claimed"), [("ack", 5), ("nack", 2), ("clear", 2), ("end", 2)])
def test_of_rows_that_are_settled_together_each_counts(driver: Driver, trainer: Client, how: str, claimed: int) -> None:
    trainer.put([*"abcde"])
    trainer.do(c.Seal(partition="p"))
    got = leased(trainer, 5, lease_s=10.0)
    if how == "end":
        trainer.extend(got, *"acd", lease_s=1.0)
        driver.tick(1.0)
    elif how == "clear":
        trainer.clear(*"acd")
    else:
        {"ack": trainer.ack, "nack": trainer.nack}[how](got, *"acd")
    (task,) = trainer.stats().partitions[0].tasks
    assert (task.leased, task.claimed) == (2, claimed)
    trainer.ack(got, "b", "e")
    (task,) = trainer.stats().partitions[0].tasks
    assert (task.leased, task.claimed) == (0, claimed)
    assert consumed(trainer) == (how in ("ack", "clear"))


def test_a_tail_waits_for_leases_that_it_could_take_and_for_no_others(trainer: Client) -> None:
    trainer.put(ABC, tags={"kind": ["x", "y", "x"]})
    trainer.do(c.Seal(partition="p"))
    leased(trainer, 1)
    wanted = {kind: (c.Predicate(tag="kind", op="==", value=kind),) for kind in "xy"}
    waiting = trainer.waits(trainer.claim(2, where=wanted["x"]))
    assert trainer.claimed(2, where=wanted["y"]) == ("b",)
    assert trainer.result(waiting) is None


def test_a_share_under_lease_that_nobody_came_for_is_not_consumed(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"])
    trainer.do(c.Seal(partition="p"))
    share = {"dp_world": 2, "dp_rank": 0, "sampler": "sequential"}
    trainer.ack(leased(trainer, 2, step=0, **share))
    waiting = trainer.waits(trainer.claim(2, lease_s=10.0, step=1, **share))
    assert not consumed(trainer)
    driver.tick(10.0)
    assert trainer.claimed_by(waiting) == ("b",)


def test_a_share_without_a_lease_is_consumed_whether_its_rank_came_or_not(trainer: Client) -> None:
    trainer.put(["a", "b"])
    trainer.do(c.Seal(partition="p"))
    share = {"dp_world": 2, "dp_rank": 0, "sampler": "sequential"}
    assert trainer.claimed(2, step=0, **share) == ("a",)
    assert trainer.claimed(2, step=1, **share) == ()
    assert consumed(trainer)


# --- what is over leaves nothing


def test_settled_leases_keep_no_partition_and_wake_nobody(driver: Driver, trainer: Client) -> None:
    before = len(driver.ledger.image())
    for number in range(20):
        trainer.put([f"s{number}.{i}" for i in range(200)])
        got = leased(trainer, 200, lease_s=1e6)
        if number % 2:
            trainer.ack(got)
        trainer.do(c.Register(partition="p", fields={}, num_samples=None, tasks=("train",)))
        trainer.call(c.Cleared, c.Clear(partition="p", samples=None))
        trainer.register()
    state = driver.ledger._state
    assert (state.leases.open, state.leases.ends) == ({}, [])
    assert len(driver.ledger.image()) < before + 20_000


def test_settled_leases_of_a_living_partition_are_forgotten(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"])
    kept = leased(trainer, 1, lease_s=1.0)
    for _ in range(4 * SLACK):
        trainer.nack(leased(trainer, 1, lease_s=1e6))
        trainer.extend(kept, lease_s=1.0)
    leases = driver.ledger._state.leases
    assert list(leases.open) == [kept.claim]
    assert len(leases.ends) <= 2 + SLACK
    assert driver.ledger.next_deadline() == 1.0


def test_held_shares_and_waits_for_groups_keep_no_dropped_partition(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"], tags={"group": ["x", "y"]})
    trainer.claimed(2, dp_world=2, dp_rank=0, step=0)
    trainer.put(["c"], tags={"group": ["z"]})
    trainer.waits(trainer.claim(2, group_size=2, partial_after_s=5.0, timeout_s=50.0))
    trainer.call(c.Cleared, c.Clear(partition="p", samples=None))
    state = driver.ledger._state
    assert not state.leases.open
    assert [name for _, _, name in state.wakes] == ["p"]
    trainer.register()
    trainer.put(["a"], tags={"group": ["x"]})
    waiting = trainer.waits(trainer.claim(2, group_size=2, partial_after_s=8.0, timeout_s=50.0))
    driver.tick(5.0)
    assert trainer.result(waiting) is None
    driver.tick(8.0)
    assert trainer.claimed_by(waiting) == ("a",)


def test_leases_of_a_task_that_was_left_out_end_with_it(driver: Driver, trainer: Client) -> None:
    trainer.put(["a"])
    leased(trainer, 1, lease_s=1e6)
    trainer.register(tasks=("other",))
    assert not driver.ledger._state.leases.open


def test_an_image_has_the_leases(driver: Driver, trainer: Client) -> None:
    trainer.put(ABC)
    got = leased(trainer, 3)
    trainer.extend(got, "b", lease_s=20.0)
    again = Ledger.restored(driver.ledger.image())
    assert fingerprint(again) == fingerprint(driver.ledger)
    driver.ledger = again
    trainer.ack(got, "a")
    driver.tick(10.0)
    assert trainer.claimed(3, blocking=False) == ("c",)


# --- columns that nobody has


def test_fields_and_tags_go_with_the_last_sample_that_has_them(driver: Driver, trainer: Client) -> None:
    trainer.register(fields=("x",))
    for number in range(20):
        trainer.put(["a"], {"x": [1], f"f{number}": [1]}, tags={f"t{number}": [1], "kept": [2]})
        trainer.put(["b"], {"x": [1]}, tags={"kept": [3]})
        trainer.clear("a")
        trainer.put([], {f"none{number}": []})
    partition = driver.ledger._state.partitions["p"]
    assert (list(partition.fields), list(partition.tags.columns)) == (["x"], ["kept"])
    trainer.clear("b")
    assert (list(partition.fields), list(partition.tags.columns)) == (["x"], [])


def test_tags_are_counted_by_sample(driver: Driver, trainer: Client) -> None:
    trainer.put(["a", "b"], tags={"t": [1, 2]})
    twice = c.TagColumn(name="u", values=(1, 2), positions=np.array([0, 0]))
    for _ in range(2):
        trainer.do(c.SetTags(partition="p", samples=by_ids("a"), tags=(c.TagColumn(name="t", values=(3,)), twice)))
    columns = driver.ledger._state.partitions["p"].tags.columns
    assert {name: tag.count for name, tag in columns.items()} == {"t": 2, "u": 1}
    trainer.clear("a")
    assert {name: tag.count for name, tag in driver.ledger._state.partitions["p"].tags.columns.items()} == {"t": 1}


# --- tags that are no lengths


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5, 1.5, 2.0, 1 << 54, "long", True, None])
def test_a_number_of_tokens_is_one(trainer: Client, value: object) -> None:
    with pytest.raises(InvalidRequestError, match="not a number of tokens"):
        trainer.put(["a"], tags={"input_lengths": [value]})
    trainer.put(["a"], tags={"input_lengths": [4]})
    with pytest.raises(InvalidRequestError, match="not a number of tokens"):
        trainer.do(
            c.SetTags(partition="p", samples=by_ids("a"), tags=(c.TagColumn(name="input_lengths", values=(value,)),))
        )
    assert trainer.claimed(1, dp_world=1, dp_rank=0, step=0) == ("a",)


def test_other_tags_that_no_float_can_hold_harm_nobody(trainer: Client) -> None:
    trainer.put(["a", "b"], tags={"weight_version": [(1 << 63) - 1, float("-inf")]})
    trainer.claimed(1, where=(c.Predicate(tag="weight_version", op=">", value=0.5),), peek=True)
    assert trainer.stats().partitions[0].tasks[0].lag is None
