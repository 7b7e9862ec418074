"""Ledger values to protocol messages and back, whole: an input written down is (method name, bytes).

Values and messages have the same fields under the same names, so the conversion is worked out once per type, from the
value's annotations and the message's descriptor; `parts` has the few kinds that look different on the wire. A field
that the two do not share is an AssertionError at import. Requests of commands carry a `Header` too.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from dataplane.control import parts
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.pb import control_pb2 as pb
from dataplane.types import FieldSpec

Convert = Callable[[Any], Any]

RESULTS: dict[type[c.Command], type[c.Result]] = {
    c.Bye: c.Done,
    c.Units: c.UnitList,
    c.Register: c.Done,
    c.Seal: c.Done,
    c.Describe: c.Described,
    c.Allocate: c.Allocated,
    c.Abort: c.Done,
    c.Commit: c.Committed,
    c.Locate: c.Located,
    c.Release: c.Done,
    c.Claim: c.Claimed,
    c.Unclaim: c.Done,
    c.Ack: c.Done,
    c.Nack: c.Done,
    c.Extend: c.Done,
    c.CheckConsumption: c.Consumption,
    c.Clear: c.Cleared,
    c.SetTags: c.Done,
    c.List: c.Listed,
    c.Stats: c.StatsReport,
    c.WhyBlocked: c.Blocked,
}
"""What answers each command."""

REPORTS: tuple[type[c.Input], ...] = (
    c.OpenSession,
    c.Heartbeat,
    c.SessionSilent,
    c.AddUnit,
    c.UnitLost,
    c.DropUnit,
    c.SessionAttached,
    c.SessionGone,
    c.SessionAlive,
    c.Grown,
    c.Tick,
)
"""The unnumbered inputs; every `Input` but `Call`."""

OUTPUTS: tuple[type[c.Output], ...] = (c.Opened, c.UnitAdded, c.UnitDropped, c.FenceSession, c.GrowArena)
"""Outputs with a message; an `Answer` travels as its result, and errors as errors."""

_BY_HAND: dict[Any, tuple[Convert, Convert]] = {
    c.Int64s: (parts.int64s_to_pb, parts.int64s_from_pb),
    c.Int32s: (parts.int32s_to_pb, parts.int32s_from_pb),
    FieldSpec: (parts.spec_to_pb, parts.spec_from_pb),
    c.Samples: (parts.samples_to_pb, parts.samples_from_pb),
    c.TagColumn: (parts.tag_to_pb, parts.tag_from_pb),
    c.Predicate: (parts.predicate_to_pb, parts.predicate_from_pb),
}
_ENTRY_OF_DICT: dict[Any, tuple[Any, str]] = {
    FieldSpec: (pb.NamedSpec, "spec"),
    int: (pb.NamedCount, "count"),
}


def _same(value: Any) -> Any:
    return value


class _Field:
    """How one field converts. `default` stands for an absent optional field (NODEFAULT: it must be there)."""

    def __init__(self, field: msgspec.structs.FieldInfo, hint: Any, message: type[Message]) -> None:
        self.name = field.name
        on_wire = message.DESCRIPTOR.fields_by_name.get(field.name)
        assert on_wire is not None, f"{message.DESCRIPTOR.full_name} has no field {field.name}"
        optional = type(None) in typing.get_args(hint)
        if optional:
            (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        self.to_pb, self.from_pb = _converters(hint, on_wire.enum_type is not None)
        self.presence = bool(on_wire.has_presence)
        assert self.presence or not optional, f"{message.DESCRIPTOR.full_name}.{field.name} must be optional"
        self.default = None if optional and field.default is msgspec.NODEFAULT else field.default


def _converters(hint: Any, is_enum: bool) -> tuple[Convert, Convert]:
    if hint in _BY_HAND:
        return _BY_HAND[hint]
    if is_enum:
        return _enum_converters(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        to_pb, from_pb = _converters(args[0], False)
        if to_pb is _same:
            return list, tuple
        return (lambda values: [to_pb(v) for v in values]), (lambda wire: tuple([from_pb(w) for w in wire]))
    if origin is dict and typing.get_origin(args[1]) is tuple:
        return _enums_to_pb, _enums_from_pb
    if origin is dict:
        return _dict_converters(args[1])
    if isinstance(hint, type) and issubclass(hint, c.Value):
        plan = _plan(hint)
        return plan.to_pb, plan.from_pb
    assert hint in (str, int, float, bool), hint
    return _same, _same


def _enum_converters(members: type[enum.StrEnum]) -> tuple[Convert, Convert]:
    """Numbers on the wire count from 1 in order of definition; 0 (unspecified) is the first member."""
    by_number = [next(iter(members)), *members]
    numbers = {member: number for number, member in enumerate(members, 1)}

    def from_pb(number: int) -> Any:
        if not 0 <= number < len(by_number):
            raise InvalidRequestError(f"unknown {members.__name__} {number}; is the client newer than the service?")
        return by_number[number]

    return (lambda member: numbers[members(member)]), from_pb


def _dict_converters(value_type: Any) -> tuple[Convert, Convert]:
    entry, key = _ENTRY_OF_DICT[value_type]
    to_pb, from_pb = _converters(value_type, False)
    return (
        lambda values: [entry(**{"name": name, key: to_pb(value)}) for name, value in values.items()],
        lambda wire: {item.name: from_pb(getattr(item, key)) for item in wire},
    )


def _enums_to_pb(enums: dict[str, tuple[str, ...]]) -> pb.Enums:
    return pb.Enums(entries=[pb.NamedTexts(name=name, values=values) for name, values in enums.items()])


def _enums_from_pb(wire: pb.Enums) -> dict[str, tuple[str, ...]]:
    return {entry.name: tuple(entry.values) for entry in wire.entries}


class _Plan:
    """How one type of value converts."""

    def __init__(self, value_type: type[c.Value]) -> None:
        self.value_type = value_type
        self.message = message_type(value_type)
        hints = typing.get_type_hints(value_type)
        infos = [info for info in msgspec.structs.fields(value_type) if info.name != "error" or _carries_error(info)]
        self.fields = [_Field(info, hints[info.name], self.message) for info in infos]
        self._to = [(field.name, None if field.to_pb is _same else field.to_pb) for field in self.fields]
        self._from = [(f.name, f.from_pb, f.presence, f.default) for f in self.fields]

    def keywords(self, value: Any) -> dict[str, Any]:
        """The message's fields; None is left out."""
        found = {}
        for name, convert in self._to:
            part = getattr(value, name)
            if part is not None:
                found[name] = part if convert is None else convert(part)
        return found

    def to_pb(self, value: Any) -> Message:
        return self.message(**self.keywords(value))

    def from_pb(self, wire: Any) -> Any:
        found = {}
        for name, convert, presence, default in self._from:
            if presence and not wire.HasField(name):
                if default is msgspec.NODEFAULT:
                    raise InvalidRequestError(f"{self.value_type.__name__} without {name}")
                found[name] = default
            else:
                found[name] = convert(getattr(wire, name))
        return self.value_type(**found)


def _carries_error(info: msgspec.structs.FieldInfo) -> bool:
    """`Grown.error` is text and part of the message; the outputs' `error` travels as an error."""
    return DataPlaneError.__name__ not in str(info.type)


_plans: dict[type[c.Value], _Plan] = {}


def _plan(value_type: type[c.Value]) -> _Plan:
    if value_type not in _plans:
        _plans[value_type] = _Plan(value_type)
    return _plans[value_type]


def message_type(value_type: type[c.Value]) -> type[Message]:
    """The protocol's message for a type of value: its name, with `Request` added for what is called by name."""
    name = value_type.__name__
    found: type[Message] = getattr(pb, f"{name}Request", None) or getattr(pb, name)
    return found


@dataclass(frozen=True, kw_only=True)
class Method:
    """One command: its name on both doors, the type of its request, and the type of its result."""

    name: str
    command: type[c.Command]
    request: type[Message]
    result: type[c.Result]


METHODS: dict[str, Method] = {
    command.__name__: Method(name=command.__name__, command=command, request=message_type(command), result=result)
    for command, result in RESULTS.items()
}
"""Every command by name."""

_REPORTS = {report.__name__: report for report in REPORTS}

for _value_type in (*RESULTS, *RESULTS.values(), *REPORTS, *OUTPUTS):
    _plan(_value_type)


def to_pb(value: c.Value) -> Message:
    """The message of a result, report or output. Raises `InvalidRequestError` for values that no message can hold."""
    try:
        return _plans[type(value)].to_pb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unfit(value, error) from error


def from_pb(value_type: type[c.Value], wire: Message) -> Any:
    """The value of a message. Raises `InvalidRequestError` for what is malformed."""
    return _plans[value_type].from_pb(wire)


def call_to_pb(call: c.Call) -> Message:
    """The request of a command in its place. Raises `InvalidRequestError` for values that no message can hold."""
    plan = _plans[type(call.command)]
    header = pb.Header(session=call.session, number=call.number, watermark=call.watermark, waiting=call.waiting)
    try:
        return plan.message(header=header, **plan.keywords(call.command))
    except (TypeError, ValueError, OverflowError) as error:
        raise _unfit(call.command, error) from error


def call_from_pb(method: Method, wire: Any) -> c.Call:
    """The call of a request. Raises `InvalidRequestError` for what is malformed."""
    header = wire.header
    return c.Call(
        session=header.session,
        number=header.number,
        watermark=header.watermark,
        waiting=tuple(header.waiting),
        command=_plans[method.command].from_pb(wire),
    )


def encode(item: c.Input) -> tuple[str, bytes]:
    """An input written down: its method (a command's name, or the report's) and the bytes of its message."""
    if isinstance(item, c.Call):
        return type(item.command).__name__, call_to_pb(item).SerializeToString()
    return type(item).__name__, to_pb(item).SerializeToString()


def decode(method: str, body: bytes) -> c.Input:
    """What `encode` wrote. Raises `InvalidRequestError` for an unknown method and for what is malformed."""
    known = METHODS.get(method)
    try:
        if known is not None:
            return call_from_pb(known, known.request.FromString(body))
        report = _REPORTS.get(method)
        if report is None:
            raise InvalidRequestError(f"unknown method {method[:80]!r}; is the client newer than the service?")
        value: c.Input = from_pb(report, _plans[report].message.FromString(body))
    except DecodeError as error:
        raise InvalidRequestError(f"{method}: the request is not a {method} message ({error})") from error
    return value


def encode_result(result: c.Result) -> bytes:
    """The bytes of a result's message."""
    return to_pb(result).SerializeToString()


def decode_result(method: str, body: bytes) -> c.Result:
    """The result of command `method` that `encode_result` wrote."""
    plan = _plans[METHODS[method].result]
    value: c.Result = plan.from_pb(plan.message.FromString(body))
    return value


def _unfit(value: c.Value, error: Exception) -> InvalidRequestError:
    if isinstance(error, InvalidRequestError):
        return error
    return InvalidRequestError(f"{type(value).__name__}: {error}")
