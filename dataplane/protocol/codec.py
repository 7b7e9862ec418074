"""Ledger values to protocol messages and back, whole: an input written down is (method name, bytes).

`converters` knows how each type converts. Requests of commands carry a `Header` too.
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
    c.Shrunk,
    c.Compacted,
    c.RowsChecked,
    c.Tick,
)
"""The unnumbered inputs with a message: every `Input` but `Call`, and `Restarted`, which never leaves its process."""

OUTPUTS: tuple[type[c.Output], ...] = (c.Opened, c.UnitAdded, c.UnitDropped, *get_args(c.UnitOrder))
"""Outputs with a message; an `Answer` travels as its result, errors as errors, and a `Notice` does not leave."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One command: its name on both servers, and the type of its request."""

    name: str
    command: type[c.Answered[Any]]
    request: type[Message]

    @property
    def result(self) -> type[c.Result]:
        """What answers it."""
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
    """The message of a result, report or output. Raises `InvalidRequestError` for values that no message can hold."""
    try:
        plan = _PLANS[type(value)]
        return plan.message(**plan.keywords(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise _unfit(value, error) from error


def from_pb(value_type: type[c.Value], wire: Message) -> Any:
    """The value of a message. Raises `InvalidRequestError` for what is malformed."""
    return _PLANS[value_type].from_pb(wire)


def call_to_pb(call: c.Call) -> Message:
    """The request of a command in its place. Raises `InvalidRequestError` for values that no message can hold."""
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
        raise _unfit(call.command, error) from error


def call_from_pb(method: Method, wire: Any) -> c.Call:
    """The call of a request. Raises `InvalidRequestError` for what is malformed."""
    header = wire.header
    if min(header.session, header.number, header.watermark) < 0:
        place = f"session {header.session}, call {header.number}, watermark {header.watermark}"
        raise InvalidRequestError(f"{method.name}: {place}: none of them may be negative")
    return c.Call(
        session=header.session,
        number=header.number,
        watermark=header.watermark,
        confirmed=tuple(header.confirmed),
        command=_PLANS[method.command].from_pb(wire),
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
        value: c.Input = from_pb(report, _PLANS[report].message.FromString(body))
    except DecodeError as error:
        raise InvalidRequestError(f"{method}: the request is not a {method} message ({error})") from error
    return value


def encode_result(result: c.Result) -> bytes:
    """The bytes of a result's message."""
    return to_pb(result).SerializeToString()


def decode_result(method: str, body: bytes) -> c.Result:
    """The result of command `method` that `encode_result` wrote. `InternalError` for anything else."""
    plan = _PLANS[METHODS[method].result]
    try:
        value: c.Result = plan.from_pb(plan.message.FromString(body))
    except (DecodeError, InvalidRequestError) as error:
        raise InternalError(what=f"the answer to {method} makes no sense ({error})") from error
    return value


def _unfit(value: c.Value, error: Exception) -> InvalidRequestError:
    if isinstance(error, InvalidRequestError):
        return error
    what = type(value).__name__
    why = _no_integer(value) or _no_text(value) or next(_not_unicode(what, value), None) or str(error)
    return InvalidRequestError(f"{what}: {why}")


def _no_integer(value: c.Value) -> str | None:
    """What is wrong with the first field of the command that is to be an integer and is none."""
    for name, hint in get_type_hints(type(value)).items():
        found = getattr(value, name)
        if found is None or int not in (hint, *get_args(hint)):
            continue
        if isinstance(found, bool) or not hasattr(found, "__index__"):
            return f"{name}={found!r}: expected an integer, got {type(found).__name__}"
        if not -(1 << 63) <= int(found) < 1 << 63:
            return f"{name}={found!r}: expected an integer of 64 bits"
    return None


def _no_text(value: c.Value) -> str | None:
    """The same for a field that is to be a text."""
    for name, hint in get_type_hints(type(value)).items():
        found = getattr(value, name)
        if found is not None and hint in (str, str | None) and not isinstance(found, str):
            return f"{name}={found!r}: expected a string, got {type(found).__name__}"
    return None


def _not_unicode(place: str, value: Any) -> Iterator[str]:
    """The texts in a value that no message can hold, each with its place."""
    if isinstance(value, str):
        if not _is_unicode(value):
            yield (
                f"{place}: the text {value[:80]!r} holds half of a surrogate pair, which is no Unicode character. "
                "Replace it, for example by text.encode('utf-8', 'replace').decode()"
            )
    elif isinstance(value, c.Samples):
        yield from _not_unicode("sample id", value.ids)
    elif isinstance(value, c.Value):
        of = "tag" if isinstance(value, c.TagColumn) else "field"
        for name in value.__struct_fields__:
            inside = {"name": f"{of} name", "values": f"tag {getattr(value, 'name', '')!r}"}.get(name, name)
            yield from _not_unicode(inside, getattr(value, name))
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _not_unicode(place, key)
            yield from _not_unicode(place, entry)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _not_unicode(place, entry)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
