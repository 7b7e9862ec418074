"""Memory pool for read results: pages are reused after the result that used them is released.

Copying into new pages is several times slower than copying into reused pages, because the kernel clears each new page
first. A trainer reads batches of similar size at every step, which can reuse the same pages.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

FROM_BYTES = 256 << 10
"""Results smaller than this are allocated on the heap, which reuses pages already."""
_STEP_BYTES = 2 << 20
"""Sizes of regions are multiples of this, the size of a huge page."""
_MOST_SLACK = 1.5
"""A region is used for a request if it is at most this many times as large."""


class BufferPool:
    """Allocates byte arrays. The memory of an array is reused after the last reference to the array and its views is
    released.

    keep_bytes: maximum idle memory; beyond it, the longest idle memory is returned to the system. Thread-safe; the
    finalizers of arrays only enqueue their memory.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._returned: collections.deque[mmap.mmap] = collections.deque()  # by finalizers, which must not lock
        self._idle: list[mmap.mmap] = []  # longest idle first
        self._lock = threading.Lock()  # guards `_idle` and `_keep_bytes`

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a page-aligned array of `nbytes` (more than 0) bytes with arbitrary content. Raises MemoryError if the
        system has no memory."""
        with self._lock:
            self._collect()
            region = self._take_idle(nbytes)
        if region is None:
            region = _map_region(nbytes)
        array = np.frombuffer(region, np.uint8, count=nbytes)
        # After the last reference to the array and its views, the region can be reused; at exit nothing needs it.
        weakref.finalize(array, self._returned.append, region).atexit = False
        return array

    def drop(self) -> None:
        """Return all idle memory to the system, and keep no idle memory from now on."""
        with self._lock:
            self._keep_bytes = 0
            self._collect()

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that are kept for reuse."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def _take_idle(self, nbytes: int) -> mmap.mmap | None:
        """Remove and return the smallest idle region that holds `nbytes` and is not much larger; None if none fits. Of
        equal regions, return the most recently used one, because parts of it may still be in the CPU cache."""
        smallest = _region_size(nbytes)
        largest = max(int(_MOST_SLACK * nbytes), smallest)
        best: int | None = None
        for index in range(len(self._idle) - 1, -1, -1):  # most recently used first
            size = len(self._idle[index])
            if size == smallest:
                return self._idle.pop(index)
            if smallest < size <= largest and (best is None or size < len(self._idle[best])):
                best = index
        return None if best is None else self._idle.pop(best)

    def _collect(self) -> None:
        """Move released regions to the idle list, and return idle memory beyond the limit to the system. The caller
        holds the lock."""
        if not self._returned and self._keep_bytes:
            return  # nothing has changed since the last call; a limit of 0 may be new (see `drop`)
        while self._returned:
            self._idle.append(self._returned.popleft())
        excess = sum(map(len, self._idle)) - self._keep_bytes
        while excess > 0:  # an unmapped region returns its memory
            excess -= len(self._idle.pop(0))


def _region_size(nbytes: int) -> int:
    """Return the size of a new region for `nbytes`: rounded up to a multiple of `_STEP_BYTES`."""
    return (nbytes + _STEP_BYTES - 1) // _STEP_BYTES * _STEP_BYTES


def _map_region(nbytes: int) -> mmap.mmap:
    """Map a new region for `nbytes`, with huge pages if available."""
    size = _region_size(nbytes)
    # MAP_PRIVATE keeps the content that a forked child inherited when the parent reuses the region.
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size:,} bytes of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
