"""Memory for results that stays warm: pages touched once are used again when nobody holds the result any more.

Copying into fresh pages runs at a small fraction of the speed of copying into warm ones (the kernel clears each page
first), and a trainer reads batches of much the same size at every step.
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
"""Smaller results come from the heap, which is warm already."""
_STEP_BYTES = 2 << 20
_MOST_SLACK = 1.5


class BufferPool:
    """Hands out byte arrays; an array's memory is used again once nothing refers to the array or a view of it.

    keep_bytes: idle memory kept; beyond it, what was idle longest goes back to the machine. Thread-safe; the finalizers
    of arrays only enqueue.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """`nbytes` (more than 0) bytes of any content, aligned to a page. MemoryError where there are none."""
        with self._lock:
            self._collect()
            region = self._fitting(nbytes)
        if region is None:
            region = _fresh(nbytes)
        array = np.frombuffer(region, np.uint8, count=nbytes)
        weakref.finalize(array, self._returned.append, region).atexit = False
        return array

    def drop(self) -> None:
        """Give idle memory back to the machine, now and from here on."""
        with self._lock:
            self._keep_bytes = 0
            self._collect()

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for its next use."""
        with self._lock:
            self._collect()
            return sum(map(len, self._idle))

    def _fitting(self, nbytes: int) -> mmap.mmap | None:
        """The smallest idle region that holds `nbytes` and is not much larger; of equal ones that used last, of which
        the processor may have parts still at hand."""
        smallest = _stepped(nbytes)
        most = max(int(_MOST_SLACK * nbytes), smallest)
        found: int | None = None
        for place in range(len(self._idle) - 1, -1, -1):
            size = len(self._idle[place])
            if size == smallest:
                return self._idle.pop(place)
            if smallest < size <= most and (found is None or size < len(self._idle[found])):
                found = place
        return None if found is None else self._idle.pop(found)

    def _collect(self) -> None:
        if not self._returned and self._keep_bytes:
            return
        while self._returned:
            self._idle.append(self._returned.popleft())
        excess = sum(map(len, self._idle)) - self._keep_bytes
        while excess > 0:
            excess -= len(self._idle.pop(0))


def _stepped(nbytes: int) -> int:
    """The size of a region made for `nbytes`."""
    return -(-nbytes // _STEP_BYTES) * _STEP_BYTES


def _fresh(nbytes: int) -> mmap.mmap:
    size = _stepped(nbytes)
    # Private: what a forked child inherited stays as it was when the parent uses the region again.
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size:,} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
