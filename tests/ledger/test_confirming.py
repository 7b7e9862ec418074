"""Calls that wait while others of their session are confirmed."""

from __future__ import annotations

import pytest

from dataplane.client.rpc.call_numbers import CallNumbers
from dataplane.errors import DataPlaneError, LimitError, StaleCallError
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.state.sessions import Session
from tests.ledger.driver import Driver, by_ids
from tests.ledger.test_sessions import call, results


@pytest.fixture
def driver() -> Driver:
    return Driver()


def named_call(
    driver: Driver, session: int, place: tuple[int, int, tuple[int, ...]], command: c.Command
) -> list[c.Output]:
    number, watermark, confirmed = place
    item = c.Call(session=session, number=number, watermark=watermark, confirmed=confirmed, command=command)
    return driver.apply(item)


class Numbered:
    """A client that numbers its calls as ours do."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.session = driver.client().session
        self.numbering = CallNumbers(self.session)

    def call(self, command: c.Command) -> c.Result | DataPlaneError | None:
        """What it was answered, of which the client takes note; None if it waits."""
        call = self.numbering.issue(command, now=0.0)
        self.driver.apply(call)
        answers = self.driver.answers.get((self.session, call.number), [None])
        if answers[-1] is not None:
            self.numbering.record_answer(call.number)
        return answers[-1]

    @property
    def state(self) -> Session:
        return self.driver.ledger._state.sessions[self.session]


def test_a_claim_is_final_after_the_next_call_whatever_else_waits(driver: Driver) -> None:
    other = driver.client()
    other.register()
    other.put(["a", "b"])
    client = Numbered(driver)
    claim = other.claim(1)
    assert client.call(other.claim(9)) is None
    taken = client.call(claim)
    assert isinstance(taken, c.Claimed)
    assert isinstance(client.call(c.Units()), c.UnitList)
    client.call(claim)  # not confirmed: it goes back
    driver.apply(c.SessionSilent(session=client.session))
    driver.tick(50.0)
    driver.tick(90.0)
    fresh = driver.client()
    assert fresh.claimed(1, blocking=False) == ("b",)
    assert fresh.claimed(1, blocking=False) == ()


def test_answers_are_kept_until_the_next_call_whatever_else_waits(driver: Driver) -> None:
    driver.client().register()
    client = Numbered(driver)
    for _ in range(3):
        assert client.call(c.Claim(partition="p", task="train", fields=(), batch_size=1)) is None
        for _ in range(50):
            client.call(c.Units())
    state = client.state
    assert len(state.answers) <= 2
    assert state.above.ranges <= 3


def test_thousands_of_waiting_calls_stop_no_other(driver: Driver) -> None:
    other = driver.client()
    other.register()
    other.put(["a"], {"x": [8]})
    client = Numbered(driver)
    waits = c.Claim(partition="p", task="train", fields=("y",), batch_size=1)
    for _ in range(4095):
        assert client.call(waits) is None
        if client.numbering.unanswered % 400 == 0:
            located = client.call(c.Locate(partition="p", samples=by_ids("a"), fields=("x",)))
            assert isinstance(located, c.Located)
            assert isinstance(client.call(c.Release(located=client.numbering._next - 1)), c.Done)
    assert isinstance(client.call(c.Units()), c.UnitList)
    assert client.call(waits) is None
    assert isinstance(client.call(c.Units()), LimitError)
    assert not client.state.pins


@pytest.mark.parametrize("kind", ["abort", "release", "unclaim"])
def test_an_undo_is_never_refused_for_the_number_of_calls(kind: str) -> None:
    driver = Driver(limits=Limits(in_flight=4))
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [8]})
    first = client.number + 1
    command, undo = {
        "abort": (client.allocate({"x": [8]}), c.Abort(reservation=first)),
        "release": (c.Locate(partition="p", samples=by_ids("a"), fields=("x",)), c.Release(located=first)),
        "unclaim": (client.claim(1), c.Unclaim(claimed=first)),
    }[kind]
    call(driver, client.session, first, first, command)
    for number in range(first + 1, first + 9):
        refused = results(call(driver, client.session, number, first, c.Units()))
    assert refused == [LimitError]
    assert results(call(driver, client.session, first + 10, first, undo)) == [c.Done]
    other = driver.client()
    other.clear("a")
    assert other.used() == 0
    assert not driver.ledger._state.sessions[client.session].unconfirmed


def test_a_number_that_was_confirmed_is_never_executed_again(driver: Driver) -> None:
    client = driver.client()
    client.register()
    client.put(["a", "b", "c"])
    first = 90
    call(driver, client.session, first - 1, first - 1, c.Units())
    claim = client.claim(1, blocking=False)
    # Claim `first` is late: 91 to 93 come before it, and two of them are confirmed.
    for number in (91, 92, 93):
        assert results(named_call(driver, client.session, (number, first, ()), claim)) == [c.Claimed]
    assert results(named_call(driver, client.session, (95, first, (91, 91, 93, 93)), c.Units())) == [c.UnitList]
    for number in (91, 93):
        assert results(named_call(driver, client.session, (number, first, ()), claim)) == [StaleCallError]
    again = driver.answers[client.session, 92][0]
    assert named_call(driver, client.session, (92, first, ()), claim)[0].result is again  # type: ignore[attr-defined]
    assert list(driver.ledger._state.sessions[client.session].unconfirmed) == [92]
    assert results(named_call(driver, client.session, (first, first, ()), c.Units())) == [c.UnitList]
    # A call named before it was seen is given up: it was abandoned.
    named_call(driver, client.session, (97, first, (96, 96)), c.Units())
    assert results(named_call(driver, client.session, (96, first, ()), claim)) == [StaleCallError]
    # The watermark passes them; an older view that arrives late changes nothing.
    named_call(driver, client.session, (98, 98, ()), c.Units())
    assert driver.ledger._state.sessions[client.session].above.ranges == 0
    assert results(named_call(driver, client.session, (99, first, (91, 91)), c.Units())) == [c.UnitList]
    assert results(named_call(driver, client.session, (94, first, ()), claim)) == [StaleCallError]


def test_large_answers_that_nobody_confirms_are_bounded() -> None:
    driver = Driver(limits=Limits(answer_bytes=100_000))
    client = driver.client()
    client.register()
    client.put([f"s{number}" for number in range(500)])
    every, first = c.List(partition="p"), client.number + 1
    for number in range(first, first + 50):
        assert results(call(driver, client.session, number, first, every)) == [c.Listed]
    state = driver.ledger._state.sessions[client.session]
    assert 0 < state.large_bytes <= 100_000
    assert state.large_bytes == sum(state.large.values())
    assert len(state.answers) < 10
    # The first can be asked for again; what was not kept is not executed again.
    assert results(call(driver, client.session, first, first, every)) == [c.Listed]
    assert results(call(driver, client.session, first + 49, first, every)) == [StaleCallError]
    call(driver, client.session, first + 60, first + 60, c.Units())
    assert (state.large, state.large_bytes) == ({}, 0)


def test_a_client_that_names_numbers_at_random_is_bounded() -> None:
    driver = Driver(limits=Limits(in_flight=8))
    client = driver.client()
    names = tuple(number for first in range(10, 100_000, 2) for number in (first, first))
    assert results(named_call(driver, client.session, (1, 1, names), c.Units())) == [c.UnitList]
    assert results(named_call(driver, client.session, (2, 1, (5, 1 << 62, 9)), c.Units())) == [c.UnitList]
    assert driver.ledger._state.sessions[client.session].above.ranges < 20
