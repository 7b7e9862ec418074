"""Conversion plans between a type of ledger value and its protocol message. A plan is built once per type, from the
value's annotations and the message's descriptor.

Values and messages have the same fields under the same names; `field_types` converts the few kinds with another wire
format. A value's field that the message lacks raises AssertionError.
"""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf.message import Message

from dataplane.core.types import FieldSpec, Scalar
from dataplane.errors import DataPlaneError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import field_types
from dataplane.protocol.field_types import Keywords
from dataplane.protocol.pb import control_pb2 as pb

Convert = Callable[[Any], Any]

# The pairs (to_pb, from_pb) of the types that `field_types` converts.
_BY_HAND: dict[Any, tuple[Convert, Convert]] = {
    c.Int64s: (field_types.int64s_to_pb, field_types.int64s_from_pb),
    c.Int32s: (field_types.int32s_to_pb, field_types.int32s_from_pb),
    c.UInt32s: (field_types.uint32s_to_pb, field_types.uint32s_from_pb),
    FieldSpec: (field_types.spec_to_pb, field_types.spec_from_pb),
    c.Samples: (field_types.samples_to_pb, field_types.samples_from_pb),
    c.TagColumn: (field_types.tag_to_pb, field_types.tag_from_pb),
    c.Predicate: (field_types.predicate_to_pb, field_types.predicate_from_pb),
    Scalar: (field_types.scalar_to_pb, field_types.scalar_from_pb),
}
_VALUE_OF_ENTRY: dict[Any, str] = {FieldSpec: "spec", int: "count", c.Int64s: "values", Scalar: "value"}
"""The name of the value's field in entries of a dict (`NamedSpec`, `NamedCount`, `NamedIntegers`, `NamedScalar`)."""


def _same(value: Any) -> Any:
    return value


class _Field:
    """The conversion of one field. `presence`: the message tells whether the field is set. `default` replaces a field
    that is not set (NODEFAULT: the field is required)."""

    def __init__(self, field: msgspec.structs.FieldInfo, hint: Any, message: type[Message]) -> None:
        self.name = field.name
        on_wire = message.DESCRIPTOR.fields_by_name.get(field.name)
        assert on_wire is not None, f"{message.DESCRIPTOR.full_name} has no field {field.name}"
        optional = type(None) in typing.get_args(hint)
        if optional:  # the hint is "X | None"; convert X
            (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        self.to_pb, self.from_pb = _converters(hint, is_enum=on_wire.enum_type is not None)
        self.presence = bool(on_wire.has_presence)
        assert self.presence or not optional, f"{message.DESCRIPTOR.full_name}.{field.name} must be optional"
        # An optional field without a default becomes None if it is not set.
        self.default = None if optional and field.default is msgspec.NODEFAULT else field.default


def _converters(hint: Any, is_enum: bool) -> tuple[Convert, Convert]:
    """Return the pair of converters (to_pb, from_pb) for a field with this type hint. is_enum: the message has an enum
    there."""
    if hint in _BY_HAND:
        return _BY_HAND[hint]
    if is_enum:
        return _enum_converters(hint)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is tuple:  # of elements of one type
        to_pb, from_pb = _converters(args[0], is_enum=False)
        if to_pb is _same:  # the elements need no conversion
            return list, tuple
        return (
            lambda values: [to_pb(value) for value in values],
            lambda wire: tuple([from_pb(item) for item in wire]),
        )
    if origin is dict and typing.get_origin(args[1]) is tuple:  # the names of several enums, with their members
        return _enums_to_pb, _enums_from_pb
    if origin is dict:
        return _dict_converters(args[1])
    if isinstance(hint, type) and issubclass(hint, c.Value):
        plan = plan_of(hint)
        return plan.keywords, plan.from_pb
    assert hint in (str, int, float, bool, bytes), hint
    return _same, _same


def _enum_converters(members: type[enum.StrEnum]) -> tuple[Convert, Convert]:
    """Return the converters of an enum. Wire numbers count from 1 in definition order; 0 (unspecified) is read as the
    first member."""
    by_number = [next(iter(members)), *members]
    numbers = {member: number for number, member in enumerate(members, 1)}

    def from_pb(number: int) -> Any:
        if not 0 <= number < len(by_number):
            raise InvalidRequestError(
                f"unknown {members.__name__} {number}; the client may be newer than the service: install the same "
                "release on both"
            )
        return by_number[number]

    return (lambda member: numbers[members(member)]), from_pb  # `members` also accepts a member's text


def _dict_converters(value_type: Any) -> tuple[Convert, Convert]:
    """Return the converters of a dict with text keys. The message has a list of entries, each a name and a value."""
    value_field = _VALUE_OF_ENTRY[value_type]
    to_pb, from_pb = _converters(value_type, is_enum=False)
    return (
        lambda values: [{"name": name, value_field: to_pb(value)} for name, value in values.items()],
        lambda wire: {item.name: from_pb(getattr(item, value_field)) for item in wire},
    )


def _enums_to_pb(enums: dict[str, tuple[str, ...]]) -> Keywords:
    return {"entries": [{"name": name, "values": values} for name, values in enums.items()]}


def _enums_from_pb(wire: pb.Enums) -> dict[str, tuple[str, ...]]:
    return {entry.name: tuple(entry.values) for entry in wire.entries}


class ConversionPlan:
    """The conversion of one type of value. Fields that every message has (`_present`) are separate from those that can
    be unset in a message (`_optional`). `_to_pb`: all fields, for the other direction."""

    def __init__(self, value_type: type[c.Value]) -> None:
        self.value_type = value_type
        self.message = message_type(value_type)
        hints = typing.get_type_hints(value_type)
        fields_of_value = msgspec.structs.fields(value_type)
        infos = [info for info in fields_of_value if info.name != "error" or _is_in_message(info)]
        fields = [_Field(info, hints[info.name], self.message) for info in infos]
        # Field name, converter and, in `_optional`, default. Converter None: the value is passed on as it is.
        self._to_pb = [(field.name, None if field.to_pb is _same else field.to_pb) for field in fields]
        always_set = [field for field in fields if not field.presence]
        self._present = [(field.name, None if field.from_pb is _same else field.from_pb) for field in always_set]
        self._optional = [(field.name, field.from_pb, field.default) for field in fields if field.presence]

    def keywords(self, value: Any) -> Keywords:
        """Return the keyword arguments that build the message of `value`. Fields that are None are left out."""
        keywords = {}
        for name, convert in self._to_pb:
            entry = getattr(value, name)
            if entry is not None:
                keywords[name] = entry if convert is None else convert(entry)
        return keywords

    def from_pb(self, wire: Any) -> Any:
        """Return the value of a message. Raises `InvalidRequestError` if the message is malformed."""
        keywords = {}
        for name, convert in self._present:
            entry = getattr(wire, name)
            keywords[name] = entry if convert is None else convert(entry)
        for name, convert, default in self._optional:
            if wire.HasField(name):
                keywords[name] = convert(getattr(wire, name))
            elif default is msgspec.NODEFAULT:
                raise InvalidRequestError(f"{self.value_type.__name__} lacks the field {name}")
            else:
                keywords[name] = default
        return self.value_type(**keywords)


def _is_in_message(info: msgspec.structs.FieldInfo) -> bool:
    """Whether the message has this `error` field: only if it is text, as in `Grown`. An error of type DataPlaneError is
    sent separately."""
    return DataPlaneError.__name__ not in str(info.type)


@functools.cache
def plan_of(value_type: type[c.Value]) -> ConversionPlan:
    """Return the plan of a type, which is created once."""
    return ConversionPlan(value_type)


def message_type(value_type: type[c.Value]) -> type[Message]:
    """Return the protocol's message for a type of value: NameRequest for commands, otherwise the message of the same
    name."""
    name = value_type.__name__
    message: type[Message] = getattr(pb, f"{name}Request", None) or getattr(pb, name)
    return message
