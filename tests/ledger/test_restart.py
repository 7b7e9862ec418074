"""A ledger that goes on in a new run of its service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceRestartedError,
    SessionExpiredError,
    StorageUnitError,
)
from dataplane.ledger import Ledger, liveness
from dataplane.ledger import commands as c
from tests.ledger.driver import MIB, Driver, by_ids, commit_columns, handles


def restarted(driver: Driver, epoch: int = 8) -> None:
    """The driver goes on with a ledger made from the image of the one it had."""
    driver.ledger = Ledger.restored(driver.ledger.image())
    settings = {"reserve_fraction": 0.15, "heartbeat_s": 2.0, "session_timeout_s": 20.0}
    driver.apply(c.Restarted(epoch=epoch, **settings))
    driver.take_orders()


def test_rows_sessions_and_answers_are_there() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    client.register()
    put = client.put(["a", "b"], {"x": [10, 20]})
    restarted(driver)
    located = client.call(c.Located, c.Locate(partition="p", samples=handles(put), fields=("x",)))
    assert located.fields[0].lengths.tolist() == [10, 20]
    assert driver.ledger.epoch == 8


def test_units_get_no_rows_before_they_offer_themselves_again() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [10]})
    restarted(driver)
    waiting = client.waits(client.allocate({"x": [10]}))
    assert driver.add_unit(name="unit0").unit == 1
    assert isinstance(client.result(waiting), c.Allocated)


def test_a_parked_claim_goes_on_and_its_repetition_joins_it() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    driver.tick(1.0)
    claim = client.claim(1, ["x"], timeout_s=10.0)
    call_id = client.waits(claim)
    restarted(driver)
    driver.add_unit(name="unit0")
    client.post(claim, call_id=call_id)
    assert client.result(call_id) is None
    client.put(["a"], {"x": [1]})
    claimed = client.result(call_id)
    assert isinstance(claimed, c.Claimed)
    assert claimed.ids == ("a",)


def test_leases_begin_again_in_full() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a", "b"], {"x": [1, 1]})
    client.call(c.Claimed, client.claim(1, ["x"], lease_s=10.0))
    driver.tick(6.0)
    client.call(c.Claimed, client.claim(1, ["x"], lease_s=10.0))
    driver.tick(9.0)
    restarted(driver)
    driver.apply(c.Heartbeat(session=client.session))
    driver.tick(18.9)
    assert client.call(c.Claimed, client.claim(2, ["x"], blocking=False)).ids == ()
    driver.tick(19.0)
    assert client.call(c.Claimed, client.claim(2, ["x"], blocking=False)).ids == ("a", "b")


def test_an_extended_lease_begins_again_with_its_extension() -> None:
    driver = Driver()
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [1]})
    claimed = client.call(c.Claimed, client.claim(1, ["x"], lease_s=2.0))
    client.extend(claimed, lease_s=15.0)
    driver.tick(1.0)
    restarted(driver)
    driver.tick(15.9)
    assert client.call(c.Claimed, client.claim(1, ["x"], blocking=False)).ids == ()
    driver.tick(16.0)
    assert client.call(c.Claimed, client.claim(1, ["x"], blocking=False)).ids == ("a",)


def test_a_session_nobody_hears_of_again_is_given_up_after_its_full_time() -> None:
    driver = Driver(session_timeout_s=20.0, heartbeat_s=2.0)
    client = driver.client()
    client.register()
    client.put(["a"], {"x": [1]})
    client.call(c.Located, c.Locate(partition="p", samples=by_ids("a"), fields=("x",)))
    driver.tick(19.0)
    restarted(driver)
    other = driver.client("other")
    for now in range(20, 39):
        driver.tick(float(now))
        driver.apply(c.Heartbeat(session=other.session))
    stats = other.call(c.StatsReport, c.Stats())
    assert {session.session: session.state for session in stats.sessions}[client.session] == "silent"
    driver.tick(39.5)
    stats = other.call(c.StatsReport, c.Stats())
    assert {session.session: session.state for session in stats.sessions}[client.session] == "ending"


def test_a_dead_local_session_is_found_out_once_its_unit_is_back() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    restarted(driver)
    driver.add_unit(name="unit0")
    driver.take_orders()
    driver.tick(10.0)
    assert driver.fences() == [(1, client.session)]


def test_epochs_only_grow() -> None:
    with pytest.raises(ValueError, match="epoch 7 must be greater than the current epoch 7"):
        restarted(Driver(), epoch=7)


def test_generations_of_a_later_state_come_after_those_of_an_earlier_one() -> None:
    """So that a meta of a state that was lost is stale, and never another sample's."""
    generations = []
    for epoch in (1_760_000_000_000_000_000, 1_760_000_001_000_000_000):
        ledger = Ledger(epoch)
        driver = Driver(units=0)
        driver.ledger = ledger
        client = driver.client()
        client.register()
        put = client.put([f"s{i}" for i in range(1000)], tags={"t": list(range(1000))})
        generations.append(put.generations)
    assert int(np.max(generations[0])) < int(np.min(generations[1]))


def test_a_session_opens_once_across_lives() -> None:
    driver = Driver()
    opening = c.OpenSession(nonce="n", host="h", name="c", protocol_version=PROTOCOL_VERSION)
    first = driver.apply(opening)[0]
    restarted(driver)
    second = driver.apply(opening)[0]
    assert isinstance(first, c.Opened)
    assert isinstance(second, c.Opened)
    assert (second.session, second.epoch) == (first.session, 8)


# --- Sessions and units that were known to an earlier run of the service: they go on, or are told
# what was lost.


EPOCH = 1_760_000_000_000_000_000
LATER = EPOCH + 1_000_000_000


def opening(nonce: str = "n", **more: Any) -> c.OpenSession:
    return c.OpenSession(nonce=nonce, host="h", name="a", **{"protocol_version": PROTOCOL_VERSION, **more})


def opened(ledger: Ledger, item: c.OpenSession) -> c.Opened:
    (output,) = ledger.apply(item)
    assert isinstance(output, c.Opened)
    return output


def again(ledger: Ledger, epoch: int) -> Ledger:
    """The ledger in its next run."""
    made = Ledger.restored(ledger.image())
    made.apply(c.Restarted(epoch=epoch, reserve_fraction=0.1, heartbeat_s=2.0, session_timeout_s=20.0))
    return made


def refused(ledger: Ledger, item: c.OpenSession) -> DataPlaneError:
    answer = opened(ledger, item)
    assert answer.session == 0
    assert answer.error is not None
    return answer.error


def test_a_session_goes_on_in_a_later_run_under_its_id() -> None:
    ledger = Ledger(EPOCH)
    first = opened(ledger, opening())
    ledger = again(ledger, LATER)
    back = opened(ledger, opening(session=first.session, epoch=EPOCH))
    assert (back.session, back.epoch, back.error) == (first.session, LATER, None)
    assert opened(ledger, opening(session=first.session, epoch=LATER)).session == first.session
    assert opened(ledger, opening("other")).session > first.session


def test_a_session_of_a_lost_state_is_told_both_epochs_and_what_is_lost() -> None:
    session = opened(Ledger(EPOCH), opening()).session
    error = refused(Ledger(LATER), opening(session=session, epoch=EPOCH))
    assert isinstance(error, ServiceRestartedError)
    assert (error.expected_epoch, error.got_epoch) == (EPOCH, LATER)
    assert f"lost: session {session}, and every partition, sample and claim" in str(error)


def test_a_session_of_a_lost_state_stays_lost_in_that_states_next_run() -> None:
    ledger = again(Ledger(LATER), LATER + 1)
    assert isinstance(refused(ledger, opening(session=5, epoch=EPOCH)), ServiceRestartedError)


def test_a_session_that_ended_is_not_opened_anew_by_going_on() -> None:
    driver = Driver()
    client = driver.client("a")
    nonce = next(item.nonce for item in driver.log if isinstance(item, c.OpenSession))
    client.do(c.Bye())
    error = refused(driver.ledger, opening(nonce, session=client.session, epoch=7))
    assert isinstance(error, SessionExpiredError)
    assert error.session == client.session


def test_an_older_service_does_not_take_a_session_of_a_later_run() -> None:
    ledger = Ledger(EPOCH)
    session = opened(ledger, opening()).session
    error = refused(ledger, opening(session=session, epoch=LATER))
    assert isinstance(error, ServiceRestartedError)
    assert (error.expected_epoch, error.got_epoch) == (LATER, EPOCH)
    assert error.lost == f"the latest changes of session {session}"


def test_going_on_is_refused_to_another_protocol_version() -> None:
    error = refused(Ledger(LATER), opening(session=5, epoch=EPOCH, protocol_version=99))
    assert isinstance(error, ProtocolVersionError)


def test_session_ids_are_never_those_of_an_earlier_state() -> None:
    """So that a call of a lost session is not executed as another's."""
    early, late = Ledger(EPOCH), Ledger(LATER)
    call_ids = [opened(early, opening(f"{i}")).session for i in range(1000)]
    assert max(call_ids) < opened(late, opening()).session
    (answer,) = late.apply(c.Call(session=call_ids[0], call_id=1, watermark=1, command=c.Units()))
    assert isinstance(answer, c.Answer)
    assert isinstance(answer.result, SessionExpiredError)


def test_session_ids_whose_opening_the_log_lost_are_not_given_again() -> None:
    ledger = Ledger(EPOCH)
    image = ledger.image()
    lost = opened(ledger, opening()).session
    made = Ledger.restored(image)
    made.apply(c.Restarted(epoch=LATER, reserve_fraction=0.1, heartbeat_s=2.0, session_timeout_s=20.0))
    assert opened(made, opening("other")).session > lost


# --- units


def offer(driver: Driver, **more: Any) -> c.UnitAdded:
    facts: dict[str, Any] = {
        "name": "unit0",
        "host": "here",
        "epoch": 1,
        "cookie": "cookie-unit0",
        "capacity_bytes": MIB,
        "backed_bytes": MIB,
        "endpoints": (),
        "arena_path": "/arena",
    }
    added = driver.apply(c.AddUnit(**{**facts, **more}))[0]
    assert isinstance(added, c.UnitAdded)
    return added


def test_a_unit_that_a_lost_state_knew_is_told_to_start_over() -> None:
    error = offer(Driver(units=0), unit=3).error
    assert isinstance(error, ServiceRestartedError)
    assert error.got_epoch == 7
    assert "storage unit 3 (unit0) and its rows" in error.lost


def test_a_unit_comes_back_before_its_end_was_noticed() -> None:
    driver = Driver()
    assert isinstance(offer(driver).error, InvalidRequestError)
    assert isinstance(offer(driver, unit=2).error, InvalidRequestError)
    added = offer(driver, unit=1)
    assert (added.unit, added.error) == (1, None)


def test_a_put_under_way_is_committed_though_its_unit_is_not_back_yet() -> None:
    driver = Driver()
    client = driver.client(attach=[1])
    client.register()
    reservations = [client.post(client.allocate({"x": [64]})) for _ in range(2)]
    driver.ledger = again(driver.ledger, 8)

    def commit(name: str, reservation: int) -> c.Commit:
        columns = commit_columns({"x": [64]})
        return c.Commit(
            partition="p", samples=by_ids(name), mode=c.Mode.CREATE, reservation=reservation, columns=columns
        )

    client.call(c.Committed, commit("a", reservations[0]))
    assert offer(driver, unit=1, host="here").error is None
    driver.apply(c.UnitLost(unit=1))
    with pytest.raises(StorageUnitError, match="its connection to the controller is lost"):
        client.raise_(commit("b", reservations[1]))


@pytest.mark.parametrize("more", [{"capacity_bytes": 2 * MIB}, {"backed_bytes": 0}, {"epoch": 0}], ids=str)
def test_a_unit_comes_back_with_the_arena_it_had(more: dict[str, Any]) -> None:
    assert isinstance(offer(Driver(), unit=1, **more).error, InvalidRequestError)


# --- Storage units: joining, coming back, being lost and dropped.


@pytest.fixture
def driver() -> Driver:
    return Driver(units=2)


def test_a_live_cookie_twice_is_refused(driver: Driver) -> None:
    assert isinstance(driver.add_unit(name="unit0", capacity=MIB).error, InvalidRequestError)
    driver.apply(c.UnitLost(unit=1))
    again = driver.add_unit(name="unit0", capacity=MIB)
    assert (again.unit, again.error) == (1, None)
    driver.apply(c.UnitLost(unit=1))
    assert isinstance(driver.add_unit(name="unit0", capacity=MIB, epoch=0).error, InvalidRequestError)
    assert isinstance(driver.add_unit(name="unit0", capacity=2 * MIB).error, InvalidRequestError)


def test_units_are_listed_with_their_present_epoch(driver: Driver) -> None:
    driver.add_unit(name="unit1", capacity=MIB, epoch=5)
    client = driver.client()
    units = client.call(c.UnitList, c.Units()).units
    assert [(unit.unit, unit.epoch, unit.name) for unit in units] == [(1, 1, "unit0"), (2, 5, "unit1")]


def test_a_new_epoch_frees_nothing_that_a_living_session_holds(driver: Driver) -> None:
    """Its client may have learned of the new epoch before it uses what the old one's answers told it."""
    remote, local = driver.client("remote", host="far"), driver.client("local", attach=[1])
    remote.register()
    for client in (remote, local):
        client.put([f"{client.session}"], {"x": [64]})
        client.raw(client.allocate({"x": [64]}, unit_wish=1))
        client.locate(by_ids(f"{client.session}"))
    held = {client: client.last_call_id for client in (remote, local)}
    assert remote.used(1) + remote.used(2) == 4 * 64
    driver.add_unit(name="unit0", capacity=MIB, epoch=2)
    driver.add_unit(name="unit1", capacity=MIB, epoch=2)
    stats = remote.stats()
    assert sum(unit.reserved_bytes for unit in stats.units) == 128
    assert sum(unit.live_bytes for unit in stats.units) == 128
    assert sum(unit.pinned_bytes for unit in stats.units) == 128
    for client, located in held.items():
        client.do(c.Release(located=located))
        client.do(c.Abort(reservation=located - 1))
    stats = remote.stats()
    assert sum(unit.reserved_bytes + unit.pinned_bytes for unit in stats.units) == 0


def test_a_unit_with_live_rows_is_dropped_under_force_only(driver: Driver) -> None:
    client = driver.client("holder", attach=[1, 2])
    client.register()
    for i, unit in enumerate((1, 2)):
        call_id = client.post(client.allocate({"x": [64]}, unit_wish=unit))
        client.call(
            c.Committed,
            c.Commit(
                partition="p",
                samples=by_ids(f"s{i}"),
                mode=c.Mode.CREATE,
                reservation=call_id,
                columns=commit_columns({"x": [64]}),
            ),
        )
    client.locate(by_ids("s0", "s1"))
    located = client.last_call_id
    doomed = client.post(client.allocate({"x": [64]}, unit_wish=1))
    (refused,) = driver.apply(c.DropUnit(unit=1))
    assert isinstance(refused, c.UnitDropped)
    assert isinstance(refused.error, InvalidRequestError)
    (dropped,) = driver.apply(c.DropUnit(unit=1, force=True))
    assert isinstance(dropped, c.UnitDropped)
    assert dropped.error is None
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s1",)
    command = c.Commit(
        partition="p",
        samples=by_ids("s9"),
        mode=c.Mode.CREATE,
        reservation=doomed,
        columns=commit_columns({"x": [64]}),
    )
    with pytest.raises(StorageUnitError):
        client.raise_(command)
    client.clear("s1")
    client.do(c.Release(located=located))
    assert client.used(2) == 0
    assert isinstance(driver.apply(c.DropUnit(unit=1))[0], c.UnitDropped)
    assert driver.add_unit(name="unit0", capacity=MIB).unit == 3


def test_dropping_a_unit_ends_the_wait_for_its_proof(driver: Driver) -> None:
    client, other = driver.client("holder", attach=[1]), driver.client()
    client.register()
    client.raw(client.allocate({"x": [64]}))
    client.do(c.Bye())
    assert len(other.stats().sessions) == 2
    driver.apply(c.DropUnit(unit=1))
    assert [s.session for s in other.stats().sessions] == [other.session]


@pytest.mark.parametrize("cookie", ["", "never heard of"])
def test_a_unit_that_lost_its_record_takes_the_place_of_what_its_name_had(driver: Driver, cookie: str) -> None:
    client = driver.client()
    client.register()
    for unit in (1, 2):
        client.put([f"s{unit}"], {"x": [64]}, unit_wish=unit)
    for unit in (1, 2):
        driver.apply(c.UnitLost(unit=unit))
    driver.add_unit(name="more", capacity=MIB)
    again = {"cookie": "another", "instead_of": cookie}
    assert driver.offer("unit0", **again).unit == 4
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s1", "s2"), "it did not say so"
    driver.apply(c.UnitLost(unit=4))
    assert driver.offer("unit0", anew=True, **{**again, "cookie": "the third"}).unit == 5
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [2, 3, 5]
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s2",)
    assert driver.offer("unit0", anew=True, cookie="the fourth").unit == 6
    assert 5 in [unit.unit for unit in client.stats().units], "a unit that is there is never taken for lost"


def test_of_units_of_one_name_the_one_of_its_host_is_lost(driver: Driver) -> None:
    client = driver.client()
    driver.offer("unit0", cookie="far", host="there")
    for unit in (1, 3):
        driver.apply(c.UnitLost(unit=unit))
    driver.offer("unit0", cookie="new", host="there", anew=True)
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [1, 2, 4]


def test_what_a_lost_arena_held_goes_when_its_unit_begins_anew(driver: Driver) -> None:
    client = driver.client()
    client.register()
    for unit in (1, 2):
        client.put([f"s{unit}"], {"x": [64]}, unit_wish=unit)
    refused = driver.add_unit(name="anew", instead_of="cookie-unit0")
    assert isinstance(refused.error, InvalidRequestError)
    assert "unit 1" in str(refused.error)
    driver.apply(c.UnitLost(unit=1))
    added = driver.add_unit(name="anew", instead_of="cookie-unit0")
    assert (added.unit, added.error) == (3, None)
    assert [unit.unit for unit in client.call(c.UnitList, c.Units()).units] == [2, 3]
    assert client.call(c.Listed, c.List(partition="p")).ids == ("s2",)
    assert driver.add_unit(name="another", instead_of="never heard of").error is None


# --- Heartbeats of many sessions: how often they are sent, and how long a silent session stays.


HEARTBEAT_S, TIMEOUT_S = 2.0, 20.0
TICK_S = 1.0


@dataclass
class Beating:
    """A client that sends heartbeats as `HeartbeatThread` does. Every second one is lost, except the first.
    `ends_by`: when the service must have ended the session, if the client is never heard from again."""

    session: int
    wakes_at: float
    sent_at: float
    min_heartbeat_s: float = 0.0
    sent: int = 0
    ends_by: float = 0.0
    called: int = 0

    def wake(self, driver: Driver) -> None:
        if driver.now < self.wakes_at:
            return
        self.wakes_at += HEARTBEAT_S
        if driver.now >= self.sent_at + self.min_heartbeat_s:
            self.send(driver)

    def send(self, driver: Driver) -> None:
        self.sent_at, self.sent = driver.now, self.sent + 1
        if self.sent % 2:
            driver.apply(c.Heartbeat(session=self.session))
            self.min_heartbeat_s = driver.ledger.min_heartbeat_s
            self.ends_by = max(self.ends_by, driver.now + TIMEOUT_S + 2 * self.min_heartbeat_s + TICK_S)

    def call(self, driver: Driver, command: c.Command) -> None:
        self.called += 1
        driver.apply(c.Call(session=self.session, call_id=self.called, watermark=self.called, command=command))
        self.ends_by = max(self.ends_by, driver.now + TIMEOUT_S + TICK_S)


class Clients:
    """Clients without an attachment, whose end no unit can prove."""

    def __init__(self) -> None:
        self.driver = Driver(heartbeat_s=HEARTBEAT_S, session_timeout_s=TIMEOUT_S)
        self.driver.tick(0.0)
        self.here: list[Beating] = []
        self.gone: list[Beating] = []

    def open(self) -> None:
        now = self.driver.now
        client = Beating(self.driver.client(f"{now}").session, wakes_at=now + HEARTBEAT_S, sent_at=now)
        client.send(self.driver)
        self.here.append(client)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.driver.tick(self.driver.now + TICK_S)
            for client in self.here:
                client.wake(self.driver)

    def live(self) -> dict[int, c.SessionStats]:
        """The sessions that have not ended, by id."""
        asking = self.driver.client("asks")
        found = asking.stats().sessions
        asking.do(c.Bye())
        return {each.session: each for each in found if each.state != "ending" and each.session != asking.session}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that wants one heartbeat in two seconds, of all sessions."""
    monkeypatch.setattr(liveness, "HEARTBEATS_PER_S", 0.5)


@given(
    rate=st.sampled_from([0.1, 0.5, 500]),
    steps=st.lists(
        st.tuples(st.sampled_from(["open", "open", "vanish", "bye", "call"]), st.integers(0, 30)), max_size=30
    ),
)
def test_clients_that_send_stay_and_those_that_vanish_end(rate: float, steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(liveness, "HEARTBEATS_PER_S", rate)
        clients = Clients()
        for step, seconds in steps:
            if step == "open":
                clients.open()
            elif clients.here:
                client = clients.here[seconds % len(clients.here)]
                if step == "vanish":
                    clients.gone.append(client)
                else:
                    client.call(clients.driver, c.Bye() if step == "bye" else c.Units())
                if step != "call":
                    clients.here.remove(client)
            clients.pass_time(seconds)
            gone = {client.session for client in clients.gone if clients.driver.now < client.ends_by}
            here = {client.session for client in clients.here}
            assert here <= clients.live().keys() <= here | gone


@pytest.mark.usefixtures("few")
def test_heartbeats_of_all_sessions_together_are_limited() -> None:
    clients = Clients()
    for _ in range(40):
        clients.open()
        clients.pass_time(1)
    clients.pass_time(80)  # all learn of the last ones
    before = sum(client.sent for client in clients.here)
    clients.pass_time(400)
    assert sum(client.sent for client in clients.here) - before <= 0.5 * 400


@pytest.mark.usefixtures("few")
def test_silence_counts_from_the_time_at_which_two_heartbeats_are_overdue() -> None:
    clients = Clients()
    for _ in range(10):
        clients.open()  # the last one may send each 20 s: two of its heartbeats are due after 2 * (20 + 2) s
    last = clients.here[-1].session
    clients.here.clear()
    found = []
    for now in (30, 43, 45, 59):
        clients.pass_time(now - int(clients.driver.now))
        stats = clients.live()[last]
        found.append((stats.state, stats.silent_s))
    assert found == [("live", 0.0), ("live", 3.0), ("silent", 5.0), ("silent", 19.0)]
    clients.pass_time(1)
    assert last not in clients.live()
