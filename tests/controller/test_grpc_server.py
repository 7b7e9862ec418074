"""The gRPC server as any client sees it: commands, errors, token, health."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane.config import DataPlaneConfig
from dataplane.controller import grpc_public, grpc_server, health
from dataplane.controller.controller import Controller
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    PartitionNotFoundError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.protocol.grpc_status import DETAILS_KEY
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.pb import control_pb2_grpc
from tests.controller.service import ScriptedLedger
from tests.grpc_errors import error_of

pytestmark = pytest.mark.integration

CONFIG = DataPlaneConfig(heartbeat_s=5.0, grpc_port=0)
WAIT_S = 60.0
OPEN = pb.OpenSessionRequest(nonce="n", host="h", name="grpc", protocol_version=PROTOCOL_VERSION)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine the service counts as healthy, and calls that are pending when it stops are answered."""
    monkeypatch.setattr(health, "HEALTHY_S", WAIT_S)
    monkeypatch.setattr(grpc_server, "GRACE_S", WAIT_S)


@pytest.fixture
def ledger() -> ScriptedLedger:
    return ScriptedLedger()


@pytest.fixture
def scripted(ledger: ScriptedLedger) -> Iterator[grpc.Channel]:
    with (
        Controller(CONFIG, ledger=ledger, epoch=ledger.epoch) as controller,
        grpc.insecure_channel(controller.grpc_address) as channel,
    ):
        yield channel


@pytest.fixture
def real() -> Iterator[grpc.Channel]:
    with Controller(CONFIG, epoch=1) as controller, grpc.insecure_channel(controller.grpc_address) as channel:
        yield channel


def stub(channel: grpc.Channel) -> Any:
    return control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]


def header(call_id: int) -> pb.Header:
    return pb.Header(session=1, call_id=call_id, watermark=1)


def test_a_session_over_grpc_alone(real: grpc.Channel) -> None:
    control = stub(real)
    welcome = control.OpenSession(OPEN, timeout=WAIT_S)
    assert (welcome.opened.session, welcome.opened.nonce, welcome.heartbeat_s) == (1, "n", 5.0)
    assert welcome.opened.epoch > 0
    assert [endpoint.partition("://")[0] for endpoint in welcome.endpoints] == ["ipc", "tcp"]
    assert control.OpenSession(OPEN, timeout=WAIT_S).opened.session == 1
    control.Register(pb.RegisterRequest(header=header(1), partition="p", tasks=["t"]), timeout=WAIT_S)
    described = control.Describe(pb.DescribeRequest(header=header(2), partition="p"), timeout=WAIT_S)
    assert list(described.tasks) == ["t"]
    beat = control.Heartbeat(pb.HeartbeatRequest(session=1), timeout=WAIT_S)
    assert beat.epoch == welcome.opened.epoch
    control.Bye(pb.ByeRequest(header=header(3)), timeout=WAIT_S)


def test_errors_are_statuses_with_facts(real: grpc.Channel) -> None:
    control = stub(real)
    control.OpenSession(OPEN, timeout=WAIT_S)
    with pytest.raises(grpc.RpcError) as caught:
        control.Describe(pb.DescribeRequest(header=header(1), partition="p"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "unknown partition 'p'" in caught.value.details()
    assert DETAILS_KEY in dict(caught.value.trailing_metadata())
    error = error_of(caught.value)
    assert isinstance(error, PartitionNotFoundError)
    assert error.partition == "p"


def test_a_malformed_request_is_refused(real: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub(real).Locate(pb.LocateRequest(header=header(1), partition="p"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_of(caught.value)
    assert isinstance(error, InvalidRequestError)


def test_parked_commands_hold_no_thread_and_may_be_left(scripted: grpc.Channel, ledger: ScriptedLedger) -> None:
    parked: dict[int, c.Call] = {}
    ledger.answer = lambda call: c.Done() if isinstance(call.command, c.Units) else parked.update({call.call_id: call})
    control = stub(scripted)
    before = threading.active_count()
    waiting = [control.Seal.future(pb.SealRequest(header=header(n)), timeout=WAIT_S) for n in range(1, 101)]
    ledger.wait_for(c.Seal, 100)
    # The one thread more, if any, is this client's own.
    assert threading.active_count() <= before + 1
    waiting[0].cancel()
    ledger.answer = lambda call: c.Done()
    for call_id in range(2, 101):
        again = control.Seal(pb.SealRequest(header=header(call_id)), timeout=WAIT_S)
        assert again == waiting[call_id - 1].result(WAIT_S) == pb.Done()
    assert waiting[0].cancelled()


def test_the_token_is_checked_on_everything_but_health() -> None:
    with (
        Controller(replace(CONFIG, token="secret"), epoch=1) as controller,
        grpc.insecure_channel(controller.grpc_address) as channel,
    ):
        control = stub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                control.OpenSession(OPEN, timeout=WAIT_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer secret"),)
        assert control.OpenSession(OPEN, timeout=WAIT_S, metadata=good).opened.session == 1
        assert healthy(channel, "tq.v1.Control")


def test_every_method_of_every_service_at_the_port_wants_the_token() -> None:
    """But for the few that are made without it; also those that are not there."""
    with (
        Controller(replace(CONFIG, token="secret"), epoch=1) as controller,
        grpc.insecure_channel(controller.grpc_address) as channel,
    ):
        methods = {f"/tq.v1.Control/{each.name}" for each in pb.DESCRIPTOR.services_by_name["Control"].methods}
        hidden = {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.channelz.v1.Channelz/GetServers"}
        for path in methods | hidden:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(path)(b"", timeout=WAIT_S, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path


def healthy(channel: grpc.Channel, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_health(real: grpc.Channel) -> None:
    assert healthy(real, "")
    assert healthy(real, "tq.v1.Control")


def test_stopping_answers_those_who_wait(ledger: ScriptedLedger) -> None:
    ledger.answer = lambda call: None
    controller = Controller(CONFIG, ledger=ledger, epoch=1).start()
    with grpc.insecure_channel(controller.grpc_address) as channel:
        waiting = stub(channel).Seal.future(pb.SealRequest(header=header(1)), timeout=WAIT_S)
        ledger.wait_for(c.Seal)
        controller.stop()
        with pytest.raises(grpc.RpcError) as caught:
            waiting.result(WAIT_S)
        error = error_of(caught.value)
        assert isinstance(error, ServiceUnavailableError)
        assert "is stopping" in str(error)


def test_a_defect_in_a_handler_is_logged_and_told_and_the_server_goes_on(
    scripted: grpc.Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub = control_pb2_grpc.ControlStub(scripted)
    with monkeypatch.context() as patched:
        patched.setattr("dataplane.controller.grpc_server.message_of", failing)
        with pytest.raises(grpc.RpcError) as told:
            stub.Seal(pb.SealRequest(header=pb.Header(session=1, call_id=1)), timeout=WAIT_S)
    with monkeypatch.context() as patched:
        patched.setattr("dataplane.controller.grpc_server.heartbeat_message", failing)
        with pytest.raises(grpc.RpcError) as beat:
            stub.Heartbeat(pb.HeartbeatRequest(session=1), timeout=WAIT_S)
    for error in (told, beat):
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in error.value.details()
    assert "Failed on a SealRequest" in caplog.text
    assert "Failed on a HeartbeatRequest" in caplog.text
    stub.Seal(pb.SealRequest(header=pb.Header(session=1, call_id=2)), timeout=WAIT_S)


def failing(*_: object) -> None:
    raise ZeroDivisionError("a defect")


def test_what_is_no_message_is_refused_by_name(scripted: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        scripted.unary_unary("/tq.v1.Control/Seal")(b"\xff\xff", timeout=WAIT_S)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the request is not a" in refused.value.details()


def test_a_refused_call_whose_caller_is_gone_leaves_no_traceback(
    real: grpc.Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reached, gone, tell = threading.Event(), threading.Event(), grpc_public.to_status

    def late(error: DataPlaneError) -> Any:
        reached.set()
        assert gone.wait(WAIT_S)
        time.sleep(0.2)  # for the news to arrive; where it takes longer, the answer is sent into the void
        return tell(error)

    monkeypatch.setattr(grpc_public, "to_status", late)
    call = stub(real).Seal.future(pb.SealRequest(header=header(1)))
    assert reached.wait(WAIT_S)
    call.cancel()
    gone.set()
    monkeypatch.setattr(grpc_public, "to_status", tell)
    assert stub(real).Heartbeat(pb.HeartbeatRequest(session=1), timeout=WAIT_S)
    told = [record.getMessage() for record in caplog.records if record.exc_info or "Seal" in record.getMessage()]
    assert told == []
