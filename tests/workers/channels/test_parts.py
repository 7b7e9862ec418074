"""Keys of channels, by themselves."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.channels.channel import key_bytes

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(-(2.0**60), 2.0**60)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(plain, plain)
def test_keys_are_the_same_bytes_where_a_dict_holds_them_for_one(first: Any, second: Any) -> None:
    assert (key_bytes(first) == key_bytes(second)) == (first == second)


@pytest.mark.parametrize("pair", [(1, 1.0), (1, True), (0.0, -0.0), ((1, "a"), (True, "a"))])
def test_numbers_that_are_equal_are_one_key(pair: tuple[Any, Any]) -> None:
    assert key_bytes(pair[0]) == key_bytes(pair[1])


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Stage:
    source: str
    sink: str


def test_other_keys_are_told_apart() -> None:
    keys = [Colour.RED, Colour.BLUE, 2**100, (Colour.RED, 1), "RED", frozenset({1}), Stage("a", "b"), Stage("b", "a")]
    assert len({key_bytes(key) for key in keys}) == len(keys)
    with pytest.raises(TypeError, match="unhashable"):
        key_bytes([1])


def test_it_does_not_matter_whether_equal_parts_of_a_key_are_one_object() -> None:
    once, again = "actor" * 3, "".join(["actor"] * 3)
    assert once is not again
    assert key_bytes(Stage(once, once)) == key_bytes(Stage(once, again))
