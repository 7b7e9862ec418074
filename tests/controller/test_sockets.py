"""A client's sockets to its service while many calls are made, answers do not come, or the service's port is full."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane.controller import grpc_server, health
from dataplane.controller.controller import Controller
from dataplane.errors import ServiceUnavailableError
from dataplane.protocol import server_keys
from dataplane.protocol.grpc_status import from_status
from dataplane.protocol.http2 import BusyError
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
from tests.restarts import CONFIG

pytestmark = pytest.mark.integration

WAIT_S = 60.0
TOKEN = "open-sesame-7f3a"


def test_a_full_port_is_busy_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    monkeypatch.setattr(health, "HEALTHY_S", WAIT_S)
    busy, ask = threading.Event(), server_keys._request_keys

    def asked(*question: Any) -> bytes:
        try:
            return ask(*question)
        except BusyError:
            busy.set()
            raise

    monkeypatch.setattr(server_keys, "_request_keys", asked)
    with (
        Controller(replace(CONFIG, token=TOKEN)) as controller,
        grpc.insecure_channel(controller.address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest())
        error = from_status(refused.value, address=controller.address, what="AttachUnit", waited_s=0.0)
        assert isinstance(error, ServiceUnavailableError)
        assert "the service is busy" in str(error)
        opening = pool.submit(keys_of, controller.address, TOKEN, None, deadline=time.monotonic() + WAIT_S)
        assert busy.wait(WAIT_S)
        watches[0].cancel()
        assert opening.result(WAIT_S).ticket is not None
