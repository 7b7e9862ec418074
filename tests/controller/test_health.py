"""Health as it is asked over gRPC and over HTTP: one answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane.config import DataPlaneConfig
from dataplane.controller import health
from dataplane.controller.controller import Controller
from dataplane.errors import StateDirError
from dataplane.ledger import commands as c
from tests.controller.service import (  # noqa: F401
    NEVER_S,
    Open,
    ScriptedLedger,
    done,
    ledger,
    open_channel,
    scripted,
    unhurried,
)
from tests.restarts import wait_until
from tests.web_client import ask

pytestmark = pytest.mark.integration


WAIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WATCHED = DataPlaneConfig(grpc_port=0, http_port=0, heartbeat_s=30.0, session_timeout_s=300.0)


class Frozen(ScriptedLedger):
    """Its thread stands still in whatever it does next, until `thaw`."""

    def __init__(self) -> None:
        super().__init__()
        self.thawed = threading.Event()
        self.thawed.set()

    def apply(self, item: c.Input) -> list[c.Output]:
        assert self.thawed.wait(WAIT_S)
        return super().apply(item)


class Full(ScriptedLedger):
    """Its journal takes nothing while it is full."""

    full = False

    def apply(self, item: c.Input) -> list[c.Output]:
        if self.full and isinstance(item, c.Call):
            raise StateDirError(directory="/state", why="it is full")
        return super().apply(item)


def stub(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def answers(controller: Controller) -> tuple[int, int]:
    """Of gRPC, and the status of `/healthz`."""
    with grpc.insecure_channel(controller.grpc_address) as channel:
        checked = stub(channel).Check(health_pb2.HealthCheckRequest(service="tq.v1.Control"), timeout=WAIT_S)
    return checked.status, ask(controller.http_address, "/healthz").status


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the service counts as healthy."""
    monkeypatch.setattr(health, "HEALTHY_S", WAIT_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH_S", 0.0)


@pytest.fixture
def started() -> Iterator[Callable[[ScriptedLedger], Controller]]:
    with ExitStack() as ends:
        yield lambda ledger: ends.enter_context(Controller(WATCHED, ledger=ledger, epoch=1))


def test_a_ledger_that_stands_still_is_not_serving(
    quick: None, started: Callable[[ScriptedLedger], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Frozen()
    controller = started(ledger)
    assert answers(controller) == (SERVING, 200)
    monkeypatch.setattr(health, "HEALTHY_S", 0.1)  # first: a look that began before would take the longer time
    ledger.thawed.clear()
    assert answers(controller) == (NOT_SERVING, 503)
    assert "the ledger did not answer within 0.1 s" in ask(controller.http_address, "/healthz").text
    monkeypatch.setattr(health, "HEALTHY_S", WAIT_S)
    ledger.thawed.set()
    wait_until(lambda: answers(controller) == (SERVING, 200))


def test_a_journal_that_takes_nothing_is_not_serving(
    quick: None, started: Callable[[ScriptedLedger], Controller]
) -> None:
    ledger = Full()
    controller = started(ledger)
    assert answers(controller) == (SERVING, 200)
    ledger.full = True
    assert answers(controller) == (NOT_SERVING, 503)
    assert "/state" in ask(controller.http_address, "/healthz").text
    ledger.full = False
    assert answers(controller) == (SERVING, 200)


def test_many_who_ask_cost_the_ledger_one_answer(
    started: Callable[[ScriptedLedger], Controller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FRESH_S", WAIT_S)
    ledger = ScriptedLedger(done)
    controller = started(ledger)
    for _ in range(5):
        assert answers(controller) == (SERVING, 200)
    assert len(ledger.of(c.Units)) == 1


def test_a_look_of_the_service_is_no_call_of_a_client() -> None:
    with Controller(WATCHED) as controller:
        assert answers(controller) == (SERVING, 200)
        assert ask(controller.http_address, "/api/stats").json["sessions"] == []
        assert 'call="units"' not in ask(controller.http_address, "/metrics").text
