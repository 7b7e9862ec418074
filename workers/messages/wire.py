"""Messages between two workers: a msgpack header frame per message, then frames of bytes.

A sender's messages go over its connection to the receiver's port; the answers return over the same connection.

    sender                                          receiver
    PostMessage + inline bytes  ----------------->  queued, or matched with a waiting receive
    <-------------  Held                            queued
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

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
import numpy as np

from dataplane.errors import DataPlaneError
from workers.transport.encoding import carried, decoder
from workers.transport.pickling import Layout


@dataclass(frozen=True)
class CollectiveGroupOptions:
    """Settings of the process groups that carry tensors on an accelerator. They have no effect on other messages.

    accel_cluster_size, accel_max_ctas, accel_min_ctas: cluster size (`cga_cluster_size`), maximum and minimum number of
    blocks of `ProcessGroupNCCL.Options.config`; is_high_priority_stream: the same of `ProcessGroupNCCL.Options`. None
    means the backend's default. A backend that does not have a setting ignores it. use_ring_broadcast: RLinf's choice
    between two broadcast algorithms; here the backend chooses, so this has no effect. The options that two workers of a
    pair or of a broadcast pass at first contact are compared; `GroupOptionsError` is raised if they differ. Later
    options are ignored.

    TypeError for a number that is not an integer and for a flag that is not a bool, ValueError for a negative number.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):  # those whose default is a bool are flags, the others numbers
            value = getattr(self, each.name)
            plain = _flag(each.name, value) if isinstance(each.default, bool) else _count(each.name, value)
            object.__setattr__(self, each.name, plain)  # plain assignment fails, because this class is frozen


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


class DeviceId(msgspec.Struct, frozen=True, array_like=True):
    """A device. device: its name in its process, such as "cpu"; uuid: the same in all processes for one device, empty
    if it is not known and for the CPU; process: identifies the process, empty for the CPU."""

    device: str
    uuid: str
    process: str = ""


class Relay(msgspec.Struct, frozen=True, array_like=True):
    """A receiver that forwards values. depth: number of receivers on the way from the source, including this one."""

    worker: str
    incarnation: int
    endpoint: str
    depth: Annotated[int, msgspec.Meta(gt=0)]


class PostMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message, whose bytes are in the last frame if `slab` is None. With an `offer` that frame has only the skeleton.

    stream: empty between a pair, otherwise the name of the broadcast group; sequence: number of
    this message from this sender in this stream to this receiver; serial: of its values, the same
    for all receivers of a broadcast; receiver: its incarnation, because another process may have
    its port by now; relay: the receiver to pull from, None for the sender; passes_on: others may
    pull from this receiver; offer: the device from which the tensors may travel by its
    collectives.
    """

    stream: bytes
    sequence: int
    source: str
    incarnation: int
    receiver: int
    form: Form
    options: CollectiveGroupOptions
    layout: Layout
    slab: Slab | None
    serial: int
    relay: Relay | None
    passes_on: bool
    offer: DeviceId | None = None

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
    """The message is queued. kept: its bytes no longer depend on the sender. Sent again once kept becomes true, if the
    receive that pulled the bytes gave up."""

    stream: bytes
    sequence: int
    kept: bool


class MessageReceived(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A receive took the message, or no receive will: the sender may reuse its memory."""

    stream: bytes
    sequence: int


class RefusedMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The message was dropped. error, facts: the name of one of this package's errors and its keyword arguments."""

    stream: bytes
    sequence: int
    error: str
    facts: dict[str, Any]


class Pull(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request `nbytes` of the message's values, from offset `start` on. Answered by Data."""

    stream: bytes
    sequence: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Data(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The bytes for a Pull or a WantMessage follow in a frame. source: whose values they are; incarnation, receiver:
    of both ends, as in the PostMessage, because a broken connection may still deliver those of an earlier message
    with that sequence number."""

    stream: bytes
    sequence: int
    source: str
    incarnation: int
    receiver: int
    start: Annotated[int, msgspec.Meta(ge=0)]


class ForgetMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """These slabs are closed: unmap them."""

    inodes: tuple[int, ...]


class WantMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request to a relay. source, incarnation, serial: identify the values; stream, sequence: of the requester's
    message; asker, receiver: the incarnations of the requester and of the relay."""

    source: str
    incarnation: int
    serial: int
    stream: bytes
    sequence: int
    asker: int
    receiver: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(gt=0)]


class Absent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to a WantMessage: this receiver does not forward these values."""

    source: str
    stream: bytes
    sequence: int


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A receive took a message with an offer. device_id: where it receives, None if it has no such device:
    the values are sent through host memory."""

    stream: bytes
    sequence: int
    device_id: DeviceId | None


class Transfer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Ready: take part in a broadcast of a process group. store: address at which its members meet; device:
    on which the receiver receives; source, incarnation, receiver: as in Data."""

    stream: bytes
    sequence: int
    source: str
    incarnation: int
    receiver: int
    collective: str
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
    sequence: int
    source: str
    incarnation: int
    receiver: int
    device: str
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    memory: SharedMemory


class HostValues(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The values of a message with an offer are in this slab now; source, incarnation, receiver: as in Data."""

    stream: bytes
    sequence: int
    source: str
    incarnation: int
    receiver: int
    slab: Slab


class FailedMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The sender has failed the message: its values will not arrive. source, incarnation, receiver: as in Data; error,
    facts: as in RefusedMessage."""

    stream: bytes
    sequence: int
    source: str
    incarnation: int
    receiver: int
    error: str
    facts: dict[str, Any]


Request = PostMessage | Data | ForgetMessage | WantMessage | Transfer | SharedValues | HostValues | FailedMessage
Answer = Held | MessageReceived | RefusedMessage | Pull | Data | Absent | Ready
ForSender = Held | MessageReceived | RefusedMessage | Pull | Ready
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


def checked(options: object) -> CollectiveGroupOptions | None:
    """Return `options` if they are a `CollectiveGroupOptions` or None. TypeError for anything else."""
    if options is None or isinstance(options, CollectiveGroupOptions):
        return options
    raise TypeError(f"options={options!r}: expected a CollectiveGroupOptions or None, got {type(options).__name__}")


def _count(name: str, value: Any) -> int | None:
    """Return an integer of any type as an int, and None as None. TypeError for other values and bools, ValueError for
    negative integers."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int or None, got {type(value).__name__}")
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{name}={count}: expected 0 or more, or None")
    return count


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r}: expected a bool, got {type(value).__name__}")


def refused(post: PostMessage, error: DataPlaneError) -> RefusedMessage:
    return RefusedMessage(stream=post.stream, sequence=post.sequence, **carried(error))
