"""Checkpoints and restores in the model test: what is saved is read back later, staged, and published or not."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.ledger.commands import (
    Abort,
    Allocate,
    Allocated,
    Bye,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Committed,
    Mode,
    OnFull,
    Publish,
    ReadSaved,
    Release,
    Save,
    Saved,
    SavedPartition,
    SavedRows,
    Stage,
)
from tests.ledger.claim_checks import Client
from tests.ledger.values import by_handles, by_ids, int64s
from tests.ledger.writer import SPECS, LedgerWriter

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
        number = client.next - 1
        if answer is None or not isinstance(answer.result, Saved):
            return
        if meanwhile == "write" and self.living():
            self.write(data, self.draw_samples(data), ["a"], Mode.UPSERT, OnFull.REJECT)
        elif meanwhile and self.living():
            samples = None if meanwhile == "drop" else self.draw_samples(data)
            self.call(self.draw_client(data), Clear(partition="p", samples=samples))
        (saved,) = answer.result.partitions
        if client.speaks and fate != "keep":
            self.copy(data, client, number, saved, fate)
        if client.speaks and fate == "publish":
            self.withdraw((client.id, number), Release(located=number))

    def copy(self, data: st.DataObject, client: Client, number: int, saved: SavedPartition, fate: str) -> None:
        """Stage what was saved, and publish it, or leave in the middle."""
        self.call(client, Stage(partition=STAGED))
        if not client.speaks:
            return
        handles = self.copy_samples(client, number, saved)
        for known in saved.fields:
            if client.speaks and known.name in SPECS and handles:
                self.copy_cells(client, number, saved, known.name, handles)
        wrong = {"refused": {"live": saved.live + 1}}.get(fate, {})
        wanted = SavedPartition(**{name: getattr(saved, name) for name in saved.__struct_fields__} | wrong)
        if client.speaks and fate in ("publish", "refused"):
            self.call(client, Publish(staged=(STAGED,), partitions=(wanted,), replace=not self.rarely(data, 4)))
        if client.speaks and fate == "bye":
            self.call(client, Bye())
        if STAGED in self.model.partitions:
            other = client if client.speaks else next((c for c in self.clients.values() if c.speaks), None)
            self.call(other or self.open_session(client.host), Clear(partition=STAGED, samples=None))
            self.books.staged.pop(STAGED, None)

    def copy_samples(self, client: Client, number: int, saved: SavedPartition) -> list[tuple[int, int]]:
        """The saved samples in two pages; their new handles."""
        handles: list[tuple[int, int]] = []
        middle = saved.live // 2
        for first, last in ((0, middle), (middle, saved.live)):
            read = self.read(client, number, first, last)
            if read is None or not client.speaks:
                return []
            commit = Commit(partition=STAGED, samples=by_ids(read.ids), mode=Mode.CREATE, tags=read.tags)
            made = self.call(client, commit)
            if made is None or not isinstance(made.result, Committed):
                return []
            handles += zip(made.result.rows.tolist(), made.result.generations.tolist(), strict=True)
        return handles

    def copy_cells(
        self, client: Client, number: int, saved: SavedPartition, name: str, handles: list[tuple[int, int]]
    ) -> None:
        read = self.read(client, number, 0, saved.live, name)
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

    def read(self, client: Client, number: int, first: int, last: int, *fields: str) -> SavedRows | None:
        command = ReadSaved(saved=number, partition="p", first=first, last=last, fields=fields, names=not fields)
        answer = self.call(client, command)
        return answer.result if answer is not None and isinstance(answer.result, SavedRows) else None

    @precondition(lambda self: any(self.clients[name[0]].speaks for name in self.books.taken))
    @rule(data=st.data())
    def read_later(self, data: st.DataObject) -> None:
        """What was saved and not released is as it was."""
        held = sorted(name for name in self.books.taken if self.clients[name[0]].speaks)
        session, number = data.draw(st.sampled_from(held))
        taken = self.books.taken[session, number].get("p", [])
        fields = tuple({name: None for sample in taken for name in sample.cells})
        command = ReadSaved(saved=number, partition="p", first=0, last=len(taken), fields=fields, names=True)
        self.call(self.clients[session], command)
