"""Connections to a port with TLS that come to no call: they fill no log, and are counted."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest

from dataplane import connect
from dataplane.config import DataPlaneConfig
from dataplane.control import handshakes
from dataplane.control.controller import Controller
from dataplane.host import split_address
from tests.lives import wait_until
from tests.logs import logged
from tests.secure import tls

pytestmark = pytest.mark.integration

WAIT_S = 60.0
GARBAGE = 30
CONFIG = DataPlaneConfig(**tls())


def told(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many each line of the log says there were."""
    found = [re.match(r"(\d+) connections to the port of gRPC came to no call", each) for each in caplog.messages]
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
    monkeypatch.setattr(handshakes, "REPORT_S", 0.2)
    with Controller(CONFIG) as controller, connect(controller.address, **tls()) as client:
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
    monkeypatch.setattr(handshakes, "REPORT_S", 0.2)
    with Controller(CONFIG) as controller:
        for _ in range(5):
            with connect(controller.address, **tls()) as client:
                client.stats()
        with logged("1 connections to the port of gRPC came to no call"):
            send_garbage(controller.address)
    assert told(caplog) == [1]
