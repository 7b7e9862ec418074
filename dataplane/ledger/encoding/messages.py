"""The encoded form of inputs, results and outputs: msgpack, as clients and the controller exchange it over ZMQ, and as
the journal stores the inputs.

Each type is declared once, as a Struct in `ledger.commands`. An input is an array of its type's name and its fields; a
command is a map of its field names, with its own name under "type"; all other values are maps of their field names. An
array of numbers is the bytes of its little-endian elements. Decoding checks every type, and what `__post_init__`
checks; the ledger checks the meaning. Fields with a default may be absent in encoded maps; unknown fields are
rejected.
"""

from __future__ import annotations

import functools
import operator
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from dataplane.core.types import INT64_MAX, INT64_MIN, PROTOCOL_VERSION
from dataplane.errors import InternalError, InvalidRequestError, ProtocolVersionError
from dataplane.ledger import commands as c

assert sys.byteorder == "little", "arrays are little-endian, and this machine is big-endian"

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""What a decoder raises; RecursionError for values that are nested too deeply."""

T = TypeVar("T")

CallersInput = c.Call | c.OpenSession | c.Heartbeat | c.DropUnit | c.Identify | c.AddUnit | c.UnitReport
"""The inputs that clients and storage units may send. All others come from the service itself."""
_AnyInput = functools.reduce(operator.or_, c.Input.__subclasses__())
_FIELDS = {kind.__name__: kind.__struct_fields__ for kind in c.Input.__subclasses__()}


def encode(value: c.Value, *before: int | str) -> bytes:
    """Encode an input, a result or an output; with `before`, an array of these and the value.
    Raises `InvalidRequestError` for a value that has no encoded form."""
    try:
        return _encode((*before, value) if before else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unrepresentable(value, error) from error


def decode(message: bytes | memoryview) -> c.Input:
    """Decode any input. Its arrays are read-only. Raises `InvalidRequestError` for other bytes."""
    try:
        item: c.Input = _decode_input(message)
    except MALFORMED as error:
        raise _malformed(error, message) from error
    return item


def decode_request(message: bytes) -> CallersInput:
    """Decode an input that a client or storage unit may send. Its arrays are read-only. Raises
    `ProtocolVersionError` for the first message of another protocol version, `InvalidRequestError`
    for other bytes."""
    try:
        item: CallersInput = _decode_request(message)
    except MALFORMED as error:
        version = _version_of(message)
        if version not in (None, PROTOCOL_VERSION):
            raise ProtocolVersionError(client_version=version, service_version=PROTOCOL_VERSION) from error
        raise _malformed(error, message) from error
    return item


def _version_of(message: bytes) -> int | None:
    """Return the protocol version in the first message of a client or storage unit, whose other fields may differ
    from those of this version; None for another message."""
    try:
        items = _split.decode(message)
        place = _VERSION_AT.get(_text.decode(items[0]))
        return None if place is None else _integer.decode(items[place])
    except (*MALFORMED, IndexError):
        return None


def call_id_of(message: bytes) -> int:
    """Return the id of the call in a message that `decode_request` rejects; 0 if it has none."""
    try:
        items = _split.decode(message)
        return _integer.decode(items[2]) if _text.decode(items[0]) == c.Call.__name__ else 0
    except (*MALFORMED, IndexError):
        return 0


def decode_result(command: type[c.Command], message: bytes | memoryview) -> Any:
    """Decode the result of a command of this type. Raises `InternalError` for other bytes."""
    try:
        return _RESULT_DECODERS[command].decode(message)
    except MALFORMED as error:
        what = f"malformed reply: no result of {command.__name__} ({error})"
        raise InternalError(what=what) from error


def decode_with(decoder: msgspec.msgpack.Decoder[T], message: bytes | memoryview) -> T:
    """Decode a value with the `decoder` of its type. Raises `InternalError` for other bytes."""
    try:
        return decoder.decode(message)
    except MALFORMED as error:
        kind = getattr(decoder.type, "__name__", decoder.type)
        raise InternalError(what=f"malformed reply: not a {kind} ({error})") from error


def _malformed(error: Exception, message: bytes | memoryview) -> InvalidRequestError:
    """Return the error for a message that is not an input. error: the exception of the decoder."""
    release = "If the client is of another release, install that of the service"
    elsewhere = f"malformed request: {error}. {release}"
    return InvalidRequestError(_in_field(str(error), message) or elsewhere)


def _in_field(error: str, message: bytes | memoryview) -> str:
    """Describe a decoder's error with the command or other input, the field and its value; ""
    unless it is inside one of these."""
    found = re.fullmatch(r"(.*) - at `\$\[([1-9])\](?!\.type`)\.?(.*)`", error, re.DOTALL)
    if found is None:
        return ""
    why, position, path = found.groups()
    path = path.partition("[...]")[0]  # the decoder does not name the keys of mappings
    try:
        item = msgspec.msgpack.decode(message)
        name = item[0]
        value = item[int(position)]
        field = _FIELDS[name][int(position) - 1]
        if field == "command":
            name = value["type"]
            field = ""
        for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
            value = value[key] if key else value[int(index)]
    except (*MALFORMED, LookupError, TypeError):  # more than this part is malformed
        return ""
    place = f" {field}{path}={reprlib.repr(value)}:" if field or path else ""
    return f"{name}:{place} {why[0].lower()}{why[1:]}"


def _plain(value: Any) -> Any:
    """Return a value of another type than msgpack's in one of its types. Subclasses of str, int and float lose their
    class."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r}: a message cannot contain a {type(value).__name__}")


def _array(kind: Any, content: Any) -> Any:
    """Decode an array of numbers, the only type that msgpack does not know."""
    if not isinstance(content, bytes):
        raise ValueError(f"expected the bytes of an array, got {type(content).__name__}")
    return np.frombuffer(content, _dtype_of(kind))


@functools.cache
def _dtype_of(kind: Any) -> Any:
    """Return the dtype of a type of arrays."""
    (dtype,) = get_args(get_args(kind)[1])
    return dtype


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder of a type. Call it only while a module is imported: msgspec crashes if two
    threads make their first decoders of the same class at once."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_array)


_decode_input = decoder(_AnyInput).decode
_decode_request: Callable[[bytes], CallersInput] = decoder(CallersInput).decode  # type: ignore[arg-type]  # a union
_RESULT_DECODERS: dict[type[c.Command], msgspec.msgpack.Decoder[Any]] = {
    command: decoder(command.answer()) for command in c.Answered.__subclasses__()
}
"""By type of command, the decoder of its results."""
_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_split = msgspec.msgpack.Decoder(list[msgspec.Raw])
_text = msgspec.msgpack.Decoder(str)
_integer = msgspec.msgpack.Decoder(int)
_VERSION_AT = {
    kind.__name__: 1 + kind.__struct_fields__.index("protocol_version") for kind in (c.OpenSession, c.Identify)
}
"""The position of the protocol version, which is the same in every version, by the name of the message."""


def _unrepresentable(value: c.Value, error: Exception) -> InvalidRequestError:
    """Return the error for a value without an encoded form, with the part that causes it if that is found. error: the
    exception of the encoder."""
    named = value.command if isinstance(value, c.Call) else value
    what = type(named).__name__
    why = next(_faults(what, named), None) or str(error)
    return InvalidRequestError(f"{what}: {why}")


def _mismatch(kind: type[c.Value], name: str, entry: Any) -> str:
    """Describe the type that a field of this type expects, and that of the entry; "" if the entry
    has it."""
    try:
        msgspec.convert(entry, get_type_hints(kind, include_extras=True)[name])
    except msgspec.ValidationError as error:
        why = str(error)
        return f"{why[0].lower()}{why[1:]}"
    return ""


def _faults(what: str, value: Any) -> Iterator[str]:
    """Yield a description of each entry of the value that has no encoded form."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield (
                f"{what}: the string {value[:80]!r} contains an unpaired surrogate, which is not valid Unicode. "
                "Replace it, for example with text.encode('utf-8', 'replace').decode()"
            )
    elif isinstance(value, int):
        if not INT64_MIN <= value <= INT64_MAX:
            yield f"{what}={value!r}: expected an integer of at most 64 bits"
    elif isinstance(value, c.Samples):
        yield from _faults("sample id", value.ids)
    elif isinstance(value, c.Value):
        # Names and tag values are described in the words of the user; other fields by their names.
        kind = "tag" if isinstance(value, c.TagColumn) else "field"
        names = {"name": f"{kind} name", "values": f"tag {getattr(value, 'name', '')!r}"}
        for name in value.__struct_fields__:
            entry = getattr(value, name)
            yield from _faults(names.get(name, name), entry)
            try:
                _encode(entry)
            except TypeError as error:
                why = _mismatch(type(value), name, entry) or error
                yield f"{name}={reprlib.repr(entry)}: {why}"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _faults(what, key)
            yield from _faults(what, entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _faults(what, entry)
