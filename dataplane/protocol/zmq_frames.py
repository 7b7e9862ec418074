"""Frames of the ZMQ server, as its two ends write and read them (see proto/control.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.errors import DataPlaneError, InternalError, RequestTooLargeError, from_wire, to_wire
from dataplane.ledger import commands as c
from dataplane.protocol import codec

OK = b"ok"
MAX_MESSAGE_BYTES = 256 << 20
"""The largest message on either server."""
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 1024
"""The same with what CURVE adds to it."""
REQUEST_FRAME_BYTES = 256 << 10
"""A longer request comes in several frames: of a peer that has not shown its ticket the service holds one at most."""
MAX_REQUEST_FRAME_BYTES = REQUEST_FRAME_BYTES + 1024


def request(item: c.Input) -> list[bytes]:
    """The frames of a command, OpenSession, Heartbeat or DropUnit. Raises `RequestTooLargeError`."""
    method, body = codec.encode(item)
    check_size(body, f"a {method} command")
    if len(body) <= REQUEST_FRAME_BYTES:
        return [method.encode(), body]
    starts = range(0, len(body), REQUEST_FRAME_BYTES)
    return [method.encode(), *(body[at : at + REQUEST_FRAME_BYTES] for at in starts)]


def check_size(body: bytes, what: str) -> None:
    """`RequestTooLargeError` for a message that the other end would drop."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise RequestTooLargeError(wanted_bytes=len(body), limit_bytes=MAX_MESSAGE_BYTES, what=what)


def answer(number: int, body: bytes) -> list[bytes]:
    """The frames of a good answer."""
    return [number.to_bytes(8, "little"), OK, body]


def refusal(number: int, error: DataPlaneError) -> list[bytes]:
    """The frames of an error."""
    name, facts = to_wire(error)
    return [number.to_bytes(8, "little"), name.encode(), facts]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: the number it answers (0: none), and the body, or the error's name and facts."""

    number: int
    outcome: str
    body: bytes

    @classmethod
    def parse(cls, frames: Sequence[bytes]) -> Reply:
        """From frames. `InternalError` if they are none of ours."""
        if len(frames) != 3 or len(frames[0]) != 8:
            raise InternalError(what=f"a reply of {len(frames)} frames that is no reply of the ZMQ server")
        return cls(int.from_bytes(frames[0], "little"), frames[1].decode(errors="replace"), frames[2])

    @property
    def error(self) -> DataPlaneError | None:
        """The error it carries, if any."""
        return None if self.outcome == "ok" else from_wire(self.outcome, self.body)

    def good_body(self) -> bytes:
        """The body; raises the error it carries."""
        error = self.error
        if error is not None:
            raise error
        return self.body
