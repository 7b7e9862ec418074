"""Tags of one partition: small per-sample scalars, stored in one column per name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.core.types import Scalar
from dataplane.ledger.commands import Int64s, Predicate, TagColumn
from dataplane.ledger.state.arrays import Bools, every, grown

TYPED: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float64}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
OPERATORS = (*COMPARE, "in")
EXACT = 1 << 53
"""Up to this absolute value, numpy and Python compare ints with floats in the same way."""


class Tag:
    """One tag by row; `count` rows have it. `values` has dtype bool, int64 or float64 while all values are of that
    type, else dtype object. Values are returned exactly as stored, including their types."""

    def __init__(self, dtype: npt.DTypeLike, capacity: int) -> None:
        self.values: np.ndarray[Any, Any] = np.zeros(capacity, dtype)
        self.present: Bools = np.zeros(capacity, np.bool_)
        self.count = 0

    def grow(self, capacity: int) -> None:
        self.values = grown(self.values, capacity)
        self.present = grown(self.present, capacity)

    def set(self, rows: Int64s, values: np.ndarray[Any, Any], *, repeats: bool) -> None:
        """Set the values of these rows. With `repeats`, rows may occur more than once."""
        if values.dtype != self.values.dtype and self.values.dtype != object:
            self.values = self.values.astype(object)  # mixed types from now on
        if self.values.dtype == object:
            values = values.astype(object)
        self.values[rows] = values
        fresh = rows[~self.present[rows]]
        self.count += len(np.unique(fresh) if repeats else fresh)
        self.present[rows] = True


def packed(values: tuple[Scalar, ...]) -> np.ndarray[Any, Any]:
    """Return the values as an array with the most specific dtype that preserves every value and type."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        dtype = TYPED.get(kinds.pop())
        if dtype is not None:
            return np.array(values, dtype)
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects


MIN_SHARED = 64
"""Minimum number of rows of a column with an index."""
MOST_SHARED = 256
"""Maximum number of different values of a column with an index."""


def shared_values(name: str, values: np.ndarray[Any, Any]) -> TagColumn | None:
    """Return a column with one entry for equal values; None if their types or the many different
    values exclude it."""
    if values.dtype != object:
        bits = values.view(f"u{values.itemsize}")  # 0.0 and -0.0 differ, and NaN equals itself
        if not every(bits == bits[0]):
            return None
        return TagColumn(name=name, values=(values[0].item(),), index=np.zeros(len(values), np.uint8))
    each = values.tolist()
    first = each[0]
    if type(first) is str and first == each[-1] and each.count(first) == len(each):
        return TagColumn(name=name, values=(first,), index=np.zeros(len(each), np.uint8))
    begin = each[:MOST_SHARED]
    if len(set(begin)) > len(begin) // 4:
        return None
    index = {value: number for number, value in enumerate(dict.fromkeys(each))}
    if len(index) > MOST_SHARED or not set(map(type, index)) <= {str, type(None)}:
        return None  # 1, 1.0 and True are equal
    numbers = bytes(map(index.__getitem__, each))
    return TagColumn(name=name, values=tuple(index), index=np.frombuffer(numbers, np.uint8))


class Tags:
    """The tag columns of a partition. A column exists while a live sample has the tag."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.columns: dict[str, Tag] = {}

    def grow(self, capacity: int) -> None:
        self.capacity = capacity
        for tag in self.columns.values():
            tag.grow(capacity)

    def merge(self, rows: Int64s, columns: tuple[TagColumn, ...]) -> None:
        """Set the tags of `columns` for the rows. A column's `positions` index into `rows` (None: all rows). They
        may be repeated; the last value counts."""
        for column in columns:
            if not column.values:
                continue
            values = packed(column.values)
            tag = self.columns.get(column.name)
            if tag is None:
                tag = self.columns[column.name] = Tag(values.dtype, self.capacity)
            where = rows if column.positions is None else rows[column.positions]
            tag.set(where, values, repeats=column.positions is not None)

    def drop(self, rows: Int64s) -> None:
        """Remove all tags of these rows (no repeats), and the columns that no row has any longer."""
        for name, tag in list(self.columns.items()):
            tag.count -= int(np.count_nonzero(tag.present[rows]))
            tag.present[rows] = False
            if tag.values.dtype == object:
                tag.values[rows] = None  # frees the values
            if not tag.count:
                del self.columns[name]

    def of(self, rows: Int64s, *, shared: bool = False) -> tuple[TagColumn, ...]:
        """Return the tags of these rows, without tags that none of them has. With `shared`, each of
        a few different values of many rows is returned once (see `TagColumn.index`)."""
        shared = shared and len(rows) >= MIN_SHARED
        columns = []
        for name, tag in self.columns.items():
            present = tag.present[rows]
            if present.all():
                if len(rows):  # `all` of no rows is true, too
                    stored = tag.values[rows]
                    column = shared_values(name, stored) if shared else None
                    columns.append(column or TagColumn(name=name, values=tuple(stored.tolist())))
            elif present.any():
                positions = np.flatnonzero(present)
                values = tuple(tag.values[rows[positions]].tolist())
                columns.append(TagColumn(name=name, values=values, positions=positions))
        return tuple(columns)

    def present(self, name: str, rows: Int64s) -> Bools:
        tag = self.columns.get(name)
        return np.zeros(len(rows), np.bool_) if tag is None else tag.present[rows]

    def values(self, name: str, rows: Int64s) -> list[Scalar]:
        """Return the tag's values of these rows, all of which must have the tag."""
        tag = self.columns.get(name)
        return [] if tag is None else tag.values[rows].tolist()

    def codes(self, name: str, rows: Int64s) -> Int64s:
        """Return a code for each row: equal for equal values of equal type, numbered by first appearance, and -1 for
        rows without the tag."""
        result = np.full(len(rows), -1)
        tag = self.columns.get(name)
        if tag is None:
            return result
        with_tag = np.flatnonzero(tag.present[rows])
        values = tag.values[rows[with_tag]]
        if values.dtype == object:
            code_of: dict[tuple[type, Scalar], int] = {}
            result[with_tag] = [code_of.setdefault((type(value), value), len(code_of)) for value in values.tolist()]
        elif len(values):
            # `np.unique` numbers the values in ascending order: renumber them by their first positions.
            _, firsts, inverse = np.unique(values, return_index=True, return_inverse=True)
            rank = np.empty(len(firsts), np.int64)
            rank[np.argsort(firsts)] = np.arange(len(firsts))
            result[with_tag] = rank[inverse]
        return result

    def numbers(self, name: str, rows: Int64s) -> npt.NDArray[np.float64] | None:
        """Return the tag's values as floats, or None if some row has no value, a value that is not an int or float
        (bools are not), or an int beyond the range of floats."""
        tag = self.columns.get(name)
        if tag is None or not every(tag.present[rows]):
            return None
        values = tag.values[rows]
        if values.dtype == object and not all(type(value) in (int, float) for value in values.tolist()):
            return None
        try:
            return None if values.dtype == np.bool_ else values.astype(np.float64)
        except OverflowError:
            return None

    def matches(self, where: tuple[Predicate, ...], rows: Int64s) -> Bools:
        """Return which rows satisfy every predicate."""
        result = np.ones(len(rows), np.bool_)
        for predicate in where:
            result &= self._match(predicate, rows)
        return result

    def undecided(self, where: tuple[Predicate, ...], rows: Int64s) -> Bools:
        """Return which rows lack the tag of some predicate and satisfy all predicates whose tag they have. Setting tags
        later decides whether these rows match."""
        lacking = np.zeros(len(rows), np.bool_)
        failing = np.zeros(len(rows), np.bool_)
        for predicate in where:
            present = self.present(predicate.tag, rows)
            lacking |= ~present
            failing |= present & ~self._match(predicate, rows)
        return lacking & ~failing

    def _match(self, predicate: Predicate, rows: Int64s) -> Bools:
        """Return which rows have the predicate's tag and satisfy the predicate."""
        tag = self.columns.get(predicate.tag)
        if tag is None:
            return np.zeros(len(rows), np.bool_)
        result = np.zeros(len(rows), np.bool_)
        with_tag = np.flatnonzero(tag.present[rows])
        result[with_tag] = _compare(predicate, tag.values[rows[with_tag]])
        return result


def _compare(predicate: Predicate, values: np.ndarray[Any, Any]) -> Bools:
    """Return which of the values satisfy the predicate."""
    if predicate.op == "in":
        options = predicate.value if isinstance(predicate.value, tuple) else (predicate.value,)
        matches = np.zeros(len(values), np.bool_)
        for option in options:
            matches |= _compare_one(operator.eq, values, option)
        return matches
    assert not isinstance(predicate.value, tuple), predicate
    return _compare_one(COMPARE[predicate.op], values, predicate.value)


def _compare_one(compare: Callable[[Any, Any], Any], values: np.ndarray[Any, Any], value: Scalar) -> Bools:
    """Return for which of the values `compare(item, value)` is true: in one vector operation if numpy and Python agree
    on the result, else item by item."""
    if values.dtype != object and isinstance(value, bool | int | float) and abs(value) <= EXACT:
        return np.asarray(compare(values, value), np.bool_)
    return np.array([_compares(compare, item, value) for item in values.tolist()], np.bool_)


def _compares(compare: Callable[[Any, Any], Any], item: Scalar, value: Scalar) -> bool:
    """Whether `item` compares to `value` as required. False for types that cannot be ordered."""
    try:
        return bool(compare(item, value))
    except TypeError:
        return False
