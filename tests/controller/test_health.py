"""Health as it is asked over gRPC and over HTTP: one answer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane import connect
from dataplane.config import DataPlaneConfig
from dataplane.controller import grpc_server, health, tls_handshakes
from dataplane.controller.controller import Controller
from dataplane.controller.tls_handshakes import Handshakes
from dataplane.core.addresses import split_address
from dataplane.errors import StateDirError
from dataplane.ledger import commands as c
from dataplane.protocol import server_keys
from dataplane.protocol.http2 import BusyError
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.pb import control_pb2_grpc
from dataplane.protocol.server_keys import keys_of
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
from tests.restarts import CONFIG, NO_HEARTBEATS, wait_until
from tests.secure import tls
from tests.web_client import ask

pytestmark = pytest.mark.integration


WAIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WATCHED = DataPlaneConfig(http_port=0, heartbeat_s=30.0, session_timeout_s=300.0)


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
    with grpc.insecure_channel(controller.address) as channel:
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


# --- A client's sockets to its service while many calls are made, answers do not come, or the
# service's port is full.


TOKEN = "open-sesame-7f3a"


def test_a_full_port_is_busy_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    busy, ask = threading.Event(), server_keys._request_keys
    ledger = ScriptedLedger(lambda call: None)

    def asked(*question: Any) -> bytes:
        try:
            return ask(*question)
        except BusyError:
            busy.set()
            raise

    monkeypatch.setattr(server_keys, "_request_keys", asked)
    with (
        Controller(replace(CONFIG, token=TOKEN), ledger=ledger, epoch=1) as controller,
        grpc.insecure_channel(controller.address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        seal = control_pb2_grpc.ControlStub(channel).Seal  # type: ignore[no-untyped-call]
        headers = [pb.Header(session=1, call_id=call_id, watermark=1) for call_id in (1, 2)]
        token = (("authorization", f"Bearer {TOKEN}"),)
        waiting = [seal.future(pb.SealRequest(header=header), metadata=token) for header in headers]
        ledger.wait_for(c.Seal, 2)
        with pytest.raises(grpc.RpcError) as refused:
            stub(channel).Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        opening = pool.submit(keys_of, controller.address, TOKEN, None, deadline=time.monotonic() + WAIT_S)
        assert busy.wait(WAIT_S)
        waiting[0].cancel()
        assert opening.result(WAIT_S).ticket is not None


# --- Connections to a port with TLS that come to no call: they fill no log, and are counted.


GARBAGE = 30
STILL: dict[str, Any] = {**NO_HEARTBEATS, **tls()}
"""A client whose heartbeat is late would connect again, and its handshake might be counted."""
TLS_CONFIG = DataPlaneConfig(**STILL)


def told(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many each line of the log says there were."""
    found = [re.match(r"(\d+) connections to the gRPC port made no call", each) for each in caplog.messages]
    return [int(each[1]) for each in found if each]


def send_garbage(address: str) -> None:
    """Until the other end has hung up."""
    with socket.create_connection(split_address(address), timeout=WAIT_S) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while peer.recv(4096):
            pass


def test_garbage_is_summed_up_and_gRPC_logs_nothing_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tls_handshakes, "REPORT_S", 0.2)
    with Controller(TLS_CONFIG) as controller, connect(controller.address, **STILL) as client:
        client.stats()
        senders = [threading.Thread(target=send_garbage, args=(controller.address,)) for _ in range(GARBAGE)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(WAIT_S)
        wait_until(lambda: sum(told(caplog)) >= GARBAGE)
        client.stats()
    assert sum(told(caplog)) == GARBAGE
    assert "andshake" not in capfd.readouterr().err


def test_connections_that_call_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over several reports, with calls of every kind."""
    monkeypatch.setattr(
        tls_handshakes, "REPORT_S", 600.0
    )  # reports come when this test wants them, however slow calls are
    counted = kept(monkeypatch)
    with Controller(TLS_CONFIG) as controller:
        for _ in range(5):
            with connect(controller.address, **STILL) as client:
                client.stats()
            report(counted)
        send_garbage(controller.address)
        wait_until(lambda: report(counted) or told(caplog), "the garbage to be told of")
        report(counted)
    assert told(caplog) == [1]


def kept(monkeypatch: pytest.MonkeyPatch) -> list[Handshakes]:
    """What counts at the ports that are opened from now on."""
    made: list[Handshakes] = []

    def keep(loop: asyncio.AbstractEventLoop) -> Handshakes:
        made.append(Handshakes(loop))
        return made[-1]

    monkeypatch.setattr(grpc_server, "Handshakes", keep)
    return made


def report(counted: list[Handshakes]) -> None:
    """The time of a report has come."""
    reported = threading.Event()

    def now() -> None:
        counted[0]._report()
        reported.set()

    counted[0]._loop.call_soon_threadsafe(now)
    assert reported.wait(WAIT_S)
