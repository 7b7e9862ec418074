from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.number_set import NumberSet
from tests.profiles import budget


@budget(300)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12), st.integers(-1, 40))
def test_it_is_a_set(added: list[tuple[int, int]], lowest: int) -> None:
    found, numbers = NumberSet(), set[int]()

    def check() -> None:
        assert [number for number in range(-2, 40) if number in found] == sorted(numbers)
        assert found.ranges == sum(number - 1 not in numbers for number in numbers)

    for first, more in added:
        found.add(first, first + more)
        numbers |= set(range(first, first + more + 1))
        check()
    found.drop_below(lowest)
    numbers = {number for number in numbers if number >= lowest}
    check()
