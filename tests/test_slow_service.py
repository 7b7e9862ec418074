"""A service without a state that does not answer for a while: it may only be slow, and calls wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import dataplane
from dataplane.client.rpc import handshake, heartbeat
from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.errors import ServiceUnavailableError
from tests.restarts import Proxy

pytestmark = pytest.mark.integration

WAIT_S = 60.0


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The network to a service, which clients look for often."""
    monkeypatch.setattr(handshake, "boot_id", lambda: "another host")
    monkeypatch.setattr(handshake, "RESUME_STEP_S", 0.05)
    with Controller(DataPlaneConfig(session_timeout_s=60.0)) as controller:
        port = int(controller.address.rpartition(":")[2])
        made = Proxy(port)
        yield made
        made.close()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """One for each time that a client looked for its service and did not find it."""
    misses = threading.Semaphore(0)
    miss = heartbeat.HeartbeatThread._miss

    def told(self: heartbeat.HeartbeatThread, why: str, *, lost: bool) -> None:
        miss(self, why, lost=lost)
        misses.release()

    monkeypatch.setattr(heartbeat.HeartbeatThread, "_miss", told)
    return misses


def test_calls_wait_for_a_service_that_is_only_slow(proxy: Proxy, looked: threading.Semaphore) -> None:
    address = f"127.0.0.1:{proxy.port}"
    with dataplane.connect(address, heartbeat_s=0.05) as client, ThreadPoolExecutor(1) as pool:
        assert client.stats().units == ()
        proxy.pause()
        asked = pool.submit(client.stats)
        for _ in range(3):
            assert looked.acquire(timeout=WAIT_S)
        proxy.heal()
        assert asked.result(WAIT_S).units == ()


def test_calls_end_where_nothing_listens(proxy: Proxy, looked: threading.Semaphore) -> None:
    address = f"127.0.0.1:{proxy.port}"
    with dataplane.connect(address, heartbeat_s=0.05) as client:
        proxy.cut()
        assert looked.acquire(timeout=WAIT_S)
        with pytest.raises(ServiceUnavailableError):
            client.stats()
