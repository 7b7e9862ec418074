"""Machines that build on `LedgerWriter`: sessions, evictions, moves and saves."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.commands import (
    Abort,
    Ack,
    AddUnit,
    Allocate,
    Allocated,
    Bye,
    Claim,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Committed,
    Drain,
    FindCells,
    FoundCells,
    Locate,
    Mode,
    Move,
    Moved,
    OnFull,
    Preallocate,
    Publish,
    ReadSaved,
    Register,
    Release,
    Samples,
    Save,
    Saved,
    SavedPartition,
    SavedRows,
    SessionSilent,
    Stage,
    Tick,
    UnitAdded,
    WhenFull,
)
from tests.ledger.checks import RESERVE, Client, Unit
from tests.ledger.claim_model import Sample
from tests.ledger.machine import HOSTS
from tests.ledger.values import BYTES, by_handles, by_ids, canonical, int64s
from tests.ledger.writer import IDS, SPECS, TASKS, LedgerWriter

# --- The world of the model test: storage units, sessions that come and go, and time.


class LedgerSessions(LedgerWriter):
    """Rules about units, sessions and time."""

    @initialize(
        data=st.data(),
        granules=st.lists(st.sampled_from([12, 20, 33, 64, 200]), min_size=1, max_size=2),
        backed=st.sampled_from([0, 5, 20, 40, 200]),
    )
    def begin(self, data: st.DataObject, granules: list[int], backed: int) -> None:
        self.start(granules, backed)
        client = self.open_session(host=HOSTS[0])
        budget = data.draw(st.sampled_from([None, None, 512, 1280]))
        policy = data.draw(st.sampled_from([WhenFull.EVICT_OLDEST, *WhenFull]))
        register = Register(partition="p", fields=dict(SPECS), num_samples=5, tasks=TASKS)
        self.call(client, msgspec.structs.replace(register, budget_bytes=budget, when_full=policy))
        self.write(data, by_ids(IDS[:4]), ["a", "b"], Mode.CREATE, OnFull.WAIT)

    def start(self, granules: list[int], backed: int) -> None:
        """One storage unit for each size, backed so far."""
        self.feed(Tick(now=0.0))
        for i, count in enumerate(granules):
            size = count * GRANULE_BYTES
            start = min(backed * GRANULE_BYTES, size)
            self.units[i + 1] = Unit(i + 1, HOSTS[i], size, start)
            outputs = self.feed(
                AddUnit(
                    name=f"unit{i}",
                    host=HOSTS[i],
                    epoch=1,
                    cookie=f"cookie{i}",
                    capacity_bytes=size + 5 * i,
                    backed_bytes=start,
                    endpoints=(f"ipc://{i}",),
                    arena_path=f"/none/{i}",
                )
            )
            assert canonical(outputs[0]) == canonical(UnitAdded(cookie=f"cookie{i}", unit=i + 1))

    @rule(host=st.sampled_from(HOSTS))
    def open(self, host: str) -> None:
        if sum(client.speaks for client in self.clients.values()) < 4:
            self.open_session(host)

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        self.attach_all(self.draw_client(data))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data(), how=st.sampled_from(["bye", "kill", "kill", "silent", "vanish"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        client = self.draw_client(data)
        if how == "bye":
            self.call(client, Bye())
        client.alive = client.alive and how in ("silent", "bye")
        if how not in ("bye", "vanish"):
            self.quiet(client)
            self.feed(SessionSilent(session=client.id))
        if not self.speaking():
            self.open_session(client.host)

    @precondition(lambda self: any(unit.orders for unit in self.units.values()))
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        """A unit carries out its next order."""
        self.carry_out(data.draw(st.sampled_from([unit for unit in self.units.values() if unit.orders])))

    @rule(seconds=st.sampled_from([0.3, 1.1, 2.7, 7.3, 23.9]))
    def tick(self, seconds: float) -> None:
        self.pass_time(seconds)

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        """The client takes note of all its answers: its watermark moves, or it names them while a call waits."""
        client = self.draw_client(data)
        waiting = [call_id for session, call_id in self.parked if session == client.id]
        client.below = max(client.below, min(waiting, default=client.next))
        answered = sorted(
            call_id for session, call_id in self.answers if session == client.id and call_id > client.below
        )
        client.has = tuple(data.draw(st.sampled_from([answered, answered[::2]]))) if answered else ()


# --- Budgets in the model test: partitions that are full, and puts that let samples go for space.


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
                    self.nobody_waits_who_could_be_served()

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
        call_id = client.next - 1
        commit = Commit(partition="p", samples=samples, mode=mode, reservation=call_id, columns=(column,))
        self.plans[client.id, call_id] = commit
        if (client.id, call_id) in self.model.reserved:
            if chance.random() < 0.9:
                self.call(client, commit)
        elif (client.id, call_id) in self.parked and chance.random() < 0.5:
            self.withdraw((client.id, call_id), Abort(reservation=call_id))

    def put_space(self, chance: Random) -> None:
        """A row into preallocated space."""
        client = self.pick(chance)
        self.attach_all(client)
        if not client.attached or not client.speaks:
            return
        unit = min(client.attached)
        self.call(client, Preallocate(unit=unit, nbytes=300))
        call_id = client.next - 1
        space = self.model.reserved.get((client.id, call_id))
        if space:
            samples = by_ids(chance.sample(IDS, 1))
            column = self.column_of(chance, samples)
            self.call(
                client,
                Commit(
                    partition="p",
                    samples=samples,
                    mode=Mode.UPSERT,
                    reservation=call_id,
                    offset=space[0][1],
                    columns=(column,),
                ),
            )
            if client.speaks:
                self.withdraw((client.id, call_id), Abort(reservation=call_id))

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
            waiting = [call_id for session, call_id in self.parked if session == client.id]
            client.below = max(client.below, min(waiting, default=client.next))

    def settle(self, chance: Random) -> None:
        """A row on lease is acknowledged, or a reader goes on."""
        leased = [(row, task, held) for row in self.rows() for task, held in row.claims.items() if held.until]
        leased = [entry for entry in leased if entry[2].name[0] and self.clients[entry[2].name[0]].speaks]
        readers = [
            name for name in self.model.pins if self.clients[name[0]].speaks and name not in self.model.saves.taken
        ]
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
            brief = chance.random() < 0.5
            self.call(self.pick(chance), Locate(partition="p", samples=handle, fields=("a",), brief=brief))

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
        call_id = client.next - 1
        self.no_put_waits_for_space_that_is_there()
        for name in sorted(set(self.model.reserved) - {(client.id, call_id)}):
            if self.clients[name[0]].speaks:
                self.withdraw(name, Abort(reservation=name[1]))
                self.no_put_waits_for_space_that_is_there()
        if (client.id, call_id) in self.model.reserved:
            self.withdraw((client.id, call_id), Abort(reservation=call_id))
        if OTHER in self.model.partitions and self.speaking():
            self.call(self.pick(chance), Clear(partition=OTHER, samples=None))


# --- Draining in the model test: units that get nothing new, and cells that are moved while others
# write and clear.


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
                self.nobody_waits_who_could_be_served()
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
        call_id = client.next - 1
        column = CommitColumn(name="a", spec=BYTES, lengths=lengths, index=index)
        if space is None:
            self.withdraw((client.id, call_id), Abort(reservation=call_id))
        elif isinstance(space.result, Allocated):
            samples = by_ids(names)
            commit = Commit(partition="p", samples=samples, mode=Mode.UPSERT, reservation=call_id, columns=(column,))
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
        call_id = client.next - 1
        for _ in range(chance.choice([0, 1, 2])):
            self.disturb_page(chance, found)
        if client.speaks and space is None:
            self.withdraw((client.id, call_id), Abort(reservation=call_id))
        elif client.speaks and space is not None and isinstance(space.result, Allocated):
            if fate == "abort":
                self.withdraw((client.id, call_id), Abort(reservation=call_id))
            else:
                offsets = found.offsets[:-1] if fate == "wrong" else found.offsets
                self.finish_move(client, found, unit, located, call_id, offsets)
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
        call_id = client.next - 1
        if space is None:
            self.withdraw((client.id, call_id), Abort(reservation=call_id))
        elif isinstance(space.result, Allocated):
            samples = by_handles([handle]) if what == "write" else by_ids([sample.id])
            column = CommitColumn(name=found.field, spec=found.spec, lengths=lengths)
            commit = Commit(
                partition=found.partition, samples=samples, mode=Mode.UPSERT, reservation=call_id, columns=(column,)
            )
            self.call(client, commit)


# --- Checkpoints and restores in the model test: what is saved is read back later, staged, and
# published or not.


STAGED = "staged"


class LedgerSaver(LedgerWriter):
    """Rules about checkpoints. Whatever a restore staged is published or gone when its rule ends."""

    @precondition(lambda self: self.living())
    @rule(
        data=st.data(),
        meanwhile=st.sampled_from(["", "write", "clear", "drop"]),
        fate=st.sampled_from(["keep", "bye", "bye", "refused"]),
    )
    def save(self, data: st.DataObject, meanwhile: str, fate: str) -> None:
        """A Save is kept, or what is staged from it is not published."""
        self.save_and_copy(data, meanwhile, fate)

    @precondition(lambda self: self.living())
    @rule(data=st.data(), meanwhile=st.sampled_from(["", "write", "clear", "drop"]))
    def restore(self, data: st.DataObject, meanwhile: str) -> None:
        self.save_and_copy(data, meanwhile, "publish")

    def save_and_copy(self, data: st.DataObject, meanwhile: str, fate: str) -> None:
        client = self.draw_client(data)
        answer = self.call(client, Save(partitions=data.draw(st.sampled_from([(), ("p",)]))))
        call_id = client.next - 1
        if answer is None or not isinstance(answer.result, Saved):
            return
        if meanwhile == "write" and self.living():
            self.write(data, self.draw_samples(data), ["a"], Mode.UPSERT, OnFull.REJECT)
        elif meanwhile and self.living():
            samples = None if meanwhile == "drop" else self.draw_samples(data)
            self.call(self.draw_client(data), Clear(partition="p", samples=samples))
        (saved,) = answer.result.partitions
        if client.speaks and fate != "keep":
            self.copy(data, client, call_id, saved, fate)
        if client.speaks and fate == "publish":
            self.withdraw((client.id, call_id), Release(located=call_id))

    def copy(self, data: st.DataObject, client: Client, call_id: int, saved: SavedPartition, fate: str) -> None:
        """Stage what was saved, and publish it, or leave in the middle."""
        self.call(client, Stage(partition=STAGED))
        if not client.speaks:
            return
        handles = self.copy_samples(client, call_id, saved)
        for known in saved.fields:
            if client.speaks and known.name in SPECS and handles:
                self.copy_cells(client, call_id, saved, known.name, handles)
        wrong = {"refused": {"live": saved.live + 1}}.get(fate, {})
        wanted = SavedPartition(**{name: getattr(saved, name) for name in saved.__struct_fields__} | wrong)
        if client.speaks and fate in ("publish", "refused"):
            self.call(client, Publish(staged=(STAGED,), partitions=(wanted,), replace=not self.rarely(data, 4)))
        if client.speaks and fate == "bye":
            self.call(client, Bye())
        if STAGED in self.model.partitions:
            other = client if client.speaks else next((c for c in self.clients.values() if c.speaks), None)
            self.call(other or self.open_session(client.host), Clear(partition=STAGED, samples=None))

    def copy_samples(self, client: Client, call_id: int, saved: SavedPartition) -> list[tuple[int, int]]:
        """The saved samples in two pages; their new handles."""
        handles: list[tuple[int, int]] = []
        middle = saved.live // 2
        for first, last in ((0, middle), (middle, saved.live)):
            read = self.read(client, call_id, first, last)
            if read is None or not client.speaks:
                return []
            commit = Commit(partition=STAGED, samples=by_ids(read.ids), mode=Mode.CREATE, tags=read.tags)
            made = self.call(client, commit)
            if made is None or not isinstance(made.result, Committed):
                return []
            handles += zip(made.result.rows.tolist(), made.result.generations.tolist(), strict=True)
        return handles

    def copy_cells(
        self, client: Client, call_id: int, saved: SavedPartition, name: str, handles: list[tuple[int, int]]
    ) -> None:
        read = self.read(client, call_id, 0, saved.live, name)
        if read is None or not client.speaks:
            return
        (cells,) = read.fields
        rows = [row for row, length in enumerate(cells.lengths.tolist()) if length >= 0]
        if not rows:
            return
        lengths = int64s(cells.lengths[row] for row in rows)
        sizes = (ColumnSizes(name=name, sizes=lengths * cells.spec.unit_bytes),)
        allocate = Allocate(partition=STAGED, columns=sizes, update=True, on_full=OnFull.REJECT, timeout_s=3.05)
        space = self.call(client, allocate)
        reservation = client.next - 1
        if space is None:
            self.withdraw((client.id, reservation), Abort(reservation=reservation))
        elif isinstance(space.result, Allocated):
            checksums = None if cells.checksums is None else cells.checksums[rows]
            column = CommitColumn(name=name, spec=cells.spec, lengths=lengths, checksums=checksums)
            samples = by_handles([handles[row] for row in rows])
            commit = Commit(
                partition=STAGED, samples=samples, mode=Mode.UPDATE, reservation=reservation, columns=(column,)
            )
            self.call(client, commit)

    def read(self, client: Client, call_id: int, first: int, last: int, *fields: str) -> SavedRows | None:
        command = ReadSaved(saved=call_id, partition="p", first=first, last=last, fields=fields, names=not fields)
        answer = self.call(client, command)
        return answer.result if answer is not None and isinstance(answer.result, SavedRows) else None

    @precondition(lambda self: any(self.clients[name[0]].speaks for name in self.model.saves.taken))
    @rule(data=st.data())
    def read_later(self, data: st.DataObject) -> None:
        """What was saved and not released is as it was."""
        held = sorted(name for name in self.model.saves.taken if self.clients[name[0]].speaks)
        session, call_id = data.draw(st.sampled_from(held))
        taken = self.model.saves.taken[session, call_id].get("p", [])
        fields = tuple({name: None for sample in taken for name in sample.cells})
        command = ReadSaved(saved=call_id, partition="p", first=0, last=len(taken), fields=fields, names=True)
        self.call(self.clients[session], command)
