"""Errors of channels. Errors that other parts of `workers` raise too are in `workers.errors`.

DataPlaneError
├── BadRequestError (ValueError)
│   ├── ChannelClosedError          a put into a closed channel, or a call on a disconnected handle
│   ├── EndOfChannelError           a get from a closed channel whose queue is empty
│   ├── ChannelSettingsError        the name exists with other settings
│   ├── ItemTooLargeError           the item is larger than the channel's memory
│   └── LocalChannelError           a local channel was pickled for another process
├── WaitTimeoutError (TimeoutError)
│   └── ChannelTimeoutError         no item, free place or memory in time
└── ServiceError (ConnectionError)
    └── ChannelLostError            the broker's process died or cannot be reached
"""

from __future__ import annotations

from dataplane.errors import BadRequestError, ServiceError, WaitTimeoutError
from workers.errors import DeclaredError, declared


@declared
class ChannelClosedError(DeclaredError, BadRequestError):
    channel: str
    why: str = "it accepts no more items"
    text = "channel {channel!r} is closed: {why}"


def disconnected(channel: str) -> ChannelClosedError:
    """Return the error for a call on a disconnected handle."""
    return ChannelClosedError(channel=channel, why="this handle was disconnected; connect to the channel again")


@declared
class EndOfChannelError(DeclaredError, BadRequestError):
    """The channel is closed and all of its items were taken."""

    channel: str
    key: str
    text = "channel {channel!r} was closed, and no item is left under key {key}; no further item will come"


@declared
class ChannelSettingsError(DeclaredError, BadRequestError):
    channel: str
    got: str
    expected: str
    text = (
        "channel {channel!r} exists with other settings: {expected}, not {got}; connect to it, "
        "close it first, or use another name"
    )


@declared
class ItemTooLargeError(DeclaredError, BadRequestError):
    channel: str
    limit_bytes: int
    text = (
        "an item is too large for channel {channel!r}: its broker has memory for {limit_bytes:,} "
        "bytes. Put smaller items, or give the broker's machine a larger /dev/shm."
    )


@declared
class LocalChannelError(DeclaredError, BadRequestError):
    channel: str
    text = (
        "channel {channel!r} is local to the process that created it and cannot be sent to "
        "another process; create it without local=True"
    )


@declared
class ChannelTimeoutError(DeclaredError, WaitTimeoutError):
    """what: the call and the channel."""

    what: str
    waited_s: float
    text = (
        "{what}: timed out after {waited_s:.1f} s; no item was taken or put. Check that the other"
        " end runs, or wait longer."
    )


@declared
class ChannelLostError(DeclaredError, ServiceError):
    what: str
    broker: str
    why: str
    text = (
        "{what}: the process at {broker} that holds the channel's items (its broker) was lost, "
        "with these items ({why}). Create the channel again."
    )
