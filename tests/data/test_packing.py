"""Packers: sequences into bins. Sharding with them is in `test_packing_shards.py`."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.data.packing import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from dataplane.data.packing.bins import (
    MOST_OPEN,
    Bins,
    concatenate,
    fewest_bins,
    first_fit,
    first_fit_decreasing,
    modified_first_fit_decreasing,
    split,
)
from tests.profiles import budget


@st.composite
def capacity_and_lengths(draw: st.DrawFn) -> tuple[int, list[int]]:
    capacity = draw(st.integers(1, 60))
    return capacity, draw(st.lists(st.integers(0, capacity), min_size=1, max_size=40))


def naive_first_fit(lengths: list[int], order: list[int], capacity: int) -> Bins:
    bins: Bins = []
    for row in order:
        for rows in bins:
            if sum(lengths[each] for each in rows) + lengths[row] <= capacity:
                rows.append(row)
                break
        else:
            bins.append([row])
    return bins


def falling(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


# --- each algorithm -----------------------------------------------------------------------------------------------


@budget(100)
@given(capacity_and_lengths())
def test_first_fit_decreasing_is_first_fit_from_the_longest_on(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    expected = naive_first_fit(lengths, falling(lengths), capacity)
    assert first_fit_decreasing(np.array(lengths), capacity) == expected


@budget(100)
@given(capacity_and_lengths(), st.randoms(use_true_random=False))
def test_first_fit_takes_rows_in_the_order_given(given_: tuple[int, list[int]], random: object) -> None:
    capacity, lengths = given_
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert first_fit(np.array(lengths), np.array(order), capacity) == naive_first_fit(lengths, order, capacity)


@pytest.mark.parametrize("seed", range(3))
def test_first_fit_into_many_bins_with_space(seed: int) -> None:
    """More of them than are looked through one after another."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(51, 70, 2 * MOST_OPEN).tolist(), *draw.integers(0, 60, 100).tolist()]
    order = list(range(len(lengths)))
    assert first_fit(np.array(lengths), np.array(order), 100) == naive_first_fit(lengths, order, 100)


@budget(100)
@given(capacity_and_lengths())
def test_concatenation_fills_one_bin_after_another(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    bins = concatenate(np.array(lengths), capacity)
    assert [row for rows in bins for row in rows] == list(range(len(lengths)))
    for rows, following in itertools.pairwise(bins):
        tokens = sum(lengths[row] for row in rows)
        assert tokens <= capacity < tokens + lengths[following[0]]


@budget(300)
@given(capacity_and_lengths())
def test_modified_never_takes_more_bins_than_plain(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    array = np.array(lengths)
    plain, modified = first_fit_decreasing(array, capacity), modified_first_fit_decreasing(array, capacity)
    assert fewest_bins(array, capacity) <= len(modified) <= len(plain)
    assert sorted(row for rows in modified for row in rows) == list(range(len(lengths)))


def test_where_the_modification_wins_and_where_it_would_lose() -> None:
    better = np.array([9, 8, 10, 13, 41, 11, 20, 29, 26])
    assert len(first_fit_decreasing(better, 43)) == 5
    bins = modified_first_fit_decreasing(better, 43)
    assert [sorted(better[rows].tolist(), reverse=True) for rows in bins] == [[41], [29, 13], [26, 9, 8], [20, 11, 10]]
    worse = np.array([14, 10, 44, 43, 56, 10, 34])
    assert len(modified_first_fit_decreasing(worse, 56)) == len(first_fit_decreasing(worse, 56)) == 4


@pytest.mark.parametrize(
    ("capacity", "lengths", "fewest"),
    [
        (10, [4, 3, 3], 1),
        (10, [4, 3, 4], 2),
        (10, [6, 6, 6], 3),
        (10, [8, 8, 3, 3], 3),
        (10, [0, 0], 0),
        (9, [5, 5], 2),
    ],
)
def test_the_bound_on_the_number_of_bins(capacity: int, lengths: list[int], fewest: int) -> None:
    assert fewest_bins(np.array(lengths), capacity) == fewest


def test_long_lengths_are_sorted_as_short_ones_are() -> None:
    short = np.random.default_rng(0).integers(0, 1 << 15, 300)
    assert first_fit_decreasing(short * 4, 1 << 18) == first_fit_decreasing(short, 1 << 16)


# --- packers ------------------------------------------------------------------------------------------------------


@budget(200)
@given(
    capacity_and_lengths(),
    st.sampled_from(PackingAlgorithm),
    st.none() | st.integers(0, 10),
    st.none() | st.integers(1, 8),
)
def test_every_packer(
    given_: tuple[int, list[int]], algorithm: PackingAlgorithm, least: int | None, multiple: int | None
) -> None:
    capacity, lengths = given_
    unbound = len(get_packer(algorithm, capacity).pack(lengths))
    count = max(unbound, least or 0)
    count += -count % (multiple or 1)
    packer = get_packer(algorithm, capacity, min_bin_count=least, bin_count_multiple=multiple)
    if count > len(lengths):
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences cannot fill {count} bins"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == count
    assert all(bins)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= capacity
    assert packer.pack(np.array(lengths)) == bins, "the same lengths, the same bins"


def test_the_fullest_bin_is_cut_in_halves() -> None:
    lengths = np.array([1, 1, 6, 2, 4, 9])
    assert split([[5], [2, 4], [3, 0, 1]], lengths, 4) == [[5], [2], [4], [3, 0, 1]]
    assert split([[0, 1, 2, 3, 4, 5]], lengths, 3) == [[0, 1, 2, 3], [4], [5]]
    assert split([[0, 1, 5]], lengths, 3) == [[0], [1], [5]]
    assert split([[0, 1, 3, 5]], lengths, 3) == [[0, 1], [3], [5]]
    assert split([[0, 1], [5]], np.zeros(6, dtype=np.int64), 3) == [[0], [1], [5]]


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_nothing_to_pack(algorithm: PackingAlgorithm) -> None:
    assert get_packer(algorithm, 8, bin_count_multiple=4).pack([]) == []
    with pytest.raises(ValueError, match="0 sequences cannot fill 1 bins"):
        get_packer(algorithm, 8, min_bin_count=1).pack([])


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_empty_rows_are_packed(algorithm: PackingAlgorithm) -> None:
    packer = get_packer(algorithm, 8)
    assert [sorted(rows) for rows in packer.pack([0, 0, 0])] == [[0, 1, 2]]
    assert sorted(row for rows in packer.pack([8, 0, 8, 0]) for row in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_what_fits_no_bin_is_refused_by_name(algorithm: PackingAlgorithm) -> None:
    with pytest.raises(
        ValueError, match=r"^sequence 1 has 9 tokens, more than bin_capacity=8; 2 sequences are too long$"
    ):
        get_packer(algorithm, 8).pack([8, 9, 0, 10])


@pytest.mark.parametrize(
    ("lengths", "told"),
    [([3, -1], "sequence 1 has -1 tokens"), ([0.5], "integers"), ([[1]], "integers"), ([True], "integers")],
)
def test_lengths_are_integers_of_zero_or_more(lengths: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        get_packer("concatenative", 8).pack(lengths)


def test_packers_by_name() -> None:
    for algorithm, kind in (
        ("concatenative", ConcatenativePacker),
        ("FIRST_FIT_DECREASING", FirstFitDecreasingPacker),
        ("First_Fit_Shuffle", FirstFitShufflePacker),
        (PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING, ModifiedFirstFitDecreasingPacker),
    ):
        packer = get_packer(algorithm, 10)
        assert type(packer) is kind
        assert isinstance(packer, SequencePacker)


@pytest.mark.parametrize("other", ["best_fit", "", None, 1, ConcatenativePacker, ["concatenative"]])
def test_what_is_no_packing_algorithm_is_refused_with_the_choices(other: Any) -> None:
    known = f"{re.escape(repr(other))}; expected one of CONCATENATIVE, FIRST_FIT_DECREASING, "
    with pytest.raises(ValueError, match=known):
        get_packer(other, 10)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bin_capacity": 0}, "bin_capacity=0"),
        ({"bin_capacity": 1, "min_bin_count": -1}, "min_bin_count=-1"),
        ({"bin_capacity": 1, "bin_count_multiple": 0}, "bin_count_multiple=0"),
    ],
)
def test_numbers_out_of_range(arguments: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        get_packer("concatenative", **arguments)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_of_one_packing() -> None:
    packer = get_packer("concatenative", 10)
    metrics = packer.compute_metrics([4, 6, 5], [[0, 1], [2]])
    assert metrics == {
        "num_sequences": 3,
        "num_bins": 2,
        "total_sequence_length": 15,
        "total_bin_capacity": 20,
        "total_waste": 5,
        "average_utilization": 0.75,
        "waste_ratio": 0.25,
        "bin_balance": pytest.approx(1 - 12.5**0.5 / 7.5),
        "theoretical_min_bins": 2,
        "bin_efficiency": 1.0,
    }
    assert set(packer.compute_metrics([], []).values()) == {0}
    assert packer.compute_metrics([0, 0], [[0], [1]])["bin_balance"] == 1.0
    assert packer.get_aggregated_metrics() == {}


def test_metrics_of_all_packings() -> None:
    packer = get_packer("concatenative", 10, collect_metrics=True)
    assert packer.get_aggregated_metrics() == {}
    packer.pack([4, 6, 5])
    packer.pack([1])
    assert packer.get_aggregated_metrics() == {
        "total_sequences": 4,
        "total_bins": 3,
        "average_utilization": pytest.approx(16 / 30),
        "min_utilization": 0.1,
        "max_utilization": 0.75,
        "average_waste_ratio": pytest.approx(14 / 30),
        "min_waste_ratio": 0.25,
        "max_waste_ratio": 0.9,
        "average_bin_count": 1.5,
        "bin_efficiency": pytest.approx(2 / 3),
    }
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    silent = get_packer("concatenative", 10)
    silent.pack([1])
    assert silent.get_aggregated_metrics() == {}
