"""Encoding and decoding of the ZMQ server's frames (see proto/control.proto)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    RequestTooLargeError,
    from_wire,
    to_wire,
)
from dataplane.ledger import commands as c
from dataplane.protocol import codec

OK = b"ok"
MAX_MESSAGE_BYTES = 256 << 20
"""Maximum size of a message, for the gRPC server and the ZMQ server."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1024
"""`MAX_MESSAGE_BYTES` plus the overhead of CURVE."""
REQUEST_FRAME_BYTES = 256 << 10
"""A longer request is split into frames, because the service may hold one frame of a peer without a valid ticket."""
MAX_REQUEST_FRAME_BYTES = REQUEST_FRAME_BYTES + 1024
GROUP = b""
"""The first frame of a message with several requests, in place of a method."""
MAX_METHOD_BYTES = 80
SHOWN_BYTES = 16
"""Number of bytes of an invalid message that an error or a log line shows."""
TLS = "it looks like a TLS handshake, but this port serves clients of this project over ZMQ"
"""Description of a message for which `is_tls` is true."""
_TLS_PEER_BYTES = 0x16 - 1
MAX_GROUP = 32
"""Maximum number of requests in a message. Their replies are sent together, so the first waits for the last."""


def request(item: c.Input) -> list[bytes]:
    """Return the frames of a command, OpenSession, Heartbeat or DropUnit: the method, then the body, in several frames
    if it is long. Raises `RequestTooLargeError`."""
    method, body = codec.encode(item)
    check_size(body, f"a {method} command")
    if len(body) <= REQUEST_FRAME_BYTES:
        return [method.encode(), body]
    starts = range(0, len(body), REQUEST_FRAME_BYTES)
    return [method.encode(), *(body[start : start + REQUEST_FRAME_BYTES] for start in starts)]


def messages(requests: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the messages for these requests (see `request`), in their order: up to `MAX_GROUP` consecutive requests
    share a message (GROUP, method, body, method, body, ...); a request of several body frames has its own."""
    group: list[list[bytes]] = []
    for each in requests:
        if group and (len(each) > 2 or len(group) == MAX_GROUP):
            yield _joined(group)
            group = []
        if len(each) > 2:
            yield each
        else:
            group.append(each)
    if group:
        yield _joined(group)


def _joined(group: Sequence[list[bytes]]) -> list[bytes]:
    return group[0] if len(group) == 1 else [GROUP, *chain.from_iterable(group)]


def split_requests(frames: Sequence[bytes]) -> list[tuple[str, bytes]]:
    """Return method and body of each request in a message. Raises `InvalidRequestError` if it is malformed."""
    if len(frames) < 2:
        raise InvalidRequestError(f"a request needs 2 or more frames (method, message), got {len(frames)}")
    method, *parts = frames
    if method != GROUP:
        return [(_method_name(method), parts[0] if len(parts) == 1 else b"".join(parts))]
    count, odd = divmod(len(parts), 2)
    if odd or count > MAX_GROUP:
        raise InvalidRequestError(
            f"a message with several requests needs 2 frames for each of up to {MAX_GROUP} requests, got {len(parts)}"
        )
    return [(_method_name(each), body) for each, body in zip(parts[::2], parts[1::2], strict=True)]


def _method_name(frame: bytes) -> str:
    """Return the text of a frame with a method. Raises `InvalidRequestError` if it cannot be the name of one."""
    if len(frame) > MAX_METHOD_BYTES or not frame.isalnum():
        raise InvalidRequestError(f"not a request of this protocol: {beginning(frame)}")
    return frame.decode()


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


def answer(number: int, body: bytes) -> list[bytes]:
    """Return the frames of a successful reply."""
    return [number.to_bytes(8, "little"), OK, body]


def refusal(number: int, error: DataPlaneError) -> list[bytes]:
    """Return the frames of an error reply."""
    name, facts = to_wire(error)
    return [number.to_bytes(8, "little"), name.encode(), facts]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: the number of its call (0: none), and the body, or the error's name and facts. outcome: "ok", or the
    name of the error."""

    number: int
    outcome: str
    body: bytes

    @classmethod
    def parse(cls, frames: Sequence[bytes]) -> list[Reply]:
        """Parse a message of one or more replies. Raises `InternalError` if the frames are malformed."""
        if not frames or len(frames) % 3 or any(len(number) != 8 for number in frames[::3]):
            raise InternalError(what=f"malformed reply of {len(frames)} frames on the ZMQ connection")
        return [
            cls(int.from_bytes(number, "little"), outcome.decode(errors="replace"), body)
            for number, outcome, body in zip(frames[::3], frames[1::3], frames[2::3], strict=True)
        ]

    @property
    def error(self) -> DataPlaneError | None:
        """The error of the reply; None if the call succeeded."""
        return None if self.outcome == "ok" else from_wire(self.outcome, self.body)

    def good_body(self) -> bytes:
        """Return the body. Raises the reply's error."""
        error = self.error
        if error is not None:
            raise error
        return self.body
