"""Conversion of whole ledger values to messages of the gRPC server and back.

`converters` converts each type. Requests of commands also carry a `Header`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from google.protobuf.message import Message

from dataplane.errors import InvalidRequestError
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
"""The inputs with a message but without a call id: every `Input` except `Call` and `Restarted`.
`Restarted` stays in its process."""

OUTPUTS: tuple[type[c.Output], ...] = (c.Opened, c.UnitAdded, c.UnitDropped, *get_args(c.UnitOrder))
"""Outputs with a message. An `Answer` is sent as its result or its error, and a `Notice` is never sent."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One command: its name on the gRPC server, and the type of its request."""

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
    if command not in c.SHORT
}
"""Every command by name."""

_COMMANDS = [method.command for method in METHODS.values()]
_RESULTS = [method.result for method in METHODS.values()]
_PLANS = {value_type: plan_of(value_type) for value_type in (*_COMMANDS, *_RESULTS, *REPORTS, *OUTPUTS)}


def to_pb(value: c.Value) -> Message:
    """Return the message of a result, report or output."""
    plan = _PLANS[type(value)]
    return plan.message(**plan.keywords(value))


def from_pb(value_type: type[c.Value], wire: Message) -> Any:
    """Return the value of a message. Raises `InvalidRequestError` if the message is malformed."""
    try:
        return _PLANS[value_type].from_pb(wire)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def call_from_pb(method: Method, wire: Any) -> c.Call:
    """Return the call of a request. Raises `InvalidRequestError` if the request is malformed."""
    header = wire.header
    if min(header.session, header.call_id, header.watermark) < 0:
        numbers = f"session {header.session}, call {header.call_id}, watermark {header.watermark}"
        raise InvalidRequestError(f"{method.name}: {numbers}: these must not be negative")
    return c.Call(
        session=header.session,
        call_id=header.call_id,
        watermark=header.watermark,
        confirmed=tuple(header.confirmed),
        command=from_pb(method.command, wire),
    )
