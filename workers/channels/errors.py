"""What goes wrong with channels, as errors; those that other parts of `workers` raise too are in `workers.errors`.

DataPlaneError
├── BadRequestError (ValueError)
│   ├── ChannelClosedError          a put into a closed channel; a call on a handle that let go
│   ├── EndOfChannelError           a get from a closed channel that has nothing left
│   ├── ChannelSettingsError        the name exists with other settings
│   ├── ItemTooLargeError           more bytes than the channel's memory has
│   └── LocalChannelError           a channel within a process was asked for elsewhere
├── WaitTimeoutError (TimeoutError)
│   └── ChannelTimeoutError         not in time: no item, no place, no memory
└── ServiceError (ConnectionError)
    └── ChannelLostError            its broker's process died or cannot be reached
"""

from __future__ import annotations

from dataplane.errors import BadRequestError, ServiceError, WaitTimeoutError


class ChannelClosedError(BadRequestError):
    def __init__(self, *, channel: str, why: str = "it takes no more items") -> None:
        super().__init__(f"channel {channel!r} is closed: {why}", channel=channel, why=why)


class EndOfChannelError(BadRequestError):
    """The end of the stream: every item was taken."""

    def __init__(self, *, channel: str, key: str) -> None:
        super().__init__(
            f"channel {channel!r} was closed and has no item left under key {key}", channel=channel, key=key
        )


class ChannelSettingsError(BadRequestError):
    def __init__(self, *, channel: str, got: str, expected: str) -> None:
        super().__init__(
            f"channel {channel!r} exists with {expected}, not {got}; connect to it, close it, or take another name",
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
            f"channel {channel!r} is local: it is in the process that created it, and no other can have it",
            channel=channel,
        )


class ChannelTimeoutError(WaitTimeoutError):
    """what: the call and what it waited for."""

    def __init__(self, *, what: str, waited_s: float) -> None:
        super().__init__(f"{what}: not within {waited_s:.1f} s; nothing was taken or put", what=what, waited_s=waited_s)


class ChannelLostError(ServiceError):
    def __init__(self, *, what: str, broker: str, why: str) -> None:
        super().__init__(
            f"{what}: the broker of the channel at {broker} is gone ({why}), and what the channel held with it",
            what=what,
            broker=broker,
            why=why,
        )
