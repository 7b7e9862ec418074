"""The values of messages as they were at the call: in shared memory, inline, or on a device."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import zmq

from workers.directory.address import WorkerAddress
from workers.messages.collectives import DeviceValues, Road
from workers.messages.relays import Backlog, Tree
from workers.messages.shared_buffers import OwnSlab, Slabs
from workers.messages.wire import Form, Place
from workers.transport.pickling import Packed

INLINE_BYTES = 64 << 10
MESSAGE_BYTES = 4 << 10
"""Approximate bytes of a message at each of its ends besides its values; counted with them."""

_serials = itertools.count()


class ValueSnapshot:
    """A message's bytes as they were at the call, kept in a slab, inline or on a device until all receivers have them.

    inline: the frame of the inline bytes, made once for all receivers; slab: None if the bytes are inline, only on a
    device, and after the release; on_device: the tensors on their device, `inline` then has only the skeleton;
    receivers: their number; serial: number of the values in this process; tree: the tree of relays, None if all
    receivers pull from this worker; ready, want_host: the messages of receivers that are ready for a transfer (None
    once it began), or wait for the slab, see `TransferSource`. free: called once all receivers released the bytes (at
    once if there are none), with the slab and whether a receiver that was given up may still read it. `_references`:
    receivers that have not released the bytes.
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
        self.ready: list[Any] | None = []
        self.want_host: list[Any] = []
        self.receivers = receivers
        self._references = receivers
        self._free = free
        self._guard = threading.Lock()
        self._may_be_read = False
        if not receivers:
            free(slab, False)

    @property
    def offer(self) -> Place | None:
        """The device from which receivers may take the values, None if these are in host memory."""
        return None if self.on_device is None or self.slab is not None else self.on_device.place

    def add_slab(self, slab: OwnSlab) -> bool:
        """Keep a slab to which the bytes on the device were copied. False if all receivers have released them."""
        with self._guard:
            if self._references:
                self.slab = slab
            return bool(self._references)

    def release(self, *, may_be_read: bool = False) -> None:
        """Drop one receiver's reference. may_be_read: that receiver was given up and may still be reading."""
        with self._guard:
            self._may_be_read = self._may_be_read or may_be_read
            self._references -= 1
            if self._references:
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
            slab, inline, on_device = None, b"", self._copy_on_device(packed, receivers)
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
        """Return a copy of the tensors on their device. None if they travel through host memory, also if the device
        has no memory for the copy."""
        device = self._road.device_of(packed, receivers)
        if device is None or len(packed.skeleton) > INLINE_BYTES:
            return None
        try:
            return DeviceValues.copy_of(packed, device)
        except torch.OutOfMemoryError:
            return None


def half_of_memory() -> int:
    """Return half of the machine's memory, the default limit of a backlog in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
