"""The items of a queue in short, for people."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.core.buffer_pool import BufferPool
from dataplane.errors import ServiceError, WaitTimeoutError
from workers.channels import items, wire
from workers.channels.errors import ChannelClosedError
from workers.channels.wire import NOWHERE

SHOWN_ITEMS = 20
SHOWN_CHARS = 200
"""Of each item."""
SHOW_S = 5.0
"""How long a broker may take to say what it has."""
CANNOT_SHOW = (ServiceError, WaitTimeoutError, ChannelClosedError)
"""Why a broker does not say so."""


def shown(peeked: Any, local: bool) -> str:
    """What a broker, or a channel within this process, answered to `Peek`: as a list, with how many
    more there are. local: the items are objects of this process."""
    assert isinstance(peeked, wire.Peeked), peeked
    parts = [_short(_text(item, local)) for item in peeked.items]
    more = peeked.size - len(parts)
    return f"[{', '.join([*parts, f'... {more} more'] if more > 0 else parts)}]"


def _text(item: wire.Item, local: bool) -> str:
    try:
        if local:
            return repr(item.head)
        if item.space != NOWHERE:
            return items.outline(item.head)
        memory = np.frombuffer(bytearray(item.body), np.uint8)
        return repr(items.unpack(item.head, memory, BufferPool(0), own=True).load())
    except Exception as error:  # of the item's own code
        return f"<cannot be shown: {type(error).__name__}: {error}>"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 3]}..."
