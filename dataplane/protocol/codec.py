"""Conversion of whole ledger values to protocol messages and back. An encoded input is (method name, bytes).

`converters` converts each type. Requests of commands also carry a `Header`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from google.protobuf.message import DecodeError, Message

from dataplane.errors import InternalError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol.converters import message_type, plan_of

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
"""The unnumbered inputs with a message: every `Input` except `Call` and `Restarted`, which stays in its process."""

OUTPUTS: tuple[type[c.Output], ...] = (c.Opened, c.UnitAdded, c.UnitDropped, *get_args(c.UnitOrder))
"""Outputs with a message. An `Answer` is sent as its result or its error, and a `Notice` is never sent."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One command: its name on both servers, and the type of its request."""

    name: str
    command: type[c.Answered[Any]]
    request: type[Message]

    @property
    def result(self) -> type[c.Result]:
        """The type of the command's result."""
        return self.command.answer()


METHODS: dict[str, Method] = {
    command.__name__: Method(name=command.__name__, command=command, request=message_type(command))
    for command in c.Answered.__subclasses__()
}
"""Every command by name."""

_REPORTS = {report.__name__: report for report in REPORTS}

_COMMANDS = [method.command for method in METHODS.values()]
_RESULTS = [method.result for method in METHODS.values()]
_PLANS = {value_type: plan_of(value_type) for value_type in (*_COMMANDS, *_RESULTS, *REPORTS, *OUTPUTS)}


def to_pb(value: c.Value) -> Message:
    """Return the message of a result, report or output. Raises `InvalidRequestError` for unrepresentable values."""
    try:
        plan = _PLANS[type(value)]
        return plan.message(**plan.keywords(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise _unrepresentable(value, error) from error


def from_pb(value_type: type[c.Value], wire: Message) -> Any:
    """Return the value of a message. Raises `InvalidRequestError` if the message is malformed."""
    return _PLANS[value_type].from_pb(wire)


def call_to_pb(call: c.Call) -> Message:
    """Return the request of a call: the fields of its command, and a header with the call's numbers. Raises
    `InvalidRequestError` for values that no message can represent."""
    plan = _PLANS[type(call.command)]
    header = {
        "session": call.session,
        "number": call.number,
        "watermark": call.watermark,
        "confirmed": call.confirmed,
    }
    try:
        return plan.message(header=header, **plan.keywords(call.command))
    except (TypeError, ValueError, OverflowError) as error:
        raise _unrepresentable(call.command, error) from error


def call_from_pb(method: Method, wire: Any) -> c.Call:
    """Return the call of a request. Raises `InvalidRequestError` if the request is malformed."""
    header = wire.header
    if min(header.session, header.number, header.watermark) < 0:
        place = f"session {header.session}, call {header.number}, watermark {header.watermark}"
        raise InvalidRequestError(f"{method.name}: {place}: these must not be negative")
    return c.Call(
        session=header.session,
        number=header.number,
        watermark=header.watermark,
        confirmed=tuple(header.confirmed),
        command=_PLANS[method.command].from_pb(wire),
    )


def encode(item: c.Input) -> tuple[str, bytes]:
    """Encode an input as its method (the name of the command or report) and the bytes of its message."""
    if isinstance(item, c.Call):
        return type(item.command).__name__, call_to_pb(item).SerializeToString()
    return type(item).__name__, to_pb(item).SerializeToString()


def decode(method: str, body: bytes) -> c.Input:
    """Decode the result of `encode`. Raises `InvalidRequestError` for an unknown method or a malformed message."""
    known = METHODS.get(method)
    try:
        if known is not None:
            return call_from_pb(known, known.request.FromString(body))
        report = _REPORTS.get(method)
        if report is None:
            raise InvalidRequestError(
                f"unknown method {method[:80]!r}; the client may be newer than the service: install the same release "
                "on both"
            )
        value: c.Input = from_pb(report, _PLANS[report].message.FromString(body))
    except DecodeError as error:
        raise InvalidRequestError(f"{method}: the request is not a {method} message ({error})") from error
    return value


def encode_result(result: c.Result) -> bytes:
    """Encode a result as the bytes of its message."""
    return to_pb(result).SerializeToString()


def decode_result(method: str, body: bytes) -> c.Result:
    """Decode a result of command `method` from `encode_result`. Raises `InternalError` if it is malformed."""
    plan = _PLANS[METHODS[method].result]
    try:
        value: c.Result = plan.from_pb(plan.message.FromString(body))
    except (DecodeError, InvalidRequestError) as error:
        raise InternalError(what=f"malformed reply to {method} ({error})") from error
    return value


def _unrepresentable(value: c.Value, error: Exception) -> InvalidRequestError:
    """Return the error for a value that no message can represent, with the field that causes it if that is found.
    error: the exception of the conversion."""
    if isinstance(error, InvalidRequestError):  # a converter has described it already
        return error
    what = type(value).__name__
    why = _integer_fault(value) or _string_fault(value) or next(_unicode_faults(what, value), None) or str(error)
    return InvalidRequestError(f"{what}: {why}")


def _integer_fault(value: c.Value) -> str | None:
    """Describe the first integer field of the value that does not hold a 64-bit integer; None if there is none."""
    for name, hint in get_type_hints(type(value)).items():
        content = getattr(value, name)
        if content is None or int not in (hint, *get_args(hint)):  # the field is empty, or not declared an integer
            continue
        if isinstance(content, bool) or not hasattr(content, "__index__"):  # numpy integers are valid
            return f"{name}={content!r}: expected an integer, got {type(content).__name__}"
        if not -(1 << 63) <= int(content) < 1 << 63:
            return f"{name}={content!r}: expected a 64-bit integer"
    return None


def _string_fault(value: c.Value) -> str | None:
    """Describe the first string field of the value that does not hold a string; None if there is none."""
    for name, hint in get_type_hints(type(value)).items():
        content = getattr(value, name)
        if content is not None and hint in (str, str | None) and not isinstance(content, str):
            return f"{name}={content!r}: expected a string, got {type(content).__name__}"
    return None


def _unicode_faults(place: str, value: Any) -> Iterator[str]:
    """Yield a description, with its place, of each string in the value that is not valid Unicode."""
    if isinstance(value, str):
        if not _is_unicode(value):
            yield (
                f"{place}: the string {value[:80]!r} contains an unpaired surrogate, which is not valid Unicode. "
                "Replace it, for example with text.encode('utf-8', 'replace').decode()"
            )
    elif isinstance(value, c.Samples):
        yield from _unicode_faults("sample id", value.ids)
    elif isinstance(value, c.Value):
        # Names and tag values are described in the words of the user; other fields by their names.
        kind = "tag" if isinstance(value, c.TagColumn) else "field"
        places = {"name": f"{kind} name", "values": f"tag {getattr(value, 'name', '')!r}"}
        for name in value.__struct_fields__:
            yield from _unicode_faults(places.get(name, name), getattr(value, name))
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _unicode_faults(place, key)
            yield from _unicode_faults(place, entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _unicode_faults(place, entry)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
