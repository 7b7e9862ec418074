"""The values of messages as they were at the call: in shared memory, inline, or on a device."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from workers.directory.address import WorkerAddress
from workers.messages.collectives import DeviceValues, Road
from workers.messages.relays import Backlog, Tree
from workers.messages.shared_buffers import OwnSlab, Slabs
from workers.messages.wire import DeviceId, Form
from workers.transport.pickling import Packed

INLINE_BYTES = 64 << 10
MESSAGE_BYTES = 4 << 10
"""Approximate bytes of a message at each of its ends besides its values; counted with them."""

_serials = itertools.count()


class ValueSnapshot:
    """A message's bytes as they were at the call, kept in a slab, inline or on a device until all receivers have them.

    inline: the frame of the inline bytes, made once for all receivers; slab: None if the bytes are inline, only on a
    device, and after the release; on_device: the tensors on their device, `inline` then has only the skeleton;
    serial: number of the values in this process; tree: the tree of relays, None if all
    receivers pull from this worker; ready: the messages and devices of receivers that wait for a transfer to begin;
    on_host: gets the slab to which the values on a device are copied, see `TransferSource`. free: called once all
    receivers released the bytes (at once if there are none), with the slab and whether a receiver that was given up may
    still read it. pending: number of receivers that have not released the bytes.
    """

    def __init__(
        self,
        form: Form,
        packed: Packed,
        slab: OwnSlab | None,
        inline: bytes,
        receivers: int,
        free: Callable[[OwnSlab | None, bool], None],
        on_device: DeviceValues | None = None,
    ) -> None:
        self.form = form
        self.serial = next(_serials)
        self.layout = packed.layout
        self.slab = slab
        self.on_device = on_device
        self.inline = zmq.Frame(inline, copy=True)
        self.tree: Tree | None = None
        self.ready: list[tuple[Any, DeviceId | None]] = []
        self.on_host: Future[OwnSlab] | None = None
        self.pending = receivers
        self._free = free
        self._guard = threading.Lock()
        self._may_be_read = False
        if not receivers:
            free(slab, False)

    @property
    def offer(self) -> DeviceId | None:
        """The device from which receivers may take the values, None if these are in host memory."""
        return None if self.on_device is None or self.slab is not None else self.on_device.device_id

    def add_slab(self, slab: OwnSlab) -> bool:
        """Keep a slab to which the bytes on the device were copied. False if all receivers have released them."""
        with self._guard:
            if self.pending:
                self.slab = slab
            return bool(self.pending)

    def release(self, *, may_be_read: bool = False) -> None:
        """Drop one receiver's reference. may_be_read: that receiver was given up and may still be reading."""
        with self._guard:
            self._may_be_read = self._may_be_read or may_be_read
            self.pending -= 1
            if self.pending:
                return
            slab, self.slab = self.slab, None
            self.on_device = None
        self._free(slab, self._may_be_read)


class Snapshots:
    """Makes the snapshots of one worker's messages. backlog: counts their bytes until all receivers have them; road:
    chooses between the device's collectives and host memory. Thread-safe."""

    def __init__(self, slabs: Slabs, backlog: Backlog, road: Road) -> None:
        self._slabs = slabs
        self._backlog = backlog
        self._road = road

    def take(self, form: Form, packed: Packed, receivers: Sequence[WorkerAddress], what: str) -> ValueSnapshot:
        """Copy the values as they are now. Those on a device are copied there, if they may travel by its collectives;
        other large ones into a slab, and small ones into one bytes object. what: names the operation.
        `MessageBacklogError`."""
        size = packed.nbytes + MESSAGE_BYTES * (1 + len(receivers))
        self._backlog.admit(size, what)
        try:
            slab = None
            inline = b""
            on_device = self._copy_on_device(packed, receivers)
            if on_device is not None:
                inline = packed.skeleton
            elif packed.nbytes > INLINE_BYTES:
                slab = self._slabs.take(packed.nbytes)
                packed.write(slab.memory)
            else:
                inline = b"".join(packed.runs())
        except BaseException:
            self._backlog.free(size)
            if slab is not None:
                self._slabs.give_back(slab)
            raise

        # may_be_read: a receiver that was given up may still read the slab, so it is not reused.
        def free_memory(slab: OwnSlab | None, may_be_read: bool) -> None:
            self._backlog.free(size)
            if slab is not None and may_be_read:
                self._slabs.abandon(slab)
            elif slab is not None:
                self._slabs.give_back(slab)

        return ValueSnapshot(form, packed, slab, inline, len(receivers), free_memory, on_device)

    def _copy_on_device(self, packed: Packed, receivers: Sequence[WorkerAddress]) -> DeviceValues | None:
        """Return a copy of the tensors on their device. None if they travel through host memory.
        `torch.OutOfMemoryError`."""
        device = self._road.device_of(packed, receivers)
        if device is None or len(packed.skeleton) > INLINE_BYTES:
            return None
        return DeviceValues.copy_of(packed, device)


def half_of_memory() -> int:
    """Return half of the machine's memory, the default limit of a backlog in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
