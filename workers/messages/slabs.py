"""Memory that the processes of one host share without a name: a sender copies its values in once, receivers copy them
out. It goes when the last of them lets go of it, however they end."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict

import numpy as np

from workers.messages.wire import Slab
from workers.values import Bytes

IDLE_BYTES = 1 << 30
"""Slabs that wait to be used again, at most; warm memory is several times as fast as fresh."""
MAPPED_MOST = 32
"""Mappings of others' slabs that are kept for the next message, at most."""
_STEPS = 8
_LEAST_BYTES = 64 << 10


class OwnSlab:
    """A slab of this process. `memory` is at least as long as asked for."""

    def __init__(self, host: str, nbytes: int) -> None:
        fd = os.memfd_create("tq-message", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self.memory = _map(fd, nbytes)
            self.name = Slab(host, os.getpid(), fd, os.fstat(fd).st_ino, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Let go of it; mappings, here and elsewhere, live on until they go."""
        os.close(self.name.fd)


class Slabs:
    """This process's slabs, those in use and the idle ones. Thread-safe."""

    def __init__(self, host: str, *, idle_bytes: int = IDLE_BYTES) -> None:
        self._host = host
        self._most = idle_bytes
        self._guard = threading.Lock()
        self._idle: list[OwnSlab] = []
        self._forgotten: list[int] = []
        self._closed = False

    def take(self, nbytes: int) -> OwnSlab:
        """A slab of at least `nbytes`, at most about an eighth larger if it is new. OSError if there is no memory."""
        with self._guard:
            fitting = [slab for slab in self._idle if nbytes <= slab.name.nbytes <= 2 * max(nbytes, _LEAST_BYTES)]
            if fitting:
                best = min(fitting, key=lambda slab: slab.name.nbytes)
                self._idle.remove(best)
                return best
        return OwnSlab(self._host, _rounded(nbytes))

    def give_back(self, slab: OwnSlab) -> None:
        """Nobody reads it any more: keep it for the next message, or let go of the oldest idle ones."""
        with self._guard:
            self._idle.append(slab)
            while self._closed or sum(idle.name.nbytes for idle in self._idle) > self._most:
                oldest = self._idle.pop(0)
                self._forgotten.append(oldest.name.inode)
                oldest.close()
                if not self._idle:
                    break

    def forgotten(self) -> tuple[int, ...]:
        """The inodes of slabs that went since this was last asked."""
        with self._guard:
            inodes, self._forgotten = tuple(self._forgotten), []
        return inodes

    def close(self) -> None:
        """Let go of the idle ones, and of the others as they come back. Idempotent."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for slab in idle:
            slab.close()


class Mappings:
    """Others' slabs, mapped here. For one thread."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._mapped: OrderedDict[int, Bytes] = OrderedDict()

    def open(self, slab: Slab) -> Bytes | None:
        """Its bytes. None if it is not of this host, or this process may not look at it."""
        if slab.host != self._host:
            return None
        memory = self._mapped.get(slab.inode)
        if memory is None:
            memory = _open(slab)
            if memory is None:
                return None
            self._mapped[slab.inode] = memory
            if len(self._mapped) > MAPPED_MOST:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(slab.inode)
        return memory

    def close(self) -> None:
        """Let go of them all."""
        self._mapped.clear()

    def forget(self, inodes: tuple[int, ...]) -> None:
        for inode in inodes:
            self._mapped.pop(inode, None)


def _open(slab: Slab) -> Bytes | None:
    try:
        fd = os.open(f"/proc/{slab.pid}/fd/{slab.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (slab.inode, slab.nbytes):
            return None
        return _map(fd, slab.nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Bytes:
    mapped = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(mapped, np.uint8)


def _rounded(nbytes: int) -> int:
    step = max(_LEAST_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
