"""Runs a service in a process that also has gRPC's own health stubs, as SGLang has; run by test_codec.py.

Arguments: the version of protobuf that is to be there, and which of both is imported first, "ours" or "theirs".
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import grpc
from google.protobuf import __version__

from dataplane.config import DataPlaneConfig
from dataplane.core.types import PROTOCOL_VERSION
from tests.restarts import WAIT_S

OURS, THEIRS = "dataplane.controller.grpc_server", "grpc_health.v1.health_pb2_grpc"


def main(version: str, first: str) -> None:
    assert __version__ == version
    for name in (OURS, THEIRS) if first == "ours" else (THEIRS, OURS):
        assert name not in sys.modules
        importlib.import_module(name)
    controller = importlib.import_module("dataplane.controller.controller")
    with (
        controller.Controller(DataPlaneConfig(grpc_port=0), epoch=1) as service,
        grpc.insecure_channel(service.grpc_address) as channel,
    ):
        assert_commands(channel)
        assert_serving(channel)


def assert_commands(channel: grpc.Channel) -> None:
    pb = importlib.import_module("dataplane.protocol.pb.control_pb2")
    control = importlib.import_module("dataplane.protocol.pb.control_pb2_grpc").ControlStub(channel)
    opening = pb.OpenSessionRequest(nonce="n", host="h", name="grpc", protocol_version=PROTOCOL_VERSION)
    session = control.OpenSession(opening, timeout=WAIT_S).opened.session
    header = pb.Header(session=session, call_id=1, watermark=1)
    register = pb.RegisterRequest(
        header=header,
        partition="p",
        fields={"x": pb.FieldSpec(kind="dense")},
        tasks=["t"],
    )
    control.Register(register, timeout=WAIT_S)
    header.call_id = 2
    described = control.Describe(pb.DescribeRequest(header=header, partition="p"), timeout=WAIT_S)
    assert (described.fields["x"].kind, list(described.tasks)) == ("dense", ["t"])


def assert_serving(channel: grpc.Channel) -> None:
    messages = importlib.import_module("grpc_health.v1.health_pb2")
    health: Any = importlib.import_module(THEIRS).HealthStub(channel)
    answer = health.Check(messages.HealthCheckRequest(service="tq.v1.Control"), timeout=WAIT_S)
    assert answer.status == messages.HealthCheckResponse.SERVING


if __name__ == "__main__":
    main(*sys.argv[1:])
