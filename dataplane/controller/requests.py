"""Correlation of requests and ledger outputs, and the replies of both servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from dataplane.config import PUT_TIMEOUT_S
from dataplane.errors import DataPlaneError, InternalError
from dataplane.ledger import commands as c
from dataplane.protocol import codec, zmq_frames

Reply = Callable[[c.Output], None]
"""Callback for the single output that answers a request. Called in the ledger thread; must not block."""

Key = tuple[str, int | str, int]
"""Correlation key that a request shares with the output that answers it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a service that its servers report to clients.

    `endpoints`: ZMQ endpoints, ipc first; the client replaces a host `*`. `durable`: the state survives a restart.
    `service`: public name of the state."""

    address: str
    epoch: int
    host: str
    endpoints: tuple[str, ...]
    heartbeat_s: float
    put_timeout_s: float = PUT_TIMEOUT_S
    durable: bool = False
    service: str = ""


def key_of(item: c.Input | c.Output) -> Key | None:
    """Return the key that correlates an input with its answer; None for items outside the request-reply scheme."""
    match item:
        case c.Call() | c.Answer():
            return "call", item.session, item.call_id
        case c.OpenSession() | c.Opened():
            return "open", item.nonce, 0
        case c.AddUnit() | c.UnitAdded():
            return "add", item.cookie, 0
        case c.DropUnit() | c.UnitDropped():
            return "drop", item.unit, 0
    return None


def rejection_of(item: c.Input, error: DataPlaneError) -> c.Output | None:
    """Return the output that answers `item` with `error`, or None if `item` has no answer."""
    match item:
        case c.Call():
            return c.Answer(session=item.session, call_id=item.call_id, result=error)
        case c.OpenSession():
            return c.Opened(nonce=item.nonce, error=error)
        case c.AddUnit():
            return c.UnitAdded(cookie=item.cookie, error=error)
        case c.DropUnit():
            return c.UnitDropped(unit=item.unit, error=error)
    return None


def _value_of(output: c.Output, facts: Facts) -> c.Value:
    """Return the reply in an output that answers a request: the result of a call, `Welcome` for
    `Opened`, or the output itself. Raises the error that the output carries, `InternalError` for an
    output that answers no request."""
    match output:
        case c.Answer():
            if isinstance(output.result, DataPlaneError):
                raise output.result
            return output.result
        case c.Opened() | c.UnitAdded() | c.UnitDropped():
            if output.error is not None:
                raise output.error
            if isinstance(output, c.Opened):
                return zmq_frames.Welcome(
                    opened=output,
                    endpoints=facts.endpoints,
                    host=facts.host,
                    heartbeat_s=facts.heartbeat_s,
                    put_timeout_s=facts.put_timeout_s,
                    durable=facts.durable,
                )
            return output
    raise InternalError(what=f"{type(output).__name__} does not answer a request")


def message_of(output: c.Output, facts: Facts) -> Message:
    """Return the reply to a request over gRPC. Raises the error that the output carries."""
    return codec.to_pb(_value_of(output, facts))


def frame_of(output: c.Output, facts: Facts) -> bytes:
    """Return the frame of the reply to a request over ZMQ: with the result, or with the error if
    the request failed or its result is too large."""
    call_id = output.call_id if type(output) is c.Answer else 0  # 0: of a request without an id
    try:
        return zmq_frames.answer(call_id, _value_of(output, facts))
    except DataPlaneError as error:
        return zmq_frames.refusal(call_id, error)


def heartbeat_message(facts: Facts, min_heartbeat_s: float) -> Message:
    """Return the reply to a heartbeat over gRPC."""
    reply = zmq_frames.HeartbeatReply(epoch=facts.epoch, min_heartbeat_s=min_heartbeat_s)
    return codec.to_pb(reply)
