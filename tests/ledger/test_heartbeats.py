"""Heartbeats of many sessions: how often they are sent, and how long a silent session stays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.ledger import commands as c
from dataplane.ledger import liveness
from tests.ledger.driver import Driver

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
        driver.apply(c.Call(session=self.session, number=self.called, watermark=self.called, command=command))
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
        """The sessions that have not ended, by number."""
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
