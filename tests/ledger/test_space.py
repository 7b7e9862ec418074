"""The free ranges of an arena, against a naive map of granules."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.ledger.state import free_space as space_module
from dataplane.ledger.state.free_space import FreeSpace
from tests.profiles import budget

CAPACITY = 96


def backed(capacity_bytes: int) -> FreeSpace:
    space = FreeSpace(capacity_bytes)
    space.back(capacity_bytes)
    return space


def free_runs(free: list[bool]) -> list[tuple[int, int]]:
    """(first, count) of every run of free granules."""
    runs: list[tuple[int, int]] = []
    for i, is_free in enumerate(free):
        if is_free and runs and runs[-1][0] + runs[-1][1] == i:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif is_free:
            runs.append((i, 1))
    return runs


class SpaceMachine(RuleBasedStateMachine):
    """`free[i]` says whether granule i is backed and free; `taken` holds what was handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.free = [False] * CAPACITY
        self.backed = 0
        self.taken: list[tuple[int, int]] = []

    @initialize(block=st.sampled_from([2, 3, 512]))
    def begin(self, block: int) -> None:
        space_module.BLOCK = block
        self.space = FreeSpace(CAPACITY * GRANULE_BYTES + 17)

    def teardown(self) -> None:
        space_module.BLOCK = 512

    def mark(self, offset: int, nbytes: int, *, free: bool) -> None:
        first, last = offset // GRANULE_BYTES, (offset + granules_up(nbytes)) // GRANULE_BYTES
        assert self.free[first:last] == [not free] * (last - first)
        self.free[first:last] = [free] * (last - first)

    @rule(granules=st.integers(0, CAPACITY + 4), odd=st.integers(0, GRANULE_BYTES - 1))
    def back(self, granules: int, odd: int) -> None:
        self.space.back(granules * GRANULE_BYTES + odd)
        top = min(granules, CAPACITY)
        if top > self.backed:
            self.free[self.backed : top] = [True] * (top - self.backed)
            self.backed = top

    @rule(nbytes=st.integers(1, 12 * GRANULE_BYTES))
    def take(self, nbytes: int) -> None:
        need = granules_up(nbytes) // GRANULE_BYTES
        expected = next((first for first, count in free_runs(self.free) if count >= need), None)
        got = self.space.take(nbytes)
        assert got == (None if expected is None else expected * GRANULE_BYTES)
        if got is not None:
            self.mark(got, nbytes, free=False)
            self.taken.append((got, nbytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset, nbytes = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.mark(offset, nbytes, free=True)
        self.space.give(offset, nbytes)

    @precondition(lambda self: any(n > GRANULE_BYTES for _, n in self.taken))
    @rule(data=st.data())
    def give_a_part(self, data: st.DataObject) -> None:
        offset, nbytes = data.draw(st.sampled_from([t for t in self.taken if t[1] > GRANULE_BYTES]))
        self.taken.remove((offset, nbytes))
        cut = data.draw(st.integers(1, granules_up(nbytes) // GRANULE_BYTES - 1)) * GRANULE_BYTES
        self.mark(offset, cut, free=True)
        self.space.give(offset, cut)
        self.taken.append((offset + cut, nbytes - cut))

    @precondition(lambda self: any(self.free))
    @rule(data=st.data())
    def give_what_is_free(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from([i for i, is_free in enumerate(self.free) if is_free]))
        before = list(self.space.ranges()), self.space.free_bytes
        with pytest.raises(AssertionError):
            FreeSpace.give(self.copy(), first * GRANULE_BYTES, GRANULE_BYTES)
        assert (list(self.space.ranges()), self.space.free_bytes) == before

    def copy(self) -> FreeSpace:
        other = backed(CAPACITY * GRANULE_BYTES)
        assert other.take(CAPACITY * GRANULE_BYTES) == 0
        for offset, nbytes in self.space.ranges():
            other.give(offset, nbytes)
        return other

    @invariant()
    def agrees(self) -> None:
        runs = free_runs(self.free)
        ranges = [(first * GRANULE_BYTES, count * GRANULE_BYTES) for first, count in runs]
        assert list(self.space.ranges()) == ranges
        assert self.space.fragments == len(ranges)
        assert self.space.free_bytes == sum(nbytes for _, nbytes in ranges)
        assert self.space.largest_bytes == max((nbytes for _, nbytes in ranges), default=0)
        assert self.space.backed_bytes == self.backed * GRANULE_BYTES
        used = [i for i in range(self.backed) if not self.free[i]]
        assert self.space.highest_used_bytes == (used[-1] + 1 if used else 0) * GRANULE_BYTES


TestSpace = SpaceMachine.TestCase
TestSpace.settings = budget(60, steps=50)


def test_nothing_is_free_before_it_is_backed() -> None:
    space = FreeSpace(1 << 20)
    assert (space.take(1), space.free_bytes, space.highest_used_bytes) == (None, 0, 0)


def test_capacity_is_whole_granules() -> None:
    space = backed(1000)
    assert space.capacity_bytes == space.backed_bytes == space.free_bytes == 960


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 64), (128, 64), (64, 192), (960, 128), (1024, 64), (32, 64), (-64, 64)]
)
def test_giving_what_is_not_in_use_asserts(offset: int, nbytes: int) -> None:
    space = backed(1024)
    assert [space.take(64), space.take(64), space.take(64)] == [0, 64, 128]
    space.give(0, 64)
    space.give(128, 64)
    with pytest.raises(AssertionError):
        space.give(offset, nbytes)


def test_many_fragments_survive_random_use() -> None:
    count = 20_000
    space = backed(count * GRANULE_BYTES)
    for _ in range(count):
        space.take(GRANULE_BYTES)
    order = list(range(count))
    random.Random(1).shuffle(order)
    for granule in order[: count // 2]:
        space.give(granule * GRANULE_BYTES, GRANULE_BYTES)
    assert space.fragments > count // 8
    ranges = list(space.ranges())
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(ranges))
    for granule in order[count // 2 :]:
        space.give(granule * GRANULE_BYTES, GRANULE_BYTES)
    assert list(space.ranges()) == [(0, count * GRANULE_BYTES)]
    assert space.highest_used_bytes == 0
