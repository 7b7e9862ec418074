"""Sessions: opening, call ids, watermarks, silence, proof, and the end."""

from __future__ import annotations

import pytest

from dataplane.client.rpc.call_ids import CallIds
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    CallCancelledError,
    DataPlaneError,
    InvalidRequestError,
    LimitError,
    ProtocolVersionError,
    SessionExpiredError,
    StaleCallError,
)
from dataplane.ledger import Limits
from dataplane.ledger import commands as c
from dataplane.ledger.state.sessions import Session
from tests.ledger.driver import Client, Driver, by_ids


@pytest.fixture
def driver() -> Driver:
    return Driver()


def call(driver: Driver, session: int, call_id: int, watermark: int, command: c.Command) -> list[c.Output]:
    return driver.apply(c.Call(session=session, call_id=call_id, watermark=watermark, command=command))


def results(out: list[c.Output]) -> list[type]:
    return [type(item.result) for item in out if isinstance(item, c.Answer)]


# --- opening


def test_opening_is_idempotent_by_nonce(driver: Driver) -> None:
    item = c.OpenSession(nonce="n", host="h", name="a", protocol_version=PROTOCOL_VERSION)
    first, again = driver.apply(item)[0], driver.apply(item)[0]
    assert isinstance(first, c.Opened)
    assert isinstance(again, c.Opened)
    assert first.session == again.session == 1
    assert first.epoch == 7
    assert [unit.unit for unit in first.units] == [1]
    other = driver.apply(c.OpenSession(nonce="m", host="h", name="a", protocol_version=PROTOCOL_VERSION))[0]
    assert isinstance(other, c.Opened)
    assert other.session == 2


def test_another_protocol_version_is_refused(driver: Driver) -> None:
    opened = driver.apply(c.OpenSession(nonce="n", host="h", name="a", protocol_version=99))[0]
    assert isinstance(opened, c.Opened)
    assert isinstance(opened.error, ProtocolVersionError)
    assert opened.session == 0


# --- call ids


def test_errors_are_answers_too_and_are_kept(driver: Driver) -> None:
    client = driver.client()
    claim = client.claim(1, blocking=False)
    first = call(driver, client.session, 1, 1, claim)
    call(driver, client.session, 2, 1, c.Register(partition="p", fields={}, num_samples=None, tasks=("train",)))
    assert results(call(driver, client.session, 1, 1, claim)) == results(first)


def test_a_retry_of_a_parked_call_joins_it(driver: Driver) -> None:
    client = driver.client()
    client.register()
    waiting = client.waits(client.claim(1))
    client.post(client.claim(1), call_id=waiting)
    client.put(["a", "b"])
    assert client.claimed_by(waiting) == ("a",)


def test_too_many_calls_in_flight_are_refused() -> None:
    driver = Driver(limits=Limits(in_flight=4))
    client = driver.client()
    client.register()
    call(driver, client.session, 2, 2, client.claim(1))
    for call_id in (3, 4, 500):  # how far apart they are does not matter
        assert results(call(driver, client.session, call_id, 2, c.Units())) == [c.UnitList]
    assert results(call(driver, client.session, 6, 2, c.Units())) == [LimitError]
    assert results(call(driver, client.session, 6, 2, c.Units())) == [LimitError]


def test_withdrawing_a_later_call_or_another_kind_is_refused(driver: Driver) -> None:
    client = driver.client()
    client.watermark = 1
    with pytest.raises(InvalidRequestError, match="earlier"):
        client.do(c.Abort(reservation=5))
    client.do(c.Register(partition="p", fields={}, num_samples=None, tasks=()))
    with pytest.raises(InvalidRequestError, match="was answered Done"):
        client.do(c.Release(located=client.last_call_id))


def test_calls_of_unknown_sessions_are_refused(driver: Driver) -> None:
    assert results(call(driver, 77, 1, 1, c.Units())) == [SessionExpiredError]
    assert results(call(driver, 77, 1, 1, c.Bye())) == [c.Done]


def test_a_watermark_past_a_parked_call_ends_it(driver: Driver) -> None:
    client = driver.client()
    client.register()
    waiting = client.waits(client.claim(1))
    client.open.clear()
    client.put(["a"])
    assert isinstance(client.result(waiting), CallCancelledError)
    assert client.claimed(1) == ("a",)


# --- silence


def holding(driver: Driver, attach: tuple[int, ...]) -> Client:
    """A client with a reservation (64 bytes), a pin (64 bytes, then cleared), a parked claim."""
    client = driver.client("holder", host="far", attach=attach)
    client.register()
    client.put(["a"], {"x": [8]})
    client.raw(client.allocate({"x": [8]}))
    client.locate(by_ids("a"))
    client.clear("a")
    client.waits(client.claim(1))
    return client


def test_a_silent_local_session_is_probed_once_per_heartbeat_and_kept_while_its_lock_is_held(driver: Driver) -> None:
    client = holding(driver, (1,))
    driver.tick(3.9)
    assert driver.fences() == []
    driver.tick(4.0)
    assert driver.fences() == [(1, client.session)]
    driver.tick(4.2)
    assert driver.fences() == []
    driver.apply(c.SessionAlive(unit=1, session=client.session))
    for step in range(6, 60, 2):
        driver.tick(float(step) + 0.2)
        assert driver.fences() == [(1, client.session)]
    driver.apply(c.Heartbeat(session=client.session))
    driver.tick(60.5)
    assert driver.fences() == []
    assert client.used() == 128


def test_proof_frees_everything_a_local_session_held(driver: Driver) -> None:
    client = holding(driver, (1,))
    other = driver.client()
    driver.apply(c.SessionSilent(session=client.session))
    assert driver.fences() == [(1, client.session)]
    assert other.used() == 128
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert other.used() == 0
    assert results(call(driver, client.session, 99, 99, c.Units())) == [SessionExpiredError]
    assert [s.session for s in other.stats().sessions] == [other.session]


def test_a_session_without_proof_is_given_up_then_fenced_and_only_the_fence_frees(driver: Driver) -> None:
    client, other = holding(driver, ()), driver.client()
    parked = client.last_call_id
    for now in range(0, 20, 2):
        driver.tick(float(now))
        driver.apply(c.Heartbeat(session=other.session))
    assert driver.fences() == []
    driver.tick(20.0)
    assert driver.fences() == [(1, client.session)]
    assert isinstance(client.result(parked), SessionExpiredError)
    assert other.used() == 128
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert other.used() == 0


def test_sessions_that_are_over_are_refused_with_one_that_is_fenced(driver: Driver) -> None:
    clients = [driver.client(str(number), attach=[1]) for number in range(6)]
    driver.take_orders()
    for place in (1, 4, 3):
        clients[place].do(c.Bye())
        (order,) = [found for found in driver.take_orders() if isinstance(found, c.FenceSession)]
        expected = {1: (2, 2), 4: (5, 5), 3: (4, 4)}[place]
        assert (order.first, order.last) == expected, "the others are there, or not proven gone"
    driver.apply(c.SessionGone(unit=1, session=2))
    driver.apply(c.SessionGone(unit=1, session=5))
    driver.tick(driver.now + 2.0)
    orders = [found for found in driver.take_orders() if isinstance(found, c.FenceSession)]
    assert (4, 4, 5) in [(found.session, found.first, found.last) for found in orders]
    clients[2].do(c.Bye())
    (order,) = [found for found in driver.take_orders() if isinstance(found, c.FenceSession)]
    assert (order.session, order.first, order.last) == (3, 2, 3)


def test_a_ledger_that_was_paused_looks_twice_before_it_gives_a_session_up(driver: Driver) -> None:
    client = holding(driver, ())
    driver.tick(100.0)
    assert driver.fences() == []
    driver.apply(c.Heartbeat(session=client.session))
    driver.tick(102.0)
    assert client.stats().sessions[0].state == "live"
    driver.tick(200.0)
    driver.tick(202.0)
    assert driver.fences() == [(1, client.session)]


def test_two_units_each_free_their_own_bytes() -> None:
    driver = Driver(units=2)
    client, other = driver.client("holder", attach=(1, 2)), driver.client()
    client.register()
    client.raw(client.allocate({"x": [8]}, unit_wish=1))
    client.raw(client.allocate({"x": [8]}, unit_wish=2))
    driver.apply(c.SessionSilent(session=client.session))
    assert driver.fences() == [(1, client.session), (2, client.session)]
    driver.apply(c.SessionGone(unit=2, session=client.session))
    assert driver.fences() == [(1, client.session)]
    assert (other.used(1), other.used(2)) == (64, 0)
    driver.tick(2.0)
    assert driver.fences() == [(1, client.session)]
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert other.used(1) == 0


def test_bye_keeps_pins_until_the_units_prove_them_gone(driver: Driver) -> None:
    client, other = holding(driver, (1,)), driver.client()
    parked = client.last_call_id
    client.do(c.Bye())
    assert isinstance(client.result(parked), SessionExpiredError)
    assert driver.fences() == [(1, client.session)]
    driver.apply(c.SessionAlive(unit=1, session=client.session))
    assert other.used() == 128
    assert [s.state for s in other.stats().sessions] == ["ending", "live"]
    driver.tick(2.0)
    assert driver.fences() == [(1, client.session)]
    driver.apply(c.SessionGone(unit=1, session=client.session))
    assert other.used() == 0
    assert results(call(driver, client.session, client.last_call_id, 1, c.Bye())) == [c.Done]


def test_bye_of_a_session_that_holds_nothing_and_is_attached_nowhere_removes_it(driver: Driver) -> None:
    client, other = driver.client(), driver.client()
    client.do(c.Bye())
    assert driver.fences() == []
    assert [s.session for s in other.stats().sessions] == [other.session]


def test_an_attachment_of_an_ended_session_is_answered_with_a_fence(driver: Driver) -> None:
    driver.apply(c.SessionAttached(unit=1, session=55))
    assert driver.fences() == [(1, 55)]


def test_orders_wait_for_a_lost_unit_and_go_out_when_it_returns(driver: Driver) -> None:
    client = holding(driver, (1,))
    driver.apply(c.UnitLost(unit=1))
    driver.apply(c.SessionSilent(session=client.session))
    client.do(c.Bye())
    assert driver.fences() == []
    driver.add_unit(name="unit0", capacity=1 << 20)
    assert driver.fences() == [(1, client.session)]


def test_orders_of_an_input_that_failed_leave_with_the_next(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    client = driver.client()
    monkeypatch.setitem(driver.ledger._handlers, c.Units, lambda *_: 1 / 0)
    driver.ledger._state.out.append(c.FenceSession(unit=1, session=9))
    with pytest.raises(ZeroDivisionError):
        call(driver, client.session, 1, 1, c.Units())
    assert [type(item) for item in driver.apply(c.Tick(now=0.0))] == [c.FenceSession]


def test_next_deadline() -> None:
    driver = Driver()
    assert driver.ledger.next_deadline() is None
    client = driver.client()
    client.register()
    assert driver.ledger.next_deadline() == 2.0
    client.waits(client.claim(1, timeout_s=0.5))
    assert driver.ledger.next_deadline() == 0.5
    client.put(["a"])
    assert driver.ledger.next_deadline() == 2.0
    client.claimed(1, blocking=False, lease_s=0.25)
    client.put(["b"])
    client.claimed(1, blocking=False, lease_s=0.25)
    assert driver.ledger.next_deadline() == 0.25


# --- Calls that wait while others of their session are confirmed.


def named_call(
    driver: Driver, session: int, place: tuple[int, int, tuple[int, ...]], command: c.Command
) -> list[c.Output]:
    call_id, watermark, confirmed = place
    item = c.Call(session=session, call_id=call_id, watermark=watermark, confirmed=confirmed, command=command)
    return driver.apply(item)


class IdentifiedCalls:
    """A client that gives its calls ids as ours do."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.session = driver.client().session
        self.call_ids = CallIds(self.session)

    def call(self, command: c.Command) -> c.Result | DataPlaneError | None:
        """What it was answered, of which the client takes note; None if it waits."""
        call = self.call_ids.issue(command, now=0.0)
        self.driver.apply(call)
        answers = self.driver.answers.get((self.session, call.call_id), [None])
        if answers[-1] is not None:
            self.call_ids.record_answer(call.call_id)
        return answers[-1]

    @property
    def state(self) -> Session:
        return self.driver.ledger._state.sessions[self.session]


def test_a_claim_is_final_after_the_next_call_whatever_else_waits(driver: Driver) -> None:
    other = driver.client()
    other.register()
    other.put(["a", "b"])
    client = IdentifiedCalls(driver)
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
    client = IdentifiedCalls(driver)
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
    client = IdentifiedCalls(driver)
    waits = c.Claim(partition="p", task="train", fields=("y",), batch_size=1)
    for _ in range(4095):
        assert client.call(waits) is None
        if client.call_ids.unanswered % 400 == 0:
            located = client.call(c.Locate(partition="p", samples=by_ids("a"), fields=("x",)))
            assert isinstance(located, c.Located)
            assert isinstance(client.call(c.Release(located=client.call_ids._next - 1)), c.Done)
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
    first = client.last_call_id + 1
    command, undo = {
        "abort": (client.allocate({"x": [8]}), c.Abort(reservation=first)),
        "release": (c.Locate(partition="p", samples=by_ids("a"), fields=("x",)), c.Release(located=first)),
        "unclaim": (client.claim(1), c.Unclaim(claimed=first)),
    }[kind]
    call(driver, client.session, first, first, command)
    for call_id in range(first + 1, first + 9):
        refused = results(call(driver, client.session, call_id, first, c.Units()))
    assert refused == [LimitError]
    assert results(call(driver, client.session, first + 10, first, undo)) == [c.Done]
    other = driver.client()
    other.clear("a")
    assert other.used() == 0
    assert not driver.ledger._state.sessions[client.session].unconfirmed


def test_a_call_that_was_confirmed_is_never_executed_again(driver: Driver) -> None:
    client = driver.client()
    client.register()
    client.put(["a", "b", "c"])
    first = 90
    call(driver, client.session, first - 1, first - 1, c.Units())
    claim = client.claim(1, blocking=False)
    # Claim `first` is late: 91 to 93 come before it, and two of them are confirmed.
    for call_id in (91, 92, 93):
        assert results(named_call(driver, client.session, (call_id, first, ()), claim)) == [c.Claimed]
    assert results(named_call(driver, client.session, (95, first, (91, 91, 93, 93)), c.Units())) == [c.UnitList]
    for call_id in (91, 93):
        assert results(named_call(driver, client.session, (call_id, first, ()), claim)) == [StaleCallError]
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
    every, first = c.List(partition="p"), client.last_call_id + 1
    for call_id in range(first, first + 50):
        assert results(call(driver, client.session, call_id, first, every)) == [c.Listed]
    state = driver.ledger._state.sessions[client.session]
    assert 0 < state.large_bytes <= 100_000
    assert state.large_bytes == sum(state.large.values())
    assert len(state.answers) < 10
    # The first can be asked for again; what was not kept is not executed again.
    assert results(call(driver, client.session, first, first, every)) == [c.Listed]
    assert results(call(driver, client.session, first + 49, first, every)) == [StaleCallError]
    call(driver, client.session, first + 60, first + 60, c.Units())
    assert (state.large, state.large_bytes) == ({}, 0)


def test_a_client_that_names_call_ids_at_random_is_bounded() -> None:
    driver = Driver(limits=Limits(in_flight=8))
    client = driver.client()
    names = tuple(call_id for first in range(10, 100_000, 2) for call_id in (first, first))
    assert results(named_call(driver, client.session, (1, 1, names), c.Units())) == [c.UnitList]
    assert results(named_call(driver, client.session, (2, 1, (5, 1 << 62, 9)), c.Units())) == [c.UnitList]
    assert driver.ledger._state.sessions[client.session].above.ranges < 20
