"""Shares: one selection per step, fixed by the first rank to ask, a part for each rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dataplane.errors import ClaimTimeoutError, InvalidRequestError, ShareConflictError, StaleSampleError
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.claims.shares import HOLD_S
from tests.ledger.driver import Client, Driver, by_ids

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


def test_what_is_dealt_does_not_depend_on_who_asks_first(driver: Driver) -> None:
    dealt = []
    for order in itertools.permutations(range(2)):
        client = Driver().client()
        client.register()
        client.put(IDS, tags={"input_lengths": [7, 1, 9, 2, 2, 8, 1, 3]})
        got = {rank: ids(client, rank, size=8) for rank in order}
        dealt.append([got[0], got[1]])
    assert dealt[0] == dealt[1]
    assert sorted(dealt[0][0] + dealt[0][1]) == IDS


def test_ranks_that_wait_are_served_together_and_take_nothing_before(driver: Driver, client: Client) -> None:
    others = [driver.client(f"rank{i}") for i in range(2)]
    waiting = [other.waits(share(other, rank)) for rank, other in enumerate(others)]
    client.put(IDS[:3])
    assert client.claimed(3, blocking=False) == ("s0", "s1", "s2")
    client.do(c.Nack(partition="p", task="train", samples=by_ids("s0", "s1", "s2")))
    assert [other.result(number) for other, number in zip(others, waiting, strict=True)] == [None, None]
    client.put(["s3"])
    got = [other.claimed_by(number) for other, number in zip(others, waiting, strict=True)]
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


def test_shares_balance_lengths() -> None:
    client = Driver().client()
    client.register()
    lengths = np.random.default_rng(0).lognormal(6, 1, 512).astype(int).tolist()
    client.put([f"s{i}" for i in range(512)], tags={"input_lengths": lengths})
    sums = []
    for rank in range(8):
        got = client.call(c.Claimed, share(client, rank, world=8, size=512))
        assert len(got.ids) == 64
        (column,) = got.tags
        sums.append(sum(value for value in column.values if isinstance(value, int)))
    assert max(sums) / (sum(sums) / 8) < 1.02
