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


class ChannelClosedError(BadRequestError):
    def __init__(self, *, channel: str, why: str = "it accepts no more items") -> None:
        super().__init__(f"channel {channel!r} is closed: {why}", channel=channel, why=why)


def disconnected(channel: str) -> ChannelClosedError:
    """Return the error for a call on a disconnected handle."""
    return ChannelClosedError(channel=channel, why="this handle was disconnected; connect to the channel again")


class EndOfChannelError(BadRequestError):
    """The channel is closed and all of its items were taken."""

    def __init__(self, *, channel: str, key: str) -> None:
        super().__init__(
            f"channel {channel!r} was closed, and no item is left under key {key}; no further item will come",
            channel=channel,
            key=key,
        )


class ChannelSettingsError(BadRequestError):
    def __init__(self, *, channel: str, got: str, expected: str) -> None:
        super().__init__(
            f"channel {channel!r} exists with other settings: {expected}, not {got}; connect to it, close it first, "
            "or use another name",
            channel=channel,
            got=got,
            expected=expected,
        )


class ItemTooLargeError(BadRequestError):
    def __init__(self, *, channel: str, limit_bytes: int) -> None:
        super().__init__(
            f"an item is too large for channel {channel!r}: its broker has memory for {limit_bytes:,} bytes. Put "
            "smaller items, or give the broker's machine a larger /dev/shm.",
            channel=channel,
            limit_bytes=limit_bytes,
        )


class LocalChannelError(BadRequestError):
    def __init__(self, *, channel: str) -> None:
        super().__init__(
            f"channel {channel!r} is local to the process that created it and cannot be sent to another process; "
            "create it without local=True",
            channel=channel,
        )


class ChannelTimeoutError(WaitTimeoutError):
    """what: the call and the channel."""

    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(
            f"{what}: timed out after {waited_s:.1f} s; no item was taken or put. Check that the other end runs, or "
            "wait longer.",
            what=what,
            waited_s=waited_s,
        )


class ChannelLostError(ServiceError):
    def __init__(self, *, what: str, broker: str, why: str) -> None:
        super().__init__(
            f"{what}: the process at {broker} that holds the channel's items (its broker) was lost, with these items "
            f"({why}). Create the channel again.",
            what=what,
            broker=broker,
            why=why,
        )
