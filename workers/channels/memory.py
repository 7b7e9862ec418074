"""The broker's memory: an arena that has no name in any file system, so that nothing of it can be left behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataplane.errors import ArenaSpaceError
from dataplane.ledger.state.free_space import FreeSpace
from dataplane.storage.arena import HEADER_BYTES, Arena, default_capacity

log = logging.getLogger(__name__)

DIRECTORY = "/dev/shm"
KEEP_BYTES = 256 << 20
"""Backed memory above this is given back to the machine whenever none is in use."""
GROW_BYTES = 32 << 20


class ChannelMemory:
    """Memory that is backed when first needed and shared through `fd`: who has it maps `nbytes`, and finds space r at
    `HEADER_BYTES` + r. One thread at a time.

    capacity_bytes: by default a share of what `directory` has. Raises ArenaSpaceError where it is not to be had.
    """

    def __init__(self, capacity_bytes: int | None = None, *, directory: str | Path = DIRECTORY) -> None:
        self._arena = Arena.create(directory, capacity_bytes or default_capacity(directory), epoch=1)
        try:
            self.fd = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._arena.close(unlink=False)
            raise
        finally:
            self._arena.path.unlink()
        self._space = FreeSpace(self._arena.capacity_bytes)
        self.nbytes = HEADER_BYTES + self._arena.capacity_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._space.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._space.backed_bytes - self._space.free_bytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The usable area; only reserved spaces of it may be touched."""
        return self._arena.data

    def take(self, nbytes: int) -> int | None:
        """Space for `nbytes`; None if there is none now. Blocks while the kernel clears new pages."""
        space = self._space.take(nbytes)
        if space is None and self._grow(nbytes):
            space = self._space.take(nbytes)
        return space

    def give(self, space: int, nbytes: int) -> None:
        """It is free again."""
        self._space.give(space, nbytes)
        if not self.used_bytes and self._space.backed_bytes > KEEP_BYTES:
            self._space = FreeSpace(self._arena.capacity_bytes)
            self._space.back(self._arena.punch(KEEP_BYTES))

    def _grow(self, nbytes: int) -> bool:
        backed = self._space.backed_bytes
        start = min(self._space.highest_used_bytes, backed)
        try:
            self._arena.grow(max(start + nbytes, backed + GROW_BYTES))
        except ArenaSpaceError as error:
            log.warning("channels have no more than %d bytes to hold items in: %s", backed, error)
        self._space.back(self._arena.backed_bytes)
        return self._space.backed_bytes > backed

    def close(self) -> None:
        """Let the memory go; who maps it keeps it until it unmaps it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._arena.close()
