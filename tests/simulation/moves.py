"""What the recorder knows of draining and compaction: which cells were found on a unit or lie where it copies from, and
which of them were moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.ledger.commands import Allocate, Command, CompactArena, Compacted, FindCells, FoundCells, Move, Moved
from tests.ledger.values import value_places
from tests.simulation.places import granules

if TYPE_CHECKING:
    from tests.simulation.record import Cell, Name, Recorder


class Page(NamedTuple):
    """Cells of a field that were found: whose they are, and which value each is."""

    partition: str
    field: str
    generations: list[int]
    cells: list[Cell]
    index: list[int]


class MoveBooks:
    """`pages` are what each FindCells found. Of orders to compact that are under way, by unit and number: `orders` are
    the ranges (from, to, bytes), `sources` the cells that lay there."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.pages: dict[Name, Page] = {}
        self.orders: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.sources: dict[tuple[int, int], list[Cell]] = {}

    def answered(self, name: Name, command: Command, result: Any) -> None:
        match command, result:
            case FindCells(), FoundCells():
                self.found(name, command, result)
            case Move(), Moved():
                self.moved(name, command, result)

    def found(self, name: Name, command: FindCells, result: FoundCells) -> None:
        """What is found is there; nothing is found only where nothing is."""
        record = self.record
        assert name not in record.withdrawn, f"{name} was released, then pinned"
        if not len(result.rows):
            left = [why for *_, why in record.in_use(command.unit) if why.startswith("live")]
            assert not left, f"{name} found nothing on unit {command.unit}, where there is {left}"
            return
        generations, index = result.generations.tolist(), result.index.tolist()
        cells = [record.cells[result.partition, generation][result.field] for generation in generations]
        for cell, k in zip(cells, index, strict=True):
            nbytes = int(result.lengths[k]) * result.spec.unit_bytes
            assert nbytes == cell.value.nbytes, (cell, nbytes)
            assert not nbytes or (command.unit, int(result.offsets[k])) == (cell.unit, cell.offset), (cell, result)
        assert len(set(result.offsets.tolist())) <= command.max_cells, "more than are the same bytes"
        self.pages[name] = Page(result.partition, result.field, generations, cells, index)
        record.pins[name] = list(cells)
        values = dict(zip(index, cells, strict=True))
        record.located[name] = {result.field: [values[k] for k in range(len(result.lengths))]}

    def moved(self, name: Name, command: Move, result: Moved) -> None:
        """The cells that were found and not written since are at their copies now; no others."""
        record = self.record
        page = self.pages[name[0], command.located]
        allocate = record.calls[name[0], command.reservation]
        assert isinstance(allocate, Allocate)
        sizes = [column.sizes.tolist() for column in allocate.columns]
        (places,) = value_places(sizes, record.placements[name[0], command.reservation])
        moved = 0
        for generation, cell, k in zip(page.generations, page.cells, page.index, strict=True):
            cells = record.cells.get((page.partition, generation), {})
            if cells.get(page.field) is cell:
                unit, offset = places[k]
                cells[page.field] = cell._replace(unit=unit, offset=offset)
                moved += 1
            elif page.field in cells:
                record.counts["cells written before they were moved"] += 1
        assert (result.cells, result.skipped) == (moved, len(page.cells) - moved), (result, moved, page)
        record.counts["cells moved"] += moved
        record.counts["cells gone before they were moved"] += result.skipped

    # --- compaction

    def ordered(self, order: CompactArena) -> None:
        """The unit copies from cells that live, to where nothing is; once more the same when it is told again."""
        record, name = self.record, (order.unit, order.number)
        ranges = list(zip(order.sources.tolist(), order.targets.tolist(), order.sizes.tolist(), strict=True))
        if name in self.orders:
            assert self.orders[name] == ranges, f"order {name} changed"
            record.counts["compactions told again"] += 1
            return
        for _, target, nbytes in ranges:
            assert record.free_before(order.unit, target, nbytes), f"order {name} copies to bytes in use: {target}"
        self.sources[name] = [
            cell
            for cells in record.cells.values()
            for cell in cells.values()
            if cell.unit == order.unit and moved(ranges, cell) is not None
        ]
        self.orders[name] = ranges

    def copy(self, order: CompactArena) -> None:
        """The unit does it. Nobody has been given what it writes to."""
        record, name = self.record, (order.unit, order.number)
        data = record.memory[order.unit].data
        for source, target, nbytes in zip(
            *(part.tolist() for part in (order.sources, order.targets, order.sizes)), strict=True
        ):
            assert name in self.orders, f"order {name} is over, and is carried out"
            for at in granules(target, nbytes):
                assert record.memory[order.unit].granted[at] is None, f"order {name} writes to granule {at}"
            data[target : target + nbytes] = data[source : source + nbytes]
        record.counts["compactions"] += 1
        record.sweep()

    def compacted(self, item: Compacted) -> None:
        """Cells that still are where they were are at their copies from now on."""
        record, name = self.record, (item.unit, item.number)
        ranges, sources = self.orders.pop(name, []), self.sources.pop(name, [])
        for cells in record.cells.values():
            for field, cell in cells.items():
                to = moved(ranges, cell) if cell.unit == item.unit else None
                if to is not None:
                    assert any(cell is source for source in sources), f"{cell} came to lie where {name} copied from"
                    cells[field] = cell._replace(offset=to)
                    record.counts["cells compacted"] += 1

    def in_use(self, unit: int) -> list[tuple[int, int, str]]:
        """What a unit reads and writes."""
        return [
            (at, nbytes, f"of order {name}")
            for name, ranges in self.orders.items()
            if name[0] == unit
            for source, target, nbytes in ranges
            for at in (source, target)
        ]


def moved(ranges: list[tuple[int, int, int]], cell: Cell) -> int | None:
    """Where the copy of the cell is; None if it is not copied."""
    for source, target, nbytes in ranges:
        if cell.value.nbytes and source <= cell.offset < source + nbytes:
            return cell.offset - source + target
    return None
