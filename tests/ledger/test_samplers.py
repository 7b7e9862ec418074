"""Strategies of claims, without a server: what they pick, and to which rank they deal it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.ledger.claims import samplers
from dataplane.ledger.claims.samplers import Picked, shares, single, whole_groups
from tests.profiles import budget

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
    assert picked.places.tolist() == [place for places in whole for place in places]
    assert picked.units.tolist() == [unit for unit, places in enumerate(whole) for _ in places]
    assert picked.amount == len(whole)
    assert picked.first(1).places.tolist() == (whole[0] if whole else [])


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
