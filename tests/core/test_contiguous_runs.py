from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.contiguous_runs import Stretches
from tests.profiles import budget


@budget(300)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12))
def test_it_is_a_set(added: list[tuple[int, int]]) -> None:
    stretches, numbers = Stretches(), set()
    for first, more in added:
        stretches.add(first, first + more)
        numbers |= set(range(first, first + more + 1))
        assert [number for number in range(-2, 40) if number in stretches] == sorted(numbers)
        assert len(stretches) == sum(number - 1 not in numbers for number in numbers)
