"""The ledger, driven command by command against a plain-dict model (`model.py`), every invariant checked after
every step: ranges in use never overlap or leave their arena, nothing pinned or writable is reused, free + used is the
capacity, a commit is visible whole or not at all, each task claims each sample once, no claim waits that could be
served.
"""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dataplane.core.durations import LONGEST_S
from dataplane.core.types import FieldSpec
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Answer,
    Bye,
    Call,
    CheckConsumption,
    Claim,
    Clear,
    ColumnSizes,
    Command,
    Commit,
    Extend,
    FindCells,
    Heartbeat,
    List,
    Locate,
    Mode,
    Nack,
    OnFull,
    Order,
    Predicate,
    Register,
    Release,
    Seal,
    SetTags,
    SetVersion,
    Stats,
    StatsReport,
    Unclaim,
    WhenFull,
)
from tests.ledger.budget_books import EVICTED
from tests.ledger.claim_model import Name, Sample
from tests.ledger.fingerprint import fingerprint
from tests.ledger.machine import HOSTS
from tests.ledger.machines import MOVED, LedgerEvictor, LedgerMover, LedgerSaver
from tests.ledger.values import by_handles, by_ids, canonical, int64s
from tests.ledger.writer import COLUMNS, SPECS, TASKS, LedgerWriter
from tests.profiles import budget


class LedgerMachine(LedgerSaver, LedgerMover):
    # --- rules: partitions -----------------------------------------------------------------------------------

    @precondition(LedgerWriter.speaking)
    @rule(
        data=st.data(),
        names=st.sets(st.sampled_from(["a", "b", "c"]), min_size=1),
        count=st.sampled_from([None, 2, 5, 9]),
        tasks=st.sampled_from([TASKS, TASKS, ("score",), ("train", "other")]),
        strict=st.booleans(),
        budget=st.sampled_from([None, None, 320, 640, 1280, 2560]),
        policy=st.sampled_from([*WhenFull]),
    )
    def register(
        self,
        data: st.DataObject,
        names: set[str],
        count: int | None,
        tasks: tuple[str, ...],
        strict: bool,
        budget: int | None,
        policy: WhenFull,
    ) -> None:
        fields = {name: SPECS[name] if name != "a" else FieldSpec() for name in sorted(names)}
        command = Register(partition="p", fields=fields, num_samples=count, tasks=tasks, strict=strict)
        command = msgspec.structs.replace(command, budget_bytes=budget, when_full=policy)
        self.call(self.draw_client(data), command)

    @precondition(lambda self: self.speaking() and len(self.log) > 40)
    @rule(data=st.data(), drop=st.booleans())
    def seal_or_drop(self, data: st.DataObject, drop: bool) -> None:
        client = self.draw_client(data)
        self.call(client, Clear(partition="p", samples=None) if drop else Seal(partition="p"))
        if client.speaks and not self.rarely(data, 3):
            self.call(client, Register(partition="p", fields=dict(SPECS), num_samples=5, tasks=TASKS))

    # --- rules: bytes ----------------------------------------------------------------------------------------

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        """Whole rows, at once."""
        self.write(data, self.draw_samples(data, "any"), ["a", "b"], Mode.UPSERT, OnFull.REJECT)
        if self.living() and data.draw(st.booleans()):
            self.write(data, self.draw_samples(data, "handles"), ["c"], Mode.UPDATE, OnFull.REJECT)

    @precondition(LedgerWriter.living)
    @rule(data=st.data())
    def write_back(self, data: st.DataObject) -> None:
        """New versions of old cells, or cells of another field."""
        names = data.draw(st.sampled_from([["a"], ["c", "b"], ["extra"]]))
        samples = self.draw_samples(data, data.draw(st.sampled_from(["live", "handles"])))
        self.write(data, samples, names, Mode.UPDATE, data.draw(st.sampled_from(list(OnFull))))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def put_somehow(self, data: st.DataObject) -> None:
        """Anything, committed wrongly, later or never."""
        names = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True))
        mode = data.draw(st.sampled_from(list(Mode)))
        fate = data.draw(st.sampled_from(["commit", "abort", "later", "later", "double", "short"]))
        self.write(data, self.draw_samples(data), names, mode, data.draw(st.sampled_from(list(OnFull))), fate)

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data(), count=st.integers(1, 4))
    def put_ahead(self, data: st.DataObject, count: int) -> None:
        """Small puts into space that their session allocated ahead."""
        for _ in range(count):
            if self.speaking():
                names = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=2, unique=True))
                self.write_ahead(data, self.draw_samples(data), names)

    @precondition(lambda self: self.planned())
    @rule(data=st.data())
    def commit_late(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.planned()))
        self.call(self.clients[name[0]], self.plans[name])

    @precondition(lambda self: any(self.clients[name[0]].speaks for name in self.model.reserved))
    @rule(data=st.data())
    def abort_late(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.model.reserved if self.clients[name[0]].speaks]))
        self.withdraw(name, Abort(reservation=name[1]))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def tags_only(self, data: st.DataObject) -> None:
        client, samples = self.draw_client(data), self.draw_samples(data)
        tags = self.draw_tags(data, len(samples))
        if data.draw(st.booleans()):
            self.call(client, SetTags(partition="p", samples=samples, tags=tags))
        else:
            listed = data.draw(st.booleans())
            self.call(client, Commit(partition="p", samples=samples, mode=Mode.UPDATE, tags=tags, listed=listed))

    @precondition(LedgerWriter.living)
    @rule(data=st.data(), names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=2, unique=True))
    def locate(self, data: st.DataObject, names: list[str]) -> None:
        samples = self.draw_samples(data)
        partition = self.model.partitions.get("p")
        named = self.model.named(partition, samples) if partition is not None else []
        if named and not self.rarely(data, 4):
            names = [name for name in COLUMNS if all(name in s.cells for s in named)] or names
        brief = data.draw(st.booleans())
        self.call(self.draw_client(data), Locate(partition="p", samples=samples, fields=tuple(names), brief=brief))

    @precondition(lambda self: any(self.clients[name[0]].speaks for name in self.model.pins))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.model.pins if self.clients[name[0]].speaks]))
        self.call(self.clients[name[0]], Release(located=name[1]))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.call(self.draw_client(data), Clear(partition="p", samples=self.draw_samples(data)))

    # --- rules: claims ---------------------------------------------------------------------------------------

    @precondition(LedgerWriter.speaking)
    @rule(
        data=st.data(),
        task=st.sampled_from([*TASKS, *TASKS, "other"]),
        names=st.lists(st.sampled_from(["a", "b", "c", "extra"]), max_size=2, unique=True),
        size=st.integers(1, 4),
        least=st.sampled_from([None, None, 1, 2]),
        blocking=st.booleans(),
        order=st.sampled_from(list(Order)),
        lease=st.sampled_from([None, None, 4.0]),
        extra=st.sampled_from(["", "", "", "where", "group", "lag"]),
    )
    def claim(
        self,
        data: st.DataObject,
        task: str,
        names: list[str],
        size: int,
        least: int | None,
        blocking: bool,
        order: Order,
        lease: float | None,
        extra: str,
    ) -> None:
        where = (Predicate(tag="score", op="<=", value=1),) if extra == "where" else ()
        if extra == "where" and data.draw(st.booleans()):
            where = (Predicate(tag="score", op="in", value=(1, "x", None)),)
        command = Claim(
            partition="p",
            task=task,
            fields=tuple(names),
            batch_size=2 * size if extra == "group" else size,
            min_batch_size=None if least is None or extra == "group" else min(least, size),
            blocking=blocking,
            timeout_s=data.draw(st.sampled_from([5.05, LONGEST_S, math.inf])),
            where=where,
            group_size=2 if extra == "group" else None,
            order=order,
            lease_s=lease,
            max_lag=2 if extra == "lag" else None,
            partial_after_s=data.draw(st.sampled_from([None, 1.0, 3.5])) if extra == "group" else None,
        )
        self.call(self.draw_client(data), command)

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data(), version=st.integers(0, 11))
    def version(self, data: st.DataObject, version: int) -> None:
        self.call(self.draw_client(data), SetVersion(partition="p", version=version))

    @precondition(LedgerWriter.living)
    @rule(
        data=st.data(),
        task=st.sampled_from(TASKS),
        name=st.sampled_from(["c", "extra", "b"]),
        size=st.integers(1, 3),
        lease=st.sampled_from([None, 6.0]),
    )
    def wait_for_write_back(self, data: st.DataObject, task: str, name: str, size: int, lease: float | None) -> None:
        """One task waits for what another is about to write."""
        claim = Claim(partition="p", task=task, fields=(name,), batch_size=size, timeout_s=5.05, lease_s=lease)
        self.call(self.draw_client(data), claim)
        if self.living():
            self.write(data, self.draw_samples(data, "handles"), [name], Mode.UPDATE, OnFull.REJECT)

    @precondition(LedgerWriter.living)
    @rule(data=st.data(), task=st.sampled_from(TASKS), size=st.integers(1, 9))
    def drain(self, data: st.DataObject, task: str, size: int) -> None:
        """Nothing more comes: a task takes what is left, and the partition is consumed."""
        client = self.draw_client(data)
        self.call(client, Seal(partition="p"))
        self.call(client, Claim(partition="p", task=task, fields=(), batch_size=size, timeout_s=5.05))
        if task in self.model.partitions["p"].tasks:
            self.call(client, CheckConsumption(partition="p", tasks=(task,)))
        if not self.rarely(data, 3):
            self.call(client, Register(partition="p", fields=dict(SPECS), num_samples=5, tasks=TASKS))

    @precondition(LedgerWriter.living)
    @rule(data=st.data(), bye=st.booleans(), seconds=st.sampled_from([1.1, 23.9]))
    def strand(self, data: st.DataObject, bye: bool, seconds: float) -> None:
        """A client goes while it may write, reads and has claimed."""
        client = self.open_session(data.draw(st.sampled_from(HOSTS)))
        if data.draw(st.booleans()):
            self.attach_all(client)
        sample = data.draw(st.sampled_from([s for p in self.model.partitions.values() for s in p.samples.values()]))
        handle = by_handles([(sample.row, sample.generation)])
        self.call(client, Locate(partition="p", samples=handle, fields=tuple(sample.cells)))
        sizes = (ColumnSizes(name="a", sizes=int64s([70])),)
        self.call(client, Allocate(partition="p", columns=sizes, update=True, timeout_s=3.05))
        self.call(client, Claim(partition="p", task="score", fields=(), batch_size=1, blocking=False))
        self.call(client, Clear(partition="p", samples=handle))
        if bye:
            self.call(client, Bye())
        else:
            client.alive = False
            self.pass_time(seconds)

    def planned(self) -> list[Name]:
        """Reservations of sessions that speak, with a commit in mind."""
        return [name for name in self.plans if name in self.model.reserved and self.clients[name[0]].speaks]

    def consumed(self) -> list[tuple[Name, str, Sample]]:
        """Samples claimed and not on lease, whose session still speaks."""
        return [
            (held.name, task, sample)
            for partition in self.model.partitions.values()
            for sample in partition.samples.values()
            for task, held in sample.claims.items()
            if held.name[0] and self.clients[held.name[0]].speaks and held.until is None
        ]

    @precondition(LedgerWriter.living)
    @rule(
        data=st.data(),
        task=st.sampled_from(TASKS),
        what=st.sampled_from([Ack, Nack, Extend]),
        mine=st.sampled_from([True, True, True, False]),
        clear=st.booleans(),
    )
    def lease(self, data: st.DataObject, task: str, what: type[Ack | Nack | Extend], mine: bool, clear: bool) -> None:
        """A task takes on lease what it can, and something becomes of samples that were claimed lately: some may be
        cleared by now, some be another claim's, or said to be."""
        claim = Claim(partition="p", task=task, fields=(), batch_size=2, blocking=False, lease_s=4.0)
        self.call(self.draw_client(data), claim)
        past = [(handle, call_id) for name, handle, call_id in self.model.past if name == task]
        if not past or not self.speaking():
            return
        chosen = data.draw(st.lists(st.sampled_from(past), min_size=1, max_size=3, unique_by=lambda kept: kept[0]))
        if clear:
            self.call(self.draw_client(data), Clear(partition="p", samples=by_handles([chosen[0][0]])))
        claims = int64s([call_id if mine else call_id + 1_000_000 for _, call_id in chosen])
        more = {"lease_s": 9.0} if what is Extend else {}
        if self.speaking():
            samples = by_handles([handle for handle, _ in chosen])
            self.call(self.draw_client(data), what(partition="p", task=task, samples=samples, claims=claims, **more))

    @precondition(lambda self: self.consumed())
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """A task is to get again what it has consumed."""
        name, task, sample = data.draw(st.sampled_from(self.consumed()))
        self.call(self.clients[name[0]], Nack(partition="p", task=task, samples=by_ids([sample.id])))

    # --- rules: call ids ------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.clients[name[0]].speaks for name in self.parked))
    @rule(data=st.data())
    def withdraw_parked(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.parked if self.clients[name[0]].speaks]))
        match self.model.commands[name]:
            case Claim():
                self.withdraw(name, Unclaim(claimed=name[1]))
            case FindCells():
                self.withdraw(name, Release(located=name[1]))
            case _:
                self.withdraw(name, Abort(reservation=name[1]))
        assert name not in self.parked or self.clients[name[0]].suspect

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def unclaim_answered(self, data: st.DataObject) -> None:
        client = self.draw_client(data)
        mine = {held.name for held in self.model.claims_of(client.id) if held.until is None and not held.acked}
        if mine:
            self.call(client, Unclaim(claimed=data.draw(st.sampled_from(sorted(mine)))[1]))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data(), kind=st.sampled_from(["allocate", "locate", "claim"]))
    def withdraw_preallocated(self, data: st.DataObject, kind: str) -> None:
        """The withdrawal overtakes its call: the call never takes effect."""
        client = self.draw_client(data)
        call_id = client.next
        client.next += 1
        sizes = (ColumnSizes(name="a", sizes=int64s([64])),)
        calls: dict[str, tuple[Command, Command]] = {
            "allocate": (Allocate(partition="p", columns=sizes), Abort(reservation=call_id)),
            "locate": (Locate(partition="p", samples=by_ids(["s0"]), fields=("a",)), Release(located=call_id)),
            "claim": (Claim(partition="p", task="score", fields=(), batch_size=1), Unclaim(claimed=call_id)),
        }
        self.withdraw((client.id, call_id), calls[kind][1])
        if not client.over:
            answer = self.call(client, calls[kind][0], call_id=call_id)
            assert answer is not None

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A call id again: the same answer, or if the watermark has passed it a refusal; nothing changes."""
        client = self.draw_client(data)
        client.heard = self.model.now
        used = [call_id for session, call_id in self.model.commands if session == client.id]
        if not used:
            return
        call_id = data.draw(st.sampled_from(sorted(used)[-12:]))
        name = (client.id, call_id)
        self.feed(Heartbeat(session=client.id))
        before = fingerprint(self.ledger)
        call = Call(session=client.id, call_id=call_id, watermark=1, command=self.model.commands[name])
        self.log.append(call)
        outputs = self.ledger.apply(call)
        self.outputs += outputs
        self.said += [canonical(output) for output in outputs]
        mine = [o for o in outputs if isinstance(o, Answer)]
        if client.suspect:
            return
        assert outputs == mine or not mine, outputs
        if name in self.parked:
            assert not outputs
        else:
            assert len(mine) == 1
            stale = type(mine[0].result).__name__ == "StaleCallError"
            assert stale == self.model.has_answer(name)
            kept = canonical(mine[0].result) == self.answers[name]
            assert (
                stale
                or kept
                or (name in self.model.withdrawn and type(mine[0].result).__name__ == "CallCancelledError")
            )
        self.feed(Heartbeat(session=client.id))
        assert fingerprint(self.ledger) == before, "a repeated call changed something"

    # --- rules: looking --------------------------------------------------------------------------------------

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data(), task=st.sampled_from(TASKS))
    def look(self, data: st.DataObject, task: str) -> None:
        client = self.draw_client(data)
        partition = self.model.partitions.get("p")
        self.call(client, List(partition="p"))
        self.look_closely(client)
        if partition is not None and task in partition.tasks:
            self.call(client, CheckConsumption(partition="p", tasks=(task,)))
            self.ask_why(client, task, data.draw(st.sampled_from([None, 2])), data.draw(st.sampled_from([None, 2])))

    @precondition(LedgerWriter.speaking)
    @rule(data=st.data())
    def stats(self, data: st.DataObject) -> None:
        before = fingerprint(self.ledger)
        self.ledger.next_deadline()
        assert fingerprint(self.ledger) == before, "asking for the deadline changed something"
        answer = self.call(self.draw_client(data), Stats())
        assert answer is not None
        if not isinstance(answer.result, StatsReport):
            return
        for unit in answer.result.units:
            used = unit.free_bytes + unit.reserved_bytes + unit.live_bytes + unit.retired_bytes
            assert used + unit.unbacked_bytes == unit.capacity_bytes
            assert unit.capacity_bytes - unit.unbacked_bytes >= self.units[unit.unit].backed
        for report in answer.result.partitions:
            partition = self.model.partitions[report.partition]
            assert (report.live, report.born) == (len(partition.samples), partition.born)
            assert report.sealed == partition.sealed
            for name, count in report.produced.items():
                assert count == sum(name in s.fields for s in partition.samples.values())
            assert report.waiting_claims == sum(isinstance(self.model.commands[n], Claim) for n in self.parked)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = budget(60, steps=60)


@pytest.mark.slow
def test_samples_are_evicted_as_they_may() -> None:
    """Enough are, of both kinds, and somebody asks for them."""
    EVICTED.clear()
    for seed in range(60):
        machine, chance = LedgerEvictor(), Random(seed)
        machine.start([chance.choice([20, 33, 64])] * chance.randint(1, 2), 64)
        for policy in chance.sample([WhenFull.EVICT, WhenFull.EVICT_OLDEST, *WhenFull], 3):
            machine.open_session(HOSTS[0])
            machine.press(chance, 40, policy)
            machine.check_all()
            machine.pass_time(chance.choice([0.3, 2.7, 7.3]))
        machine.teardown()
    assert min(EVICTED["consumed"], EVICTED["unconsumed"], EVICTED["told"]) >= 80, EVICTED


@pytest.mark.slow
def test_cells_are_moved() -> None:
    """Enough are, also of values that are shared, and enough had been written or cleared meanwhile."""
    MOVED.clear()
    for seed in range(40):
        machine, chance = LedgerMover(), Random(seed)
        machine.start([chance.choice([20, 33, 64]) for _ in range(2)], 64)
        for _ in range(3):
            machine.open_session(HOSTS[0])
            machine.shift(chance, 30)
            machine.check_all()
            machine.pass_time(chance.choice([0.3, 2.7, 7.3]))
        machine.teardown()
    assert min(MOVED["moved"], MOVED["skipped"], MOVED["shared"]) > 100, MOVED
