"""The broker's memory: an arena without a name in any file system, so that a crash leaves no file behind."""

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
GROW_BYTES = 32 << 20


class ChannelMemory:
    """Memory that is backed when first needed and shared through the descriptor `fd`. A process that has `fd` maps
    `nbytes` and finds space r at `HEADER_BYTES` + r. For one thread at a time.

    capacity_bytes: by default a share of the space of `directory`. ArenaSpaceError if it is not available.
    """

    def __init__(self, capacity_bytes: int | None = None, *, directory: str | Path = DIRECTORY) -> None:
        self._arena = Arena.create(directory, capacity_bytes or default_capacity(directory), epoch=1)  # its only epoch
        try:
            self.fd = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._arena.close(unlink=False)  # `finally` removes the name
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
        """The usable area. Access only reserved spaces of it."""
        return self._arena.data

    def take(self, nbytes: int) -> int | None:
        """Reserve space for `nbytes`, and back more of the arena if needed. None if there is no space now. Blocks while
        the kernel clears new pages."""
        space = self._space.take(nbytes)
        if space is None and self._grow(nbytes):
            space = self._space.take(nbytes)
        return space

    def give(self, space: int, nbytes: int) -> None:
        """Release a reserved space. The memory behind it stays with the arena, for later messages."""
        self._space.give(space, nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Back more of the arena with memory, for a space of `nbytes`. Return whether the backed part grew."""
        backed = self._space.backed_bytes
        start = self._space.highest_used_bytes  # the end of the last used space; all memory after it is free
        try:
            self._arena.grow(max(start + nbytes, backed + GROW_BYTES))
        except ArenaSpaceError as error:
            log.warning("Channel memory cannot grow beyond %d bytes: %s", backed, error)
        self._space.back(self._arena.backed_bytes)
        return self._space.backed_bytes > backed

    def close(self) -> None:
        """Unmap and close the memory. Other processes keep it until they unmap it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._arena.close()
