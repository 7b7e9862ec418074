"""What the recorder knows of checkpoints: what was saved, which partitions are staged, what a publication makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataplane.errors import DataPlaneError, StaleCallError
from dataplane.ledger.commands import Command, Publish, ReadSaved, Save, Saved, SavedRows, Stage

if TYPE_CHECKING:
    from tests.simulation.record import Cell, Name, Recorder

Snapshot = list[tuple[str, "dict[str, Cell]"]]
"""(id, cells by field) of each sample, oldest first."""


class SaveBooks:
    """`taken` are the partitions of each Save as they were, until its Release; `staged` names the session of each
    staged partition."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.taken: dict[Name, dict[str, Snapshot]] = {}
        self.staged: dict[str, int] = {}

    @property
    def doubtful(self) -> set[str]:
        """Staged partitions that may have gone with their sessions by now."""
        return {partition for partition, session in self.staged.items() if session in self.record.over}

    def answered(self, name: Name, command: Command, result: Any) -> None:
        match command:
            case Save():
                self.saved(name, command, result)
            case ReadSaved():
                self.read(name, command, result)
            case Stage():
                self.staged[command.partition] = name[0]
            case Publish():
                for staged, wanted in zip(command.staged, command.partitions, strict=True):
                    self.published(staged, wanted.partition, wanted.live)

    def refused(self, name: Name, command: Command, error: DataPlaneError) -> None:
        """What was saved is there until it is released, or its session ends. A call that is too late to be executed has
        a caller that gave up (see `Client.answered`)."""
        late = isinstance(error, StaleCallError)
        if isinstance(command, ReadSaved) and (name[0], command.saved) in self.taken and not late:
            assert name[0] in self.record.over, f"{name} cannot read what call {command.saved} saved: {error}"

    def saved(self, name: Name, command: Save, result: Saved) -> None:
        record = self.record
        assert name not in record.withdrawn, f"{name} was released, then saved"
        self.taken[name] = {partition: self.snapshot(partition) for partition in command.partitions}
        for found in result.partitions:
            snapshot = self.taken[name][found.partition]
            assert found.live == len(snapshot), (found, snapshot)
        record.pins[name] = [
            cell for snapshot in self.taken[name].values() for _, cells in snapshot for cell in cells.values()
        ]

    def snapshot(self, partition: str) -> Snapshot:
        ids = {generation: name for (at, name), (_, generation) in self.record.ids.items() if at == partition}
        return [(ids[generation], dict(self.record.cells[partition, generation])) for generation in sorted(ids)]

    def read(self, name: Name, command: ReadSaved, result: SavedRows) -> None:
        """It says what was there then, whatever was put and cleared since."""
        rows = self.taken[name[0], command.saved][command.partition][command.first : command.last]
        assert list(result.ids) == [each for each, _ in rows], (result.ids, rows)
        self.record.located[name] = {}
        for found in result.fields:
            cells = [cells.get(found.name) for _, cells in rows]
            for i, cell in enumerate(cells):
                nbytes = int(found.lengths[i]) * found.spec.unit_bytes
                assert (cell is None) == (nbytes < 0), (cell, found)
                assert cell is None or nbytes == cell.value.nbytes, (cell, nbytes)
                if cell is not None and nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset), (cell, found)
            self.record.located[name][found.name] = cells  # type: ignore[assignment]
        self.record.counts["pieces of saves read"] += 1

    def published(self, staged: str, partition: str, live: int) -> None:
        """What was staged is the partition of that name now, and what was that is no more."""
        record = self.record
        del self.staged[staged]
        record.ids = {key: handle for key, handle in record.ids.items() if key[0] != partition}
        record.cells = {key: cells for key, cells in record.cells.items() if key[0] != partition}
        record.born = {key for key in record.born if key[0] != partition}
        record.ids = {(_named(key[0], staged, partition), key[1]): handle for key, handle in record.ids.items()}
        record.cells = {(_named(key[0], staged, partition), key[1]): cells for key, cells in record.cells.items()}
        record.born = {(_named(key[0], staged, partition), key[1]) for key in record.born}
        assert sum(key[0] == partition for key in record.cells) == live, "other samples were published than staged"
        record.counts["published"] += 1


def _named(name: str, staged: str, partition: str) -> str:
    return partition if name == staged else name
