"""What two workers say to each other: a msgpack header frame per message, then frames of bytes.

A sender's messages go over its connection to the receiver's port; the answers come back over the same.

    sender                                          receiver
    Post + inline bytes  ------------------------>  queued, or met by a receive that waits
    <-------------  Held                            queued; Settled follows where the sender waits for more
    <-------------  Pull                            a part of the values, where they are not in memory both can see
    Data + bytes    ------------->
    <-------------  Done or Refused                 taken, or met by a receive that expected something else

Values of a broadcast to many may be pulled from another receiver (see `workers.messages.relays`):

    receiver                                        receiver that passes on
    Want  ------------------------------------->
    <-------------  Data + bytes, or Absent

The bytes of a message are those of its tensors, then a pickle of the rest, the skeleton. Workers trust each other as
those of one Ray job do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from dataplane.errors import DataPlaneError
from workers.messages.options import CollectiveGroupOptions
from workers.transport.encoding import carried, decoder
from workers.transport.pickling import Layout


class ObjectForm(msgspec.Struct, frozen=True, tag="object"):
    """What `send` sends and `recv` takes. piggyback: a payload came along."""

    piggyback: bool = False

    def __str__(self) -> str:
        return "an object (with send, for recv)"


class TensorForm(msgspec.Struct, frozen=True, tag="tensor"):
    """What `send_tensor` sends and `recv_tensor` takes."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"a tensor of {self.dtype} {list(self.shape)} (with send_tensor, for recv_tensor)"


class FaultForm(msgspec.Struct, frozen=True, tag="fault"):
    """The source of a broadcast failed before it could send."""

    why: str

    def __str__(self) -> str:
        return "a failure"


Form = ObjectForm | TensorForm | FaultForm


class Slab(msgspec.Struct, frozen=True, array_like=True):
    """Anonymous shared memory of a process of this host, or another's: `inode` tells it from any other. host empty: of
    that process only."""

    host: str
    pid: int
    fd: int
    inode: int
    nbytes: int


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """A receiver that passes values on. depth: through how many receivers they come, this one included."""

    worker: str
    incarnation: int
    endpoint: str
    depth: Annotated[int, msgspec.Meta(gt=0)]


class PostMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message, whose bytes are in the last frame where `slab` is None.

    stream: empty between a pair, else names the broadcast group; number: of this message, of this sender in this
    stream to this receiver; serial: of its values, the same for all receivers of a broadcast; receiver: its
    incarnation, as another may have its port by now; settling: the sender waits for more than Held; relay: whom to
    pull from, None for the sender; passes_on: others may pull from this receiver.
    """

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    form: Form
    options: CollectiveGroupOptions
    layout: Layout
    slab: Slab | None
    settling: bool
    serial: int
    relay: Relay | None
    passes_on: bool

    def __post_init__(self) -> None:
        """ValueError for values that are not among the bytes of the message."""
        self.layout.check()
        if self.slab is not None and self.slab.nbytes < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes in a slab of {self.slab.nbytes}")

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


class Held(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """It is queued. kept: its bytes will outlive the sender; busy: the receiver waits for something else. Said again
    once they do, where they had to be pulled and the receive that pulled them gave up."""

    stream: bytes
    number: int
    kept: bool
    busy: bool


class Settled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The receiver began to wait for something else; no answer may come soon."""

    stream: bytes
    number: int


class MessageReceived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    stream: bytes
    number: int


class RefusedMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The message was dropped. error, facts: the name of one of this package's errors and its keywords."""

    stream: bytes
    number: int
    error: str
    facts: dict[str, Any]


class Pull(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    stream: bytes
    number: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Data(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The bytes of a Pull or a Want follow in a frame. source: whose they are; incarnation, receiver: of both ends, as
    in the Post; a connection that was cut may bring those of an earlier message of that number."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    start: Annotated[int, msgspec.Meta(ge=0)]


class ForgetMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """These slabs are used no more: give their mappings back."""

    inodes: tuple[int, ...]


class WantMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a receiver that passes on. source, incarnation, serial: whose values; stream, number: of the message they are
    for, at the one that asks; asker, receiver: the incarnations of the one that asks and the one that is asked."""

    source: str
    incarnation: int
    serial: int
    stream: bytes
    number: int
    asker: int
    receiver: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Absent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a Want: these values are not passed on here, or no longer."""

    source: str
    stream: bytes
    number: int


Request = PostMessage | Data | ForgetMessage | WantMessage
Answer = Held | Settled | MessageReceived | RefusedMessage | Pull | Data | Absent
FOLLOWED = (PostMessage, Data)
"""A frame of bytes follows the head of these."""

decode_request: Callable[[Any], Request] = decoder(Request)
decode_answer: Callable[[Any], Answer] = decoder(Answer)


def refused(post: PostMessage, error: DataPlaneError) -> RefusedMessage:
    return RefusedMessage(stream=post.stream, number=post.number, **carried(error))
