"""The simulator finds what it is there to find: with a defect planted in the ledger, a unit or a client, it fails.

Not here, as the simulator hardly comes by them: staged partitions that outlive their session (`test_saves.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from dataplane.client.rpc.call_ids import CallIds
from dataplane.errors import StaleSampleError
from dataplane.ledger.claims.claims import Claims
from dataplane.ledger.commands import Locate
from dataplane.ledger.ledger import Ledger
from dataplane.ledger.liveness import Liveness
from dataplane.ledger.samples.drain import Drains
from dataplane.ledger.samples.partitions import UnitReports
from dataplane.ledger.samples.snapshots import Saves
from dataplane.ledger.state.extents import Extents
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.rows import Rows
from dataplane.ledger.state.state import State
from tests.profiles import LONG, budget
from tests.simulation.plans import Plan, plans, schedules, simulate
from tests.simulation.world import Unit

pytestmark = [pytest.mark.slow, pytest.mark.soak]

Plant = Callable[[pytest.MonkeyPatch], None]


def pins_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Extents, "pin", lambda self, extent_ids: None)
    patch.setattr(Extents, "unpin", lambda self, extent_ids: None)


def the_end_of_a_session_frees_without_proof(patch: pytest.MonkeyPatch) -> None:
    end = Liveness.end

    def hasty(self: Liveness, session: Any, why: str) -> None:
        for unit in self.state.units:
            self._free_held_on(session, unit)
        end(self, session, why)

    patch.setattr(Liveness, "end", hasty)


def a_held_lock_proves_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "alive", lambda self, item: self.gone(item))


def withdrawals_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_withdraw", lambda self, session, call_id, target, kind: None)


def reservations_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(State, "free_reservation", lambda self, session, call_id: session.reservations.pop(call_id))


def a_part_is_not_taken_out_of_its_space(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Extents, "cut", lambda self, extent_id, start, nbytes: [extent_id])


def generations_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "holds", lambda self, rows, generations: self.generations[rows] > 0)


def units_serve_fenced_sessions(patch: pytest.MonkeyPatch) -> None:
    def write(self: Unit, grant: tuple[int, int], offset: int, data: bytes, epoch: int) -> str:
        self.world.record.write(self.id, offset, data, grant)
        return "written"

    patch.setattr(Unit, "write", write)


def an_abort_overtakes_its_frames(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unit, "stop", lambda self, grant, epoch: "stopped")


def a_new_epoch_of_a_unit_frees_what_remote_sessions_hold(patch: pytest.MonkeyPatch) -> None:
    add_again = UnitReports._add_again

    def hasty(self: UnitReports, unit: Any, item: Any) -> None:
        if item.epoch > unit.epoch:
            for session in self.state.sessions.values():
                if session.host != unit.host:
                    self.liveness._free_held_on(session, unit.unit_id)
        add_again(self, unit, item)

    patch.setattr(UnitReports, "_add_again", hasty)


def with_a_session_all_before_it_are_refused(patch: pytest.MonkeyPatch) -> None:
    order = Unit.order
    early = {"first": 1}

    def hasty(self: Unit, told: Any) -> None:
        order(self, msgspec.structs.replace(told, **early) if hasattr(told, "first") else told)

    patch.setattr(Unit, "order", hasty)


def a_restarted_unit_takes_everybody_for_gone(patch: pytest.MonkeyPatch) -> None:
    fence = Unit.fence
    patch.setattr(Unit, "fence", lambda self, session, lock_path: fence(self, session, ""))


def units_take_frames_of_earlier_runs(patch: pytest.MonkeyPatch) -> None:
    write = Unit.write
    patch.setattr(Unit, "write", lambda self, grant, offset, data, epoch: write(self, grant, offset, data, self.epoch))


def saves_pin_nothing(patch: pytest.MonkeyPatch) -> None:
    save = Saves.save

    def careless(self: Saves, session: Any, call_id: int, command: Any) -> Any:
        saved = save(self, session, call_id, command)
        self.state.extents.unpin(session.pins.pop(call_id))
        return saved

    patch.setattr(Saves, "save", careless)


def saves_show_what_is_there_now(patch: pytest.MonkeyPatch) -> None:
    read = Saves.read_saved

    def late(self: Saves, session: Any, call_id: int, command: Any) -> Any:
        taken, there = session.saves.get(command.saved, {}), self.state.partitions.get(command.partition)
        if command.partition in taken and there is not None:
            now = self._snapshot(there)
            taken[command.partition] = now if len(now.ids) >= command.last else taken[command.partition]
        return read(self, session, call_id, command)

    patch.setattr(Saves, "read_saved", late)


def restarts_forget_saves(patch: pytest.MonkeyPatch) -> None:
    restored = Ledger.restored.__func__  # type: ignore[attr-defined]

    def forgetful(kind: type[Ledger], image: bytes) -> Any:
        ledger = restored(kind, image)
        for session in ledger._state.sessions.values():
            session.saves.clear()
        return ledger

    patch.setattr(Ledger, "restored", classmethod(forgetful))


def what_is_published_over_is_kept(patch: pytest.MonkeyPatch) -> None:
    publish = Saves.publish

    def sparing(self: Saves, session: Any, call_id: int, command: Any) -> Any:
        with pytest.MonkeyPatch.context() as during_publish:
            during_publish.setattr(State, "drop", lambda state, partition: 0)
            return publish(self, session, call_id, command)

    patch.setattr(Saves, "publish", sparing)


def moves_do_not_look_again(patch: pytest.MonkeyPatch) -> None:
    def credulous(self: Drains, command: Any, partition: Any, field: Any, pinned: Any) -> Any:
        return np.flatnonzero(partition.rows.holds(command.rows, command.generations))

    patch.setattr(Drains, "_unchanged_positions", credulous)


def what_is_found_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    found = Drains._pin_first_cells

    def careless(self: Drains, session: Any, call_id: int, *more: Any) -> Any:
        page = found(self, session, call_id, *more)
        if call_id in session.pins:
            self.state.extents.unpin(session.pins[call_id])
            session.pins[call_id] = session.pins[call_id][:0]
        return page

    patch.setattr(Drains, "_pin_first_cells", careless)


def moves_keep_what_was_pinned(patch: pytest.MonkeyPatch) -> None:
    switch = Drains._repoint_cells

    def forgetful(self: Drains, partition: Any, field: Any, command: Any, space: Any, kept: Any, pinned: Any) -> None:
        switch(self, partition, field, command, space, kept, pinned[:0])

    patch.setattr(Drains, "_repoint_cells", forgetful)


def one_cleared_sample_holds_up_the_rest(patch: pytest.MonkeyPatch) -> None:
    living = Partition.living

    def all_or_nothing(self: Claims, command: Any, claims: Any) -> Any:
        there, _ = living(self.state.partition(command.partition), command.samples)
        places = np.flatnonzero(~there).tolist()
        if places:
            raise StaleSampleError(partition=command.partition, samples=["?"], total=len(places), positions=places)
        return named(self, command, claims)

    named = Claims._resolve_named
    patch.setattr(Claims, "_resolve_named", all_or_nothing)


def of_several_only_the_first_goes_back(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: State, partition: Any, task: Any, rows: Any) -> None:
        give_back(self, partition, task, rows[:1])

    give_back = State.return_rows
    patch.setattr(State, "return_rows", hasty)


def a_waiting_call_keeps_the_others_from_being_confirmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallIds, "confirmed", ())


def an_answer_ends_its_read(patch: pytest.MonkeyPatch) -> None:
    record = CallIds.record_answer

    def hasty(self: CallIds, call_id: int, **more: Any) -> None:
        is_read = self.is_open(call_id) and isinstance(self._open[call_id].command, Locate)
        record(self, call_id, **more)
        if is_read and not self._open[call_id].abandoned:
            self.settle(call_id)

    patch.setattr(CallIds, "record_answer", hasty)


@LONG
@pytest.mark.parametrize(
    "plant",
    [
        one_cleared_sample_holds_up_the_rest,
        of_several_only_the_first_goes_back,
        pins_hold_nothing,
        the_end_of_a_session_frees_without_proof,
        a_held_lock_proves_death,
        withdrawals_are_forgotten,
        reservations_leak,
        a_part_is_not_taken_out_of_its_space,
        generations_are_not_checked,
        units_serve_fenced_sessions,
        an_abort_overtakes_its_frames,
        a_new_epoch_of_a_unit_frees_what_remote_sessions_hold,
        with_a_session_all_before_it_are_refused,
        a_restarted_unit_takes_everybody_for_gone,
        units_take_frames_of_earlier_runs,
        saves_pin_nothing,
        saves_show_what_is_there_now,
        restarts_forget_saves,
        what_is_published_over_is_kept,
        moves_do_not_look_again,
        what_is_found_is_not_pinned,
        moves_keep_what_was_pinned,
        a_waiting_call_keeps_the_others_from_being_confirmed,
        an_answer_ends_its_read,
    ],
)
def test_a_planted_defect_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    @settings(budget(200), phases=[Phase.generate], report_multiple_bugs=False)
    @given(plan=plans(), decisions=schedules())
    def live(plan: Plan, decisions: bytes) -> None:
        assert simulate(plan, decisions).record.all_free(), "bytes were lost"

    with pytest.raises(AssertionError):
        live()
