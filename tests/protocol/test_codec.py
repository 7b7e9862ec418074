"""Messages as bytes: commands and results, frames of ZeroMQ, statuses, and the generated protobuf code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import errors as e
from dataplane.client.rpc.handshake import zmq_address_of
from dataplane.controller.requests import parse
from dataplane.core.addresses import register_resolver, resolve
from dataplane.core.types import FieldKind, FieldSpec, Scalar
from dataplane.errors import AuthenticationError, InternalError, InvalidRequestError, PartitionNotFoundError
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames
from dataplane.protocol.grpc_status import DETAILS_KEY, from_status, to_status
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.proof import Secret, Ticket
from dataplane.protocol.unit_stream import order_from_pb, order_to_pb, report_from_pb, report_to_pb
from dataplane.protocol.zmq_frames import MAX_GROUP
from tests.profiles import budget
from tests.protocol.values import of_type, plain

# --- Every input, output and result survives the wire; what is malformed is refused by name.


FEW = budget(25)


def tag(name: str, *values: Scalar) -> c.TagColumn:
    return c.TagColumn(name=name, values=values)


def leaves(base: type[c.Value]) -> set[type[c.Value]]:
    below = base.__subclasses__()
    return set().union(*map(leaves, below)) if below else {base}


def test_the_tables_are_whole() -> None:
    assert {method.command for method in codec.METHODS.values()} == leaves(c.Command)
    assert {method.result for method in codec.METHODS.values()} == leaves(c.Result)
    assert {*codec.REPORTS, c.Call, c.Restarted} == leaves(c.Input)
    assert {*codec.OUTPUTS, c.Answer, c.Notice} == leaves(c.Output)


def test_every_method_of_the_service_is_a_command_or_report() -> None:
    service = pb.DESCRIPTOR.services_by_name["Control"]
    streams = {"KeepSession", "AttachUnit"}
    reports = {"OpenSession", "Heartbeat", "DropUnit"}
    assert {method.name for method in service.methods} == streams | reports | {"GetKeys"} | set(codec.METHODS)
    for name, method in codec.METHODS.items():
        rpc = service.methods_by_name[name]
        assert rpc.input_type.full_name == method.request.DESCRIPTOR.full_name
        assert rpc.output_type.name == method.result.__name__


@pytest.mark.parametrize("command", c.Answered.__subclasses__(), ids=lambda each: each.__name__)
def test_commands_round_trip(command: type[c.Command]) -> None:
    @FEW
    @given(of_type(command), *[st.integers(0, (1 << 63) - 1)] * 3)
    def check(value: c.Command, session: int, number: int, watermark: int) -> None:
        call = c.Call(session=session, number=number, watermark=watermark, command=value)
        method, body = codec.encode(call)
        assert method == command.__name__
        assert plain(codec.decode(method, body)) == plain(call)

    check()


@pytest.mark.parametrize("report", codec.REPORTS, ids=lambda each: each.__name__)
def test_reports_round_trip(report: type[c.Input]) -> None:
    @FEW
    @given(of_type(report))
    def check(value: c.Input) -> None:
        assert plain(codec.decode(*codec.encode(value))) == plain(value)

    check()


@pytest.mark.parametrize("method", codec.METHODS.values(), ids=lambda each: each.name)
def test_results_round_trip(method: codec.Method) -> None:
    @FEW
    @given(of_type(method.result))
    def check(value: c.Result) -> None:
        assert plain(codec.decode_result(method.name, codec.encode_result(value))) == plain(value)

    check()


@pytest.mark.parametrize("output", codec.OUTPUTS, ids=lambda each: each.__name__)
def test_outputs_round_trip(output: type[c.Output]) -> None:
    @FEW
    @given(of_type(output))
    def check(value: c.Output) -> None:
        assert plain(codec.from_pb(output, codec.to_pb(value))) == plain(value)

    check()


def test_what_travels_on_a_units_stream() -> None:
    report = c.SessionGone(unit=3, session=4)
    assert plain(report_from_pb(report_to_pb(report))) == plain(report)
    order = c.GrowArena(unit=3, backed_bytes=1 << 40)
    assert plain(order_from_pb(order_to_pb(order))) == plain(order)
    with pytest.raises(InvalidRequestError, match="cannot report Tick"):
        report_to_pb(c.Tick(now=1.0))
    with pytest.raises(InvalidRequestError, match="empty or unsupported report"):
        report_from_pb(pb.UnitReport())
    with pytest.raises(InvalidRequestError, match="empty or unsupported order"):
        order_from_pb(pb.UnitOrder())


def test_nan_and_negative_zero_keep_their_bits() -> None:
    tag = c.TagColumn(name="x", values=(float("nan"), -0.0, float("inf")))
    call = c.Call(session=1, number=1, watermark=1, command=c.SetTags(partition="p", samples=SOME, tags=(tag,)))
    back = codec.decode(*codec.encode(call))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.SetTags)
    values = back.command.tags[0].values
    assert np.array(values).tobytes() == np.array(tag.values).tobytes()


SOME = c.Samples(ids=("a",))


def test_arrays_need_not_be_contiguous_and_come_back_read_only() -> None:
    rows = np.arange(10, dtype=np.int64)[::-2]
    call = c.Call(
        session=1, number=1, watermark=1, command=c.Clear(partition="p", samples=c.Samples(rows=rows, generations=rows))
    )
    back = codec.decode(*codec.encode(call))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.Clear)
    assert back.command.samples is not None
    assert back.command.samples.rows is not None
    assert back.command.samples.rows.tolist() == rows.tolist()
    assert not back.command.samples.rows.flags.writeable


def test_absent_optional_fields_take_the_documented_defaults() -> None:
    claim = pb.ClaimRequest(partition="p", task="t", batch_size=2)
    call = codec.decode("Claim", claim.SerializeToString())
    assert isinstance(call, c.Call)
    assert plain(call.command) == plain(c.Claim(partition="p", task="t", fields=(), batch_size=2))
    allocate = codec.decode("Allocate", pb.AllocateRequest(partition="p").SerializeToString())
    assert isinstance(allocate, c.Call)
    assert plain(allocate.command) == plain(c.Allocate(partition="p", columns=()))
    commit = pb.CommitRequest(partition="p", samples=pb.Samples(ids=pb.TextList()))
    back = codec.decode("Commit", commit.SerializeToString())
    assert isinstance(back, c.Call)
    assert plain(back.command) == plain(c.Commit(partition="p", samples=c.Samples(ids=()), mode=c.Mode.UPSERT))


ODD = b"\0" * 7
IDS = pb.Samples(ids=pb.TextList(values=["a"]))

MALFORMED = {
    "unknown method": ("Frobnicate", b"", "unknown method 'Frobnicate'"),
    "not a message": ("Seal", b"\xff\xff", "not a Seal message"),
    "no samples": ("Commit", pb.CommitRequest(partition="p"), "Commit lacks the field samples"),
    "samples by nothing": ("Locate", pb.LocateRequest(samples=pb.Samples()), "neither ids nor handles"),
    "odd array": (
        "Locate",
        pb.LocateRequest(samples=pb.Samples(handles=pb.Handles(rows=ODD))),
        "8-byte values has 7 bytes",
    ),
    "uneven handles": (
        "Locate",
        pb.LocateRequest(samples=pb.Samples(handles=pb.Handles(rows=b"\0" * 8))),
        "1 rows but 0 generations",
    ),
    "unknown enum": ("Commit", pb.CommitRequest(samples=IDS, mode=9), "unknown Mode 9"),  # type: ignore[arg-type]
    "unknown kind": (
        "Register",
        pb.RegisterRequest(fields=[pb.NamedSpec(spec=pb.FieldSpec(kind=77))]),  # type: ignore[arg-type]
        "unknown field kind 77",
    ),
    "unknown dtype": (
        "Register",
        pb.RegisterRequest(fields=[pb.NamedSpec(spec=pb.FieldSpec(dtype="int3"))]),
        "unknown dtype 'int3'",
    ),
    "negative shape": (
        "Register",
        pb.RegisterRequest(fields=[pb.NamedSpec(spec=pb.FieldSpec(inner=pb.Shape(sizes=[-1])))]),
        "negative size",
    ),
    "tag without values": (
        "SetTags",
        pb.SetTagsRequest(samples=IDS, tags=[pb.TagColumn(name="x")]),
        "tag 'x' has no values",
    ),
    "tag at other positions": (
        "SetTags",
        pb.SetTagsRequest(samples=IDS, tags=[pb.TagColumn(name="x", positions=b"", booleans=b"\1")]),
        "1 values for 0 positions",
    ),
    "no operand": ("Claim", pb.ClaimRequest(where=[pb.Predicate(tag="x")]), "no value to compare"),
    "not a number": (
        "SetTags",
        pb.SetTagsRequest(samples=IDS, tags=[pb.TagColumn(mixed=pb.ScalarList(values=[pb.Scalar(big_integer="ten")]))]),
        "'ten'",
    ),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_requests_are_refused(case: tuple[str, bytes | pb.SealRequest, str]) -> None:
    method, body, why = case
    wire = body if isinstance(body, bytes) else body.SerializeToString()
    with pytest.raises(InvalidRequestError, match=why):
        codec.decode(method, wire)


@pytest.mark.parametrize(
    "command",
    [
        c.Claim(partition="p", task="t", fields=(), batch_size="three"),  # type: ignore[arg-type]
        c.Seal(partition="lone surrogate \ud800"),
        c.Release(located=1 << 80),
        c.SetTags(partition="p", samples=SOME, tags=(c.TagColumn(name="x", values=(b"bytes",)),)),  # type: ignore[arg-type]
        c.Commit(partition="p", samples=SOME, mode="replace"),  # type: ignore[arg-type]
    ],
    ids=lambda each: type(each).__name__,
)
def test_values_no_message_can_hold_are_refused_at_the_sender(command: c.Command) -> None:
    with pytest.raises(InvalidRequestError, match=type(command).__name__ + "|expected a str"):
        codec.encode(c.Call(session=1, number=1, watermark=1, command=command))


def test_specs_with_a_kind_by_name_are_the_same_on_the_wire() -> None:
    by_name = FieldSpec("jagged", "torch.int64", ())
    assert plain(codec.from_pb(c.Described, codec.to_pb(described(by_name)))) == plain(described(by_name))
    assert by_name.kind is FieldKind.JAGGED


def test_a_spec_is_read_once() -> None:
    wire = codec.to_pb(described(FieldSpec("dense", "float32", (3, 1)))).SerializeToString()
    first, second = (codec.decode_result("Describe", wire) for _ in range(2))
    assert isinstance(first, c.Described)
    assert isinstance(second, c.Described)
    assert first.fields["b"] is second.fields["b"]


def described(spec: FieldSpec) -> c.Described:
    return c.Described(
        partition="p",
        fields={"b": spec, "a": FieldSpec()},
        strict=False,
        tasks=(),
        num_samples=None,
        group_size=None,
        sealed=False,
        live=0,
    )


@pytest.mark.parametrize("body", [b"\xff", pb.Claimed(rows=b"\0").SerializeToString()], ids=["noise", "odd array"])
def test_an_answer_that_makes_no_sense_is_an_internal_error(body: bytes) -> None:
    with pytest.raises(InternalError, match="malformed reply to Claim"):
        codec.decode_result("Claim", body)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (c.Claim(partition="p", task="t", fields=(), batch_size=1.5), "Claim: batch_size=1.5: expected an integer"),  # type: ignore[arg-type]
        (c.Claim(partition="p", task="t", fields=(), batch_size="1"), "batch_size='1': .* integer, got str"),  # type: ignore[arg-type]
        (c.Claim(partition="p", task="t", fields=(), batch_size=1, step=True), "step=True: .* got bool"),
        (c.Claim(partition="p", task="t", fields=(), batch_size=1, max_lag=1.5), "max_lag=1.5"),  # type: ignore[arg-type]
        (c.Forget(unit="0"), "Forget: unit='0': expected an integer, got str"),  # type: ignore[arg-type]
        (c.SetVersion(partition="p", version=1 << 64), "version=18446744073709551616: expected a 64-bit integer"),
        (c.Locate(partition="p", samples=c.Samples(ids=("a", "\udc80")), fields=()), r"sample id: the string '\\udc"),
        (c.SetTags(partition="p", samples=c.Samples(ids=("a",)), tags=(tag("v", "\udc80"),)), "tag 'v': the string"),
        (c.SetTags(partition="p", samples=c.Samples(ids=("a",)), tags=(tag("v", "\udc80", 1),)), "tag 'v': the string"),
        (c.SetTags(partition="p", samples=c.Samples(ids=("a",)), tags=(tag("\udc80", 1),)), "tag name: the string"),
        (c.Register(partition="p", fields={"\udc80": FieldSpec()}, num_samples=None, tasks=()), "fields: the string"),
        (c.Seal(partition="\udc80"), "Seal: partition: the string .* Replace it"),
        (c.Seal(partition=3), "Seal: partition=3: expected a string, got int"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_no_message_can_hold_is_named(command: c.Command, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        codec.encode(c.Call(session=1, number=1, watermark=1, command=command))


# --- Frames of the ZMQ server, the token check, and addresses.


def test_a_request_is_method_and_message() -> None:
    method, body = zmq_frames.request(c.Heartbeat(session=3))
    assert method == b"Heartbeat"
    assert body


def test_a_long_request_comes_in_short_frames() -> None:
    seal = c.Seal(partition="p" * (600 << 10))
    method, *parts = zmq_frames.request(c.Call(session=3, number=1, watermark=1, command=seal))
    assert [len(part) for part in parts[:2]] == [zmq_frames.REQUEST_FRAME_BYTES] * 2
    back = parse(method.decode(), b"".join(parts))
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.Seal)
    assert back.command.partition == seal.partition


@pytest.mark.parametrize("method", [b'w\xc2"', b"Clear\n", b"x" * 81, b"a b"])
@pytest.mark.parametrize("group", [[], [zmq_frames.GROUP, b"Clear", b""]])
def test_other_bytes_are_no_method(group: list[bytes], method: bytes) -> None:
    frames = [*group, method, b""]
    with pytest.raises(InvalidRequestError, match="not a request of this protocol: it ") as caught:
        zmq_frames.split_requests(frames)
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 150


def test_a_method_of_a_group_is_not_empty() -> None:
    with pytest.raises(InvalidRequestError, match="it is empty"):
        zmq_frames.split_requests([zmq_frames.GROUP, b"", b"body"])


def test_answers_and_refusals_come_back() -> None:
    reply = zmq_frames.Reply.parse(zmq_frames.answer(7, b"body"))[0]
    assert (reply.number, reply.error, reply.good_body()) == (7, None, b"body")
    refusal = zmq_frames.Reply.parse(zmq_frames.refusal(8, PartitionNotFoundError(partition="p")))[0]
    assert refusal.number == 8
    with pytest.raises(PartitionNotFoundError, match="'p'"):
        refusal.good_body()


@pytest.mark.parametrize("frames", [[], [b"x" * 8, b"ok"], [b"short", b"ok", b""]])
def test_other_frames_are_no_reply(frames: list[bytes]) -> None:
    with pytest.raises(InternalError, match="malformed reply of"):
        zmq_frames.Reply.parse(frames)


def test_the_token_is_checked_only_where_there_is_one() -> None:
    Secret(None).check(b"whatever", peer="x")
    Secret("s").check(b"s", peer="x")
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        Secret("s").check(b"t", peer="x")
    with pytest.raises(AuthenticationError, match="no token was given"):
        Secret("s").check(b"", peer="x")
    ticket = Ticket.of("s", "instance")
    assert ticket is not None
    Secret("s", ticket).check(ticket.code.encode(), peer="x")
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        Secret("s", Ticket.of("s", "another instance")).check(ticket.code.encode(), peer="x")


def test_addresses_resolve() -> None:
    register_resolver("somewhere", lambda rest: f"{rest}:80")
    assert resolve("somewhere:there") == "there:80"
    assert resolve("localhost:1") == "localhost:1"
    assert resolve("[::1]:1") == "[::1]:1"
    assert zmq_address_of("[::1]:1") == "[::1]:2"
    for bad in ("localhost", "host:port", ":80", "host:0", "host:99999", "host:²"):
        with pytest.raises(ValueError, match="is not host:port"):
            resolve(bad)


def test_an_actors_address_needs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.addresses._resolvers", {})
    with pytest.raises(ValueError, match="run `import workers` first"):
        resolve("actor:tq")


@given(
    st.lists(
        st.tuples(st.sampled_from(["Units", "Seal"]), st.binary(max_size=9), st.booleans()), max_size=3 * MAX_GROUP + 2
    )
)
def test_requests_keep_their_order_in_shared_messages(sent: list[tuple[str, bytes, bool]]) -> None:
    frames = [[method.encode(), body, *([b"rest"] if long else [])] for method, body, long in sent]
    messages = list(zmq_frames.messages(frames))
    split = [zmq_frames.split_requests(message) for message in messages]
    assert [each for message in split for each in message] == [
        (method, body + b"rest" * long) for method, body, long in sent
    ]
    assert all(len(message) <= MAX_GROUP for message in split)
    # Every message but the last is full, or one of its neighbours has several body frames.
    for first, second in itertools.pairwise(messages):
        assert len(first) in (3, 1 + 2 * MAX_GROUP) or len(second) == 3


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "2 or more frames"),
        ([b"Units"], "2 or more frames"),
        ([b"", b"Units"], "2 frames for each"),
        ([b"", *[b"Units", b""] * (MAX_GROUP + 1)], "up to 32 requests, got 66"),
    ],
)
def test_other_frames_are_no_requests(frames: list[bytes], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        zmq_frames.split_requests(frames)


def test_a_message_of_several_replies() -> None:
    error = PartitionNotFoundError(partition="p")
    replies = zmq_frames.Reply.parse([*zmq_frames.answer(7, b"body"), *zmq_frames.refusal(8, error)])
    assert [(reply.number, reply.outcome) for reply in replies] == [(7, "ok"), (8, "PartitionNotFoundError")]
    assert str(replies[1].error) == str(error)


# --- Errors to gRPC statuses and back.


class Ended(grpc.RpcError, grpc.Call):
    """What a failed gRPC call raises."""

    def __init__(self, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self._of_call = (code, text, metadata)

    def code(self) -> grpc.StatusCode:
        return self._of_call[0]

    def details(self) -> str:
        return self._of_call[1]

    def trailing_metadata(self) -> Any:
        return self._of_call[2]

    def initial_metadata(self) -> Any:
        return ()

    def add_callback(self, callback: Any) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0


def back(error: grpc.RpcError) -> e.DataPlaneError:
    return from_status(error, address="here:1", what="Claim", waited_s=1.5)


def test_every_error_has_a_status() -> None:
    statuses = {grpc.StatusCode[kind.grpc_status] for kind in e.ERROR_TYPES.values()}
    assert grpc.StatusCode.OK not in statuses
    assert grpc.StatusCode.UNKNOWN not in statuses


def test_an_error_comes_back_with_its_facts() -> None:
    error = e.SchemaError(partition="p", field="f", got="int64", expected="float32")
    code, text, metadata = to_status(error)
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, str(error))
    again = back(Ended(code, text, metadata))
    assert type(again) is e.SchemaError
    assert again.facts == error.facts


def test_an_error_too_large_for_a_trailer_keeps_its_status_and_the_start_of_its_text() -> None:
    code, text, metadata = to_status(e.InvalidRequestError("x" * 100_000))
    assert metadata == ()
    assert len(text) == 1024
    again = back(Ended(code, text))
    assert isinstance(again, e.InvalidRequestError)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, e.ServiceUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, e.CallTimeoutError),
        (grpc.StatusCode.UNAUTHENTICATED, e.AuthenticationError),
        (grpc.StatusCode.INVALID_ARGUMENT, e.InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, e.ServiceUnavailableError),
        (grpc.StatusCode.DATA_LOSS, e.InternalError),
    ],
    ids=lambda each: getattr(each, "name", getattr(each, "__name__", "")),
)
def test_statuses_that_grpc_made_itself_become_the_nearest_of_ours(
    code: grpc.StatusCode, error: type[e.DataPlaneError]
) -> None:
    assert type(back(Ended(code, "why"))) is error
    assert type(back(Ended(code, "why", ((DETAILS_KEY, b"\xff\xff"),)))) is error


# --- Generated code is what `make proto` makes of proto/. Where the generator is installed that is
# tried; elsewhere the sums that `make proto` wrote tell whether a source or its outcome was
# changed by itself.


ROOT = Path(__file__).parents[2]
SUMS = ROOT / "proto" / "SHA256SUMS"
SOURCES = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))
GENERATED = sorted(path.name for path in (ROOT / "dataplane" / "protocol" / "pb").glob("*_pb2*.py*"))


def generator() -> str | None:
    own = ROOT / ".venv-proto" / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec("grpc_tools") else None


def test_sources_and_outcome_belong_together() -> None:
    lines = [line.split(maxsplit=1) for line in SUMS.read_text(encoding="ascii").splitlines()]
    listed = {name: digest for digest, name in lines}
    found = [f"proto/{name}" for name in SOURCES] + [f"dataplane/protocol/pb/{name}" for name in GENERATED]
    assert sorted(listed) == sorted(found), "run `make proto`"
    changed = [name for name in found if hashlib.sha256((ROOT / name).read_bytes()).hexdigest() != listed[name]]
    assert not changed, "run `make proto`"


@pytest.mark.integration
@pytest.mark.skipif(generator() is None, reason="no generator here (.venv-proto, grpc_tools); the sums were compared")
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    python = generator()
    assert python is not None
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    names = [f"dataplane/protocol/pb/{name}" for name in SOURCES]
    command = [python, "-m", "grpc_tools.protoc", f"-Idataplane/protocol/pb={ROOT / 'proto'}", *outs, *names]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    made = tmp_path / "dataplane" / "protocol" / "pb"
    assert sorted(path.name for path in made.iterdir()) == GENERATED
    for name in GENERATED:
        assert (made / name).read_bytes() == (ROOT / "dataplane" / "protocol" / "pb" / name).read_bytes(), (
            f"{name}: run `make proto`"
        )


@pytest.mark.parametrize("name", SOURCES)
def test_every_message_field_and_method_has_a_comment(name: str) -> None:
    lines = (ROOT / "proto" / name).read_text(encoding="utf-8").splitlines()
    bare = []
    for before, line in itertools.pairwise(lines):
        text = line.strip()
        declares = text.endswith(("{", "{}", ";")) and not text.startswith(("//", "syntax", "package", "reserved"))
        if declares and not before.strip().startswith("//"):
            bare.append(text)
    assert not bare


# --- The service runs beside each protobuf that pyproject.toml allows, and beside gRPC's own health
# stubs, whichever of both is imported first.


CACHE = ROOT / ".venv-protobuf"
OTHERS = {"5.29.1": "1.71.2", "6.33.0": "1.76.0", "7.35.1": "1.85.1"}
"""Versions of protobuf, and of a grpcio-health-checking that takes it: it takes one major version."""
TIMEOUT_S = 300.0
ORDERS = pytest.mark.parametrize("first", ["ours", "theirs"])


@pytest.mark.integration
@ORDERS
def test_a_service_beside_grpcs_own_stubs(first: str) -> None:
    runs(importlib.metadata.version("protobuf"), first, ROOT)


@pytest.mark.integration
@pytest.mark.slow
@ORDERS
@pytest.mark.parametrize("version", OTHERS)
def test_a_service_beside_another_protobuf(version: str, first: str) -> None:
    runs(version, first, installed(version), ROOT)


def runs(version: str, first: str, *path: Path) -> None:
    """The program ends well where these folders come before what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-m", "tests.beside_protobuf", version, first]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def installed(version: str) -> Path:
    """A folder with that protobuf, and with what takes it; kept for the next time."""
    folder = CACHE / version
    if folder.exists():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        packages = [f"protobuf=={version}", f"grpcio-health-checking=={OTHERS[version]}"]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{made}/all", *packages]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"protobuf {version} cannot be installed here: {done.stderr[-500:]}")
        try:
            Path(made, "all").rename(folder)
        except OSError:  # another test process was faster
            assert folder.exists()
    return folder
