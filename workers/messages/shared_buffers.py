"""Anonymous memory that the processes of one host share: a sender copies its values in once, and receivers copy them
out. The kernel frees it when the last process unmaps it or exits."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np

from workers.messages.wire import Slab
from workers.transport.pickling import Bytes

IDLE_BYTES = 1 << 30
"""Most bytes of idle slabs that are kept for reuse. Reused memory is several times as fast as new memory."""
IDLE_MOST = 256
"""Most idle slabs that are kept for reuse."""
MAPPED_MOST = 32
"""Most mappings of other processes' slabs that are kept for the next message."""
HELD_MOST = 1 << 14
"""Most mappings of other processes' slabs at a time, including those of messages that wait to be received: a quarter
of the kernel's default limit for a process (vm.max_map_count)."""
OPEN_MOST = 1 << 12
OPEN_SHARE = 4
"""A process's slabs have at most `OPEN_MOST` descriptors, and at most 1 / `OPEN_SHARE` of its limit of open files."""
_STEPS = 8
_LEAST_BYTES = 64 << 10
_NO_FD = -1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class OwnSlab:
    """A slab of this process. `memory` is at least as long as requested."""

    def __init__(self, host: str, nbytes: int) -> None:
        """Create a slab that the processes of this host can map by its descriptor. OSError if there is no free
        descriptor or memory."""
        fd = os.memfd_create("tq-message", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self.memory = _map(fd, nbytes)
            self.name = Slab(host, os.getpid(), fd, os.fstat(fd).st_ino, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def shared(self) -> bool:
        """Whether other processes can map it."""
        return self.name.fd != _NO_FD

    def close(self) -> None:
        """Close its descriptor. Existing mappings, here and in other processes, stay valid."""
        if self.shared:
            os.close(self.name.fd)


class PrivateSlab(OwnSlab):
    """Memory of this process only, whose bytes are sent to the receivers."""

    def __init__(self, nbytes: int) -> None:
        """MemoryError if there is no memory."""
        self.memory = np.empty(nbytes, np.uint8)
        self.name = Slab("", os.getpid(), _NO_FD, 0, nbytes)


class Slabs:
    """This process's slabs, those in use and the idle ones. Thread-safe.

    open_most: limit of the slabs with a descriptor; None: `OPEN_MOST`, or less if this process may open few files.
    """

    def __init__(self, host: str, *, idle_bytes: int = IDLE_BYTES, open_most: int | None = None) -> None:
        self._host = host
        self._most = idle_bytes
        self._open_most = _open_most() if open_most is None else open_most
        self._guard = threading.Lock()
        self._idle: list[OwnSlab] = []
        self._idle_bytes = 0
        self._open = 0
        self._forgotten: list[int] = []
        self._closed = False

    def take(self, nbytes: int) -> OwnSlab:
        """Return a slab of at least `nbytes`; a new one is at most about an eighth larger. A `PrivateSlab` if the
        limit of descriptors is reached. MemoryError if there is no memory."""
        with self._guard:
            fitting = [slab for slab in self._idle if nbytes <= slab.name.nbytes <= 2 * max(nbytes, _LEAST_BYTES)]
            if fitting:
                best = min(fitting, key=lambda slab: slab.name.nbytes)
                self._idle.remove(best)
                self._idle_bytes -= best.name.nbytes
                return best
            if self._open >= self._open_most and self._idle:
                self._close_oldest()
            if self._open >= self._open_most:
                return PrivateSlab(nbytes)
            self._open += 1
        try:
            return OwnSlab(self._host, _rounded(nbytes))
        except OSError:
            with self._guard:
                self._open -= 1
            return PrivateSlab(nbytes)

    def give_back(self, slab: OwnSlab) -> None:
        """Keep a slab that no receiver reads for the next message, and close the oldest idle slabs beyond the
        limits."""
        if not slab.shared:
            return
        with self._guard:
            self._idle.append(slab)
            self._idle_bytes += slab.name.nbytes
            while self._idle and (self._closed or self._idle_bytes > self._most or len(self._idle) > IDLE_MOST):
                self._close_oldest()

    def abandon(self, slab: OwnSlab) -> None:
        """Close a slab that a given-up receiver may still read. It is never reused; the kernel frees it with its last
        mapping."""
        if slab.shared:
            with self._guard:
                self._close_slab(slab)

    def _close_oldest(self) -> None:
        oldest = self._idle.pop(0)
        self._idle_bytes -= oldest.name.nbytes
        self._close_slab(oldest)

    def _close_slab(self, slab: OwnSlab) -> None:
        self._open -= 1
        self._forgotten.append(slab.name.inode)
        slab.close()

    def forgotten(self) -> tuple[int, ...]:
        """Return the inodes of slabs that were closed since the last call."""
        with self._guard:
            inodes, self._forgotten = tuple(self._forgotten), []
        return inodes

    def close(self) -> None:
        """Close the idle slabs, and the others as they are given back. Idempotent."""
        with self._guard:
            self._closed = True
            while self._idle:
                self._close_oldest()


class Mappings:
    """Slabs of other processes, mapped here. For one thread; any thread may drop a returned array."""

    def __init__(self, host: str, *, held_most: int = HELD_MOST) -> None:
        self._host = host
        self._held_most = held_most
        self._mapped: OrderedDict[int, Bytes] = OrderedDict()
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, slab: Slab) -> Bytes | None:
        """Return the bytes of a slab. None if it is on another host, this process may not map it, or has too many
        mappings."""
        if slab.host != self._host:
            return None
        memory = self._mapped.get(slab.inode)
        if memory is None:
            memory = self._open(slab)
            if memory is None:
                return None
            self._mapped[slab.inode] = memory
            if len(self._mapped) > MAPPED_MOST:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(slab.inode)
        return memory

    def close(self) -> None:
        """Drop all mappings."""
        self._mapped.clear()

    def forget(self, inodes: tuple[int, ...]) -> None:
        for inode in inodes:
            self._mapped.pop(inode, None)

    def _open(self, slab: Slab) -> Bytes | None:
        if len(self._held) >= self._held_most:
            return None
        try:
            memory = _open(slab)
        except OSError:
            return None
        if memory is not None:
            self._held.add(memory.base)
        return memory


class _Mapping:
    """A descriptor's memory, mapped while an array refers to it. (Python's `mmap` would keep a duplicate of the
    descriptor.)"""

    def __init__(self, fd: int, nbytes: int) -> None:
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False


def _open(slab: Slab) -> Bytes | None:
    fd = os.open(f"/proc/{slab.pid}/fd/{slab.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (slab.inode, slab.nbytes):
            return None
        return _map(fd, slab.nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Bytes:
    return np.asarray(_Mapping(fd, nbytes))


def _open_most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_MOST if soft == resource.RLIM_INFINITY else min(OPEN_MOST, soft // OPEN_SHARE)


def _rounded(nbytes: int) -> int:
    step = max(_LEAST_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
