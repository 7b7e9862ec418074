"""The arena: one file of shared memory that holds every byte of a storage unit, and how clients map it.

The file is `tq-arena-<random>` in a directory of shared memory (or any local directory), mode 0600, locked by the unit
while it runs. It begins with a header (`HEADER_BYTES`): identity, epoch, capacity, and a few slots of random bytes that
prove a client maps it. The usable area follows; offsets count from its start. The file is as long as the capacity from
the beginning, but only its first `backed_bytes` have memory behind them; `grow` adds memory, after asking whether
there is any, so that a full file system is an error here and never a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataplane.config import MIB
from dataplane.core.file_locks import (
    ARENA_NAME,
    RECORDED_ARENA_NAME,
    HeldFile,
    create_locked,
    is_unheld,
    new_arena_name,
    new_recorded_arena_name,
    open_own,
    sweep,
    unlink_unheld,
)
from dataplane.core.fsync import force_ranges, sync_path
from dataplane.core.memory_limits import available_memory
from dataplane.errors import ArenaSpaceError, ClientClosedError

log = logging.getLogger(__name__)

__all__ = [
    "Arena",
    "ArenaFormatError",
    "MappedArena",
    "default_capacity",
    "sweep",
    "sweep_recorded",
    "HEADER_BYTES",
    "PAGE_BYTES",
]

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
HEADER_BYTES = 4 * PAGE_BYTES
GROW_STEP_BYTES = 32 * MIB
"""`grow_steps` looks for space for so much at a time, and pauses after it: a few milliseconds of page clearing."""

SHARE_OF_FILE_SYSTEM = 0.3
SHARE_OF_AVAILABLE = 0.5

_HEADER = struct.Struct("<8sII16sQQQ")
_BACKED_AT = _HEADER.size - 8
_KEEPER_AT = 1024
_KEEPER = struct.Struct("<QH")
"""Where the path of an arena's keeper means something (see `_mounts`), and how long that is."""
LAST_EPOCH = (1 << 63) - 1
_MAGIC = b"TQARENA\0"
FORMAT = 3
_CHALLENGES_AT = PAGE_BYTES
_CHALLENGE_BYTES = 32
_CHALLENGE_SLOTS = (HEADER_BYTES - _CHALLENGES_AT) // _CHALLENGE_BYTES

_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """Fresh random bytes (`secret`) that now stand at `offset` of the arena's file, counted from its first byte."""

    offset: int
    secret: bytes


def default_capacity(directory: str | Path) -> int:
    """Bytes for one arena in `directory`: 30 percent of its file system, as Ray's object store wants 30 percent of the
    memory in the same place, and never more than half of what may still be taken there now."""
    stat = os.statvfs(directory)
    share = int(stat.f_blocks * stat.f_frsize * SHARE_OF_FILE_SYSTEM)
    return max(MIB, _down(min(share, int(available_memory(directory).free_bytes * SHARE_OF_AVAILABLE)), MIB))


class ArenaFormatError(ValueError):
    """An arena was written by a version of the package that has another format."""


class Arena:
    """The unit's side: owns the file, its lock and its memory. One thread at a time."""

    def __init__(
        self,
        path: Path,
        file: HeldFile,
        capacity_bytes: int,
        epoch: int,
        cookie: bytes,
        backed_bytes: int,
        fsynced: bool,
    ) -> None:
        """Use `create` or `adopt`."""
        self.path = path
        self.fsynced = fsynced
        self.capacity_bytes = capacity_bytes
        self.epoch = epoch
        self.backed_bytes = backed_bytes
        self.cookie = cookie
        self._file = file
        self._owner = os.getpid()
        self._slots = itertools.cycle(range(_CHALLENGE_SLOTS))
        # Opened anew: `mmap` keeps a descriptor, with which a forked child would hold the lock, too.
        again = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map: mmap.mmap | None = mmap.mmap(again, HEADER_BYTES + capacity_bytes)
        finally:
            os.close(again)
        self._map.madvise(mmap.MADV_DONTDUMP)
        header = _HEADER.pack(_MAGIC, FORMAT, HEADER_BYTES, cookie, epoch, capacity_bytes, backed_bytes)
        self._map[: len(header)] = header
        self._whole: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        self._data: Bytes | None = self._whole[HEADER_BYTES:]
        self._force_header()

    @classmethod
    def create(
        cls,
        directory: str | Path,
        capacity_bytes: int,
        *,
        epoch: int,
        keeper: Path | None = None,
        fsynced: bool = False,
    ) -> Arena:
        """A new arena of `capacity_bytes` (rounded down to whole pages, at least one), none of it backed yet.

        keeper: a file whose existence says that the arena is to outlive its unit; see `sweep_recorded`. fsynced: it is
        to outlive the machine too: its header is kept on the disk, and `force` puts the rest there. Raises
        ArenaSpaceError if that much could not be had in `directory` even now.
        """
        capacity_bytes = max(PAGE_BYTES, _down(capacity_bytes, PAGE_BYTES))
        _check_available(directory, capacity_bytes + HEADER_BYTES)
        path = Path(directory) / (new_arena_name() if keeper is None else new_recorded_arena_name())
        try:
            file = HeldFile(create_locked(path))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise _no_space(directory, capacity_bytes, error) from error
            raise
        try:
            os.ftruncate(file.fd, HEADER_BYTES + capacity_bytes)
            os.posix_fallocate(file.fd, 0, HEADER_BYTES)
            arena = cls(path, file, capacity_bytes, epoch, secrets.token_bytes(16), 0, fsynced)
            arena._name_keeper(keeper)
            arena._force_header()
            if fsynced:
                sync_path(path.parent)
            return arena
        except BaseException as error:
            path.unlink()
            file.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
                raise _no_space(directory, capacity_bytes, error) from error
            raise

    @classmethod
    def adopt(cls, path: str | Path, *, epoch: int, fsynced: bool = False) -> Arena:
        """The arena that an earlier epoch of the unit left at `path`, with all that is in it, in a new epoch: `epoch`,
        or the one after the last where that is greater (the machine's clock was set back).

        OSError if it is not there, BlockingIOError while another process holds it, ValueError if it is no arena,
        `ArenaFormatError` if it is one of another format.
        """
        os.stat(path)
        file = HeldFile.take(Path(path))
        if file is None:
            raise BlockingIOError(errno.EAGAIN, "another process holds it", str(path))
        try:
            raw = os.pread(file.fd, _HEADER.size, 0)
            capacity = _check_header(raw, path, None)
            if os.fstat(file.fd).st_size < HEADER_BYTES + capacity:
                raise ValueError(f"{path}: the arena is cut short")
            *_, cookie, before, _, backed = _HEADER.unpack(raw)
            if before >= LAST_EPOCH or backed > capacity:
                raise ValueError(f"{path}: its epoch is {before} and {backed} of its {capacity} bytes are backed")
            return cls(Path(path), file, capacity, max(epoch, before + 1), cookie, backed, fsynced)
        except BaseException:
            file.close()
            raise

    def _name_keeper(self, keeper: Path | None) -> None:
        name = os.fsencode("" if keeper is None else keeper.absolute())
        if len(name) > PAGE_BYTES - _KEEPER_AT - _KEEPER.size:
            raise ValueError(f"{keeper}: a path of {len(name)} bytes is too long to be kept in an arena")
        assert self._map is not None
        self._map[_KEEPER_AT : _KEEPER_AT + _KEEPER.size + len(name)] = _KEEPER.pack(_mounts(), len(name)) + name

    def _set_backed(self, backed_bytes: int) -> None:
        assert self._map is not None, "the arena is closed"
        self.backed_bytes = backed_bytes
        self._map[_BACKED_AT : _HEADER.size] = backed_bytes.to_bytes(8, "little")
        self._force_header()

    def _force_header(self) -> None:
        if self.fsynced and self._whole is not None:
            force_ranges(self._whole, [0], [_HEADER.size])

    def force(self, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        """Force what was written to these ranges to the disk, and return when it is there. OSError if it fails."""
        force_ranges(self.data, offsets, sizes)

    @property
    def data(self) -> Bytes:
        """The usable area, writable; only its first `backed_bytes` may be touched."""
        assert self._data is not None, "the arena is closed"
        return self._data

    def grow(self, to_bytes: int) -> int:
        """Back the arena up to `to_bytes` (rounded up to whole pages, at most the capacity); the bytes now backed.

        Raises ArenaSpaceError, with as many steps of `GROW_STEP_BYTES` more as there was space for, if the memory is
        not there. Blocks while the kernel clears pages: about a second for each 4 GB.
        """
        for _ in self.grow_steps(to_bytes):
            pass
        return self.backed_bytes

    def grow_steps(self, to_bytes: int) -> Iterator[int]:
        """`grow`, pausing after each `GROW_STEP_BYTES` with the bytes backed so far."""
        target = min(self.capacity_bytes, _down(to_bytes + PAGE_BYTES - 1, PAGE_BYTES))
        while self.backed_bytes < target:
            step = min(GROW_STEP_BYTES, target - self.backed_bytes)
            _check_available(self.path.parent, step)
            try:
                os.posix_fallocate(self._file.fd, HEADER_BYTES + self.backed_bytes, step)
            except OSError as error:
                raise _no_space(self.path.parent, step, error) from error
            self._set_backed(self.backed_bytes + step)
            yield self.backed_bytes

    def punch(self, above_bytes: int) -> int:
        """Give the memory from `above_bytes` (rounded up to a page) on back to the system; the bytes still backed."""
        start = min(self.backed_bytes, _down(above_bytes + PAGE_BYTES - 1, PAGE_BYTES))
        if start < self.backed_bytes:
            nbytes = self.backed_bytes - start
            self._set_backed(start)
            _punch_hole(self._file.fd, HEADER_BYTES + start, nbytes)
        return self.backed_bytes

    def challenge(self) -> Challenge:
        """Write fresh random bytes into the header. They stand until some hundred more challenges were made."""
        assert self._map is not None, "the arena is closed"
        offset = _CHALLENGES_AT + next(self._slots) * _CHALLENGE_BYTES
        secret = secrets.token_bytes(_CHALLENGE_BYTES)
        self._map[offset : offset + len(secret)] = secret
        return Challenge(offset=offset, secret=secret)

    def close(self, *, unlink: bool = True) -> None:
        """Let the file go: unlock it and, unless told otherwise, remove it. Idempotent. The memory itself lives until
        the last process that maps it is gone. A forked child only lets go of its own hold."""
        self._data = None
        self._whole = None
        self._map = None
        if unlink and self._file.fd >= 0 and os.getpid() == self._owner:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedArena:
    """A client's view of an arena: one writable mapping to fill reserved bytes, one read-only for views given to users.

    Arrays handed out keep their mapping alive, so `close` is safe while some live: memory is unmapped with the last.
    """

    def __init__(self, writable: Bytes | None, readonly: Bytes, *, path: Path, capacity_bytes: int) -> None:
        """Use `open`."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._writable = writable
        self._readonly: Bytes | None = readonly

    @classmethod
    def open(cls, path: str | Path, *, cookie: bytes | None = None, writable: bool = True) -> MappedArena:
        """Map the arena at `path`, whole.

        Raises OSError if the file is missing or not for this user, ValueError if it is no arena, or another one than
        `cookie` says.
        """
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags)
        try:
            size = HEADER_BYTES + _check_header(os.pread(fd, _HEADER.size, 0), path, cookie)
            if os.fstat(fd).st_size < size:
                raise ValueError(f"{path}: the arena is cut short")
            return cls(
                _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE) if writable else None,
                _map(fd, size, mmap.PROT_READ),
                path=Path(path),
                capacity_bytes=size - HEADER_BYTES,
            )
        finally:
            os.close(fd)

    @property
    def backed_bytes(self) -> int:
        """As the unit wrote last: what is above is no memory, or none any more."""
        return int.from_bytes(self.header(_BACKED_AT, 8), "little")

    def header(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file's header, counted from its first byte."""
        data = self._open(self._readonly)
        if offset < 0 or nbytes < 0 or offset + nbytes > HEADER_BYTES:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not in the header of {HEADER_BYTES} bytes")
        return data[offset : offset + nbytes].tobytes()

    def writable(self, offset: int, nbytes: int) -> Bytes:
        """Bytes [offset, offset + nbytes) of the usable area, to be written only while they are reserved by us."""
        return self._slice(self._open(self._writable), offset, nbytes)

    def force(self, offsets: Iterable[int], sizes: Iterable[int]) -> None:
        """Force what was written to these ranges to the disk, and return when it is there. OSError if it fails."""
        force_ranges(self._open(self._writable)[HEADER_BYTES:], offsets, sizes)

    def readonly(self, offset: int, nbytes: int) -> Bytes:
        """The same bytes from the read-only mapping: writing to them, even past numpy's flag, faults."""
        return self._slice(self._open(self._readonly), offset, nbytes)

    @staticmethod
    def _open(data: Bytes | None) -> Bytes:
        if data is None:
            raise ClientClosedError(why="the arena was unmapped, or was mapped for reading only")
        return data

    def _slice(self, data: Bytes, offset: int, nbytes: int) -> Bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside the arena of {self.capacity_bytes}")
        return data[HEADER_BYTES + offset : HEADER_BYTES + offset + nbytes]

    @property
    def closed(self) -> bool:
        return self._readonly is None

    def close(self) -> None:
        """Forget the mappings; each goes when the last array handed out of it does. Idempotent."""
        self._writable = None
        self._readonly = None

    def __enter__(self) -> MappedArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep_recorded(directory: str | Path, *, superseded: Path | None = None) -> list[Path]:
    """Remove the arenas in `directory` that were to outlive their units and that nobody will ask for: no process holds
    them, and the file that keeps them is gone, or is `superseded`, which is to keep another. What was removed. Those of
    another container, whose files cannot be seen from here, stay."""
    folder = Path(directory)
    gone = [folder / name for name in os.listdir(folder) if RECORDED_ARENA_NAME.fullmatch(name)]
    return [path for path in gone if _has_no_keeper(path, superseded) and unlink_unheld(path)]


def leftovers(directory: str | Path) -> list[Path]:
    """The arenas in `directory` that the next storage unit there removes: no process holds them, and no state directory
    keeps them. OSError if the directory cannot be listed."""
    folder = Path(directory)
    names = sorted(os.listdir(folder))
    ended = [folder / name for name in names if ARENA_NAME.fullmatch(name)]
    kept = [folder / name for name in names if RECORDED_ARENA_NAME.fullmatch(name)]
    return [path for path in ended + [each for each in kept if _has_no_keeper(each, None)] if is_unheld(path)]


def _has_no_keeper(path: Path, superseded: Path | None) -> bool:
    """Where that cannot be told, it may have one."""
    try:
        return _keeper_is_gone(path, superseded)
    except (OSError, ValueError) as error:
        log.warning("cannot tell whether %s is still kept (%s): it stays", path, error)
        return False


def _keeper_is_gone(path: Path, superseded: Path | None) -> bool:
    fd = open_own(path)
    if fd is None:
        return False
    try:
        raw = os.pread(fd, PAGE_BYTES, 0)
    finally:
        os.close(fd)
    if len(raw) < PAGE_BYTES:
        return True
    start = _KEEPER_AT + _KEEPER.size
    mounts, length = _KEEPER.unpack_from(raw, _KEEPER_AT)
    if mounts != _mounts():
        return False
    keeper = raw[start : start + length]
    if superseded is not None and keeper == os.fsencode(superseded):
        return True
    try:
        os.stat(keeper)
    except (FileNotFoundError, NotADirectoryError):
        return True
    return False


def _mounts() -> int:
    """Names the mounts that this process sees: those of its container, or of the machine."""
    return os.stat("/proc/self/ns/mnt").st_ino


def _map(fd: int, size: int, protection: int) -> Bytes:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapping, dtype=np.uint8)


def _check_header(raw: bytes, path: str | Path, cookie: bytes | None) -> int:
    """The capacity that the header tells."""
    if len(raw) < _HEADER.size:
        raise ValueError(f"{path}: not an arena")
    magic, version, header_bytes, found, _, capacity, _ = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise ValueError(f"{path}: not an arena")
    if version != FORMAT or header_bytes != HEADER_BYTES:
        raise ArenaFormatError(f"has format {version}, this version reads {FORMAT}")
    if cookie is not None and found != cookie:
        raise ValueError(f"{path}: another arena than expected")
    return int(capacity)


def _check_available(directory: str | Path, wanted_bytes: int) -> None:
    found = available_memory(directory)
    if wanted_bytes > found.free_bytes:
        raise ArenaSpaceError(
            directory=str(directory), found_bytes=found.free_bytes, wanted_bytes=wanted_bytes, limit=found.limit
        )


def _no_space(directory: str | Path, wanted_bytes: int, error: OSError) -> ArenaSpaceError:
    limit = "file size limit, ulimit -f" if error.errno == errno.EFBIG else str(error.strerror)
    return ArenaSpaceError(
        directory=str(directory),
        found_bytes=available_memory(directory).free_bytes,
        wanted_bytes=wanted_bytes,
        limit=limit,
    )


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(fd, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, nbytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"punching a hole of {nbytes:,} bytes into the arena: {os.strerror(number)}")


def _down(value: int, unit: int) -> int:
    return value - value % unit
