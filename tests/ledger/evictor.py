"""Budgets in the model test: partitions that are full, and puts that let samples go for space."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Claim,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Locate,
    Mode,
    OnFull,
    Preallocate,
    Register,
    Release,
    Samples,
    WhenFull,
)
from tests.ledger.claim_checks import Client
from tests.ledger.claim_model import Sample
from tests.ledger.sessions_machine import LedgerSessions
from tests.ledger.space_checks import RESERVE
from tests.ledger.values import BYTES, by_handles, by_ids, int64s
from tests.ledger.writer import IDS, SPECS, TASKS

OTHER = "other"
OPEN = Register(partition="p", fields=dict(SPECS), num_samples=None, tasks=TASKS)


class LedgerEvictor(LedgerSessions):
    """Rules about budgets. Within a rule chance decides: what hypothesis draws is too much alike to fill a budget with
    rows of all kinds."""

    @precondition(lambda self: self.living())
    @rule(
        seed=st.integers(0, 1 << 32),
        steps=st.sampled_from([50, 12, 25, 80]),
        policy=st.sampled_from([WhenFull.EVICT_OLDEST, WhenFull.EVICT, WhenFull.EVICT_OLDEST, *WhenFull]),
    )
    def crowd(self, seed: int, steps: int, policy: WhenFull) -> None:
        """Rows are put into a budget that is used up, while tasks take and clients read what is there."""
        self.press(Random(seed), steps, policy)

    def press(self, chance: Random, steps: int, policy: WhenFull) -> None:
        """Orders of units are carried out first; after a few steps the budget is set."""
        for unit in self.units.values():
            while unit.orders:
                self.carry_out(unit)
        self.call(self.pick(chance), OPEN)
        acts = [
            self.put_rows,
            self.put_rows,
            self.put_rows,
            self.update,
            self.put_space,
            self.take_rows,
            self.take_rows,
        ]
        acts += [self.take_rows, self.settle, self.read_rows, self.ask_for_evicted]
        acts += [self.put_rows, self.write_back_by_ids, self.finish_put]
        for step in range(steps):
            if step == 4 and "p" in self.model.partitions:
                self.limit(chance, policy)
            if self.speaking() and "p" in self.model.partitions:
                chance.choice(acts)(chance)
                if chance.random() < 0.3:
                    self.no_put_waits_only_because_nobody_looked_again()

    def pick(self, chance: Random) -> Client:
        return chance.choice([client for client in self.clients.values() if client.speaks])

    def rows(self) -> list[Sample]:
        return self.model.partitions["p"].in_order()

    def limit(self, chance: Random, policy: WhenFull) -> None:
        """From now on the partition has a budget of little more than is used."""
        used = self.ledger._state.partitions["p"].account.used_bytes
        budget = int((used + chance.choice([0, 0, 1, 3]) * GRANULE_BYTES) / (1 - RESERVE)) + 1
        command = Register(
            partition="p", fields=OPEN.fields, num_samples=None, tasks=TASKS, budget_bytes=budget, when_full=policy
        )
        self.call(self.pick(chance), command)

    # --- puts

    def put_rows(self, chance: Random) -> None:
        """One or two rows, mostly new ones."""
        fresh = [name for name in IDS if name not in self.model.partitions["p"].samples]
        names = chance.sample(fresh or IDS, min(len(fresh or IDS), chance.choice([1, 1, 1, 2])))
        self.put_column(chance, by_ids(names), Mode.UPSERT)

    def update(self, chance: Random) -> None:
        if self.rows():
            row = chance.choice(self.rows())
            self.put_column(chance, by_handles([(row.row, row.generation)]), Mode.UPDATE)

    def write_back_by_ids(self, chance: Random) -> None:
        """More of one or two rows that live, by their ids."""
        if self.rows():
            chosen = chance.sample(self.rows(), min(len(self.rows()), chance.choice([1, 1, 2])))
            self.put_column(chance, by_ids([row.id for row in chosen]), Mode.UPSERT)

    def finish_put(self, chance: Random) -> None:
        """A put that has space is committed, or given up."""
        names = [name for name in self.plans if name in self.model.reserved and self.clients[name[0]].speaks]
        if names:
            name = chance.choice(names)
            if chance.random() < 0.5:
                self.call(self.clients[name[0]], self.plans[name])
            else:
                self.withdraw(name, Abort(reservation=name[1]))

    def column_of(self, chance: Random, samples: Samples) -> CommitColumn:
        lengths = [chance.choice([0, 1, 64, 65, 130, 200]) for _ in range(len(samples))]
        return CommitColumn(name="a", spec=BYTES, lengths=int64s(lengths))

    def put_column(self, chance: Random, samples: Samples, mode: Mode) -> None:
        client, column = self.pick(chance), self.column_of(chance, samples)
        sizes = (ColumnSizes(name="a", sizes=column.lengths),)
        on_full = chance.choice([OnFull.WAIT, OnFull.REJECT])
        update = mode is Mode.UPDATE
        put = {"samples": samples, "update": update, "on_full": on_full}
        self.call(client, Allocate(partition="p", columns=sizes, timeout_s=3.05, **put))
        number = client.next - 1
        commit = Commit(partition="p", samples=samples, mode=mode, reservation=number, columns=(column,))
        self.plans[client.id, number] = commit
        if (client.id, number) in self.model.reserved:
            if chance.random() < 0.9:
                self.call(client, commit)
        elif (client.id, number) in self.parked and chance.random() < 0.5:
            self.withdraw((client.id, number), Abort(reservation=number))

    def put_space(self, chance: Random) -> None:
        """A row into preallocated space."""
        client = self.pick(chance)
        self.attach_all(client)
        if not client.attached or not client.speaks:
            return
        unit = min(client.attached)
        self.call(client, Preallocate(unit=unit, nbytes=300))
        number = client.next - 1
        space = self.model.reserved.get((client.id, number))
        if space:
            samples = by_ids(chance.sample(IDS, 1))
            column = self.column_of(chance, samples)
            self.call(
                client,
                Commit(
                    partition="p",
                    samples=samples,
                    mode=Mode.UPSERT,
                    reservation=number,
                    offset=space[0][1],
                    columns=(column,),
                ),
            )
            if client.speaks:
                self.withdraw((client.id, number), Abort(reservation=number))

    # --- what keeps rows, or lets them go

    def take_rows(self, chance: Random) -> None:
        """A task claims the oldest rows, mostly for good; mostly its client knows later that it has them."""
        client, lease = self.pick(chance), chance.choice([None, None, None, 4.0])
        claim = Claim(
            partition="p",
            task=chance.choice(TASKS),
            fields=(),
            batch_size=chance.randint(1, 2),
            blocking=False,
            lease_s=lease,
        )
        self.call(client, claim)
        if chance.random() < 0.6:
            waiting = [number for session, number in self.parked if session == client.id]
            client.below = max(client.below, min(waiting, default=client.next))

    def settle(self, chance: Random) -> None:
        """A row on lease is acknowledged, or a reader goes on."""
        leased = [(row, task, held) for row in self.rows() for task, held in row.claims.items() if held.until]
        leased = [entry for entry in leased if entry[2].name[0] and self.clients[entry[2].name[0]].speaks]
        readers = [name for name in self.model.pins if self.clients[name[0]].speaks and name not in self.books.taken]
        if leased and chance.random() < 0.5:
            row, task, held = chance.choice(leased)
            samples = by_handles([(row.row, row.generation)])
            ack = Ack(partition="p", task=task, samples=samples, claims=int64s([held.claim]))
            self.call(self.clients[held.name[0]], ack)
        elif readers:
            name = chance.choice(readers)
            self.call(self.clients[name[0]], Release(located=name[1]))

    def read_rows(self, chance: Random) -> None:
        """Somebody begins to read a row that would soon go."""
        rows = [row for row in self.rows() if "a" in row.cells][:3]
        if rows:
            row = chance.choice(rows)
            handle = by_handles([(row.row, row.generation)])
            self.call(self.pick(chance), Locate(partition="p", samples=handle, fields=("a",)))

    # --- who is told, and who is not held up

    def ask_for_evicted(self, chance: Random) -> None:
        """Whoever asks for samples that were evicted is told so."""
        gone = list(self.budgets.lost("p").values())
        if gone:
            chosen = chance.sample(gone, min(len(gone), 2))
            handles = by_handles([(sample.row, sample.generation) for sample in chosen])
            samples = handles if chance.random() < 0.5 else by_ids([sample.id for sample in chosen])
            self.call(self.pick(chance), Locate(partition="p", samples=samples, fields=()))

    @precondition(lambda self: any(isinstance(self.model.commands[name], Allocate) for name in self.parked))
    @rule(seed=st.integers(0, 1 << 32), update=st.booleans())
    def put_elsewhere(self, seed: int, update: bool) -> None:
        """While puts wait for a budget, another partition has space."""
        chance = Random(seed)
        if not self.speaking():
            return
        client = self.pick(chance)
        self.call(client, Register(partition=OTHER, fields=dict(SPECS), num_samples=None, tasks=()))
        sizes = (ColumnSizes(name="a", sizes=int64s([chance.choice([1, 70, 300])])),)
        self.call(client, Allocate(partition=OTHER, columns=sizes, update=update, timeout_s=3.05))
        number = client.next - 1
        self.no_put_waits_for_space_that_is_there()
        for name in sorted(set(self.model.reserved) - {(client.id, number)}):
            if self.clients[name[0]].speaks:
                self.withdraw(name, Abort(reservation=name[1]))
                self.no_put_waits_for_space_that_is_there()
        if (client.id, number) in self.model.reserved:
            self.withdraw((client.id, number), Abort(reservation=number))
        if OTHER in self.model.partitions and self.speaking():
            self.call(self.pick(chance), Clear(partition=OTHER, samples=None))
