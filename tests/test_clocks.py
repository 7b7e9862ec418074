"""Clocks that jump: the machine's clock is set back or forward between two runs, and the service is paused."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import dataplane
from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings
from dataplane.controller.event_loop import LedgerThread
from dataplane.controller.requests import Facts
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.ledger import Ledger
from dataplane.ledger import commands as c
from tests.ledger.driver import part_of

pytestmark = pytest.mark.integration

DAY_NS = 24 * 3600 * 10**9
SETTINGS = LedgerSettings(reserve_fraction=0.15, heartbeat_s=2.0, session_timeout_s=20.0)
FACTS = Facts(address="here:1", epoch=1, host="host", endpoints=(), heartbeat_s=2.0)
WAIT_S = 60.0


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def set_clock(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """The machine's clock is wrong by so much from now on."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(days * DAY_NS))


@pytest.mark.parametrize("days", [-10, -1 / 86400, 400])
def test_a_service_whose_clock_was_set_goes_on_in_a_later_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float
) -> None:
    first = DurableLedger.open(tmp_path, SETTINGS)
    opened = _open(first)
    first.apply(c.Tick(now=500.0))
    first.close()
    with monkeypatch.context() as patched:
        set_clock(patched, days)
        second = DurableLedger.open(tmp_path, SETTINGS)
        assert second.epoch > first.epoch
        # The clock of ticks began anew, too, and far from where it was.
        second.apply(c.Tick(now=3.0))
        again = _open(second, session=opened.session, epoch=opened.epoch)
        assert again.error is None
        assert (again.session, again.epoch) == (opened.session, second.epoch)
        second.close()
    third = DurableLedger.open(tmp_path, SETTINGS)
    assert third.epoch > second.epoch
    third.close()


def _open(ledger: DurableLedger, session: int = 0, epoch: int = 0) -> c.Opened:
    wanted = c.OpenSession(
        nonce="n", host="h", name="c", protocol_version=PROTOCOL_VERSION, session=session, epoch=epoch
    )
    (opened,) = ledger.apply(wanted)
    assert isinstance(opened, c.Opened)
    return opened


def test_no_row_is_lost_when_the_clock_is_set_back_between_two_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arenas").mkdir()
    settings = {"capacity_bytes": 4 << 20, "state_dir": str(tmp_path / "s"), "arena_dir": str(tmp_path / "arenas")}
    with dataplane.serve(settings) as server, dataplane.connect(server.address) as client:
        client.register_partition("p", ["x"], 2, ["train"])
        client.put_samples(["a", "b"], "p", {"x": [torch.arange(3), torch.arange(5)]})
    set_clock(monkeypatch, -3)
    with dataplane.serve(settings) as server, dataplane.connect(server.address) as client:
        found = client.get_samples(["a", "b"], "p", ["x"])["x"].unbind()
        assert [row.tolist() for row in found] == [[0, 1, 2], [0, 1, 2, 3, 4]]


# --- standing still -----------------------------------------------------------------------------------------------


class Service:
    """A real ledger in its thread, by a clock that the test sets, and sessions that ask it."""

    def __init__(self, clock: Clock) -> None:
        server = ZmqServer("127.0.0.1", 0)
        server.introduce(FACTS)
        ledger = Ledger(7, heartbeat_s=SETTINGS.heartbeat_s, session_timeout_s=SETTINGS.session_timeout_s)
        self.shell = LedgerThread(ledger, server, FACTS, clock=clock)
        self.shell.start()
        self.outputs: queue.SimpleQueue[c.Output] = queue.SimpleQueue()
        self._call_id = 0

    def open(self, name: str) -> int:
        wanted = c.OpenSession(nonce=name, host="h", name=name, protocol_version=PROTOCOL_VERSION)
        self.shell.submit(wanted, self.outputs.put)
        opened = self.outputs.get(timeout=WAIT_S)
        assert isinstance(opened, c.Opened)
        return opened.session

    def send(self, session: int, command: c.Command) -> None:
        self._call_id += 1
        call = c.Call(session=session, call_id=self._call_id, watermark=1, command=command)
        self.shell.submit(call, self.outputs.put)

    def ask(self, session: int, command: c.Command) -> c.Result:
        self.send(session, command)
        answer = self.outputs.get(timeout=WAIT_S)
        assert isinstance(answer, c.Answer)
        assert isinstance(answer.result, c.Result), answer.result
        return answer.result


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Iterator[Service]:
    running = Service(clock)
    yield running
    running.shell.stop(WAIT_S)


CLAIM = c.Claim(partition="p", task="t", fields=(), batch_size=1, lease_s=5.0, timeout_s=300.0)


def test_to_a_service_that_stood_still_no_time_has_passed(service: Service, clock: Clock) -> None:
    worker, other = service.open("worker"), service.open("other")
    service.ask(worker, c.Register(partition="p", fields={}, num_samples=2, tasks=("t",)))
    service.ask(worker, c.Commit(partition="p", samples=c.Samples(ids=("a",)), mode=c.Mode.CREATE))
    claimed = service.ask(worker, CLAIM)
    assert isinstance(claimed, c.Claimed)
    service.send(other, CLAIM)
    # Longer than the lease, and than anybody may be silent. What the worker says comes in only after.
    clock.now += 3600.0
    assert isinstance(service.ask(worker, c.Ack(partition="p", task="t", **part_of(claimed))), c.ClaimsSettled)
    stats = service.ask(other, c.Stats())
    assert isinstance(stats, c.StatsReport)
    assert len(stats.sessions) == 2
    assert sum(part.waiting_claims for part in stats.partitions) == 1


def test_time_in_which_it_looked_counts(service: Service, clock: Clock) -> None:
    worker, other = service.open("worker"), service.open("other")
    service.ask(worker, c.Register(partition="p", fields={}, num_samples=2, tasks=("t",)))
    service.ask(worker, c.Commit(partition="p", samples=c.Samples(ids=("a",)), mode=c.Mode.CREATE))
    first = service.ask(worker, CLAIM)
    service.send(other, msgspec.structs.replace(CLAIM))
    for _ in range(4):
        clock.now += 1.5
        service.shell.submit(c.Heartbeat(session=worker))
        _heard(service, worker)
    answer = service.outputs.get(timeout=WAIT_S)
    assert isinstance(answer, c.Answer)
    assert isinstance(first, c.Claimed)
    assert isinstance(answer.result, c.Claimed)
    assert answer.result.ids == first.ids


def _heard(service: Service, session: int) -> None:
    """Returns once the ledger's thread has been around; what else it said is kept."""
    service.send(session, c.Units())
    kept = []
    while True:
        output = service.outputs.get(timeout=WAIT_S)
        if isinstance(output, c.Answer) and isinstance(output.result, c.UnitList):
            break
        kept.append(output)
    for output in kept:
        service.outputs.put(output)
