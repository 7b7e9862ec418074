"""Items on their way: a head, which tells how to build the value, and bytes."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import NamedTuple

import msgspec
import numpy as np

from dataplane.core.buffer_pool import BufferPool
from workers.channels import wire
from workers.transport import pickling
from workers.transport.encoding import encode
from workers.transport.pickling import Bytes, Layout, Packed, Unpacked

CARRIED_BYTES = 16 << 10
"""Items up to this size travel within their message: cheaper than a space."""

OUTLINED = 4
"""So many tensors of an item are named."""

_layouts: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def as_weight(what: str, value: object) -> float:
    """`value` as one; ValueError if it is none."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf:
            return float(value)
    raise ValueError(f"{what} is {value!r}; it is a number, 0 or more and finite")


class Parcel(NamedTuple):
    """A value ready to go. nbytes: of all its bytes. own: they are here, and nobody else's; else they are still the
    value's own, and are what they are at `write`, `runs` or `item`."""

    head: bytes
    nbytes: int
    packed: Packed
    own: Bytes | None = None

    @classmethod
    def of(cls, value: object, what: str) -> Parcel:
        """`NotSerializableError` naming `what`."""
        packed = pickling.pack(value, what)
        return cls(encode(packed.layout), packed.nbytes, packed)

    @property
    def carried(self) -> bool:
        return self.nbytes <= CARRIED_BYTES

    def item(self, space: int) -> wire.Item:
        """`space` is not looked at where the item is carried."""
        if self.carried:
            return wire.Item(self.head, b"".join(self.runs()))
        return wire.Item(self.head, b"", space, self.nbytes)

    def write(self, target: Bytes) -> None:
        """All its bytes into `target`, as many."""
        if self.own is None:
            self.packed.write(target)
        else:
            np.copyto(target, self.own)

    def runs(self) -> list[memoryview]:
        """All its bytes as buffers that follow each other."""
        return self.packed.runs() if self.own is None else [self.own.data]

    def kept(self, warm: BufferPool) -> Parcel:
        """The same with bytes of its own, that nobody changes."""
        own = pickling.fresh(self.nbytes, warm)
        self.write(own)
        return self._replace(packed=pickling.NOTHING, own=own)


def outline(head: bytes) -> str:
    """What is known of an item without its bytes: its tensors and its size."""
    layout = _layouts.decode(head)
    tensors = [f"{each.dtype.removeprefix('torch.')} {list(each.shape)}" for each in layout.segments if each.dtype]
    return f"<{', '.join([*tensors[:OUTLINED], f'{layout.nbytes:,} bytes'])}>"


def unpack(head: bytes, memory: Bytes, warm: BufferPool, *, own: bool) -> Unpacked:
    """An item's values, of all its bytes. own: see `pickling.unpack`."""
    return pickling.unpack(_layouts.decode(head), memory, warm, own=own)
