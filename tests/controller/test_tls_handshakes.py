"""Connections to a port with TLS that come to no call: they fill no log, and are counted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from typing import Any

import pytest

from dataplane import connect
from dataplane.config import DataPlaneConfig
from dataplane.controller import grpc_server, tls_handshakes
from dataplane.controller.controller import Controller
from dataplane.controller.tls_handshakes import Handshakes
from dataplane.core.addresses import split_address
from tests.restarts import NO_HEARTBEATS, wait_until
from tests.secure import tls

pytestmark = pytest.mark.integration

WAIT_S = 60.0
GARBAGE = 30
STILL: dict[str, Any] = {**NO_HEARTBEATS, **tls()}
"""A client whose heartbeat is late would connect again, and its handshake might be counted."""
CONFIG = DataPlaneConfig(**STILL)


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
    with Controller(CONFIG) as controller, connect(controller.address, **STILL) as client:
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
    with Controller(CONFIG) as controller:
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
