"""What the service does with a request, whatever carried it: both servers use this and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from dataplane.config import PUT_TIMEOUT_S
from dataplane.errors import DataPlaneError, InternalError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import codec
from dataplane.protocol.pb import control_pb2 as pb

Reply = Callable[[c.Output], None]
"""Takes the one output that answers a request. Called in the ledger's thread; returns at once."""

Key = tuple[str, int | str, int]
"""What a request and the output that answers it have in common."""

CALLERS_REPORTS = frozenset({c.OpenSession.__name__, c.Heartbeat.__name__, c.DropUnit.__name__})
"""The unnumbered inputs that anyone with the token may send. The rest are for units, or for the service itself."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a service tells of itself. `endpoints` are ZMQ endpoints, ipc first; a host `*` is for the client to fill
    in. `durable`: it keeps its state over a restart; `fsynced`: over the end of its machine, too. `curve_key`: of its
    ZMQ server, "" where that does not encrypt. `service`: a public name of its state; `instance`: of this start;
    `secret`: what its proof and its ticket are made with, "" where it has none; `told`: holders of a certificate are
    told the secret."""

    address: str
    epoch: int
    host: str
    endpoints: tuple[str, ...]
    heartbeat_s: float
    put_timeout_s: float = PUT_TIMEOUT_S
    durable: bool = False
    fsynced: bool = False
    curve_key: str = ""
    service: str = ""
    instance: str = ""
    secret: str = field(default="", repr=False)
    told: bool = False


def parse(method: str, body: bytes) -> c.Input:
    """The input behind a caller's request. `InvalidRequestError` for what is malformed or not for callers to send."""
    if method not in codec.METHODS and method not in CALLERS_REPORTS:
        raise InvalidRequestError(f"unknown method {method[:80]!r}; is the client newer than the service?")
    return codec.decode(method, body)


def key_of(item: c.Input | c.Output) -> Key | None:
    """What tells which output answers which input; None for what neither answers nor is answered."""
    match item:
        case c.Call() | c.Answer():
            return "call", item.session, item.number
        case c.OpenSession() | c.Opened():
            return "open", item.nonce, 0
        case c.AddUnit() | c.UnitAdded():
            return "add", item.cookie, 0
        case c.DropUnit() | c.UnitDropped():
            return "drop", item.unit, 0
    return None


def refused(item: c.Input, error: DataPlaneError) -> c.Output | None:
    """The output that answers `item` with an error."""
    match item:
        case c.Call():
            return c.Answer(session=item.session, number=item.number, result=error)
        case c.OpenSession():
            return c.Opened(nonce=item.nonce, error=error)
        case c.AddUnit():
            return c.UnitAdded(cookie=item.cookie, error=error)
        case c.DropUnit():
            return c.UnitDropped(unit=item.unit, error=error)
    return None


def message_of(output: c.Output, facts: Facts) -> Message:
    """The reply that an output becomes. Raises the error it carries."""
    match output:
        case c.Answer():
            if isinstance(output.result, DataPlaneError):
                raise output.result
            return codec.to_pb(output.result)
        case c.Opened() | c.UnitAdded() | c.UnitDropped():
            if output.error is not None:
                raise output.error
            wire = codec.to_pb(output)
            if isinstance(wire, pb.Opened):
                wire.endpoints.extend(facts.endpoints)
                wire.host, wire.heartbeat_s, wire.durable = facts.host, facts.heartbeat_s, facts.durable
                wire.put_timeout_s = facts.put_timeout_s
            return wire
    raise InternalError(what=f"{type(output).__name__} is no answer")


def heartbeat_reply(facts: Facts) -> pb.HeartbeatReply:
    """The answer to every heartbeat: an epoch other than the session's tells that the session is over."""
    return pb.HeartbeatReply(epoch=facts.epoch)
