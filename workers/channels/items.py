"""Items in transit: a head, which describes how to build the value, and bytes."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import NamedTuple

import numpy as np

from dataplane.core.buffer_pool import BufferPool
from workers.channels import wire
from workers.transport import pickling
from workers.transport.encoding import encode
from workers.transport.pickling import Bytes, Packed, Unpacked

CARRIED_BYTES = 16 << 10
"""Items up to this size travel within their message, which is cheaper than a reserved space."""

OUTLINED = 4
"""Most tensors that an outline names."""


def as_weight(what: str, value: object) -> float:
    """Return `value` as a weight. ValueError if it is invalid."""
    with contextlib.suppress(OverflowError):  # of an integer that no float can represent
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf:
            return float(value)
    raise ValueError(f"{what}={value!r}: expected a finite number of 0 or more")


class Parcel(NamedTuple):
    """A packed value. nbytes: of all its bytes. private_copy: a copy of these bytes; None if they are still the
    value's, and are read at `write`, `runs` or `item`."""

    head: bytes
    nbytes: int
    packed: Packed
    private_copy: Bytes | None = None

    @classmethod
    def of(cls, value: object, what: str) -> Parcel:
        """Pack `value`. `NotSerializableError`, which names `what`, if that fails."""
        packed = pickling.pack(value, what)
        return cls(encode(packed.layout), packed.nbytes, packed)

    @property
    def carried(self) -> bool:
        """Whether the bytes travel within the message and need no reserved space."""
        return self.nbytes <= CARRIED_BYTES

    def item(self, space: int) -> wire.Item:
        """Return the item to send. `space` is ignored if the item is carried."""
        if self.carried:
            return wire.Item(self.head, b"".join(self.runs()))
        return wire.Item(self.head, b"", space, self.nbytes)

    def write(self, target: Bytes) -> None:
        """Copy all bytes into `target`, which has the same length."""
        if self.private_copy is None:
            self.packed.write(target)
        else:
            np.copyto(target, self.private_copy)

    def runs(self) -> list[memoryview]:
        """Return all bytes as consecutive buffers."""
        return self.packed.runs() if self.private_copy is None else [self.private_copy.data]

    def with_private_copy(self, pool: BufferPool) -> Parcel:
        """Return a parcel with a private copy of the bytes."""
        private_copy = pickling.fresh(self.nbytes, pool)
        self.write(private_copy)
        return self._replace(packed=pickling.NOTHING, private_copy=private_copy)


def outline(head: bytes) -> str:
    """Describe an item without its bytes: its tensors and its size."""
    layout = pickling.decode_layout(head)
    # A segment without a dtype is not a tensor.
    tensors = [f"{each.dtype.removeprefix('torch.')} {list(each.shape)}" for each in layout.segments if each.dtype]
    return f"<{', '.join([*tensors[:OUTLINED], f'{layout.nbytes:,} bytes'])}>"


def unpack(head: bytes, memory: Bytes, pool: BufferPool, *, own: bool) -> Unpacked:
    """Unpack an item from all of its bytes. own: see `pickling.unpack`."""
    return pickling.unpack(pickling.decode_layout(head), memory, pool, own=own)
