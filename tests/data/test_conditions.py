"""Conditions on tags, as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.data.conditions import Condition, conditions_of
from dataplane.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("reward > 0.5", ("reward", ">", 0.5)),
        ("  reward>=-1  ", ("reward", ">=", -1)),
        ("source == math", ("source", "==", "math")),
        ('source != "a b = c"', ("source", "!=", "a b = c")),
        ("source == 'a b'", ("source", "==", "a b")),
        ("tag with spaces<3", ("tag with spaces", "<", 3)),
        ("done == true", ("done", "==", True)),
        ("done == True", ("done", "==", True)),
        ("done != None", ("done", "!=", None)),
        ("done <= null", ("done", "<=", None)),
        ("begin == 1", ("begin", "==", 1)),
        ("in == 1", ("in", "==", 1)),
        ("k in [1, 2]", ("k", "in", (1, 2))),
        ("k in[1]", ("k", "in", (1,))),
        ('k in ["a"]', ("k", "in", ("a",))),
        ('k in ["a", null]', ("k", "in", ("a", None))),
    ],
)
def test_a_text_is_a_condition(text: str, condition: Condition) -> None:
    assert conditions_of(text) == (condition,)
    assert conditions_of([text, ("x", "==", 1)]) == (condition, ("x", "==", 1))


def test_values_keep_their_type() -> None:
    assert [type(conditions_of(f"k == {value}")[0][2]) for value in ("1", "1.0", "true", '"1"')] == [
        int,
        float,
        bool,
        str,
    ]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("group", "'group': expected TAG OPERATOR VALUE"),
        ("", "'': expected TAG OPERATOR VALUE"),
        ("> 3", "'> 3': expected TAG OPERATOR VALUE"),
        ("a > 1 and b > 2", "pass several conditions as a list"),
        ("a == two words", "quote a text of several words"),
        ("a = 1", "expected TAG OPERATOR VALUE"),
        ("a === 1", "quote a text"),
        ("a == [1]", "quote a text"),
        ("a in 3", "`in` needs a JSON list"),
        ("a in [[1]]", "`in` needs a JSON list"),
        ([("a", "in", "xyz")], r"where\[0\]=.*`in` needs a list of values"),
        ([("a", "~", 1)], r"where\[0\]=.*expected text such as 'reward > 0.5', or \(tag, operator, value\)"),
        (["a > 1", 3], r"where\[1\]=3: expected"),
        (("a", ">", 1), "'a': expected TAG OPERATOR VALUE"),
        (3, "where=3: expected text"),
        (None, "where=None: expected text"),
    ],
)
def test_what_is_none_is_refused_by_name(where: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        conditions_of(where)
