"""Host memory that CUDA can access: registered shared memory, and pinned buffers.

Kernels read and write registered memory directly, and copies between it and a GPU need no staging. `lock` is held from
the registration until the copies are complete, so that no other thread ends the registration in between.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dataplane.core.row_copy import UInt8s, address

log = logging.getLogger(__name__)

lock = threading.RLock()
"""Held by a thread that registers memory or copies from or to registered memory."""

_PORTABLE_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: every GPU of the process can access the memory."""
_STEP_BYTES = 64 << 20
"""The first registration of a mapping has at least this size."""


class RegisteredMemory:
    """The registration of the first bytes of a mapping with CUDA, which makes them accessible to the GPUs of this
    process. Callers of `cover` hold `lock`.

    memory: the mapping. backed_bytes: returns how many of its bytes have memory now. `_refused`: the smallest size that
    CUDA refused.
    """

    def __init__(self, memory: UInt8s, backed_bytes: Callable[[], int]) -> None:
        self._memory = memory
        self._backed_bytes = backed_bytes
        self._owner = os.getpid()
        self._nbytes = 0
        self._refused: float = math.inf

    def cover(self, nbytes: int) -> bool:
        """Register at least the first `nbytes`. Return False if CUDA cannot register them, which is logged once.

        A new registration takes time in proportion to its size (see `docs/concepts/gpu.md`). It replaces the previous
        one and has at least twice its size, if possible.
        """
        if self._nbytes >= nbytes:
            return True
        backed_bytes = self._backed_bytes()
        if nbytes > backed_bytes or nbytes >= self._refused:
            return False
        earlier = self._nbytes
        self._end()
        preferred = min(backed_bytes, max(nbytes, 2 * earlier, _STEP_BYTES))
        if self._begin(preferred) or self._begin(nbytes):
            return True
        self._refused = nbytes
        log.warning(
            "CUDA cannot register %s bytes of shared memory; copies between it and GPUs are staged in pinned memory "
            "instead. Raise the limit of locked memory (`ulimit -l`, in a container `--ulimit memlock=-1`)",
            f"{nbytes:,}",
        )
        if earlier:
            self._begin(earlier)
        return False

    def _begin(self, nbytes: int) -> bool:
        """Register the first `nbytes`. Return whether CUDA did it."""
        self._nbytes = nbytes  # first, so that an interrupt after the call is not lost
        try:
            registered = _register(address(self._memory), nbytes)
        except BaseException:
            self._end()
            raise
        if not registered:
            self._nbytes = 0
        return registered

    def _end(self) -> None:
        try:
            if self._nbytes:
                _unregister(address(self._memory))
        finally:
            self._nbytes = 0

    def release(self) -> None:
        """End the registration. Blocks while another thread holds `lock`; in a signal handler that interrupts a copy of
        this thread, the registration ends after the copy. A forked child leaves that of its parent alone."""
        if os.getpid() != self._owner:
            return
        with lock:
            if _copies:
                _to_release.append(self)
            else:
                self._end()


_copies = 0
"""Copies of the thread that holds `lock`."""
_to_release: list[RegisteredMemory] = []


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    global lock
    lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _register(start: int, nbytes: int) -> bool:
    """Register memory with CUDA. Return whether it succeeded."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return _succeeded(torch.cuda.cudart().cudaHostRegister(start, nbytes, _PORTABLE_MAPPED))  # type: ignore[no-untyped-call]


def _unregister(start: int) -> None:
    _succeeded(torch.cuda.cudart().cudaHostUnregister(start))  # type: ignore[no-untyped-call]


def _succeeded(result: Any) -> bool:
    """Return whether a call of CUDA succeeded."""
    if int(result) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA reports the failure again to the next kernel, which is this one
        torch.zeros(1, device="cuda")
    return False


class DeviceBuffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that a GPU can access once `registration` covers the first `before_bytes + n` bytes of its memory, for the
    first n bytes here. `registration` is None for pinned memory."""

    registration: RegisteredMemory | None = None
    before_bytes: int = 0

    def cover(self, nbytes: int) -> bool:
        """Make the first `nbytes` accessible. Return whether they are. The caller holds `lock`."""
        return self.registration is None or self.registration.cover(self.before_bytes + nbytes)


def pinned(nbytes: int) -> UInt8s:
    """Return new pinned memory of torch's pool, as a `DeviceBuffer`."""
    memory: UInt8s = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().view(DeviceBuffer)
    return memory


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """Return the stream of this process for copies between the host and a GPU."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def copying(device: torch.device, *, after_current: bool = False) -> Iterator[None]:
    """Hold `lock` and enqueue the body's work on the copy stream of a GPU; wait until it is complete. Other streams go
    on. after_current: begin after the work that this thread's current stream has now. Tensors that are allocated in
    the body belong to the copy stream: record the streams that use them."""
    with torch.cuda.device(device):
        stream = _copy_stream(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        with lock, torch.cuda.stream(stream), _counted():
            if after_current:
                stream.wait_stream(current)
            try:
                yield
            finally:  # also after an error, before the memory is reused
                stream.synchronize()


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count a copy, and end the registrations that were released during it."""
    global _copies
    _copies += 1
    try:
        yield
    finally:
        _copies -= 1
        while not _copies and _to_release:
            _to_release.pop()._end()
