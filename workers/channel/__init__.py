"""Queues between workers, and the broker that holds their items. Names are loaded when first used, so that the
broker's process never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.channel.broker import ChannelBroker as ChannelBroker
    from workers.channel.channel import DEFAULT_KEY as DEFAULT_KEY
    from workers.channel.channel import Channel as Channel
    from workers.channel.errors import ChannelClosedError as ChannelClosedError
    from workers.channel.errors import ChannelLostError as ChannelLostError
    from workers.channel.errors import ChannelSettingsError as ChannelSettingsError
    from workers.channel.errors import ChannelTimeoutError as ChannelTimeoutError
    from workers.channel.errors import EndOfChannelError as EndOfChannelError
    from workers.channel.errors import ItemTooLargeError as ItemTooLargeError
    from workers.channel.errors import LocalChannelError as LocalChannelError
    from workers.channel.hosting import start_brokers as start_brokers

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
    "start_brokers": "hosting",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
