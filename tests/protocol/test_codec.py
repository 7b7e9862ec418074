"""Every input, output and result survives the wire; what is malformed is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import FieldKind, FieldSpec, Scalar
from dataplane.errors import InternalError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.pb import control_pb2 as pb
from dataplane.protocol.unit_stream import order_from_pb, order_to_pb, report_from_pb, report_to_pb
from tests.profiles import budget
from tests.protocol.values import of_type, plain

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
