"""Parser of conditions on tags, such as "reward > 0.5"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dataplane.core.types import Scalar
from dataplane.errors import InvalidRequestError

Condition = tuple[str, str, Any]
"""(tag, operator, value)."""
Where = str | Sequence[str | Condition]
"""One condition as text, or several, each as text or as (tag, operator, value). A sample must match all of them."""

OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "in")
_TEXT = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|<|>|(?<=\s)in(?=[\s\[]))\s*(.+?)\s*", re.DOTALL)
"""Tag, operator, value. The word `in` is an operator only after white space and before white space or a "["."""
_CONSTANTS = {"True": True, "False": False, "None": None}
_NO_WORD = re.compile(r"[\s=<>!'\"\[\]{},]")
"""Text values with one of these characters need quotes. Otherwise two conditions in one string would parse as one."""


def conditions_of(where: Where) -> tuple[Condition, ...]:
    """Parse `where` into (tag, operator, value) triples. Raises `InvalidRequestError` (a ValueError) if malformed."""
    if isinstance(where, str):
        return (parse_condition(where),)
    is_triple = isinstance(where, tuple) and len(where) == 3 and where[1] in OPERATORS
    if is_triple or isinstance(where, Mapping) or not isinstance(where, Iterable):
        expected = "expected text such as 'reward > 0.5', or a list of conditions"
        raise InvalidRequestError(f"where={where!r}: {expected}, such as [('reward', '>', 0.5)]")
    return tuple(_check_condition(number, given) for number, given in enumerate(where))


def _check_condition(number: int, given: object) -> Condition:
    """Parse one condition of a list, or check it if it is a triple already. number: its position, for errors."""
    if isinstance(given, str):
        return parse_condition(given)
    if not isinstance(given, Sequence) or len(given) != 3 or given[1] not in OPERATORS:
        raise InvalidRequestError(
            f"where[{number}]={given!r}: expected text such as 'reward > 0.5', or (tag, operator, value) with one of "
            f"the operators {', '.join(OPERATORS)}"
        )
    tag, operator, value = given
    if operator == "in" and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise InvalidRequestError(f"where[{number}]={given!r}: `in` needs a list of values")
    return tag, operator, value


def parse_condition(text: str) -> Condition:
    """Parse one condition: a tag, an operator and a value. The value is JSON, True, False, None, text in single quotes,
    or one word, which is text and must not look like a number. For `in` it is a JSON list."""
    matched = _TEXT.fullmatch(text)
    if matched is None:
        raise InvalidRequestError(
            f"{text!r}: expected TAG OPERATOR VALUE, such as 'reward > 0.5' or 'source in [\"a\", \"b\"]'"
        )
    tag, operator, value = matched.groups()
    if operator != "in":
        return tag, operator, _parse_value(text, value)
    try:
        return tag, operator, tuple(msgspec.json.decode(value, type=list[Scalar]))
    except msgspec.MsgspecError:
        raise InvalidRequestError(f'{text!r}: `in` needs a JSON list of values, such as [1, 2] or ["a", "b"]') from None


def _parse_value(text: str, value: str) -> Scalar:
    """Parse the value of a condition (not of `in`): the first that fits of a constant, JSON, a text in single quotes
    and one word. text: the whole condition, for the error."""
    if value in _CONSTANTS:
        return _CONSTANTS[value]
    try:
        scalar: Scalar = msgspec.json.decode(value, type=Scalar)
        return scalar
    except msgspec.MsgspecError:
        quoted = len(value) > 1 and value[0] == value[-1] == "'" and "'" not in value[1:-1]
        if quoted:
            return value[1:-1]
        # Otherwise it can only be one word; see below.
    if _NO_WORD.search(value):
        raise InvalidRequestError(
            f'{text!r}: cannot read the value {value!r}; quote a text of several words (source == "two words"), use '
            "'in' for a list of values, and pass several conditions as a list"
        )
    if _is_number(value):
        raise InvalidRequestError(
            f"{text!r}: {value!r} is not a number of JSON; write a number as 0.5 or -1e3, pass "
            "(tag, operator, value) for infinity, or quote a text"
        )
    return value


def _is_number(word: str) -> bool:
    """Whether Python reads the word as a number. With an underscore it is an id, such as 3_7."""
    try:
        float(word)
    except ValueError:
        return False
    return "_" not in word
