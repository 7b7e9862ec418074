"""What a channel's broker and its clients say to each other.

The body of a message (see `workers.transport.framing`) is msgpack of a tagged struct, its payload the bytes of items,
for those who cannot map the broker's arena. Clients number their requests; an answer carries the number of its request.
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


class Item(msgspec.Struct, array_like=True):
    """An item as it is stored.

    head: how to build it from its bytes; in a channel within a process the object itself. The bytes are in `body`, or,
    where `space` is not `NOWHERE`, `nbytes` of the arena from there on.
    """

    head: Any
    body: bytes = b""
    space: int = NOWHERE
    nbytes: int = 0


class BrokerRequest(msgspec.Struct, array_like=True):
    number: int


class OpenBroker(BrokerRequest, tag=1):
    """Said first. local: the client would map the arena."""

    version: int
    token: str
    local: bool


class Create(BrokerRequest, tag=2):
    """`channel` is unique for ever; the answer is Done, also when it is there."""

    channel: str
    name: str
    maxsize: int


class RouteKey(BrokerRequest, tag=3):
    """Which replica has `key`: the one that was wished when it was first asked for. Asked of the first replica, then
    of the one that has the key, which so learns it."""

    channel: str
    key: bytes
    wish: int


class Reserve(BrokerRequest, tag=4):
    """Space for the bytes of an item that is to go to a queue, waited for behind others' of that queue unless
    `nowait`."""

    channel: str
    key: bytes
    nbytes: int
    nowait: bool


class ReleaseSpace(BrokerRequest, tag=5):
    """Give space back that was reserved and not used. Not answered."""

    space: int


class Put(BrokerRequest, tag=6):
    """want: so much space would be of use for the next put, if there is plenty."""

    channel: str
    key: bytes
    item: Item
    weight: float
    nowait: bool
    want: int = 0


class Get(BrokerRequest, tag=7):
    """target None: one item; else a batch of that weight. Waited for unless `nowait`."""

    channel: str
    key: bytes
    target: float | None
    nowait: bool


class AckItems(BrokerRequest, tag=8):
    """The items that `number` got have arrived. Answered by Done under `confirm`, else not: over a network it may not
    reach the broker, which then gives the items to the next getter."""

    confirm: bool = False


class NackItems(BrokerRequest, tag=9):
    """The items that `number` got go back to where they were, but for those at places `lost` of them, which their
    getter cannot load: they are gone. Not answered."""

    lost: tuple[int, ...] = ()


class Cancel(BrokerRequest, tag=10):
    """Give `number` up if it still waits; then it is answered by Cancelled, else by what it was answered already."""


class Count(BrokerRequest, tag=11):
    channel: str
    key: bytes


class Close(BrokerRequest, tag=12):
    channel: str


class Peek(BrokerRequest, tag=13):
    """The first `most` items of a queue, which stay there."""

    channel: str
    key: bytes
    most: int


class BrokerReply(msgspec.Struct, array_like=True):
    number: int


class Welcome(BrokerReply, tag=1):
    """arena_bytes: how much of the descriptor that comes along to map, 0 where none does."""

    capacity_bytes: int
    arena_bytes: int
    data_from: int


class BrokerDone(BrokerReply, tag=2):
    """space: reserved for the next put, as wanted."""

    space: int = NOWHERE


class ItemSpace(BrokerReply, tag=3):
    space: int


class Items(BrokerReply, tag=4):
    items: list[Item]


class Full(BrokerReply, tag=5):
    """Refused under `nowait`: the queue, or the memory, is full."""


class Empty(BrokerReply, tag=6):
    """Refused under `nowait`: there is no item."""


class Ended(BrokerReply, tag=7):
    """The channel is closed and there will be no more items."""


class Closed(BrokerReply, tag=8):
    """The channel takes no more items."""


class Cancelled(BrokerReply, tag=9):
    pass


class Counted(BrokerReply, tag=10):
    """puts, gets: how many wait (puts also for memory); leased: how many items are with those who got them, not
    acknowledged; routed: this part of a distributed channel has the key, with or without items."""

    size: int
    maxsize: int
    puts: int
    gets: int
    leased: int
    routed: bool


class Routed(BrokerReply, tag=11):
    replica: int


class TooLarge(BrokerReply, tag=12):
    """More bytes than there could ever be space for."""

    limit_bytes: int


class Rejected(BrokerReply, tag=13):
    why: str


class Peeked(BrokerReply, tag=14):
    """size: how many the queue has. Of an item whose bytes are in the arena they are not to be read there: another may
    take it at any time."""

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
    """Header and body."""
    return framed(encoding.encode(message), payload_bytes)
