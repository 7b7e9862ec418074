"""Encoding and decoding of the ZMQ server's frames (see proto/control.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.errors import DataPlaneError, InternalError, RequestTooLargeError, from_wire, to_wire
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


def request(item: c.Input) -> list[bytes]:
    """Return the frames of a command, OpenSession, Heartbeat or DropUnit: the method, then the body, in several frames
    if it is long. Raises `RequestTooLargeError`."""
    method, body = codec.encode(item)
    check_size(body, f"a {method} command")
    if len(body) <= REQUEST_FRAME_BYTES:
        return [method.encode(), body]
    starts = range(0, len(body), REQUEST_FRAME_BYTES)
    return [method.encode(), *(body[start : start + REQUEST_FRAME_BYTES] for start in starts)]


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
    def parse(cls, frames: Sequence[bytes]) -> Reply:
        """Parse a reply. Raises `InternalError` if the frames are malformed."""
        if len(frames) != 3 or len(frames[0]) != 8:
            raise InternalError(what=f"malformed reply of {len(frames)} frames on the ZMQ connection")
        return cls(int.from_bytes(frames[0], "little"), frames[1].decode(errors="replace"), frames[2])

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
