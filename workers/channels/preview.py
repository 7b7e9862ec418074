"""A short text of a queue's items."""

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
"""Most characters for each item."""
SHOW_S = 5.0
"""How long a broker may take to answer."""
CANNOT_SHOW = (ServiceError, WaitTimeoutError, ChannelClosedError)
"""Errors of a request for the items."""


def format_items(peeked: Any, local: bool) -> str:
    """Format the answer to `Peek` as a list, with the number of the other items. local: the items are objects of this
    process."""
    assert isinstance(peeked, wire.Peeked), peeked
    texts = [_shortened(_format_item(item, local)) for item in peeked.items]
    more = peeked.size - len(texts)
    if more > 0:
        texts.append(f"... {more} more")
    return f"[{', '.join(texts)}]"


def _format_item(item: wire.Item, local: bool) -> str:
    """Return the repr of an item; of an item in the broker's memory only its tensors and size."""
    try:
        if local:
            return repr(item.head)
        if item.space != NOWHERE:
            return items.outline(item.head)
        memory = np.frombuffer(bytearray(item.body), np.uint8)  # a small item: its bytes came with the answer
        return repr(items.unpack(item.head, memory, BufferPool(0), own=True).load())
    except Exception as error:  # raised by the item's own code
        return f"<cannot be shown: {type(error).__name__}: {error}>"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 3]}..."
