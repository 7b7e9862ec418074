"""The thread that keeps a session alive."""

from __future__ import annotations

import queue

import pytest

from dataplane.controller.controller import Controller
from tests.controller.service import NEVER_S, Open, ScriptedLedger, ledger, open_channel, scripted  # noqa: F401
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration


def test_a_service_with_many_sessions_gets_fewer_heartbeats(
    scripted: Controller, ledger: ScriptedLedger, open_channel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else that a client does with each heartbeat is done as often as before."""
    ledger.min_heartbeat_s = NEVER_S
    heartbeat = open_channel(scripted)._heartbeat
    wait_until(lambda: heartbeat._min_heartbeat_s == NEVER_S, "the service's answer to a heartbeat")
    done: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(heartbeat, "_maintain", lambda: done.put("maintained"))
    monkeypatch.setattr(heartbeat, "_send_beat", lambda: done.put("sent"))
    assert {done.get(timeout=WAIT_S) for _ in range(5)} == {"maintained"}
    heartbeat.check()
    while done.get(timeout=WAIT_S) != "sent":
        pass
