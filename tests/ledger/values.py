"""Helpers for tests that drive the ledger: values compared, columns built, placements worked out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.core.types import GRANULE_BYTES, FieldKind, FieldSpec
from dataplane.errors import DataPlaneError
from dataplane.ledger.commands import Allocated, FieldLocations, Placement, Samples

BYTES = FieldSpec(FieldKind.JAGGED, "uint8", ())
WORDS = FieldSpec(FieldKind.JAGGED, "int64", ())


def canonical(value: Any) -> Any:
    """`value` as nested tuples that compare and hash: equal iff the values say the same."""
    if isinstance(value, msgspec.Struct):
        parts = tuple((name, canonical(getattr(value, name))) for name in value.__struct_fields__)
        return type(value).__name__, parts
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), tuple(value.tolist())
    if isinstance(value, DataPlaneError):
        return type(value).__name__, canonical(value.facts)
    if isinstance(value, dict):
        return "dict", tuple(sorted((key, canonical(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(canonical(item) for item in value)
    return type(value).__name__, value


def int64s(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(list(values), dtype=np.int64)


def by_ids(ids: Iterable[str]) -> Samples:
    return Samples(ids=tuple(ids))


def by_handles(handles: Iterable[tuple[int, int]]) -> Samples:
    """`handles` are (row, generation) pairs."""
    pairs = list(handles)
    return Samples(rows=int64s(row for row, _ in pairs), generations=int64s(generation for _, generation in pairs))


def value_locations(sizes: Sequence[Sequence[int]], allocated: Allocated) -> list[list[tuple[int, int]]]:
    """(unit, offset) of every value of every column of an allocation; asserts that each has exactly one place."""
    places: list[list[tuple[int, int] | None]] = [[None] * len(column) for column in sizes]
    for placement in allocated.placements:
        offset = placement.offset
        for k in range(placement.first, placement.last):
            assert places[placement.column][k] is None, placement
            places[placement.column][k] = (placement.unit, offset)
            offset += int(sizes[placement.column][k])
    whole: list[list[tuple[int, int]]] = []
    for c, column in enumerate(places):
        # A value of no bytes may go without a place; it stands wherever the ledger says when it is located.
        whole.append([place if place is not None else (-1, 0) for place in column])
        assert all(place is not None or not sizes[c][k] for k, place in enumerate(column)), (c, column)
    return whole


def placement_ranges(sizes: Sequence[Sequence[int]], allocated: Allocated) -> list[tuple[int, int, int]]:
    """(unit, offset, nbytes) of every placement."""

    def nbytes(p: Placement) -> int:
        return sum(int(size) for size in sizes[p.column][p.first : p.last])

    return [(p.unit, p.offset, nbytes(p)) for p in allocated.placements]


def granules(offset: int, nbytes: int) -> range:
    """Which granules of an arena these bytes touch."""
    return range(offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES))


def checksums_in(found: FieldLocations) -> list[int]:
    """Of each sample; 0 where there is none."""
    return [0] * len(found.lengths) if found.checksums is None else found.checksums.tolist()
