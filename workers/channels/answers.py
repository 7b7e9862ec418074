"""Errors for the answers of a broker that are not results."""

from __future__ import annotations

import asyncio
from typing import Any

from workers.channels import wire
from workers.channels.errors import ChannelClosedError, EndOfChannelError, ItemTooLargeError


def error_of(answer: Any, channel: str, key: Any) -> Exception:
    """Return the error for the answer to a put or get under `key`."""
    match answer:
        case wire.Full():
            return asyncio.QueueFull(f"channel {channel!r} has no free place under key {key!r}")
        case wire.Empty():
            return asyncio.QueueEmpty(f"channel {channel!r} has no item under key {key!r}")
        case wire.Ended():
            return EndOfChannelError(channel=channel, key=repr(key))
        case wire.Closed():
            return ChannelClosedError(channel=channel)
        case wire.TooLarge(limit_bytes=limit):
            return ItemTooLargeError(channel=channel, limit_bytes=limit)
    return RuntimeError(f"channel {channel!r}: unexpected answer {answer!r} from its broker")
