"""Where the values of a put lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.ledger.commands import Commit
from tests.simulation.rows import Value


@dataclass
class PlannedColumn:
    """One column of a put: its values, and which value each sample points at."""

    name: str
    values: list[Value]
    index: list[int]


def granules(offset: int, nbytes: int) -> range:
    return range(offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES))


def part_places(plan: list[PlannedColumn], unit: int, offset: int) -> list[list[tuple[int, int]]]:
    """(unit, offset) of every value of columns that lie one after another, each from a granule of its own."""
    places: list[list[tuple[int, int]]] = []
    for column in plan:
        places.append([])
        at = offset
        for value in column.values:
            places[-1].append((unit, at))
            at += value.nbytes
        offset += granules_up(at - offset)
    return places


def extent(command: Commit) -> tuple[int, int]:
    """Where a commit's part of preallocated space begins, and its bytes."""
    assert command.offset is not None
    return command.offset, sum(granules_up(int(c.lengths.sum()) * c.spec.unit_bytes) for c in command.columns)


def without(ranges: list[tuple[int, int, int]], offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(unit, offset, nbytes) of what is left of ranges of one unit."""
    for unit, start, size in ranges:
        for first, last in ((start, min(offset, start + size)), (max(offset + nbytes, start), start + size)):
            if last > first:
                yield unit, first, last - first
