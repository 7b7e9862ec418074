"""Draws what the model test does: clients, samples, columns, whole puts."""

from __future__ import annotations

from hypothesis import strategies as st

from dataplane.ledger.commands import (
    Abort,
    Allocate,
    ColumnSizes,
    Commit,
    CommitColumn,
    Mode,
    OnFull,
    Samples,
    SessionAttached,
    TagColumn,
)
from dataplane.types import FieldKind, FieldSpec
from tests.ledger_machine import Client, LedgerDriver
from tests.ledger_model import sizes_of
from tests.ledger_values import BYTES, WORDS, by_handles, by_ids, int64s

IDS = [f"s{i}" for i in range(7)]
PAIRS = FieldSpec(FieldKind.DENSE, "int32", (2,))
SPECS = {"a": BYTES, "b": WORDS, "c": PAIRS, "extra": BYTES}
TASKS = ("score", "train")


class LedgerWriter(LedgerDriver):
    """Adds to the driver what several rules need."""

    def draw_client(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from([c for c in self.clients.values() if c.speaks]), label="client")

    def rarely(self, data: st.DataObject, one_in: int) -> bool:
        return data.draw(st.sampled_from([False] * (one_in - 1) + [True]))

    def draw_samples(self, data: st.DataObject, how: str | None = None) -> Samples:
        """Live ids, any ids, or handles, sometimes a stale one; none twice."""
        live = [s for p in self.model.partitions.values() for s in p.samples.values()]
        how = how or data.draw(st.sampled_from(["live", "handles", "any"]))
        if not live or how == "any":
            return by_ids(data.draw(st.lists(st.sampled_from(IDS), min_size=1, max_size=5, unique=True)))
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique_by=lambda s: s.birth))
        if how == "live":
            return by_ids([s.id for s in chosen])
        pairs = [(s.row, s.birth) for s in chosen]
        if self.rarely(data, 12):
            pairs = [*pairs[1:], (pairs[0][0], pairs[0][1] + data.draw(st.sampled_from([-1, 1])))]
        return by_handles(pairs)

    def speaking(self) -> bool:
        return any(client.speaks for client in self.clients.values())

    def living(self) -> bool:
        return self.speaking() and any(p.samples for p in self.model.partitions.values())

    def write(
        self, data: st.DataObject, samples: Samples, names: list[str], mode: Mode, on_full: OnFull, fate: str = "commit"
    ) -> None:
        client = self.draw_client(data)
        columns = tuple(self.draw_column(data, name, len(samples), wrong=fate != "commit") for name in names)
        allocate = Allocate(
            partition="p",
            columns=tuple(ColumnSizes(name=c.name, sizes=int64s(sizes_of(c))) for c in columns),
            update=mode is Mode.UPDATE,
            on_full=on_full,
            timeout_s=3.05,
            unit_wish=data.draw(st.sampled_from([None, *self.units])),
        )
        answer = self.call(client, allocate)
        if fate == "double" and samples.ids is not None:
            samples = by_ids((*samples.ids, samples.ids[0]))
        if fate == "short":
            columns = (with_longer(columns[0]), *columns[1:])
        tags = self.draw_tags(data, len(samples))
        number = client.next - 1
        commit = Commit(partition="p", samples=samples, mode=mode, reservation=number, columns=columns, tags=tags)
        self.plans[client.id, number] = commit
        if (client.id, number) not in self.model.reserved or fate == "later":
            return
        assert answer is not None
        self.call(client, Abort(reservation=number) if fate == "abort" else commit)

    def draw_column(self, data: st.DataObject, name: str, count: int, *, wrong: bool) -> CommitColumn:
        spec = WORDS if wrong and self.rarely(data, 6) else SPECS[name]
        shared = self.rarely(data, 4)
        values = data.draw(st.integers(1, 2)) if shared else count
        index = [i % values for i in range(count)] if shared else None
        if index is not None:
            values = max(index) + 1
        if spec.kind is FieldKind.DENSE:
            lengths = [1] * values
        else:
            most = 200 // spec.unit_bytes
            length = st.one_of(st.just(1), st.integers(0, most))
            lengths = data.draw(st.lists(length, min_size=values, max_size=values))
        index_array = None if index is None else int64s(index)
        return CommitColumn(name=name, spec=spec, lengths=int64s(lengths), index=index_array)

    def draw_tags(self, data: st.DataObject, count: int) -> tuple[TagColumn, ...]:
        names = data.draw(st.lists(st.sampled_from(["group", "score"]), max_size=2, unique=True))
        columns = []
        for name in names:
            places = data.draw(st.sampled_from([None, [0], [count - 1]]))
            size = count if places is None else 1
            scalar = st.one_of(st.integers(0, 2), st.sampled_from([None, True, "x", 0.5, 1 << 70]))
            if name == "group":
                scalar = st.integers(0, 1)
            values = data.draw(st.lists(scalar, min_size=size, max_size=size))
            positions = None if places is None else int64s(places)
            columns.append(TagColumn(name=name, values=tuple(values), positions=positions))
        return tuple(columns)

    def attach_all(self, client: Client) -> None:
        for unit in self.units.values():
            if unit.host == client.host and client.id not in unit.fenced:
                client.attached.add(unit.id)
                self.feed(SessionAttached(unit=unit.id, session=client.id))


def with_longer(column: CommitColumn) -> CommitColumn:
    """The column claiming one unit more for its first value than was allocated."""
    lengths = column.lengths.copy()
    lengths[0] += 1
    return CommitColumn(name=column.name, spec=column.spec, lengths=lengths, index=column.index)
