"""Partitions, samples, arenas and who waits, seen from close."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequestError, PartitionNotFoundError, SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.samples import inspection
from tests.ledger.driver import Client, Driver, by_ids
from tests.ledger.fingerprint import fingerprint

KIB = 1024


@pytest.fixture
def driver() -> Driver:
    return Driver(capacity=64 * KIB, reserve_fraction=0.0)


@pytest.fixture
def client(driver: Driver) -> Client:
    client = driver.client("trainer", attach=[1])
    client.register(fields=("x", "reward"), tasks=("train", "score"))
    return client


def matrix(client: Client, columns: int = 8) -> c.Matrix:
    return client.call(c.Matrix, c.Inspect(partition="p", columns=columns))


def memory(client: Client, cells: int) -> c.MemoryMap:
    return client.call(c.MemoryMap, c.MapMemory(unit=1, cells=cells))


def show(client: Client, sample: str) -> c.Shown:
    return client.call(c.Shown, c.Show(partition="p", samples=by_ids(sample)))


def test_the_matrix_of_few_samples_has_a_column_for_each(client: Client) -> None:
    client.put(["a", "b", "c"], {"x": [1, 2, 3]})
    client.put(["b"], {"reward": [1]})
    client.claimed(1, ["x"])
    client.claimed(1, ["x"], lease_s=9.0)
    seen = matrix(client)
    assert (seen.live, seen.last_generation - seen.first_generation) == (3, 2)
    assert seen.samples.tolist() == seen.examined.tolist() == [1, 1, 1]
    assert {name: counts.tolist() for name, counts in seen.produced.items()} == {"x": [1, 1, 1], "reward": [0, 1, 0]}
    train, score = seen.tasks
    assert (train.task, train.claimed.tolist(), train.leased.tolist()) == ("train", [1, 1, 0], [0, 1, 0])
    assert (score.task, score.claimed.tolist()) == ("score", [0, 0, 0])


def test_the_matrix_of_nothing(client: Client) -> None:
    seen = matrix(client)
    assert (seen.live, seen.first_generation, seen.last_generation, len(seen.samples)) == (0, 0, 0, 0)
    assert {name: len(counts) for name, counts in seen.produced.items()} == {"x": 0, "reward": 0}


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 70), st.integers(1, 80))
def test_the_columns_add_up(has_reward: list[bool], columns: int, examined: int) -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    for number, rewarded in enumerate(has_reward):
        client.put([f"s{number}"], {"x": [1], **({"reward": [1]} if rewarded else {})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "EXAMINED", examined)
        seen = matrix(client, columns)
    assert len(seen.samples) == min(columns, len(has_reward))
    assert seen.samples.sum() == len(has_reward)
    if has_reward:
        assert seen.samples.max() - seen.samples.min() <= 1
        assert (seen.examined >= 1).all()
        assert (seen.examined <= seen.samples).all()
        assert seen.produced["x"].tolist() == seen.examined.tolist()
    if examined >= len(has_reward) and "reward" in seen.produced:
        edges = np.cumsum([0, *seen.samples.tolist()])
        by_hand = [sum(has_reward[a:b]) for a, b in itertools.pairwise(edges)]
        assert seen.produced["reward"].tolist() == by_hand
    assert seen.examined.sum() <= examined + columns


@pytest.mark.parametrize("columns", [0, -1, inspection.PARTS + 1])
def test_how_many_columns_there_may_be(client: Client, columns: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"columns={columns}: must be in"):
        matrix(client, columns)


def test_a_sample_is_shown_whole(driver: Driver, client: Client) -> None:
    driver.tick(5.0)
    client.put(["a", "b"], {"x": [10, 20]}, tags={"group": ["g", "h"], "score": [None, 2]})
    client.put(["a"], {"reward": [3]}, index=[0])
    client.claimed(1, ["x"], lease_s=9.0)
    driver.tick(7.0)
    client.call(c.Located, c.Locate(partition="p", samples=by_ids("b"), fields=("x",)))
    shown = show(client, "a")
    assert (shown.sample, shown.since, shown.now, shown.missing) == ("a", 5.0, 7.0, ())
    assert shown.tags == {"group": "g", "score": None}
    x, reward = shown.cells
    assert (x.field, x.unit, x.length, x.size_bytes, x.pinned, x.shared) == ("x", 1, 10, 10, True, False)
    assert (reward.field, reward.size_bytes, reward.pinned) == ("reward", 3, False)
    train, score = shown.tasks
    assert (train.state, train.client, train.until) == (c.TaskState.LEASED, "trainer", 14.0)
    assert (score.state, score.client, score.until) == (c.TaskState.UNCLAIMED, "", None)


def test_what_a_sample_lacks_for_a_task(client: Client) -> None:
    client.put(["a"], {"x": [1]})
    client.waits(client.claim(1, ["x", "reward", "ghost"]))
    shown = show(client, "a")
    assert shown.missing == ("reward",)
    assert [task.lacking for task in shown.tasks] == [("ghost", "reward"), ()]


def test_shared_bytes_are_said_to_be(client: Client) -> None:
    client.put(["a", "b"], {"x": [7]}, index=[0, 0])
    client.put(["c"], {"x": [7]})
    assert [show(client, name).cells[0].shared for name in "abc"] == [True, True, False]


def test_one_sample_at_a_time_and_one_that_lives(client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]})
    with pytest.raises(InvalidRequestError, match="exactly one sample, got 2"):
        client.raise_(c.Show(partition="p", samples=by_ids("a", "b")))
    with pytest.raises(SampleNotFoundError, match="'z'"):
        client.raise_(c.Show(partition="p", samples=by_ids("z")))


def test_a_sample_is_found_in_the_first_partition_that_has_it(client: Client) -> None:
    for name in ("q", "r"):
        client.register(name, fields=("x",))
        client.put(["a"], {"x": [1]}, partition=name)
    client.put(["b"], {"x": [1]})
    for sample, partition in (("a", "q"), ("b", "p")):
        assert client.call(c.Shown, c.Show(samples=by_ids(sample))).partition == partition
    with pytest.raises(SampleNotFoundError, match="the service has no live sample 'z'"):
        client.raise_(c.Show(samples=by_ids("z")))
    handle = c.Samples(rows=np.array([0]), generations=np.array([1]))
    with pytest.raises(InvalidRequestError, match="a handle requires the name of its partition"):
        client.raise_(c.Show(samples=handle))


def test_the_map_shows_what_lies_where(driver: Driver, client: Client) -> None:
    client.put(["a"], {"x": [16 * KIB]})
    client.put(["b"], {"x": [16 * KIB]})
    client.locate(by_ids("b"))
    client.clear("b")
    client.post(client.allocate({"x": [8 * KIB]}))
    seen = memory(client, 8)
    assert (seen.cell_bytes, seen.capacity_bytes, seen.backed_bytes) == (8 * KIB, 64 * KIB, 64 * KIB)
    assert seen.live.tolist() == [8 * KIB] * 2 + [0] * 6
    assert seen.retired.tolist() == seen.pinned.tolist() == [0] * 2 + [8 * KIB] * 2 + [0] * 4
    assert seen.reserved.tolist() == [0] * 4 + [8 * KIB] + [0] * 3
    assert (seen.free_bytes, seen.largest_free_bytes, seen.fragments, seen.extents) == (24 * KIB, 24 * KIB, 1, 3)
    stats = client.unit()
    assert (stats.largest_free_bytes, stats.fragments, stats.extents) == (24 * KIB, 1, 3)
    with pytest.raises(InvalidRequestError, match=r"no storage unit 9; registered units are: 1"):
        client.raise_(c.MapMemory(unit=9, cells=4))


@given(st.lists(st.integers(1, 3000), max_size=12), st.data(), st.integers(1, 200))
def test_the_map_adds_up_whatever_was_put_cleared_and_trimmed(
    sizes: list[int], data: st.DataObject, cells: int
) -> None:
    driver = Driver(capacity=64 * KIB, reserve_fraction=0.0)
    client = driver.client(attach=[1])
    client.register()
    names = [f"s{number}" for number in range(len(sizes))]
    if names:
        client.put(names, {"x": sizes})
    client.clear(*data.draw(st.lists(st.sampled_from(names), unique=True) if names else st.just([])))
    seen, stats = memory(client, cells), client.unit()
    by_hand = np.zeros(64 * KIB, bool)
    for _, start, size in driver.ledger.held_ranges():
        by_hand[start : start + size] = True
    edges = np.minimum(np.arange(len(seen.live) + 1) * seen.cell_bytes, 64 * KIB)
    assert seen.live.tolist() == [int(by_hand[a:b].sum()) for a, b in itertools.pairwise(edges)]
    assert seen.live.sum() == stats.live_bytes
    assert len(seen.live) <= cells


def test_who_waits_for_what(driver: Driver, client: Client) -> None:
    driver.tick(3.0)
    client.put(["a"], {"x": [40 * KIB]})
    client.waits(client.claim(4, ["x"], min_batch_size=2, timeout_s=10.0))
    driver.tick(4.0)
    other = driver.client("rollout", attach=[1])
    other.waits(other.allocate({"x": [30 * KIB]}, timeout_s=20.0))
    seen = client.call(c.WaitList, c.Waits())
    claim, put = seen.waits
    assert seen.now == 4.0
    assert (claim.client, claim.what, claim.task, claim.fields) == ("trainer", c.WaitKind.CLAIM, "train", ("x",))
    assert (claim.wanted, claim.ready, claim.since, claim.until) == (2, 1, 3.0, 13.0)
    assert (put.client, put.what, put.partition, put.fields) == ("rollout", c.WaitKind.PUT, "p", ("x",))
    assert (put.wanted, put.ready, put.since, put.until) == (30 * KIB, 24 * KIB, 4.0, 24.0)


def test_those_that_wait_for_what_is_named(driver: Driver, client: Client) -> None:
    client.register("q", fields=("x",))
    client.put(["a"], {"x": [40 * KIB]})
    for at, (partition, task) in enumerate([("p", "train"), ("p", "score"), ("q", "train"), ("p", "train")]):
        driver.tick(float(at))
        other = driver.client(f"{task} {at}", attach=[1])
        other.waits(other.claim(4, ["x"], partition=partition, task=task))
    driver.tick(5.0)
    client.waits(client.allocate({"x": [30 * KIB]}, timeout_s=20.0))

    def told(**asked: Any) -> tuple[list[str], int]:
        seen = client.call(c.WaitList, c.Waits(**asked))
        return [wait.client for wait in seen.waits], seen.total

    everybody = ["train 0", "score 1", "train 2", "train 3", "trainer"]
    assert told() == (everybody, 5)
    assert told(limit=2) == (everybody[:2], 5)
    assert told(partition="p") == (["train 0", "score 1", "train 3", "trainer"], 4)
    assert told(partition="p", task="train") == (["train 0", "train 3"], 2)
    assert told(partition="p", task="train", limit=1) == (["train 0"], 2)
    assert told(task="train") == (["train 0", "train 2", "train 3"], 3)
    with pytest.raises(PartitionNotFoundError, match="'nope'"):
        client.raise_(c.Waits(partition="nope"))
    with pytest.raises(InvalidRequestError, match="limit=-1"):
        client.raise_(c.Waits(limit=-1))


def test_figures_of_tasks(driver: Driver, client: Client) -> None:
    client.put(["a", "b", "c", "d"], {"x": [1] * 4}, tags={"weight_version": [3, 4, 5, 6]})
    client.do(c.SetVersion(partition="p", version=6))
    client.claimed(1, ["x"], lease_s=9.0)
    client.waits(client.claim(9, ["x"]))
    train, score = client.stats().partitions[0].tasks
    assert (train.task, train.fields, train.ready, train.leased, train.claimed) == ("train", ("x",), 3, 1, 1)
    assert (train.waiting, train.lag, train.stalest_version) == (1, 2, 4)
    assert (score.fields, score.ready, score.claimed, score.lag) == ((), 4, 0, None)


def test_there_is_no_lag_until_the_version_is_set(client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]}, tags={"weight_version": [354, 355]})
    client.waits(client.claim(9, ["x"], max_lag=0))
    (part,) = client.stats().partitions
    assert (part.version, part.tasks[0].lag, part.tasks[0].stalest_version) == (None, None, 354)
    assert client.call(c.Blocked, c.WhyBlocked(partition="p", task="train", fields=("x",))).version is None
    client.do(c.SetVersion(partition="p", version=0))
    (part,) = client.stats().partitions
    assert (part.version, part.tasks[0].lag) == (0, -354)


def test_looking_changes_nothing(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 1]}, tags={"weight_version": [1, 1]})
    client.waits(client.claim(9, ["x"]))
    for look in (c.Stats(), c.Waits(), c.Inspect(partition="p", columns=3), c.MapMemory(unit=1, cells=3)):
        client.raw(look)
    client.raw(c.Show(partition="p", samples=by_ids("a")))
    before = [kept.low for kept in driver.ledger._state.partitions["p"].interests.values()]
    client.stats()
    assert [kept.low for kept in driver.ledger._state.partitions["p"].interests.values()] == before


def test_figures_of_some_partitions(client: Client) -> None:
    for name in ("q", "r"):
        client.register(name)
    some = client.call(c.StatsReport, c.Stats(limit=2))
    assert ([found.partition for found in some.partitions], some.partition_count) == (["p", "q"], 3)
    named = client.call(c.StatsReport, c.Stats(partitions=("r", "p")))
    assert ([found.partition for found in named.partitions], named.partition_count) == (["r", "p"], 3)
    assert len(client.stats().partitions) == 3
    with pytest.raises(PartitionNotFoundError, match="nobody"):
        client.call(c.StatsReport, c.Stats(partitions=("nobody",)))
    with pytest.raises(InvalidRequestError, match="limit=-1"):
        client.call(c.StatsReport, c.Stats(limit=-1))


def test_looking_without_a_session_gives_the_same_and_changes_nothing(driver: Driver, client: Client) -> None:
    client.put(["a", "b"], {"x": [1, 2]})
    client.claimed(1, ["x"], lease_s=9.0)
    looks: list[c.Command] = [
        c.Stats(),
        c.Waits(),
        c.Inspect(partition="p", columns=2),
        c.MapMemory(unit=1, cells=4),
        c.Show(partition="p", samples=by_ids("a")),
        c.WhyBlocked(partition="p", task="train", fields=("x", "reward")),
    ]
    before = fingerprint(driver.ledger)
    seen = [repr(driver.ledger.inspect(look)) for look in looks]
    assert fingerprint(driver.ledger) == before
    assert seen == [repr(client.call(c.Result, look)) for look in looks]
    with pytest.raises(PartitionNotFoundError):
        driver.ledger.inspect(c.Inspect(partition="none", columns=2))
