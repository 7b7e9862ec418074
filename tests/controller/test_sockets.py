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

from dataplane import connect, serve
from dataplane.controller import grpc_server, health
from dataplane.controller.controller import Controller
from dataplane.errors import CallTimeoutError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import server_keys
from dataplane.protocol.grpc_status import from_status
from dataplane.protocol.http2 import BusyError
from dataplane.protocol.server_keys import keys_of
from tests.client.test_socket_pool import counted_sockets
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
from tests.restarts import CONFIG, NO_HEARTBEATS

pytestmark = pytest.mark.integration

WAIT_S = 60.0
TOKEN = "open-sesame-7f3a"


def test_a_client_whose_threads_call_while_its_heart_beats_has_few_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = counted_sockets(monkeypatch)
    threads = 4
    with (
        serve({"capacity_bytes": 16 << 20, **NO_HEARTBEATS}) as server,
        connect(server.address, **NO_HEARTBEATS) as client,
        ThreadPoolExecutor(threads) as pool,
    ):
        client.register_partition("p", ["x"], None, ["t"])
        channel = client._connections.get()._channel
        process_replies = channel._process_replies

        def call_meanwhile(dealer: Any) -> None:
            for call in [pool.submit(client.list_samples, "p") for _ in range(threads)]:
                call.result(WAIT_S)
            process_replies(dealer)

        monkeypatch.setattr(channel, "_process_replies", call_meanwhile)
        for _ in range(8):
            channel._maintain()  # what each heartbeat does
    # One for each thread, one that is being served, and one to post with.
    assert len(opened) <= threads + 2


def test_a_socket_that_brought_no_answer_is_not_used_again(
    scripted: Controller,
    ledger: ScriptedLedger,
    open_channel: Open,
    monkeypatch: pytest.MonkeyPatch,
    unhurried: None,
) -> None:
    """It may have no connection, as the process may open no more files."""
    opened = counted_sockets(monkeypatch)
    channel = open_channel(scripted, call_timeout_s=0.2, heartbeat_s=NEVER_S)
    ledger.answer = lambda call: None
    with pytest.raises(CallTimeoutError):
        channel.call(c.Seal(partition="p"))
    ledger.answer = done
    channel.call(c.Seal(partition="p"), timeout_s=60.0)
    assert [dealer.closed for dealer in opened] == [True, False]


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
