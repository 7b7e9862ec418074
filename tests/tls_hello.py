"""What a TLS client sends first, as far as ZMQ takes it for a message."""

from __future__ import annotations

HEADER = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
"""A TLS record with a ClientHello, up to the client's random bytes."""


def hello(number: int = 0) -> bytes:
    """A ClientHello whose rest ZMQ takes for a message of two frames, of one byte each. number: of the connection."""
    return HEADER + bytes([number]) * 12 + b"\x02\x01\xc2" + b"\x02\x00\x1b"
