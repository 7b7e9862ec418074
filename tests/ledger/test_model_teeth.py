"""The ledger's model finds what it is there to find: with a defect planted, it fails."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from dataplane.ledger.commands import Clear, Commit, List, Mode, TagColumn, WhenFull
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tags import Tags
from tests.ledger.machine import HOSTS
from tests.ledger.machines import OPEN, LedgerEvictor
from tests.ledger.values import by_ids


def nothing_is_kept_for_puts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "targeted", lambda self, rows: np.zeros(len(rows), np.bool_))


def what_waits_keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    park = State.park

    def careless(self: State, parked: object) -> None:
        if hasattr(parked, "targets"):
            self.unprotect_targets(parked)  # type: ignore[arg-type]
        park(self, parked)  # type: ignore[arg-type]

    patch.setattr(State, "park", careless)


def what_has_space_keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    judge = LedgerEvictor.feed

    def careless(self: LedgerEvictor, *args: object) -> object:
        for session in self.ledger._state.sessions.values():
            for reservation in session.reservations.values():
                if hasattr(reservation, "targets"):
                    self.ledger._state.unprotect_targets(reservation)  # type: ignore[arg-type]
        return judge(self, *args)  # type: ignore[arg-type]

    patch.setattr(LedgerEvictor, "feed", careless)


PLANTED = [
    nothing_is_kept_for_puts,
    what_waits_keeps_nothing,
    what_has_space_keeps_nothing,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        press_all()


def press_all() -> None:
    """Budgets that are used up, under the policies that evict."""
    for seed in range(60):
        chance, machine = Random(seed), LedgerEvictor()
        machine.start([chance.choice([20, 33, 64])] * chance.randint(1, 2), 64)
        for policy in (WhenFull.EVICT_OLDEST, WhenFull.EVICT):
            machine.open_session(HOSTS[0])
            machine.press(chance, 40, policy)
            machine.check_all()
            machine.pass_time(chance.choice([0.3, 2.7, 7.3]))
        machine.teardown()


def test_a_tag_that_outlives_its_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tags, "drop", lambda self, rows: None)
    machine = LedgerEvictor()
    machine.start([64], 64)
    client = machine.open_session(HOSTS[0])
    tags = (TagColumn(name="score", values=(1,)),)
    put = Commit(partition="p", samples=by_ids(["a"]), mode=Mode.CREATE, tags=tags)
    again = Commit(partition="p", samples=by_ids(["b"]), mode=Mode.CREATE)
    for command in (OPEN, put, Clear(partition="p", samples=by_ids(["a"])), again):
        machine.call(client, command)
    with pytest.raises(AssertionError):
        machine.call(client, List(partition="p"))
