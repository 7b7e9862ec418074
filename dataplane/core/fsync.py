"""fsync of mapped memory, files and directories, so that data survives a crash of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["force_ranges", "is_on_disk", "sync_path"]

TOGETHER_BYTES = 1 << 20
"""Maximum gap between ranges that one call syncs together. The pages in the gap are most likely clean."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_MS_SYNC = 4


def force_ranges(data: npt.NDArray[np.uint8], offsets: Iterable[int], sizes: Iterable[int]) -> None:
    """Sync ranges of `data`, a shared file mapping, to the disk: range i is `sizes[i]` bytes from `offsets[i]`. Blocks
    until they are on the disk, without the GIL. Raises OSError if the disk fails."""
    if not len(data):
        return
    base = data.ctypes.data
    ranges = sorted((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True) if size)
    begin, end = 0, -1  # the ranges joined so far, not synced yet; end -1: none
    for start, stop in ranges:
        if end >= 0 and start <= end + TOGETHER_BYTES:
            end = max(end, stop)
            continue
        if end >= 0:
            _sync_memory(base + begin, end - begin)
        begin, end = start, stop
    if end >= 0:
        _sync_memory(base + begin, end - begin)


def _sync_memory(address: int, nbytes: int) -> None:
    """Sync the pages that contain these bytes of a mapping to the disk. OSError if the disk fails."""
    start = address - address % mmap.PAGESIZE
    if _msync()(start, address + nbytes - start, _MS_SYNC) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot sync {nbytes:,} bytes to the disk: {os.strerror(number)}")


@functools.cache
def _msync() -> Callable[[int, int, int], int]:
    """Return the C function msync(address, size, flags), which returns 0 for success."""
    function = ctypes.CDLL(None, use_errno=True).msync
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk. Does nothing if the path does not exist."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def is_on_disk(file_system: str) -> bool:
    """Whether files on a file system of this type survive a reboot, unlike files in memory."""
    return file_system not in _IN_MEMORY
