"""A client's mappings of the arena of a storage unit on the same host."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dataplane.errors import ClientClosedError
from dataplane.storage.arena import BACKED_AT, HEADER, HEADER_BYTES, check_header

if TYPE_CHECKING:
    from dataplane.core.cuda_memory import RegisteredMemory

Bytes = npt.NDArray[np.uint8]


class MappedArena:
    """A client's mappings of an arena: a writable one to fill reserved bytes, a read-only one for views given to users.
    Both are None after `close`; the writable one also if `open` was called without `writable`.

    Returned arrays keep their mapping alive, so `close` is safe while arrays exist; the last one unmaps the memory.
    """

    def __init__(self, writable: Bytes | None, readonly: Bytes, *, path: Path, capacity_bytes: int) -> None:
        """Use `open`."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._writable = writable
        # The usable area of both mappings; None as `_writable` and `_readonly`.
        self.writable_memory: Bytes | None = None if writable is None else writable[HEADER_BYTES:]
        self.readable_memory: Bytes | None = readonly[HEADER_BYTES:]
        self._readonly: Bytes | None = readonly
        self._registered: RegisteredMemory | None = None

    @classmethod
    def open(cls, path: str | Path, *, cookie: bytes | None = None, writable: bool = True) -> MappedArena:
        """Map the whole arena at `path`. cookie: the expected identity; None: any.
        Raises OSError if the file is missing or not accessible for this user, ValueError if it is not an intact
        arena or its cookie differs from `cookie`.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags)
        try:
            size = HEADER_BYTES + check_header(os.pread(fd, HEADER.size, 0), path, cookie)
            if os.fstat(fd).st_size < size:
                raise ValueError(f"{path}: the arena file is truncated")
            return cls(
                _map_file(fd, size, mmap.PROT_READ | mmap.PROT_WRITE) if writable else None,
                _map_file(fd, size, mmap.PROT_READ),
                path=Path(path),
                capacity_bytes=size - HEADER_BYTES,
            )
        finally:
            os.close(fd)

    @property
    def backed_bytes(self) -> int:
        """The backed bytes that the unit wrote last; bytes above have no memory."""
        return int.from_bytes(self.header(BACKED_AT, 8), "little")

    def header(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file's header. `offset` counts from the first byte of the file."""
        data = self._require_open(self._readonly)
        if offset < 0 or nbytes < 0 or offset + nbytes > HEADER_BYTES:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside the header of {HEADER_BYTES} bytes")
        return data[offset : offset + nbytes].tobytes()

    def writable(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes [offset, offset + nbytes) of the usable area. Write to them only while the session holds their
        reservation."""
        return self._slice(self._require_open(self._writable), offset, nbytes)

    def readonly(self, offset: int, nbytes: int) -> Bytes:
        """Return the same bytes from the read-only mapping. Any write to them, even past numpy's flag, faults."""
        return self._slice(self._require_open(self._readonly), offset, nbytes)

    def registration(self) -> RegisteredMemory | None:
        """Return the registration of the writable mapping with CUDA, by which GPUs access the arena; None without such
        a mapping. The usable area begins at `HEADER_BYTES` of its memory."""
        from dataplane.core import cuda_memory  # noqa: PLC0415  # imports torch, without which units start sooner

        with cuda_memory.lock:
            if self._registered is None and self._writable is not None:
                self._registered = cuda_memory.RegisteredMemory(self._writable, self._memory_bytes)
            return self._registered

    def _memory_bytes(self) -> int:
        """Return the size of the part of the file that has memory."""
        return 0 if self.closed else HEADER_BYTES + self.backed_bytes

    @staticmethod
    def _require_open(data: Bytes | None) -> Bytes:
        """Return `data`. Raises ClientClosedError if it is None."""
        if data is None:
            raise ClientClosedError(why="the arena is unmapped, or was mapped read-only")
        return data

    def _slice(self, data: Bytes, offset: int, nbytes: int) -> Bytes:
        """Return bytes of the usable area of the mapping `data`, without a copy."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside the arena ({self.capacity_bytes} bytes)")
        return data[HEADER_BYTES + offset : HEADER_BYTES + offset + nbytes]

    @property
    def closed(self) -> bool:
        return self._readonly is None

    def close(self) -> None:
        """Release the mappings. Each one is unmapped when the last array returned from it is freed. Idempotent. Blocks
        while a GPU copies from or to the arena."""
        self._writable = None
        self.writable_memory = None
        self.readable_memory = None
        self._readonly = None
        registered, self._registered = self._registered, None
        if registered is not None:
            registered.release()

    def __enter__(self) -> MappedArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map_file(fd: int, size: int, protection: int) -> Bytes:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapping, dtype=np.uint8)
