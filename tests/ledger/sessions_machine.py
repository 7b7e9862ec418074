"""The world of the model test: storage units, sessions that come and go, and time."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.commands import AddUnit, Bye, Mode, OnFull, Register, SessionSilent, Tick, UnitAdded, WhenFull
from tests.ledger.machine import HOSTS
from tests.ledger.space_checks import Unit
from tests.ledger.values import by_ids, canonical
from tests.ledger.writer import IDS, SPECS, TASKS, LedgerWriter


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
        waiting = [number for session, number in self.parked if session == client.id]
        client.below = max(client.below, min(waiting, default=client.next))
        answered = sorted(number for session, number in self.answers if session == client.id and number > client.below)
        client.has = tuple(data.draw(st.sampled_from([answered, answered[::2]]))) if answered else ()
