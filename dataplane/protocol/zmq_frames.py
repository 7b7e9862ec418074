"""The messages between the ZMQ server and its clients and storage units, as frames.

A request is the encoded form of an input (`ledger.encoding.messages`). A reply is a frame: msgpack of the id of its
call, "ok" and the encoded result, or the name of an error and its facts. A message carries any number of replies, and
up to `MAX_JOINED` requests. A storage unit sends `Identify`, `AddUnit` and then its reports. Each has one reply, in
their order. Orders to the unit are replies to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    RequestTooLargeError,
    from_wire,
    to_wire,
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages

OK = "ok"
MAX_MESSAGE_BYTES = 256 << 20
"""Maximum size of a message, for the gRPC server and the ZMQ server."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1024
"""`MAX_MESSAGE_BYTES` plus the overhead of CURVE."""
REQUEST_FRAME_BYTES = 256 << 10
"""A longer request is split into frames, because the service may hold one frame of a peer without the token."""
MAX_REQUEST_FRAME_BYTES = REQUEST_FRAME_BYTES + 1024
JOINED = b""
"""The first frame of a message with several requests."""
SHOWN_BYTES = 16
"""Number of bytes of an invalid message that an error or a log line shows."""
TLS = "it looks like a TLS handshake, but this port serves clients of this project over ZMQ"
"""Description of a message for which `is_tls` is true."""
_TLS_PEER_BYTES = 0x16 - 1
MAX_JOINED = 32
"""Maximum number of requests in a message. Their replies are sent together, so the first waits for the last."""
_encode = msgspec.msgpack.Encoder().encode


def request(item: c.Input | c.Identify) -> list[bytes]:
    """Return the frames of an input: one, or several if its encoded form is long. Raises `RequestTooLargeError`."""
    body = messages.encode(item)
    if len(body) > MAX_MESSAGE_BYTES:
        named = item.command if isinstance(item, c.Call) else item
        check_size(body, f"a {type(named).__name__} command")
    if len(body) <= REQUEST_FRAME_BYTES:
        return [body]
    return [body[start : start + REQUEST_FRAME_BYTES] for start in range(0, len(body), REQUEST_FRAME_BYTES)]


def joined(requests: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the messages for these requests (see `request`), in their order: up to `MAX_JOINED` consecutive requests
    share a message (JOINED, request, request, ...); a request of several frames has its own."""
    requests_so_far: list[bytes] = []
    for each in requests:
        if requests_so_far and (len(each) > 1 or len(requests_so_far) == MAX_JOINED):
            yield _message(requests_so_far)
            requests_so_far = []
        if len(each) > 1:
            yield each
        else:
            requests_so_far += each
    if requests_so_far:
        yield _message(requests_so_far)


def _message(requests_so_far: list[bytes]) -> list[bytes]:
    return requests_so_far if len(requests_so_far) == 1 else [JOINED, *requests_so_far]


def split_requests(frames: Sequence[bytes]) -> list[bytes]:
    """Return the requests in a message. Raises `InvalidRequestError` if it is malformed, `RequestTooLargeError` if it
    is too large."""
    size = sum(map(len, frames))
    if size > MAX_MESSAGE_BYTES:
        raise RequestTooLargeError(wanted_bytes=size, limit_bytes=MAX_MESSAGE_BYTES, what="a message")
    if not frames or frames[0] != JOINED:
        return [frames[0] if len(frames) == 1 else b"".join(frames)]
    if len(frames) - 1 > MAX_JOINED:
        raise InvalidRequestError(f"a message has at most {MAX_JOINED} requests, got {len(frames) - 1}")
    return list(frames[1:])


def beginning(data: bytes) -> str:
    """Describe an invalid message in printable characters, for the log."""
    return f"it begins with {data[:SHOWN_BYTES]!r}" if data else "it is empty"


def is_tls(peer: bytes) -> bool:
    """Whether a message comes from a TLS client that has connected to a ZMQ port without authentication.

    peer: the routing id that a ROUTER gives to the connection. ZMQ reads the handshake of TLS, 16 03 01..., as the
    greeting of its oldest version: a length, flags, and a routing id, which is the rest of the TLS header.
    """
    # The lower byte of the version, two bytes of length, and the type of the first message: a ClientHello.
    return len(peer) == _TLS_PEER_BYTES and peer[0] <= 4 and peer[3] == 1


def check_size(body: bytes, what: str) -> None:
    """Raise `RequestTooLargeError` if the message exceeds the size limit of the receiver."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise RequestTooLargeError(wanted_bytes=len(body), limit_bytes=MAX_MESSAGE_BYTES, what=what)


def answer(call_id: int, result: c.Value) -> bytes:
    """Return the frame of a successful reply. Raises `InvalidRequestError` for a result that has no
    encoded form, `RequestTooLargeError` for one that is too large."""
    frame = messages.encode(result, call_id, OK)
    if len(frame) > MAX_MESSAGE_BYTES:
        check_size(frame, "the answer")
    return frame


def refusal(call_id: int, error: DataPlaneError) -> bytes:
    """Return the frame of an error reply."""
    name, facts = to_wire(error)
    return _encode((call_id, name, msgspec.Raw(facts)))


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reply: the id of its call (0: none), and the body, or the error's name and facts. outcome: "ok", or the
    name of the error."""

    call_id: int
    outcome: str
    body: msgspec.Raw

    @classmethod
    def parse(cls, frames: Sequence[bytes]) -> list[Reply]:
        """Parse a message of one or more replies, a frame each. Raises as `decode_reply`."""
        return [decode_reply(frame) for frame in frames]

    @property
    def error(self) -> DataPlaneError | None:
        """The error of the reply; None if the call succeeded."""
        return None if self.outcome == OK else from_wire(self.outcome, bytes(self.body))

    def good_body(self) -> msgspec.Raw:
        """Return the body. Raises the reply's error."""
        error = self.error
        if error is not None:
            raise error
        return self.body


_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def decode_reply(frame: bytes) -> Reply:
    """Decode the frame of a reply. Raises `InternalError` if it is malformed."""
    try:
        return _decode_reply(frame)
    except messages.MALFORMED as error:
        raise InternalError(what=f"malformed reply on the ZMQ connection ({error})") from error


class Welcome(c.Value, frozen=True, kw_only=True):
    """The reply to an `OpenSession`: the ledger's output, and the facts of the service that a
    client needs.

    `endpoints` are ZMQ addresses for the session's commands, ipc before tcp; a host `*` stands for
    the one that the client connected to. `host` is the boot id of the controller's host; only its
    processes reach ipc endpoints. `heartbeat_s`: the interval at which the client sends heartbeats.
    `put_timeout_s`: how long puts wait for space unless the client sets another time. `durable`:
    the service keeps its sessions over a restart."""

    opened: c.Opened
    endpoints: tuple[str, ...]
    host: str
    heartbeat_s: float
    put_timeout_s: float
    durable: bool


class HeartbeatReply(c.Value, frozen=True, kw_only=True):
    """The reply to a heartbeat. An epoch that differs from the session's epoch means that the session ended.
    min_heartbeat_s: the shortest time until the next heartbeat."""

    epoch: int
    min_heartbeat_s: float


class Identity(c.Value, frozen=True, kw_only=True, tag=True):
    """The reply to an `Identify`: the name of the service's state, which is stored with the state."""

    service: str


class ReportHandled(c.Value, frozen=True, kw_only=True, tag=True):
    """The reply to a report of a storage unit, which therefore needs no repetition."""


UnitMessage = Identity | c.UnitAdded | c.UnitOrder | ReportHandled
"""What the body of a reply to a storage unit is."""

WELCOME = messages.decoder(Welcome)
UNIT_MESSAGE: msgspec.msgpack.Decoder[UnitMessage] = messages.decoder(UnitMessage)  # type: ignore[arg-type]  # a union
HEARTBEAT_REPLY = messages.decoder(HeartbeatReply)
