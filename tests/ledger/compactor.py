"""Compaction in the model test: puts that wait for a larger piece, and what becomes of rows copied for them."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.commands import (
    Abort,
    Allocate,
    Allocated,
    Clear,
    ColumnSizes,
)
from tests.ledger.evictor import OPEN
from tests.ledger.mover import LedgerMover
from tests.ledger.values import by_handles, int64s
from tests.ledger.writer import IDS


class LedgerCompactor(LedgerMover):
    """Within a rule chance decides, as in those about budgets."""

    @precondition(lambda self: self.speaking())
    @rule(seed=st.integers(0, 1 << 32), steps=st.sampled_from([6, 12, 24]))
    def compact(self, seed: int, steps: int) -> None:
        """Rows come and go in arenas that are nearly full, and large ones are put."""
        self.squeeze(Random(seed), steps)

    def squeeze(self, chance: Random, steps: int) -> None:
        """Orders of units are carried out first."""
        for unit in self.units.values():
            while unit.orders:
                self.carry_out(unit)
        self.call(self.pick(chance), OPEN)
        for _ in range(len(IDS)):
            if self.speaking() and "p" in self.model.partitions:
                self.put_rows(chance)
        acts = [self.put_rows, self.put_shared, self.update, self.read_rows, self.settle, self.clear_rows]
        acts += [self.put_large, self.put_large, self.let_time_pass, self.let_time_pass, self.obey_some, self.obey_some]
        for _ in range(steps):
            if not self.speaking() or "p" not in self.model.partitions:
                break
            chance.choice(acts)(chance)
            if chance.random() < 0.3:
                self.no_put_waits_only_because_nobody_looked_again()

    def clear_rows(self, chance: Random) -> None:
        if self.rows():
            row = chance.choice(self.rows())
            self.call(self.pick(chance), Clear(partition="p", samples=by_handles([(row.row, row.generation)])))

    def let_time_pass(self, chance: Random) -> None:
        self.pass_time(chance.choice([0.3, 1.1]))

    def obey_some(self, chance: Random) -> None:
        """Some units carry out what they were told."""
        for unit in self.units.values():
            if unit.orders and chance.random() < 0.6:
                self.carry_out(unit)

    def put_large(self, chance: Random) -> None:
        """A row that is larger than any free piece, where bytes enough may be free."""
        spaces = [unit.space for unit in self.ledger._state.units.values()]
        largest = max(space.largest_bytes for space in spaces)
        free = max(space.free_bytes for space in spaces)
        if free <= largest:
            return
        client, nbytes = self.pick(chance), chance.randrange(largest + GRANULE_BYTES, free + 1, GRANULE_BYTES)
        sizes = (ColumnSizes(name="a", sizes=int64s([nbytes])),)
        timeout_s = chance.choice([0.55, 3.05])
        space = self.call(client, Allocate(partition="p", columns=sizes, update=True, timeout_s=timeout_s))
        number = client.next - 1
        if space is not None and isinstance(space.result, Allocated):
            self.withdraw((client.id, number), Abort(reservation=number))

    def settle(self, chance: Random) -> None:
        """What was granted to puts that waited is given back, mostly; or as it is for those who read."""
        granted = [
            name
            for name in self.model.reserved
            if self.clients[name[0]].speaks and isinstance(self.model.commands[name], Allocate)
        ]
        if granted and chance.random() < 0.7:
            name = chance.choice(granted)
            self.withdraw(name, Abort(reservation=name[1]))
        else:
            super().settle(chance)
