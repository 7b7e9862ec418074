"""The real ledger under clients that die, pause and retry, a network that loses, doubles, delays and reorders messages,
and an arena so small that freed bytes are reused at once. Every copy and every read is checked as it happens."""

from __future__ import annotations

from hypothesis import given

from tests.ledger.fingerprint import fingerprint
from tests.ledger.values import canonical
from tests.profiles import LONG, budget
from tests.simulation.plans import Plan, new_ledger, plans, schedules, simulate


@LONG
@budget(120)
@given(plan=plans(), decisions=schedules())
def test_no_torn_or_stale_byte_and_none_lost(plan: Plan, decisions: bytes) -> None:
    world = simulate(plan, decisions)
    assert world.record.all_free(), "bytes were lost"


@budget(15)
@given(plan=plans(), decisions=schedules())
def test_what_was_written_down_replays(plan: Plan, decisions: bytes) -> None:
    record = simulate(plan, decisions).record
    again = new_ledger()
    outputs = [output for item in record.log for output in again.apply(item)]
    assert canonical(outputs) == canonical(record.outputs)
    assert fingerprint(again) == fingerprint(record.ledger)
