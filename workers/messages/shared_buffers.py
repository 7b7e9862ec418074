"""Anonymous memory that the processes of one host share: a sender copies its values in once, and receivers copy them
out. The kernel frees it when the last process unmaps it or exits."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import weakref
from typing import Any

import numpy as np

from dataplane.core.bounded import Bounded
from workers.messages.wire import Slab
from workers.transport.pickling import Bytes

IDLE_BYTES = 1 << 30
"""Most bytes of idle slabs that are kept for reuse. Reused memory is several times as fast as new memory."""
MAX_IDLE_SLABS = 256
"""Most idle slabs that are kept for reuse."""
MAX_IDLE_MAPPINGS = 32
"""Most mappings of other processes' slabs that are kept for the next message."""
MAX_MAPPINGS = 1 << 14
"""Most mappings of other processes' slabs at a time, including those of messages that wait to be received: a quarter
of the kernel's default limit for a process (vm.max_map_count)."""
MAX_OPEN = 1 << 12
OPEN_SHARE = 4
"""A process's slabs have at most `MAX_OPEN` descriptors, and at most 1 / `OPEN_SHARE` of its limit of open files."""
_STEPS = 8
"""Number of sizes of new slabs from one power of two to the next."""
_LEAST_BYTES = 64 << 10
"""The smallest new slab, and the least difference of two sizes."""
_NO_FD = -1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class OwnSlab:
    """A slab of this process. memory: at least as long as requested; name: by which other processes map it."""

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

    open_limit: limit of the slabs with a descriptor; None: `MAX_OPEN`, or less if this process may open few files.
    idle_bytes: most bytes of idle slabs. `_idle`: the idle slabs, oldest first; `_open_count`: slabs with a descriptor,
    idle, in use or being created; `_closed_inodes`: for `pop_closed`; `_closed`: keep no slabs any more.
    """

    def __init__(self, host: str, *, idle_bytes: int = IDLE_BYTES, open_limit: int | None = None) -> None:
        self._host = host
        self._idle_limit_bytes = idle_bytes
        self._open_limit = _default_open_limit() if open_limit is None else open_limit
        self._guard = threading.Lock()
        self._idle: list[OwnSlab] = []
        self._idle_bytes = 0
        self._open_count = 0
        self._closed_inodes: list[int] = []
        self._closed = False

    def take(self, nbytes: int) -> OwnSlab:
        """Return a slab of at least `nbytes`: an idle one of at most about twice the size, or a new one, at most about
        an eighth larger. A `PrivateSlab` if the limit of descriptors is reached. MemoryError if there is no memory."""
        with self._guard:
            fitting = [slab for slab in self._idle if nbytes <= slab.name.nbytes <= 2 * max(nbytes, _LEAST_BYTES)]
            if fitting:
                best = min(fitting, key=lambda slab: slab.name.nbytes)
                self._idle.remove(best)
                self._idle_bytes -= best.name.nbytes
                return best
            if self._open_count >= self._open_limit and self._idle:
                self._close_oldest()  # frees a descriptor
            if self._open_count >= self._open_limit:
                return PrivateSlab(nbytes)
            self._open_count += 1  # counted before it is created without the lock
        try:
            return OwnSlab(self._host, _rounded_up(nbytes))
        except OSError:
            with self._guard:
                self._open_count -= 1
            return PrivateSlab(nbytes)

    def give_back(self, slab: OwnSlab) -> None:
        """Keep a slab, which no receiver reads any more, for another message, and close the oldest idle slabs beyond
        the limits."""
        if not slab.shared:  # freed with its last reference
            return
        with self._guard:
            self._idle.append(slab)
            self._idle_bytes += slab.name.nbytes
            while self._idle and self._has_too_many_idle():
                self._close_oldest()

    def _has_too_many_idle(self) -> bool:
        """Return whether an idle slab must be closed."""
        return self._closed or self._idle_bytes > self._idle_limit_bytes or len(self._idle) > MAX_IDLE_SLABS

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
        """Close the slab's descriptor, and note its inode for `pop_closed`. Under `_guard`."""
        self._open_count -= 1
        self._closed_inodes.append(slab.name.inode)
        slab.close()

    def pop_closed(self) -> tuple[int, ...]:
        """Return the inodes of the slabs that were closed since the last call. Their readers must unmap them."""
        with self._guard:
            inodes = tuple(self._closed_inodes)
            self._closed_inodes = []
        return inodes

    def close(self) -> None:
        """Close the idle slabs, and the others as they are given back. Idempotent."""
        with self._guard:
            self._closed = True
            while self._idle:
                self._close_oldest()


class Mappings:
    """Slabs of other processes, mapped here. For one thread; any thread may drop a returned array.

    host: of this process; held_limit: most mappings at a time. `_mapped`: by inode, the mappings kept for the next
    message, the least recently used first; `_held`: all mappings that still exist, also those that only a message uses.
    """

    def __init__(self, host: str, *, held_limit: int = MAX_MAPPINGS) -> None:
        self._host = host
        self._held_limit = held_limit
        self._mapped: Bounded[int, Bytes] = Bounded(MAX_IDLE_MAPPINGS)
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, slab: Slab) -> Bytes | None:
        """Return the bytes of a slab, and keep its mapping for the next message. None if it is on another host, this
        process may not map it, or has too many mappings."""
        if slab.host != self._host:
            return None
        memory = self._mapped.get(slab.inode)
        if memory is None:
            memory = self._map_slab(slab)
        if memory is not None:
            self._mapped.store(slab.inode, memory)
        return memory

    def close(self) -> None:
        """Drop all mappings."""
        self._mapped.clear()

    def forget(self, inodes: tuple[int, ...]) -> None:
        for inode in inodes:
            self._mapped.pop(inode, None)

    def _map_slab(self, slab: Slab) -> Bytes | None:
        """Map a slab that is not mapped yet. None if this process may not map it, or has too many mappings."""
        if len(self._held) >= self._held_limit:
            return None
        try:
            memory = _map_process_slab(slab)
        except OSError:
            return None
        if memory is not None:
            self._held.add(memory.base)  # the `_Mapping`
        return memory


class _Mapping:
    """A descriptor's memory, mapped while an array refers to it. (Python's `mmap` would keep a duplicate of the
    descriptor.)"""

    def __init__(self, fd: int, nbytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        # From this description numpy makes an array of the memory, which keeps a reference to this object.
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False


def _map_process_slab(slab: Slab) -> Bytes | None:
    """Map a slab through its process's descriptor. None if that descriptor is of another file by now, OSError if it
    cannot be opened or mapped."""
    fd = os.open(f"/proc/{slab.pid}/fd/{slab.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (slab.inode, slab.nbytes):
            return None
        return _map(fd, slab.nbytes)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int) -> Bytes:
    return np.asarray(_Mapping(fd, nbytes))


def _default_open_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft == resource.RLIM_INFINITY else min(MAX_OPEN, soft // OPEN_SHARE)


def _rounded_up(nbytes: int) -> int:
    """Return the size of a new slab: `nbytes` and at most about an eighth more, so that it fits more messages."""
    # A step is 1 / `_STEPS` of the largest power of two below `nbytes`, so `_STEPS` steps lead to the next power.
    step = max(_LEAST_BYTES, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
