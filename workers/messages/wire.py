"""Messages between two workers: a msgpack header frame per message, then frames of bytes.

A sender's messages go over its connection to the receiver's port; the answers return over the same connection.

    sender                                          receiver
    PostMessage + inline bytes  ----------------->  queued, or matched with a waiting receive
    <-------------  Held                            queued; Settled follows if the sender waits for more
    <-------------  Pull                            a chunk of the values, if they are not in shared memory
    Data + bytes    ------------->
    <-------------  MessageReceived                 taken by a receive
    <-------------  RefusedMessage                  matched with a receive that expected something else
    FailedMessage   ------------->                  the sender cannot send the values

Tensors on a device may travel by its collectives (see `workers.messages.transfers`).

Values of a broadcast to many receivers may be pulled from another receiver (see `workers.messages.relays`):

    receiver                                        receiver that forwards (relay)
    WantMessage  ------------------------------>
    <-------------  Data + bytes, or Absent

The bytes of a message are those of its tensors, then a pickle of the other values, the skeleton. Workers trust each
other, as the workers of any Ray job do.
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
    """A message of `send` for `recv`. piggyback: a payload is attached."""

    piggyback: bool = False

    def __str__(self) -> str:
        return "an object (with send, for recv)"


class TensorForm(msgspec.Struct, frozen=True, tag="tensor"):
    """A message of `send_tensor` for `recv_tensor`."""

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
    """Anonymous shared memory of a process, identified by `inode`. host empty: not mappable by other processes."""

    host: str
    pid: int
    fd: int
    inode: int
    nbytes: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A device. device: its name in its process, such as "cpu"; uuid: the same in all processes for one device, empty
    if it is not known and for the CPU."""

    device: str
    uuid: str


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """A receiver that forwards values. depth: number of receivers on the way from the source, including this one."""

    worker: str
    incarnation: int
    endpoint: str
    depth: Annotated[int, msgspec.Meta(gt=0)]


class PostMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message, whose bytes are in the last frame if `slab` is None. With an `offer` that frame has only the skeleton.

    stream: empty between a pair, otherwise the name of the broadcast group; number: of this message from this sender
    in this stream to this receiver; serial: of its values, the same for all receivers of a broadcast; receiver: its
    incarnation, because another process may have its port by now; settling: the sender waits for more than Held;
    relay: the receiver to pull from, None for the sender; passes_on: others may pull from this receiver; offer: the
    device from which the tensors may travel by its collectives.
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
    offer: Place | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the layout names bytes beyond those of the message, or if the slab is too small."""
        self.layout.check()
        if self.slab is not None and self.slab.nbytes < self.nbytes:
            raise ValueError(
                f"message header: {self.nbytes:,} bytes of values do not fit in the shared buffer of "
                f"{self.slab.nbytes:,} bytes that {self.source} named (a defect of the sender; please report it)"
            )

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


class Held(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The message is queued. kept: its bytes no longer depend on the sender; busy: the receiver waits for something
    else. Sent again once kept becomes true, if the receive that pulled the bytes gave up."""

    stream: bytes
    number: int
    kept: bool
    busy: bool


class Settled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The receiver began to wait for another operation, so its answer may take long."""

    stream: bytes
    number: int


class MessageReceived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A receive took the message, or no receive will: the sender may reuse its memory."""

    stream: bytes
    number: int


class RefusedMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The message was dropped. error, facts: the name of one of this package's errors and its keyword arguments."""

    stream: bytes
    number: int
    error: str
    facts: dict[str, Any]


class Pull(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request `nbytes` of the message's values, from offset `start` on. Answered by Data."""

    stream: bytes
    number: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Data(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The bytes for a Pull or a WantMessage follow in a frame. source: whose values they are; incarnation, receiver:
    of both ends, as in the PostMessage, because a broken connection may still deliver those of an earlier message
    with that number."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    start: Annotated[int, msgspec.Meta(ge=0)]


class ForgetMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """These slabs are closed: unmap them."""

    inodes: tuple[int, ...]


class WantMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request to a relay. source, incarnation, serial: identify the values; stream, number: of the requester's
    message; asker, receiver: the incarnations of the requester and of the relay."""

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
    """Answer to a WantMessage: this receiver does not forward these values."""

    source: str
    stream: bytes
    number: int


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A receive took a message with an offer. place: the device on which it receives."""

    stream: bytes
    number: int
    place: Place


class WantHost(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send the values of a message with an offer through host memory. group: the process group that failed, if any."""

    stream: bytes
    number: int
    group: str
    why: str


class Transfer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Ready: take part in a broadcast of a process group. store: address at which its members meet; device:
    on which the receiver receives; source, incarnation, receiver: as in Data."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    group: str
    store: str
    rank: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=1)]
    device: str
    options: CollectiveGroupOptions
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class SharedMemory(msgspec.Struct, frozen=True, array_like=True):
    """How another process opens the memory of a tensor. The fields are those of torch's `_share_cuda_`: the allocation
    and the tensor's place in it; the counter by which torch in the owner's process learns that the other process has
    closed it; and the event after which the values are there."""

    handle: bytes
    nbytes: int
    offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_needed: bool


class SharedValues(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Ready of a receiver on the sender's device: copy the values from this memory. device: on which the
    receiver receives; source, incarnation, receiver: as in Data."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    device: str
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    memory: SharedMemory


class HostValues(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The values of a message with an offer are in this slab now; source, incarnation, receiver: as in Data."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    slab: Slab


class FailedMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The sender has failed the message: its values will not arrive. source, incarnation, receiver: as in Data; error,
    facts: as in RefusedMessage."""

    stream: bytes
    number: int
    source: str
    incarnation: int
    receiver: int
    error: str
    facts: dict[str, Any]


class EndGroup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A process group failed: end it."""

    source: str
    incarnation: int
    receiver: int
    group: str


Request = (
    PostMessage | Data | ForgetMessage | WantMessage | Transfer | SharedValues | HostValues | FailedMessage | EndGroup
)
Answer = Held | Settled | MessageReceived | RefusedMessage | Pull | Data | Absent | Ready | WantHost
ForSender = Held | Settled | MessageReceived | RefusedMessage | Pull | Ready | WantHost
"""Messages about one that this worker sent."""
ForReceiver = Absent | Data | FailedMessage | HostValues | SharedValues | Transfer
"""Messages about one that this worker receives."""
FOLLOWED = (PostMessage, Data)
"""A frame of bytes follows the header of these messages."""

decode_request: Callable[[Any], Request] = decoder(Request)
decode_answer: Callable[[Any], Answer] = decoder(Answer)


def incarnations(message: PostMessage | Data | Transfer | SharedValues | HostValues | FailedMessage) -> tuple[int, int]:
    """Return the incarnations of the source and of the receiver."""
    return message.incarnation, message.receiver


def refused(post: PostMessage, error: DataPlaneError) -> RefusedMessage:
    return RefusedMessage(stream=post.stream, number=post.number, **carried(error))
