"""Small sums over columns of numbers, against the plain way."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.ledger.state.arrays import every, some, tally, top

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 40)), min_size=1, max_size=30)


@given(PAIRS)
def test_a_tally_is_the_count_and_the_sum_of_each_key(pairs: list[tuple[int, int]]) -> None:
    keys, amounts = zip(*pairs, strict=True)
    distinct, counts, sums = tally(np.array(keys, np.int32), np.array(amounts, np.int64))
    total: Counter[int] = Counter()
    for key, amount in pairs:
        total[key] += amount
    assert distinct.tolist() == sorted(set(keys))
    assert counts.tolist() == [keys.count(key) for key in distinct.tolist()]
    assert sums.tolist() == [total[key] for key in distinct.tolist()]


@given(st.lists(INT64, max_size=6))
def test_the_top_is_the_largest_and_beyond_all_with_a_negative_one(values: list[int]) -> None:
    found = top(np.array(values, np.int64))
    assert found >= 1 << 63 if min(values, default=0) < 0 else found == max(values, default=0)


@given(st.lists(st.integers(0, 2), max_size=6))
def test_some_and_every_are_any_and_all(values: list[int]) -> None:
    array = np.array(values, np.int64)
    assert (some(array), every(array)) == (any(values), all(values))
