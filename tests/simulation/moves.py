"""What the recorder knows of draining: which cells were found on a unit, and which of them were moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.ledger.commands import Allocate, Command, FindCells, FoundCells, Move, Moved
from tests.ledger.values import value_places

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
    """`pages` are what each FindCells found."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.pages: dict[Name, Page] = {}

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
