"""Messages as bytes: commands and results, frames of ZeroMQ, statuses, and the generated protobuf code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import errors as e
from dataplane.core.addresses import register_resolver, resolve
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.errors import AuthenticationError, InternalError, InvalidRequestError, PartitionNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import codec, zmq_frames
from dataplane.protocol.auth import check_token
from dataplane.protocol.grpc_status import DETAILS_KEY, to_status
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.zmq_frames import MAX_JOINED
from tests.profiles import budget
from tests.protocol.values import from_message, grpc_request, of_type, plain

# --- Every input, output and result survives the wire; what is malformed is refused by name.


FEW = budget(25)


def leaves(base: type[c.Value]) -> set[type[c.Value]]:
    below = base.__subclasses__()
    return set().union(*map(leaves, below)) if below else {base}


COMMANDS = sorted(leaves(c.Command) - set(c.SHORT), key=lambda each: each.__name__)
RESULTS = sorted(leaves(c.Result) - {c.RowsLocated}, key=lambda each: each.__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["Control"]
REQUESTS = (c.OpenSession, c.Heartbeat, c.DropUnit)
"""The inputs that have a method, but are no commands."""
REPLIES = (c.Opened, c.UnitDropped, zmq_frames.Welcome, zmq_frames.HeartbeatReply)
by_name = functools.partial(plain, by_name=True)


def test_every_method_of_the_service_is_a_command_or_report() -> None:
    names = {each.__name__ for each in (*COMMANDS, *REQUESTS)}
    assert {method.name for method in SERVICE.methods} == names
    results = set()
    for command in COMMANDS:
        rpc = SERVICE.methods_by_name[command.__name__]
        assert issubclass(command, c.Answered)
        assert rpc.input_type.name == f"{command.__name__}Request"
        assert rpc.output_type.name == command.answer().__name__
        results.add(command.answer())
    assert results == set(RESULTS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.__name__)
def test_commands_round_trip(command: type[c.Command]) -> None:
    @FEW
    @given(of_type(command), *[st.integers(0, (1 << 63) - 1)] * 3)
    def check(value: c.Command, session: int, call_id: int, watermark: int) -> None:
        call = c.Call(session=session, call_id=call_id, watermark=watermark, command=value)
        assert by_name(codec.from_pb(grpc_request(call))) == by_name(call)

    check()


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda each: each.__name__)
def test_other_requests_round_trip(request_type: type[c.Input]) -> None:
    @FEW
    @given(of_type(request_type))
    def check(value: c.Input) -> None:
        assert plain(codec.from_pb(grpc_request(value))) == plain(value)

    check()


@pytest.mark.parametrize("kind", [*RESULTS, *REPLIES], ids=lambda each: each.__name__)
def test_results_round_trip(kind: type[c.Value]) -> None:
    @FEW
    @given(of_type(kind))
    def check(value: c.Value) -> None:
        assert by_name(from_message(kind, codec.to_pb(value))) == by_name(value)

    check()


IDS = pb.Samples(ids=pb.StringList(values=["a"]))
FLAG = pb.Scalar(bool_value=True)


def command_of(wire: Any) -> c.Command:
    call = codec.from_pb(wire)
    assert isinstance(call, c.Call)
    return call.command


def test_absent_optional_fields_take_the_documented_defaults() -> None:
    claim = command_of(pb.ClaimRequest(partition="p", task="t", batch_size=2))
    assert plain(claim) == plain(c.Claim(partition="p", task="t", fields=(), batch_size=2))
    allocate = command_of(pb.AllocateRequest(partition="p"))
    assert plain(allocate) == plain(c.Allocate(partition="p", columns=()))
    commit = command_of(pb.CommitRequest(samples=pb.Samples(ids=pb.StringList()), mode="upsert"))
    expected = c.Commit(partition="", samples=c.Samples(ids=()), mode=c.Mode.UPSERT)
    assert plain(commit) == plain(expected)


def test_a_value_without_a_kind_is_none() -> None:
    tags = [pb.TagColumn(name="x", values=[pb.Scalar()])]
    command = command_of(pb.SetTagsRequest(samples=IDS, tags=tags))
    assert isinstance(command, c.SetTags)
    assert command.tags[0].values == (None,)


def register(**spec: Any) -> pb.RegisterRequest:
    return pb.RegisterRequest(fields={"f": pb.FieldSpec(**spec)})


MALFORMED = {
    "no samples": (
        pb.CommitRequest(partition="p", mode="upsert"),
        "Commit: samples=None: expected `object`, got `None`",
    ),
    "samples by nothing": (
        pb.LocateRequest(samples=pb.Samples()),
        "Locate: samples={}: name samples by ids, or by rows",
    ),
    "odd array": (
        pb.LocateRequest(samples=pb.Samples(rows=b"\0" * 7)),
        r"Locate: samples.rows=b.*: buffer size must be a multiple of element size",
    ),
    "uneven handles": (
        pb.LocateRequest(samples=pb.Samples(rows=b"\0" * 8)),
        "Locate: samples=.*rows and generations of equal length",
    ),
    "unknown enum": (
        pb.CommitRequest(samples=IDS, mode="swap"),
        "Commit: mode='swap': invalid enum value 'swap'",
    ),
    "unknown kind": (
        register(kind="flat"),
        "Register: fields={'f': {'kind': 'flat'}}: invalid enum value 'flat'",
    ),
    "unknown dtype": (register(dtype="int3"), "Register: fields=.*: unknown dtype 'int3'"),
    "negative shape": (
        register(inner=pb.Int64List(values=[-1])),
        "Register: fields=.* has a negative size",
    ),
    "tag at other positions": (
        pb.SetTagsRequest(samples=IDS, tags=[pb.TagColumn(name="x", values=[FLAG], positions=b"")]),
        r"SetTags: tags\[0\]={.*}: tag 'x' has 1 values for 0 positions",
    ),
    "no operand": (
        pb.ClaimRequest(where=[pb.Predicate(tag="x")]),
        r"Claim: where\[0\]={.*}: .* field `value`",
    ),
    "negative session": (
        pb.SealRequest(header=pb.Header(session=-1)),
        "Call: session=-1: expected `int` >= 0",
    ),
    "negative confirmation": (
        pb.SealRequest(header=pb.Header(confirmed=[1, -2])),
        r"Call: confirmed\[1\]=-2: expected `int` >= 0",
    ),
}


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_requests_are_refused(case: tuple[Any, str]) -> None:
    wire, why = case
    with pytest.raises(InvalidRequestError, match=why):
        codec.from_pb(wire)


def test_specs_with_a_kind_by_name_are_the_same_on_the_wire() -> None:
    by_text = FieldSpec("jagged", "torch.int64", ())
    wire = codec.to_pb(c.SavedField(name="f", declared=by_text))
    expected = c.SavedField(name="f", declared=by_text)
    assert plain(from_message(c.SavedField, wire)) == plain(expected)
    assert by_text.kind is FieldKind.JAGGED


# --- Frames of the ZMQ server, the token check, and addresses.


def test_a_request_is_one_frame() -> None:
    (frame,) = zmq_frames.request(c.Heartbeat(session=3))
    assert frame == messages.encode(c.Heartbeat(session=3))


def test_a_long_request_comes_in_short_frames() -> None:
    seal = c.Seal(partition="p" * (600 << 10))
    frames = zmq_frames.request(c.Call(session=3, call_id=1, watermark=1, command=seal))
    assert [len(frame) for frame in frames[:2]] == [zmq_frames.REQUEST_FRAME_BYTES] * 2
    (joined,) = zmq_frames.split_requests(frames)
    back = messages.decode_request(joined)
    assert isinstance(back, c.Call)
    assert isinstance(back.command, c.Seal)
    assert back.command.partition == seal.partition


def test_answers_and_refusals_come_back() -> None:
    (reply,) = zmq_frames.Reply.parse([zmq_frames.answer(7, c.Cleared(count=3))])
    body = messages.encode(c.Cleared(count=3))
    assert (reply.call_id, reply.error, bytes(reply.good_body())) == (7, None, body)
    (refusal,) = zmq_frames.Reply.parse([zmq_frames.refusal(8, PartitionNotFoundError(partition="p"))])
    assert refusal.call_id == 8
    with pytest.raises(PartitionNotFoundError, match="'p'"):
        refusal.good_body()


@pytest.mark.parametrize("frame", [b"", b"ok", b"\x93\x01\x02\x03", b"\x92\x01\xa2ok"])
def test_other_frames_are_no_reply(frame: bytes) -> None:
    with pytest.raises(InternalError, match="malformed reply on"):
        zmq_frames.Reply.parse([frame])


def test_the_token_is_checked_only_where_there_is_one() -> None:
    check_token(None, b"whatever", peer="x")
    check_token("s", b"s", peer="x")
    with pytest.raises(AuthenticationError, match="the token is wrong"):
        check_token("s", b"t", peer="x")
    with pytest.raises(AuthenticationError, match="no token was given"):
        check_token("s", b"", peer="x")


def test_addresses_resolve() -> None:
    register_resolver("somewhere", lambda rest: f"{rest}:80")
    assert resolve("somewhere:there") == "there:80"
    assert resolve("localhost:1") == "localhost:1"
    assert resolve("[::1]:1") == "[::1]:1"
    for bad in ("localhost", "host:port", ":80", "host:0", "host:99999", "host:²"):
        with pytest.raises(ValueError, match="is not host:port"):
            resolve(bad)


def test_an_actors_address_needs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.addresses._resolvers", {})
    with pytest.raises(ValueError, match="run `import workers` first"):
        resolve("actor:tq")


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.booleans()), max_size=3 * MAX_JOINED + 2))
def test_requests_keep_their_order_in_shared_messages(sent: list[tuple[bytes, bool]]) -> None:
    frames = [[body, *([b"rest"] if long else [])] for body, long in sent]
    grouped = list(zmq_frames.joined(frames))
    split = [zmq_frames.split_requests(message) for message in grouped]
    assert [each for message in split for each in message] == [body + b"rest" * long for body, long in sent]
    assert all(len(message) <= MAX_JOINED for message in split)
    # Every message but the last is full, or one of its neighbours has several frames of one request.
    for first, second in itertools.pairwise(grouped):
        assert len(first) in (2, 1 + MAX_JOINED) or len(second) == 2


def test_a_message_has_a_limited_number_of_requests() -> None:
    with pytest.raises(InvalidRequestError, match="at most 32 requests, got 33"):
        zmq_frames.split_requests([zmq_frames.JOINED, *[b"x"] * (MAX_JOINED + 1)])


def test_a_message_of_several_replies() -> None:
    error = PartitionNotFoundError(partition="p")
    replies = zmq_frames.Reply.parse([zmq_frames.answer(7, c.Done()), zmq_frames.refusal(8, error)])
    assert [(reply.call_id, reply.outcome) for reply in replies] == [(7, "ok"), (8, "PartitionNotFoundError")]
    assert str(replies[1].error) == str(error)


# --- Errors as gRPC statuses.


def test_every_error_has_a_status() -> None:
    statuses = {grpc.StatusCode[kind.grpc_status] for kind in e.ERROR_TYPES.values()}
    assert grpc.StatusCode.OK not in statuses
    assert grpc.StatusCode.UNKNOWN not in statuses


def test_an_error_comes_back_with_its_facts() -> None:
    error = e.SchemaError(partition="p", field="f", got="int64", expected="float32")
    code, text, ((key, details),) = to_status(error)
    assert (code, text, key) == (grpc.StatusCode.INVALID_ARGUMENT, str(error), DETAILS_KEY)
    told = pb.Error.FromString(details)
    again = e.from_wire(told.name, told.facts)
    assert type(again) is e.SchemaError
    assert again.facts == error.facts


def test_an_error_too_large_for_a_trailer_keeps_its_status_and_the_start_of_its_text() -> None:
    code, text, metadata = to_status(e.InvalidRequestError("x" * 100_000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata == ()
    assert len(text) == 1024


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


def test_the_messages_are_those_of_the_structs() -> None:
    source = (ROOT / "proto" / "control.proto").read_text(encoding="utf-8")
    generated = runpy.run_path(str(ROOT / "proto" / "generate.py"))["generated"]
    assert generated(source) == source, "run `make proto`"


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
