"""Host memory that CUDA can access: registered shared memory, and pinned buffers.

Kernels read and write registered memory directly, and copies between it and a GPU need no staging. `lock` is held from
the registration until the copies are complete, so that no other thread ends the registration in between.
"""

from __future__ import annotations

import contextlib
import functools
import logging
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

    memory: the mapping. backed: returns how many of its bytes have memory now, and a number that changes whenever the
    pages of some bytes are replaced: a registration keeps the pages that the mapping had when it was made.
    """

    def __init__(self, memory: UInt8s, backed: Callable[[], tuple[int, int]]) -> None:
        self._memory = memory
        self._backed = backed
        self._owner = os.getpid()
        self._nbytes = 0
        self._version = 0
        self._failed = False

    def cover(self, nbytes: int) -> bool:
        """Register at least the first `nbytes`. Return False if CUDA cannot register them, which is logged once.

        A new registration takes about 35 ms per GiB. It replaces the previous one and has at least twice its size.
        """
        backed_bytes, version = self._backed()
        if version != self._version:
            self.release()
        if self._nbytes >= nbytes:
            return True
        if self._failed or nbytes > backed_bytes:
            return False
        size = min(backed_bytes, max(nbytes, 2 * self._nbytes, _STEP_BYTES))
        self.release()
        self._failed = not _register(address(self._memory), size)
        if not self._failed:
            self._nbytes, self._version = size, version
        return not self._failed

    def release(self) -> None:
        """End the registration. Blocks while another thread holds `lock`. A forked child leaves the registration of its
        parent alone."""
        if not self._nbytes or os.getpid() != self._owner:
            return
        with lock:
            _unregister(address(self._memory))
            self._nbytes = 0


def _register(start: int, nbytes: int) -> bool:
    """Register memory with CUDA. Return whether it succeeded; a failure is logged."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    result = torch.cuda.cudart().cudaHostRegister(start, nbytes, _PORTABLE_MAPPED)  # type: ignore[no-untyped-call]
    if int(result) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA reports the failure again to the next kernel, which is this one
        torch.zeros(1, device="cuda")
    log.warning(
        "CUDA cannot register %s bytes of shared memory (error %d); copies between it and GPUs are staged in pinned "
        "memory instead. Raise the limit of locked memory (`ulimit -l`, in a container `--ulimit memlock=-1`)",
        f"{nbytes:,}",
        int(result),
    )
    return False


def _unregister(start: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]


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
        stream, current = _copy_stream(torch.cuda.current_device()), torch.cuda.current_stream()
        with lock, torch.cuda.stream(stream):
            if after_current:
                stream.wait_stream(current)
            try:
                yield
            finally:  # also after an error, before the memory is reused
                stream.synchronize()
