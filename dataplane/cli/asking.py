"""One session with a running service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dataplane.config import DataPlaneConfig
    from dataplane.control.channel import Channel
    from dataplane.ledger import commands as c

R = TypeVar("R", bound="c.Result")


@contextlib.contextmanager
def session(config: DataPlaneConfig) -> Iterator[Channel]:
    """Open to the service at `config.address`; raises as `Channel.open`."""
    from dataplane.control.channel import Channel

    channel = Channel.open(config)
    try:
        yield channel
    finally:
        channel.close()


def ask(channel: Channel, command: c.Command, kind: type[R]) -> R:
    """The answer to a command. Raises the error that it got."""
    _, result = channel.call(command)
    assert isinstance(result, kind)
    return result
