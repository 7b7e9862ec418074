"""Draws what the model test does: clients, samples, columns, whole puts."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.core.schema import variants_of
from dataplane.core.types import GRANULE_BYTES, FieldKind, FieldSpec
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Blocked,
    Claim,
    Clear,
    ColumnSizes,
    Commit,
    CommitColumn,
    Inspect,
    Matrix,
    Mode,
    Nack,
    OnFull,
    Preallocate,
    Predicate,
    Samples,
    SessionAttached,
    TagColumn,
    WaitList,
    Waits,
    WhyBlocked,
)
from tests.ledger.checks import Client
from tests.ledger.claim_model import is_ready, matches
from tests.ledger.machine import LedgerDriver
from tests.ledger.model import expected_state, sizes_of
from tests.ledger.values import BYTES, WORDS, by_handles, by_ids, int64s

IDS = [f"s{i}" for i in range(7)]
PAIRS = FieldSpec(FieldKind.DENSE, "int32", (2,))
SPECS = {"a": BYTES, "b": WORDS, "c": PAIRS, "extra": BYTES}
COLUMNS = {**SPECS, variants_of("a"): BYTES}
TASKS = ("score", "train")
TAGS = ("group", "score", "input_lengths", "weight_version")


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
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique_by=lambda s: s.generation))
        if how == "live":
            return by_ids([s.id for s in chosen])
        pairs = [(s.row, s.generation) for s in chosen]
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
        if fate == "double" and samples.ids is not None:
            samples = by_ids((*samples.ids, samples.ids[0]))
        allocate = Allocate(
            partition="p",
            columns=tuple(ColumnSizes(name=c.name, sizes=int64s(sizes_of(c)), by_schema=c.by_schema) for c in columns),
            update=mode is Mode.UPDATE,
            on_full=on_full,
            timeout_s=3.05,
            unit_wish=data.draw(st.sampled_from([None, *self.units])),
            samples=samples,
        )
        answer = self.call(client, allocate)
        if fate == "short":
            columns = (with_longer(columns[0]), *columns[1:])
        tags = self.draw_tags(data, len(samples))
        call_id = client.next - 1
        commit = Commit(
            partition="p",
            samples=samples,
            mode=mode,
            reservation=call_id,
            columns=columns,
            tags=tags,
            listed=data.draw(st.booleans()),
        )
        self.plans[client.id, call_id] = commit
        if (client.id, call_id) not in self.model.reserved or fate == "later":
            return
        assert answer is not None
        self.call(client, Abort(reservation=call_id) if fate == "abort" else commit)

    def write_ahead(self, data: st.DataObject, samples: Samples, names: list[str]) -> None:
        """Preallocated space if the client has none, then a commit that takes a part of it: the next free, another, or
        none."""
        client = self.draw_client(data)
        reservations = [
            call_id for session, call_id in self.model.ahead & set(self.model.reserved) if session == client.id
        ]
        if not reservations:
            self.attach_all(client)
            unit = data.draw(st.sampled_from(sorted(client.attached) or [1]))
            self.call(client, Preallocate(unit=unit, nbytes=data.draw(st.sampled_from([1, 300, 700, 1500, 3000]))))
            reservations = [client.next - 1]
        call_id = data.draw(st.sampled_from(sorted(reservations)))
        left = self.model.reserved.get((client.id, call_id), [])
        first = [(offset, offset + nbytes) for _, offset, nbytes in left] or [(0, 0)]
        start, end = data.draw(st.sampled_from(first))
        offset = data.draw(st.sampled_from([start, start, start, start + GRANULE_BYTES, end, start + 1]))
        columns = tuple(self.draw_column(data, name, len(samples), wrong=False) for name in names)
        tags = self.draw_tags(data, len(samples))
        mode = data.draw(st.sampled_from([Mode.UPSERT, Mode.UPSERT, Mode.CREATE, Mode.UPDATE]))
        self.call(
            client,
            Commit(
                partition="p",
                samples=samples,
                mode=mode,
                reservation=call_id,
                offset=None if self.rarely(data, 12) else offset,
                columns=columns,
                tags=tags,
                listed=data.draw(st.booleans()),
            ),
        )

    def draw_column(self, data: st.DataObject, name: str, count: int, *, wrong: bool) -> CommitColumn:
        spec = WORDS if wrong and self.rarely(data, 6) else COLUMNS[name]
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
        first = data.draw(st.sampled_from([None, 0, 1, 2]))
        checksums = None if first is None else np.arange(first, first + values, dtype=np.uint32)
        partition = self.model.partitions.get("p")
        by_schema = partition is not None and partition.names_kind(name)
        return CommitColumn(
            name=name,
            spec=spec,
            lengths=int64s(lengths),
            index=index_array,
            checksums=checksums,
            by_schema=not by_schema if self.rarely(data, 3) else by_schema,
        )

    def draw_tags(self, data: st.DataObject, count: int) -> tuple[TagColumn, ...]:
        names = data.draw(st.lists(st.sampled_from(TAGS), max_size=2, unique=True))
        columns = []
        for name in names:
            places = data.draw(st.sampled_from([None, [0], [count - 1]]))
            size = count if places is None else 1
            scalar = st.one_of(st.integers(0, 2), st.sampled_from([None, True, "x", 0.5, (1 << 63) - 1]))
            if name == "group":
                scalar = st.integers(0, 1)
            if name in ("input_lengths", "weight_version"):
                scalar = st.integers(0, 9)
            values = data.draw(st.lists(scalar, min_size=size, max_size=size))
            positions = None if places is None else int64s(places)
            columns.append(TagColumn(name=name, values=tuple(values), positions=positions))
        return tuple(columns)

    def ask_why(self, client: Client, task: str, group_size: int | None, max_lag: int | None) -> None:
        """Why a claim waits, counted by hand."""
        where = (Predicate(tag="score", op="<=", value=1),)
        terms = {"task": task, "fields": ("a", "c"), "where": where, "group_size": group_size, "max_lag": max_lag}
        answer = self.call(client, WhyBlocked(partition="p", **terms))
        claim = Claim(partition="p", batch_size=2, **terms)
        if answer is None or not isinstance(answer.result, Blocked):
            return
        facts, left = answer.result, self.model.unclaimed(claim)
        ready = [s for s in left if is_ready(s, claim)]
        conditions = self.model.conditions(claim)
        counts = (len(left), len(ready), sum(matches(s, conditions) for s in ready))
        assert (facts.unclaimed, facts.ready, facts.matching) == counts
        assert facts.lacking == {name: sum(name not in s.fields for s in left) for name in ("a", "c")}
        assert list(facts.filtered.values()) == [sum(not matches(s, (p,)) for s in ready) for p in conditions]
        held = [s.claims[task] for p in self.model.partitions.values() for s in p.samples.values() if task in s.claims]
        states = [expected_state(one) for one in held]
        assert (facts.claimed, facts.leased, facts.held) == (len(held), states.count("leased"), states.count("held"))
        assert facts.version == self.model.partitions["p"].version
        puts = [
            self.clients[name[0]].suspect
            for name in self.parked
            if isinstance(wait := self.model.commands[name], Allocate) and wait.partition == "p"
        ]
        assert puts.count(False) <= facts.waiting_puts <= len(puts)
        assert facts.why.partition(" ")[2].startswith(("put waits", "puts wait")) == (facts.waiting_puts > 0)
        if group_size is not None:
            sizes: dict[int, int] = {}
            for sample in left:
                group = sample.tags.get("group")
                if isinstance(group, int):
                    sizes[group] = sizes.get(group, 0) + is_ready(sample, claim)
            partial = {str(group): size for group, size in sizes.items() if size < 2}
            assert (facts.groups, facts.partial_groups) == (len(sizes) - len(partial), len(partial))
            assert facts.partial == partial

    def look_closely(self, client: Client) -> None:
        """What a picture of the partition counts, and who waits, counted by hand."""
        answer = self.call(client, Inspect(partition="p", columns=5))
        if answer is not None and isinstance(answer.result, Matrix):
            samples, seen = self.model.partitions["p"].samples.values(), answer.result
            assert (seen.live, seen.samples.sum(), len(seen.samples)) == (
                len(samples),
                len(samples),
                min(5, len(samples)),
            )
            for name, counts in seen.produced.items():
                assert counts.sum() == sum(name in s.fields for s in samples)
        parked = [command for n in self.parked if isinstance(command := self.model.commands[n], Claim | Allocate)]
        answer = self.call(client, Waits(limit=2))
        if answer is not None and isinstance(answer.result, WaitList):
            assert (len(answer.result.waits), answer.result.total) == (min(len(parked), 2), len(parked))
        answer = self.call(client, Waits(partition="p", task=TASKS[0]))
        if answer is not None and isinstance(answer.result, WaitList):
            claims = [command for command in parked if isinstance(command, Claim)]
            named = [command for command in claims if (command.partition, command.task) == ("p", TASKS[0])]
            assert len(answer.result.waits) == answer.result.total == len(named)

    @precondition(lambda self: self.living())
    @rule(
        data=st.data(),
        task=st.sampled_from(TASKS),
        steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=4),
        lease=st.sampled_from([None, 4.0]),
        blocking=st.booleans(),
    )
    def share(
        self, data: st.DataObject, task: str, steps: list[tuple[int, int]], lease: float | None, blocking: bool
    ) -> None:
        """Ranks ask for their shares of some steps, sometimes twice, sometimes on other terms than before."""
        for step, rank in steps:
            odd = step + 1 if self.rarely(data, 6) else step
            command = Claim(
                partition="p",
                task=task,
                fields=("a",) if odd % 2 else (),
                batch_size=4 if odd % 3 else 2,
                min_batch_size=2 if odd == 4 else None,
                blocking=blocking,
                timeout_s=5.05,
                where=(Predicate(tag="score", op="<=", value=1),) if odd == 2 else (),
                group_size=2 if odd == 5 else None,
                partial_after_s=2.0 if odd == 5 else None,
                sampler=(None, "sequential", "rank-aware", None, "length-balanced", "group-n")[odd % 6],
                lease_s=lease,
                dp_rank=rank,
                dp_world=2,
                step=step,
            )
            if self.speaking():
                self.call(self.draw_client(data), command)
            if self.living() and self.rarely(data, 2):
                self.disturb(data, task)

    def disturb(self, data: st.DataObject, task: str) -> None:
        """Something becomes of a sample that the task has: it is acknowledged, given back, or cleared and put again."""
        partition = self.model.partitions.get("p")
        had = [s for s in partition.samples.values() if task in s.claims] if partition is not None else []
        if not had:
            return
        sample = data.draw(st.sampled_from(had))
        held = sample.claims[task]
        owner = self.clients.get(held.name[0])
        client = owner if owner is not None and owner.speaks else self.draw_client(data)
        samples = by_handles([(sample.row, sample.generation)])
        match data.draw(st.sampled_from(["ack", "nack", "again"])):
            case "ack":
                self.call(client, Ack(partition="p", task=task, samples=samples, claims=int64s([held.claim])))
            case "nack":
                self.call(client, Nack(partition="p", task=task, samples=samples, claims=int64s([held.claim])))
            case _:
                self.call(client, Clear(partition="p", samples=samples))
                if client.speaks:
                    self.call(client, Commit(partition="p", samples=by_ids([sample.id]), mode=Mode.UPSERT))

    def attach_all(self, client: Client) -> None:
        for unit in self.units.values():
            if unit.host == client.host and client.id not in unit.fenced:
                client.attached.add(unit.id)
                self.feed(SessionAttached(unit=unit.id, session=client.id))


def with_longer(column: CommitColumn) -> CommitColumn:
    """The column claiming one unit more for its first value than was allocated."""
    lengths = column.lengths.copy()
    lengths[0] += 1
    return msgspec.structs.replace(column, lengths=lengths)
