"""Draining in the model test: units that get nothing new, and cells that are moved while others write and clear."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.ledger.commands import (
    Abort,
    Allocate,
    Allocated,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Drain,
    FindCells,
    FoundCells,
    Mode,
    Move,
    Moved,
    OnFull,
    Release,
)
from tests.ledger.claim_checks import Client
from tests.ledger.evictor import OPEN, LedgerEvictor
from tests.ledger.values import BYTES, by_handles, by_ids, int64s
from tests.ledger.writer import IDS

MOVED: Counter[str] = Counter()
"""Of all examples so far: cells that were moved, that were skipped, values that several cells share."""


class LedgerMover(LedgerEvictor):
    """Rules about draining. Within a rule chance decides, as in those about budgets."""

    @precondition(lambda self: self.speaking())
    @rule(seed=st.integers(0, 1 << 32), steps=st.sampled_from([3, 6, 10]))
    def migrate(self, seed: int, steps: int) -> None:
        """Units are drained and come back, one after another, while rows come and go."""
        self.shift(Random(seed), steps)

    @precondition(lambda self: self.speaking())
    @rule(data=st.data())
    def wait_for_cells(self, data: st.DataObject) -> None:
        """Whoever finds cells keeps them pinned; whoever finds none waits while others hold what is there."""
        unit = data.draw(st.sampled_from(sorted(self.units)))
        self.call(self.draw_client(data), FindCells(unit=unit, timeout_s=data.draw(st.sampled_from([0.0, 3.05]))))

    def shift(self, chance: Random, steps: int) -> None:
        """Orders of units are carried out first. At the end no unit is drained any more."""
        for unit in self.units.values():
            while unit.orders:
                self.carry_out(unit)
        self.call(self.pick(chance), OPEN)
        acts = [self.put_rows, self.put_shared, self.update, self.take_rows, self.settle, self.read_rows]
        for _ in range(steps):
            if not self.speaking() or "p" not in self.model.partitions:
                break
            if chance.random() < 0.4:
                self.empty(chance, chance.choice(sorted(self.units)))
            else:
                chance.choice(acts)(chance)
            if chance.random() < 0.3:
                self.no_put_waits_only_because_nobody_looked_again()
        for unit in sorted(self.model.draining):
            if self.speaking():
                self.call(self.pick(chance), Drain(unit=unit, undo=True))

    def put_shared(self, chance: Random) -> None:
        """Two or three rows that point at one value, or two."""
        client, names = self.pick(chance), chance.sample(IDS, chance.choice([2, 3]))
        lengths = int64s([chance.choice([1, 65, 130])] * chance.choice([1, 2]))
        index = int64s(place % len(lengths) for place in range(len(names)))
        sizes = (ColumnSizes(name="a", sizes=lengths),)
        space = self.call(client, Allocate(partition="p", columns=sizes, on_full=OnFull.REJECT, timeout_s=3.05))
        number = client.next - 1
        column = CommitColumn(name="a", spec=BYTES, lengths=lengths, index=index)
        if space is None:
            self.withdraw((client.id, number), Abort(reservation=number))
        elif isinstance(space.result, Allocated):
            samples = by_ids(names)
            commit = Commit(partition="p", samples=samples, mode=Mode.UPSERT, reservation=number, columns=(column,))
            self.call(client, commit)

    def empty(self, chance: Random, unit: int) -> None:
        """Only this unit is drained, mostly; some pages of it are moved."""
        client = self.pick(chance)
        for other in sorted({*self.model.draining} - {unit}):
            self.call(client, Drain(unit=other, undo=True))
        self.call(client, Drain(unit=unit, undo=chance.random() < 0.2, force=chance.random() < 0.5))
        place = "", ""
        for _ in range(chance.choice([1, 2, 4])):
            if not client.speaks:
                return
            find = FindCells(
                unit=unit,
                max_cells=chance.choice([1, 3, 99]),
                max_bytes=chance.choice([1, 150, 1 << 20]),
                partition=place[0],
                field=place[1],
            )
            answer = self.call(client, find)
            if answer is None or not isinstance(answer.result, FoundCells) or not len(answer.result.rows):
                return
            found = answer.result
            place = found.partition, found.field
            MOVED["shared"] += len(found.rows) - len(found.lengths)
            self.move_page(chance, client, client.next - 1, unit, found)

    def move_page(self, chance: Random, client: Client, located: int, unit: int, found: FoundCells) -> None:
        fate = chance.choice(["move"] * 6 + ["wrong", "abort"])
        sizes = (ColumnSizes(name=found.field, sizes=found.lengths * found.spec.unit_bytes),)
        on_full = chance.choice([OnFull.REJECT, OnFull.REJECT, OnFull.WAIT])
        space = self.call(
            client,
            Allocate(
                partition=found.partition, columns=sizes, update=True, moving=True, on_full=on_full, timeout_s=3.05
            ),
        )
        number = client.next - 1
        for _ in range(chance.choice([0, 1, 2])):
            self.disturb_page(chance, found)
        if client.speaks and space is None:
            self.withdraw((client.id, number), Abort(reservation=number))
        elif client.speaks and space is not None and isinstance(space.result, Allocated):
            if fate == "abort":
                self.withdraw((client.id, number), Abort(reservation=number))
            else:
                offsets = found.offsets[:-1] if fate == "wrong" else found.offsets
                self.finish_move(client, found, unit, located, number, offsets)
        if client.speaks and (fate != "move" or chance.random() < 0.8):
            self.withdraw((client.id, located), Release(located=located))

    def finish_move(
        self, client: Client, found: FoundCells, unit: int, located: int, reservation: int, offsets: object
    ) -> None:
        move = Move(
            partition=found.partition,
            field=found.field,
            unit=unit,
            rows=found.rows,
            generations=found.generations,
            index=found.index,
            offsets=offsets,
            lengths=found.lengths,
            located=located,
            reservation=reservation,
        )
        answer = self.call(client, move)
        if answer is not None and isinstance(answer.result, Moved):
            MOVED["moved"] += answer.result.cells
            MOVED["skipped"] += answer.result.skipped

    def disturb_page(self, chance: Random, found: FoundCells) -> None:
        """Something becomes of a cell that was found: it is cleared, written anew, or its id is born again."""
        partition = self.model.partitions.get(found.partition)
        place = chance.randrange(len(found.rows))
        handle = found.rows.tolist()[place], found.generations.tolist()[place]
        sample = partition.live.get(handle) if partition is not None else None
        if sample is None or not self.speaking():
            return
        what, client = chance.choice(["clear", "write", "again"]), self.pick(chance)
        if what != "write":
            self.call(client, Clear(partition=found.partition, samples=by_handles([handle])))
        if what == "clear" or not client.speaks:
            return
        lengths = int64s([1])
        sizes = (ColumnSizes(name=found.field, sizes=lengths * found.spec.unit_bytes),)
        allocate = Allocate(
            partition=found.partition, columns=sizes, update=what == "write", on_full=OnFull.REJECT, timeout_s=3.05
        )
        space = self.call(client, allocate)
        number = client.next - 1
        if space is None:
            self.withdraw((client.id, number), Abort(reservation=number))
        elif isinstance(space.result, Allocated):
            samples = by_handles([handle]) if what == "write" else by_ids([sample.id])
            column = CommitColumn(name=found.field, spec=found.spec, lengths=lengths)
            commit = Commit(
                partition=found.partition, samples=samples, mode=Mode.UPSERT, reservation=number, columns=(column,)
            )
            self.call(client, commit)
