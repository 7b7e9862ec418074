"""Channels (queues between workers) and the broker that stores their items. Names are imported on first use, so that
the broker's process never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.channels.broker import ChannelBroker as ChannelBroker
    from workers.channels.broker_actor import start_brokers as start_brokers
    from workers.channels.channel import DEFAULT_KEY as DEFAULT_KEY
    from workers.channels.channel import Channel as Channel
    from workers.channels.errors import ChannelClosedError as ChannelClosedError
    from workers.channels.errors import ChannelLostError as ChannelLostError
    from workers.channels.errors import ChannelSettingsError as ChannelSettingsError
    from workers.channels.errors import ChannelTimeoutError as ChannelTimeoutError
    from workers.channels.errors import EndOfChannelError as EndOfChannelError
    from workers.channels.errors import ItemTooLargeError as ItemTooLargeError
    from workers.channels.errors import LocalChannelError as LocalChannelError

_HOME = {
    "Channel": "channel",
    "ChannelBroker": "broker",
    "ChannelClosedError": "errors",
    "ChannelLostError": "errors",
    "ChannelSettingsError": "errors",
    "ChannelTimeoutError": "errors",
    "DEFAULT_KEY": "channel",
    "EndOfChannelError": "errors",
    "ItemTooLargeError": "errors",
    "LocalChannelError": "errors",
    "start_brokers": "broker_actor",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import an exported name on its first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
