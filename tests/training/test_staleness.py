from __future__ import annotations

import random

import pytest

from dataplane.training.staleness import TARGET_STEP, Flow, InOrder, ReadyFirst, StalenessPolicy, WeightFifo, Windowed

POLICIES = [Windowed, ReadyFirst, WeightFifo, InOrder]


@pytest.mark.parametrize("make", POLICIES)
def test_producers_run_ahead_by_the_window_and_no_further(make: type[StalenessPolicy]) -> None:
    policy = make(batch_size=8, window=2)
    assert policy.headroom(Flow(version=0)) == 24
    assert policy.headroom(Flow(version=0, running=5, stored=12)) == 7
    assert policy.headroom(Flow(version=0, running=20, stored=8)) == 0
    assert policy.headroom(Flow(version=3, consumed=24, stored=8, running=8)) == 8
    assert policy.headroom(Flow(version=3, consumed=32, stored=8, running=8)) == 0, (
        "a batch that was taken gives no headroom until its step is over"
    )


def test_window_0_is_on_policy() -> None:
    policy = Windowed(batch_size=4, window=0)
    assert policy.headroom(Flow(version=0)) == 4
    assert policy.headroom(Flow(version=0, consumed=4)) == 0
    assert policy.headroom(Flow(version=1, consumed=4)) == 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("make", [WeightFifo, InOrder])
def test_without_evictions_nothing_used_is_older_than_the_window(make: type[StalenessPolicy], seed: int) -> None:
    """Producers begin and end in any order, steps take whole batches: admission alone keeps the window."""
    draw = random.Random(seed)
    window = draw.randrange(4)
    policy = make(batch_size=4, window=window)
    version = consumed = begun = 0
    running: list[tuple[int, int]] = []
    stored: list[tuple[int, int]] = []
    for _ in range(400):
        headroom = policy.headroom(Flow(version=version, consumed=consumed, stored=len(stored), running=len(running)))
        if headroom and draw.random() < 0.7:
            running.append((version, begun))
            begun += 1
        if running and draw.random() < 0.6:
            stored.append(running.pop(0 if make is WeightFifo else draw.randrange(len(running))))
        if make is InOrder:
            batch = [s for s in stored if policy.target(s[1]) == version]
        else:
            batch = sorted(stored)[:4]
        if len(batch) == 4:
            assert all(version - at <= window for at, _ in batch)
            stored = [s for s in stored if s not in batch]
            consumed += 4
            version += 1
    assert version > 10


def test_what_is_taken_evicted_and_given_up() -> None:
    windowed = Windowed(batch_size=4, window=2)
    assert windowed.claims(5) == [(("weight_version", ">=", 3),)]
    assert windowed.evicts(5) == (("weight_version", "<", 3),)
    assert windowed.aborts(2, 5)
    assert not windowed.aborts(3, 5)


def test_ready_first_evicts_and_gives_up_nothing() -> None:
    policy = ReadyFirst(batch_size=4, window=2)
    assert policy.claims(5) == [()]
    assert policy.evicts(5) is None
    assert not policy.aborts(0, 5)


def test_weight_fifo_takes_older_weights_first_and_waits_for_any_in_the_window() -> None:
    policy = WeightFifo(batch_size=4, window=2)
    assert policy.claims(5) == [
        (("weight_version", "==", 3),),
        (("weight_version", "==", 4),),
        (("weight_version", ">=", 3),),
    ]


def test_in_order_means_each_sample_for_a_step() -> None:
    policy = InOrder(batch_size=4, window=1)
    assert [policy.target(place) for place in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert policy.claims(2) == [((TARGET_STEP, "==", 2),)]


@pytest.mark.parametrize("arguments", [{"batch_size": 0, "window": 1}, {"batch_size": 4, "window": -1}])
def test_senseless_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"batch_size|window"):
        Windowed(**arguments)
