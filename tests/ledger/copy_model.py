"""The model's copies: what units were ordered to copy within their arenas, and where cells are once they have."""

from __future__ import annotations

import dataclasses
from collections import Counter

from dataplane.ledger.commands import CompactArena, Compacted
from tests.ledger.claim_model import ClaimModel, Name, Place, Sample

COMPACTED: Counter[str] = Counter()
"""Of all examples so far: orders to compact, cells that moved by them, and those that were gone by then."""


class CopyModel(ClaimModel):
    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[int, list[tuple[int, int, int]]] = {}

    def ordered(self, order: CompactArena) -> None:
        """The unit is told to copy: (from, to, bytes)."""
        parts = (order.sources.tolist(), order.targets.tolist(), order.sizes.tolist())
        assert order.unit not in self.orders
        ranges = self.orders[order.unit] = list(zip(*parts, strict=True))
        cells = [cell for sample in self.all_samples() for cell in sample.cells.values() if cell.unit == order.unit]
        COMPACTED["orders"] += 1
        COMPACTED["gone"] += sum(copied(ranges, cell) is not None for cell in cells)

    def all_samples(self) -> list[Sample]:
        return [sample for partition in self.partitions.values() for sample in partition.samples.values()]

    def copies(self) -> list[tuple[Name, list[tuple[int, int, int]]]]:
        """(unit, offset, bytes) of where units write, by a name that no call has."""
        return [
            ((-unit, 0), [(unit, target, nbytes) for _, target, nbytes in ranges])
            for unit, ranges in self.orders.items()
        ]

    def compacted(self, item: Compacted) -> None:
        """Cells that live, and lie where the unit copied from, are at their copies."""
        ranges = self.orders.pop(item.unit)
        for sample in self.all_samples():
            for name, cell in sample.cells.items():
                offset = copied(ranges, cell) if cell.unit == item.unit else None
                if offset is not None:
                    value = ((-item.unit, item.number), name, offset)
                    sample.cells[name] = dataclasses.replace(cell, offset=offset, value=value)
                    COMPACTED["moved"] += 1
                    COMPACTED["gone"] -= 1


def copied(ranges: list[tuple[int, int, int]], cell: Place) -> int | None:
    """Where the copy of a cell lies; None if it is not copied."""
    for source, target, nbytes in ranges if cell.nbytes else []:
        if source <= cell.offset < source + nbytes:
            return cell.offset - source + target
    return None
