"""Tags: what goes in comes out, types included."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.core.types import Scalar
from dataplane.errors import InvalidRequestError, SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.state.tags import Tags, packed
from tests.ledger.driver import Client, Driver, by_ids


@pytest.fixture
def client() -> Client:
    client = Driver().client()
    client.register()
    return client


def tags_of(client: Client) -> dict[str, dict[str, Scalar]]:
    """Tags by sample."""
    listed = client.call(c.Listed, c.List(partition="p"))
    found: dict[str, dict[str, Scalar]] = {name: {} for name in listed.ids}
    for column in listed.tags:
        places = range(len(listed.ids)) if column.positions is None else column.positions.tolist()
        for place, value in zip(places, column.values, strict=True):
            found[listed.ids[place]][column.name] = value
    return found


@pytest.mark.parametrize(
    "values",
    [
        (1, 2, -3),
        (1.0, float("inf"), -0.0),
        (True, False, True),
        ("a", "", "\u00e9"),
        (1, 1.0, True),
        (None, None, "x"),
        (1 << 80, 2, 3),
        (None, 1, False),
    ],
)
def test_values_come_back_with_their_types(client: Client, values: tuple[Scalar, ...]) -> None:
    client.put(["a", "b", "c"], tags={"t": values})
    got = [tags["t"] for tags in tags_of(client).values()]
    assert [(type(v), v) for v in got] == [(type(v), v) for v in values]


def test_tags_merge_and_a_column_may_change_kind(client: Client) -> None:
    client.put(["a", "b"], tags={"t": [1, 2], "u": [True, False]})
    client.put(["b"], {"x": [1]})
    client.do(c.SetTags(partition="p", samples=by_ids("b"), tags=(c.TagColumn(name="t", values=("two",)),)))
    client.put(["c"])
    assert tags_of(client) == {"a": {"t": 1, "u": True}, "b": {"t": "two", "u": False}, "c": {}}


def test_positions_tag_some_of_the_samples(client: Client) -> None:
    column = c.TagColumn(name="t", values=(5, 6), positions=np.array([2, 0]))
    client.call(
        c.Committed,
        c.Commit(partition="p", samples=by_ids("a", "b", "c"), mode=c.Mode.CREATE, tags=(column,)),
    )
    assert tags_of(client) == {"a": {"t": 6}, "b": {}, "c": {"t": 5}}


def test_a_used_again_slot_has_no_tags_of_the_dead(client: Client) -> None:
    client.put(["a"], tags={"t": ["secret"], "n": [1]})
    client.clear("a")
    client.put(["b"])
    assert tags_of(client) == {"b": {}}


def test_set_tags_needs_living_samples(client: Client) -> None:
    with pytest.raises(SampleNotFoundError):
        client.do(c.SetTags(partition="p", samples=by_ids("a"), tags=()))


def test_enumerated_tags(client: Client) -> None:
    client.register(enums={"status": ("ok", "cut")})
    client.put(["a"], tags={"status": ["ok"]})
    with pytest.raises(InvalidRequestError, match="'bad' is not one of the values declared with enums: ok, cut"):
        client.put(["a"], tags={"status": ["bad"]})


PYTHON = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@pytest.mark.parametrize("op", sorted(PYTHON))
@pytest.mark.parametrize("column", [(1, 2, 3), (1.0, 2.5, float("nan")), (False, True), ("a", "b"), (1, "a", None)])
@pytest.mark.parametrize("value", [1, 2.5, True, "a", None, (1 << 60) + 1, float("nan")])
def test_predicates_mean_what_python_means(op: str, column: tuple[Scalar, ...], value: Scalar) -> None:
    tags, rows = Tags(8), np.arange(len(column))
    tags.merge(rows, (c.TagColumn(name="t", values=column),))

    def python(item: Scalar) -> bool:
        try:
            return bool(PYTHON[op](item, value))
        except TypeError:
            return False

    got = tags.matches((c.Predicate(tag="t", op=op, value=value),), rows)
    assert got.tolist() == [python(item) for item in column]


def test_large_numbers_compare_exactly() -> None:
    tags, rows = Tags(2), np.arange(2)
    tags.merge(rows, (c.TagColumn(name="t", values=((1 << 60), (1 << 60) + 1)),))
    got = tags.matches((c.Predicate(tag="t", op="==", value=(1 << 60) + 1),), rows)
    assert got.tolist() == [False, True]
    assert packed((1, 2)).dtype == np.int64
