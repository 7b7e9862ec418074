"""Messages between a broker and its clients.

The body of a message (see `workers.transport.framing`) is the msgpack of a tagged struct. Its payload is the bytes of
items, for clients that cannot map the broker's arena. Clients give their requests ids; an answer carries the id of
its request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from workers.transport import encoding
from workers.transport.encoding import decoder
from workers.transport.framing import framed

VERSION = 5
NOWHERE = -1
"""In place of the offset of a space: there is none."""


class Item(msgspec.Struct, array_like=True):
    """An item as it is stored.

    head: how to build the item from its bytes; in a local channel the object itself. The bytes are in `body`, or, if
    `space` is not `NOWHERE`, at offset `space` of the arena with length `nbytes`.
    """

    head: Any
    body: bytes = b""
    space: int = NOWHERE
    nbytes: int = 0


class BrokerRequest(msgspec.Struct, array_like=True):
    """request_id: chosen by the client; the answer carries it."""

    request_id: int


class OpenBroker(BrokerRequest, tag=1):
    """The first request of a client. local: the client requests to map the arena."""

    version: int
    token: str
    local: bool


class Create(BrokerRequest, tag=2):
    """Create a channel, or do nothing if it exists; answered by BrokerDone. `channel` is unique and never reused."""

    channel: str
    name: str
    maxsize: int


class RouteKey(BrokerRequest, tag=3):
    """Ask which replica (the index of a part of the channel) stores `key`; a new key gets the replica `wish`. Clients
    ask the first replica, then the replica that stores the key, which thereby learns of it."""

    channel: str
    key: bytes
    wish: int


class Reserve(BrokerRequest, tag=4):
    """Reserve space for the bytes of an item for a queue. Waits behind earlier requests of that queue unless
    `nowait`."""

    channel: str
    key: bytes
    nbytes: int
    nowait: bool


class ReleaseSpace(BrokerRequest, tag=5):
    """Release unused reserved space. Not answered."""

    space: int


class Put(BrokerRequest, tag=6):
    """Put an item into a queue. Waits for a free place unless `nowait`. preallocate_bytes: space to reserve for the
    client's next put, if there is plenty of memory; 0 for none."""

    channel: str
    key: bytes
    item: Item
    weight: float
    nowait: bool
    preallocate_bytes: int = 0


class Get(BrokerRequest, tag=7):
    """target None: one item; otherwise a batch of that weight. Waits unless `nowait`."""

    channel: str
    key: bytes
    target: float | None
    nowait: bool


class AckItems(BrokerRequest, tag=8):
    """Acknowledge the items that request `request_id` received. Answered by BrokerDone only with `confirm`: over a
    network the acknowledgement may not reach the broker, which then gives the items to the next getter."""

    confirm: bool = False


class NackItems(BrokerRequest, tag=9):
    """Return the items that request `request_id` received to their places, except those at the positions `lost`, which
    the getter cannot load and which are removed. Not answered."""

    lost: tuple[int, ...] = ()


class Cancel(BrokerRequest, tag=10):
    """Cancel request `request_id`. If it still waits, its answer is Cancelled; otherwise it was already answered."""


class Count(BrokerRequest, tag=11):
    """Ask for the counts of a queue. Answered by Counted."""

    channel: str
    key: bytes


class Close(BrokerRequest, tag=12):
    """Close a channel for all clients. Answered by BrokerDone."""

    channel: str


class Peek(BrokerRequest, tag=13):
    """Show the first `most` items of a queue, which stay there."""

    channel: str
    key: bytes
    most: int


class BrokerReply(msgspec.Struct, array_like=True):
    """request_id: of the request."""

    request_id: int


class Welcome(BrokerReply, tag=1):
    """arena_bytes: bytes to map of the descriptor sent along; 0 if none is sent. data_from: where offset 0 of the
    spaces is in them."""

    capacity_bytes: int
    arena_bytes: int
    data_from: int


class BrokerDone(BrokerReply, tag=2):
    """space: preallocated for the next put, as it requested."""

    space: int = NOWHERE


class ItemSpace(BrokerReply, tag=3):
    """The answer to Reserve: the offset of the reserved space in the arena."""

    space: int


class Items(BrokerReply, tag=4):
    """The answer to Get. The items are leased to the client until it acknowledges or returns them."""

    items: list[Item]


class Full(BrokerReply, tag=5):
    """Answer under `nowait`: the queue or the memory is full."""


class Empty(BrokerReply, tag=6):
    """Answer under `nowait`: the queue has no item."""


class Ended(BrokerReply, tag=7):
    """The channel is closed and the queue has no more items."""


class Closed(BrokerReply, tag=8):
    """The channel accepts no more items."""


class Cancelled(BrokerReply, tag=9):
    """The answer to a request that Cancel has cancelled. It had no effect."""


class Counted(BrokerReply, tag=10):
    """puts, gets: numbers of waiting requests (puts also for memory); leased: number of received items without an
    acknowledgement; routed: this part of a distributed channel stores the key, with or without items."""

    size: int
    maxsize: int
    puts: int
    gets: int
    leased: int
    routed: bool


class Routed(BrokerReply, tag=11):
    """The answer to RouteKey: the index of the replica that stores the key."""

    replica: int


class TooLarge(BrokerReply, tag=12):
    """The item exceeds the capacity of the memory."""

    limit_bytes: int


class Rejected(BrokerReply, tag=13):
    """The answer to OpenBroker of a client that the broker does not accept."""

    why: str


class Peeked(BrokerReply, tag=14):
    """size: number of items in the queue. Do not read the bytes of items in the arena: another client may take these
    items at any time."""

    size: int
    items: list[Item]


AnyRequest = (
    OpenBroker
    | Create
    | RouteKey
    | Reserve
    | ReleaseSpace
    | Put
    | Get
    | AckItems
    | NackItems
    | Cancel
    | Count
    | Close
    | Peek
)
AnyAnswer = (
    Welcome
    | BrokerDone
    | ItemSpace
    | Items
    | Full
    | Empty
    | Ended
    | Closed
    | Cancelled
    | Counted
    | Routed
    | TooLarge
    | Rejected
    | Peeked
)

decode_request: Callable[[Any], AnyRequest] = decoder(AnyRequest)
decode_answer: Callable[[Any], AnyAnswer] = decoder(AnyAnswer)


def encode(message: AnyRequest | AnyAnswer, payload_bytes: int = 0) -> bytes:
    """Return header and body."""
    return framed(encoding.encode(message), payload_bytes)
