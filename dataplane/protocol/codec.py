"""Conversion between the messages of gRPC and the encoded form of inputs and results.

`proto/generate.py` makes a message from each Struct of `ledger.commands`, with the same fields. A
message is therefore read without a table: its fields become the msgpack that a client sends over
ZMQ, and `ledger.encoding.messages` decodes and checks that. Replies take the same way back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol.pb import control_pb2 as pb

Convert = Callable[[Any], Any]
Content = dict[str, Any]
"""The fields of a message by name, as msgpack has them."""
M = TypeVar("M", bound=Message)

UNION = "kind"
"""The oneof of a message that stands for a value of several types. None of them set: the value is
None."""
UNION_FIELDS = {
    str: "string_value",
    bool: "bool_value",
    int: "int64_value",
    float: "double_value",
    list: "list_value",
}
"""The fields of that oneof by the type of the value."""
WRAPPED = ["values"]
"""The only field of a message that stands for a list or map where protobuf has none: one that may
be absent, or is in another one."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def from_pb(wire: Message) -> c.Input:
    """Return the input of a request. Raises `InvalidRequestError` if the message is
    malformed."""
    name = wire.DESCRIPTOR.name.removesuffix("Request")
    # Required fields that are absent are None, which some of them may be.
    content = {**dict.fromkeys(_required(getattr(c, name))), **content_of(wire)}
    if "header" not in wire.DESCRIPTOR.fields_by_name:
        fields = getattr(c, name).__struct_fields__
        return messages.decode(_pack([name, *(content.get(field) for field in fields)]))
    header = cast(pb.CommitRequest, wire).header  # every command has one
    command = {"type": name, **content}
    place = [header.session, header.call_id, header.watermark]
    return messages.decode(_pack(["Call", *place, command, list(header.confirmed)]))


def to_pb(value: c.Value) -> Message:
    """Return the message of a result or output."""
    kind: type[Message] = getattr(pb, type(value).__name__)
    return filled(kind, _content_of_value(value))


def content_of(wire: Message) -> Content:
    """Return the fields of a message, without its header and without optional fields that are not
    set."""
    content: Content = _reader(wire.DESCRIPTOR)(wire)
    return content


def filled(kind: type[M], content: Content) -> M:
    """Return the message with these fields. Those that are None, or that the message does not have,
    are left out."""
    return kind(**_writer(kind.DESCRIPTOR)(content))


@functools.cache
def _required(kind: type[c.Value]) -> list[str]:
    """Return the fields without a default."""
    return [field.name for field in msgspec.structs.fields(kind) if field.required]


def _content_of_value(value: c.Value) -> Content:
    content = _unpack(messages.encode(value))
    if isinstance(content, list):  # of an input: its name and its fields
        return dict(zip(value.__struct_fields__, content[1:], strict=True))
    return cast(Content, content)


def _is_wrapper(message: Descriptor) -> bool:
    return [field.name for field in message.fields] == WRAPPED


def _is_union(message: Descriptor) -> bool:
    return UNION in message.oneofs_by_name


def _same(value: Any) -> Any:
    return value


def _entry_value(field: FieldDescriptor) -> FieldDescriptor | None:
    """Return the field for the values of a map; None for other fields."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"]


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.default_value == [])  # in all versions of protobuf that may be installed


@functools.cache
def _reader(message: Descriptor) -> Convert:
    """Return the function from a message of this type to its content."""
    fields = {field.name: field for field in message.fields if field.name != "header"}
    readers = {name: _field_reader(field) for name, field in fields.items()}
    if _is_wrapper(message):
        return lambda wire: readers["values"](wire.values)
    if _is_union(message):

        def chosen(wire: Any) -> Any:
            name = wire.WhichOneof(UNION)
            return None if name is None else readers[name](getattr(wire, name))

        return chosen
    optional = [(name, read) for name, read in readers.items() if fields[name].has_presence]
    always = [(name, read) for name, read in readers.items() if not fields[name].has_presence]

    def all_set(wire: Any) -> Content:
        content = {name: read(getattr(wire, name)) for name, read in always}
        for name, read in optional:
            if wire.HasField(name):
                content[name] = read(getattr(wire, name))
        return content

    return all_set


def _field_reader(field: FieldDescriptor) -> Convert:
    value = _entry_value(field)
    if value is not None:
        read_value = _field_reader(value)
        # In the order of names, because protobuf has its entries in any.
        return lambda wire: {name: read_value(wire[name]) for name in sorted(wire)}
    if field.message_type is None:
        return list if _is_repeated(field) else _same
    read = _reader(field.message_type)
    return (lambda wire: [read(item) for item in wire]) if _is_repeated(field) else read


@functools.cache
def _writer(message: Descriptor) -> Convert:
    """Return the function from a content to the keyword arguments of a message of this type.
    Messages in it are their keyword arguments, too, because protobuf copies a message by
    serializing it."""
    writers = {field.name: _field_writer(field) for field in message.fields}
    if _is_wrapper(message):
        return lambda values: {"values": writers["values"](values)}
    if _is_union(message):

        def chosen(value: Any) -> Content:
            if value is None:
                return {}
            name = UNION_FIELDS[type(value)]
            return {name: writers[name](value)}

        return chosen
    # None is a value of a union, and the absence of all others.
    parts = {field.name: field.message_type for field in message.fields if field.message_type}
    unions = {name for name, part in parts.items() if _is_union(part)}
    return lambda content: {
        name: writers[name](value)
        for name, value in content.items()
        if name in writers and (value is not None or name in unions)
    }


def _field_writer(field: FieldDescriptor) -> Convert:
    value = _entry_value(field)
    if value is not None:
        if value.message_type is None:
            return _same
        kind = GetMessageClass(value.message_type)  # protobuf 5 takes no keyword arguments in a map
        return lambda values: {name: filled(kind, item) for name, item in values.items()}
    if field.message_type is None:
        return _same
    write = _writer(field.message_type)
    return (lambda items: [write(item) for item in items]) if _is_repeated(field) else write
