"""The gRPC server as any client sees it: commands, errors, token, health, reflection, streams."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataplane.config import DataPlaneConfig
from dataplane.controller import grpc_public, grpc_server, health
from dataplane.controller.controller import Controller
from dataplane.controller.grpc_standard import POOL
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

CONFIG = DataPlaneConfig(heartbeat_s=5.0)
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
        grpc.insecure_channel(controller.address) as channel,
    ):
        yield channel


@pytest.fixture
def real() -> Iterator[grpc.Channel]:
    with Controller(CONFIG, epoch=1) as controller, grpc.insecure_channel(controller.address) as channel:
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
        grpc.insecure_channel(controller.address) as channel,
    ):
        control = stub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.RpcError) as caught:
                control.OpenSession(OPEN, timeout=WAIT_S, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer secret"),)
        assert control.OpenSession(OPEN, timeout=WAIT_S, metadata=good).opened.session == 1
        assert healthy(channel, "tq.v1.Control")


def methods_of(channel: grpc.Channel, metadata: Any) -> dict[str, list[str]]:
    """The paths of every method of every service at the port, as reflection tells them."""
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    request = reflection_pb2.ServerReflectionRequest
    (listed,) = ask(iter([request(list_services="")]), timeout=WAIT_S, metadata=metadata)
    names = [service.name for service in listed.list_services_response.service]
    files = ask(iter([request(file_containing_symbol=name) for name in names]), timeout=WAIT_S, metadata=metadata)
    found: dict[str, list[str]] = {}
    for name, answer in zip(names, files, strict=True):
        for file in map(FileDescriptorProto.FromString, answer.file_descriptor_response.file_descriptor_proto):
            for service in file.service:
                if f"{file.package}.{service.name}" == name:
                    found[name] = [f"/{name}/{method.name}" for method in service.method]
    return found


def test_every_method_of_every_service_at_the_port_wants_the_token() -> None:
    """But for the few that are made without it; also what reflection does not tell of."""
    with (
        Controller(replace(CONFIG, token="secret"), epoch=1) as controller,
        grpc.insecure_channel(controller.address) as channel,
    ):
        methods = methods_of(channel, (("authorization", "Bearer secret"),))
        reflections = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
        assert set(methods) == {"tq.v1.Control", "grpc.health.v1.Health", *reflections}
        public = {"/tq.v1.Control/GetKeys", *methods["grpc.health.v1.Health"]}
        hidden = ["/grpc.reflection.v2.ServerReflection/ServerReflectionInfo", "/grpc.channelz.v1.Channelz/GetServers"]
        for path in {*(path for paths in methods.values() for path in paths), *hidden} - public:
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.stream_stream(path)(iter([b""]), timeout=WAIT_S, metadata=metadata))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, path


def healthy(channel: grpc.Channel, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_health(real: grpc.Channel) -> None:
    assert healthy(real, "")
    assert healthy(real, "tq.v1.Control")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_tells_the_service_and_its_messages(real: grpc.Channel, version: str) -> None:
    """gRPC's package for Python has stubs of the older version; the messages are the same."""
    request, response = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    ask = real.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    extension = reflection_pb2.ExtensionRequest(containing_type="tq.v1.Header", extension_number=1)
    requests = [
        request(host="here", list_services=""),
        request(file_containing_symbol="tq.v1.Control"),
        request(file_by_filename=pb.DESCRIPTOR.name),
        request(all_extension_numbers_of_type="tq.v1.Header"),
        request(file_containing_extension=extension),
        request(file_containing_symbol="tq.v1.Nothing"),
        request(file_by_filename="nothing.proto"),
        request(),
    ]
    answers = list(ask(iter(requests), timeout=WAIT_S))
    assert [answer.original_request for answer in answers] == requests
    services, by_symbol, by_name, numbers, *failed = answers
    assert services.valid_host == "here"
    assert "tq.v1.Control" in [service.name for service in services.list_services_response.service]
    files = by_symbol.file_descriptor_response.file_descriptor_proto
    assert files == by_name.file_descriptor_response.file_descriptor_proto
    assert [FileDescriptorProto.FromString(file).package for file in files] == ["tq.v1"]
    assert numbers.all_extension_numbers_response.base_type_name == "tq.v1.Header"
    codes = [answer.error_response.error_code for answer in failed]
    assert codes == [grpc.StatusCode.NOT_FOUND.value[0]] * 3 + [grpc.StatusCode.INVALID_ARGUMENT.value[0]]
    assert "tq.v1.Nothing" in failed[1].error_response.error_message


@pytest.mark.parametrize("module", [health_pb2, reflection_pb2])
def test_what_is_told_of_health_and_reflection_is_as_grpc_publishes_it(module: Any) -> None:
    """Their fields and methods have the numbers, names and types of gRPC's own; the methods may be fewer."""
    published = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    service = f"{published.package}.{published.service[0].name}"
    ours = FileDescriptorProto.FromString(POOL.FindFileContainingSymbol(service).serialized_pb)
    messages = {message.name: message for message in published.message_type}
    for message in ours.message_type:
        theirs = messages[message.name]
        for field in theirs.field:
            field.ClearField("json_name")
        assert message == theirs
    methods = {method.name: method for method in published.service[0].method}
    for method in ours.service[0].method:
        assert method == methods[method.name]


def test_the_end_of_the_last_stream_that_keeps_a_session_is_told(
    scripted: grpc.Channel, ledger: ScriptedLedger
) -> None:
    control = stub(scripted)
    beats: list[queue.SimpleQueue[pb.HeartbeatRequest | None]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    streams = [control.KeepSession(iter(each.get, None), timeout=WAIT_S) for each in beats]
    for each, stream in zip(beats, streams, strict=True):
        each.put(pb.HeartbeatRequest(session=7))
        assert next(stream).epoch > 0
    ledger.wait_for(c.Heartbeat, 2)
    beats[0].put(None)
    assert list(streams[0]) == []
    assert ledger.of(c.SessionSilent) == []
    streams[1].cancel()
    assert [silent.session for silent in ledger.wait_for(c.SessionSilent)] == [7]
    beats[1].put(None)


def test_stopping_answers_those_who_wait(ledger: ScriptedLedger) -> None:
    ledger.answer = lambda call: None
    controller = Controller(CONFIG, ledger=ledger, epoch=1).start()
    with grpc.insecure_channel(controller.address) as channel:
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
            list(stub.KeepSession(iter([pb.HeartbeatRequest(session=1)]), timeout=WAIT_S))
    for error in (told, beat):
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert "ZeroDivisionError" in error.value.details()
    assert "Failed on a SealRequest" in caplog.text
    assert "Failed on a HeartbeatRequest" in caplog.text
    stub.Seal(pb.SealRequest(header=pb.Header(session=1, call_id=2)), timeout=WAIT_S)


def failing(*_: object) -> None:
    raise ZeroDivisionError("a defect")


@pytest.mark.parametrize(("method", "kind"), [("Seal", "unary_unary"), ("KeepSession", "stream_stream")])
def test_what_is_no_message_is_refused_by_name(scripted: grpc.Channel, method: str, kind: str) -> None:
    call = getattr(scripted, kind)(f"/tq.v1.Control/{method}")
    body = b"\xff\xff"
    with pytest.raises(grpc.RpcError) as refused:
        call(body, timeout=WAIT_S) if kind == "unary_unary" else list(call(iter([body]), timeout=WAIT_S))
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
