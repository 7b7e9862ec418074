"""The arena: one file of shared memory that holds every byte of a storage unit. Clients map it: see `mapped_arena`.

The file is `tq-arena-<random>` in a directory of shared memory (or any local directory), mode 0600, locked by the unit
while it runs. It begins with a header (`HEADER_BYTES`): identity, epoch, capacity, and a few slots of random bytes by
which a client proves that it maps the file. The usable area follows; offsets count from its start. The file has the
length of the full capacity from its creation, but only the first `backed_bytes` are backed by memory. `grow` checks
that memory is available before it adds some, so a full file system raises an error instead of a later SIGBUS.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
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
from dataplane.core.memory_limits import available_memory
from dataplane.errors import ArenaSpaceError

log = logging.getLogger(__name__)

__all__ = [
    "Arena",
    "ArenaFormatError",
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
"""Bytes that `grow_steps` adds before each pause; the kernel clears these pages in a few milliseconds."""

SHARE_OF_FILE_SYSTEM = 0.3
SHARE_OF_AVAILABLE = 0.5

HEADER = struct.Struct("<8sII16sQQQ")
"""Magic, format, header bytes, cookie, epoch, capacity and backed bytes."""
BACKED_AT = HEADER.size - 8
_KEEPER_AT = 1024
_KEEPER = struct.Struct("<QH")
"""The mount namespace in which the path of the arena's keeper is valid (see `_mounts`), and the path's length."""
LAST_EPOCH = (1 << 63) - 1
_MAGIC = b"TQARENA\0"
FORMAT = 5
_CHALLENGES_AT = PAGE_BYTES
_CHALLENGE_BYTES = 32
_CHALLENGE_SLOTS = (HEADER_BYTES - _CHALLENGES_AT) // _CHALLENGE_BYTES


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """Fresh random bytes (`secret`), stored at `offset` from the first byte of the arena's file."""

    offset: int
    secret: bytes


def default_capacity(directory: str | Path, *, units: int = 1, promised_bytes: int = 0) -> int:
    """Return the default capacity in bytes of each of `units` arenas in `directory`: 30 percent of its file system, but
    together at most half of the memory available there now without `promised_bytes`, and at least 1 MiB. Ray's object
    store claims 30 percent of the same memory."""
    stat = os.statvfs(directory)
    share = int(stat.f_blocks * stat.f_frsize * SHARE_OF_FILE_SYSTEM)
    free_bytes = available_memory(directory).free_bytes - promised_bytes
    most_bytes = int(free_bytes * SHARE_OF_AVAILABLE) // units
    return max(MIB, _round_down(min(share, most_bytes), MIB))


class ArenaFormatError(ValueError):
    """The arena was written by a version of the package that uses another format."""


class Arena:
    """The unit's side: owns the file, its lock and its memory. Not thread-safe. `_whole` views the whole mapped file,
    `_data` the usable area; both are None after `close`."""

    def __init__(
        self,
        path: Path,
        file: HeldFile,
        capacity_bytes: int,
        epoch: int,
        cookie: bytes,
        backed_bytes: int,
    ) -> None:
        """Map `file`, the locked arena file at `path`, and write its header. Use `create` or `adopt` instead."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.epoch = epoch
        self.backed_bytes = backed_bytes
        self.cookie = cookie  # the random identity of the arena; its later epochs keep it
        self._file = file
        self._owner = os.getpid()  # only this process unlinks the file
        self._slots = itertools.cycle(range(_CHALLENGE_SLOTS))  # the numbers of the challenge slots, in turn
        # A separate open: `mmap` keeps a duplicate descriptor, by which a forked child would keep the lock held.
        map_fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map: mmap.mmap | None = mmap.mmap(map_fd, HEADER_BYTES + capacity_bytes)
        finally:
            os.close(map_fd)
        self._map.madvise(mmap.MADV_DONTDUMP)
        header = HEADER.pack(_MAGIC, FORMAT, HEADER_BYTES, cookie, epoch, capacity_bytes, backed_bytes)
        self._map[: len(header)] = header
        self._whole: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        self._data: Bytes | None = self._whole[HEADER_BYTES:]

    @classmethod
    def create(
        cls,
        directory: str | Path,
        capacity_bytes: int,
        *,
        epoch: int,
        keeper: Path | None = None,
    ) -> Arena:
        """Create an arena of `capacity_bytes` (rounded down to whole pages, at least one), without backed bytes.
        keeper: a file; as long as it exists, the arena outlives its unit (see `sweep_recorded`). Raises
        ArenaSpaceError if `directory` has less than `capacity_bytes` available.
        """
        capacity_bytes = max(PAGE_BYTES, _round_down(capacity_bytes, PAGE_BYTES))
        _check_available(directory, capacity_bytes + HEADER_BYTES)
        path = Path(directory) / (new_arena_name() if keeper is None else new_recorded_arena_name())
        try:
            file = HeldFile(create_locked(path))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise _out_of_space(directory, capacity_bytes, error) from error
            raise
        try:
            os.ftruncate(file.fd, HEADER_BYTES + capacity_bytes)
            os.posix_fallocate(file.fd, 0, HEADER_BYTES)
            arena = cls(path, file, capacity_bytes, epoch, secrets.token_bytes(16), backed_bytes=0)
            arena._write_keeper(keeper)
            return arena
        except BaseException as error:
            path.unlink()  # before the lock is released
            file.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
                raise _out_of_space(directory, capacity_bytes, error) from error
            raise

    @classmethod
    def adopt(cls, path: str | Path, *, epoch: int) -> Arena:
        """Open the arena that an earlier epoch of the unit left at `path`, with its content. The new epoch is `epoch`,
        or the last epoch plus one if that is greater (the machine's clock was set back).

        Raises OSError if the file does not exist, BlockingIOError while another process holds it, ValueError if it is
        not an intact arena, `ArenaFormatError` if it has another format.
        """
        os.stat(path)  # raises if the file does not exist; `take` would create it
        file = HeldFile.take(Path(path))
        if file is None:
            raise BlockingIOError(errno.EAGAIN, "another process holds the arena", str(path))
        try:
            raw = os.pread(file.fd, HEADER.size, 0)
            capacity = check_header(raw, path, cookie=None)
            if os.fstat(file.fd).st_size < HEADER_BYTES + capacity:
                raise ValueError(f"{path}: the arena file is truncated")
            *_, cookie, previous_epoch, _, backed = HEADER.unpack(raw)
            if previous_epoch >= LAST_EPOCH or backed > capacity:
                raise ValueError(
                    f"{path}: corrupt header: epoch {previous_epoch} (must be below {LAST_EPOCH}), {backed:,} bytes "
                    f"backed (at most the capacity, {capacity:,})"
                )
            return cls(Path(path), file, capacity, max(epoch, previous_epoch + 1), cookie, backed)
        except BaseException:
            file.close()
            raise

    def _write_keeper(self, keeper: Path | None) -> None:
        """Store the path of the keeper in the header; None: there is no keeper. ValueError if the path is too long."""
        name = os.fsencode("" if keeper is None else keeper.absolute())
        if len(name) > PAGE_BYTES - _KEEPER_AT - _KEEPER.size:
            raise ValueError(f"the path {keeper} is too long ({len(name)} bytes); use a shorter state directory")
        assert self._map is not None
        self._map[_KEEPER_AT : _KEEPER_AT + _KEEPER.size + len(name)] = _KEEPER.pack(_mounts(), len(name)) + name

    def _set_backed(self, backed_bytes: int) -> None:
        """Set `backed_bytes`, also in the header, where clients read it."""
        assert self._map is not None, "the arena is closed"
        self.backed_bytes = backed_bytes
        self._map[BACKED_AT : HEADER.size] = backed_bytes.to_bytes(8, "little")

    @property
    def data(self) -> Bytes:
        """The usable area, writable. Accesses beyond `backed_bytes` are not allowed."""
        assert self._data is not None, "the arena is closed"
        return self._data

    def grow(self, to_bytes: int) -> int:
        """Back the arena up to `to_bytes` (rounded up to whole pages, at most the capacity). Return the backed bytes.
        Raises ArenaSpaceError if memory runs out; steps of `GROW_STEP_BYTES` that succeeded stay backed. Blocks while
        the kernel clears pages: about one second for each 4 GB.
        """
        for _ in self.grow_steps(to_bytes):
            pass
        return self.backed_bytes

    def grow_steps(self, to_bytes: int) -> Iterator[int]:
        """Grow as `grow` does, and yield the bytes backed so far after each `GROW_STEP_BYTES`."""
        target = min(self.capacity_bytes, _round_down(to_bytes + PAGE_BYTES - 1, PAGE_BYTES))  # rounded up
        while self.backed_bytes < target:
            step = min(GROW_STEP_BYTES, target - self.backed_bytes)
            _check_available(self.path.parent, step)
            try:
                os.posix_fallocate(self._file.fd, HEADER_BYTES + self.backed_bytes, step)
            except OSError as error:
                raise _out_of_space(self.path.parent, step, error) from error
            self._set_backed(self.backed_bytes + step)
            yield self.backed_bytes

    def challenge(self) -> Challenge:
        """Write fresh random bytes into the next slot of the header; its `_CHALLENGE_SLOTS` slots are used in turn."""
        assert self._map is not None, "the arena is closed"
        offset = _CHALLENGES_AT + next(self._slots) * _CHALLENGE_BYTES
        secret = secrets.token_bytes(_CHALLENGE_BYTES)
        self._map[offset : offset + len(secret)] = secret
        return Challenge(offset=offset, secret=secret)

    def close(self, *, unlink: bool = True) -> None:
        """Unlock the file and, with `unlink`, remove it. Idempotent. The kernel frees the memory when the last process
        that maps it ends. A forked child, in which `HeldFile` has closed the file, only drops its references."""
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


def sweep_recorded(directory: str | Path, *, superseded: Path | None = None) -> list[Path]:
    """Remove recorded arenas in `directory` that are no longer needed, and return their paths. Such an arena is held by
    no process, and its keeper does not exist or is `superseded`, the keeper of a new arena. Arenas of another
    container stay, because their keepers are not visible from here."""
    folder = Path(directory)
    recorded = [folder / name for name in os.listdir(folder) if RECORDED_ARENA_NAME.fullmatch(name)]
    return [path for path in recorded if _has_no_keeper(path, superseded) and unlink_unheld(path)]


def leftovers(directory: str | Path) -> list[Path]:
    """Return the arenas in `directory` that the next storage unit removes: held by no process and recorded in no state
    directory. Raises OSError if the directory cannot be listed."""
    folder = Path(directory)
    names = sorted(os.listdir(folder))
    unrecorded = [folder / name for name in names if ARENA_NAME.fullmatch(name)]
    recorded = [folder / name for name in names if RECORDED_ARENA_NAME.fullmatch(name)]
    unneeded = unrecorded + [path for path in recorded if _has_no_keeper(path, superseded=None)]
    return [path for path in unneeded if is_unheld(path)]


def _has_no_keeper(path: Path, superseded: Path | None) -> bool:
    """Return whether the arena's keeper does not exist or is `superseded`; False if that cannot be determined."""
    try:
        return _keeper_is_missing(path, superseded)
    except (OSError, ValueError) as error:
        log.warning("Cannot determine whether arena %s is still recorded (%s); it is not removed", path, error)
        return False


def _keeper_is_missing(path: Path, superseded: Path | None) -> bool:
    """Return whether the arena's keeper does not exist or is `superseded`. Return False if that cannot be seen
    from here: the file belongs to another user, or the keeper's path to another mount namespace."""
    fd = open_own(path)
    if fd is None:
        return False
    try:
        raw = os.pread(fd, PAGE_BYTES, 0)
    finally:
        os.close(fd)
    if len(raw) < PAGE_BYTES:  # its creation ended before the file had its length
        return True
    start = _KEEPER_AT + _KEEPER.size
    mounts, length = _KEEPER.unpack_from(raw, _KEEPER_AT)
    if mounts == 0:  # its creation ended before the keeper was written
        return True
    if mounts != _mounts():  # another container, where the path means another file
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
    """Return the identity of this process's mount namespace: that of its container, or of the machine."""
    return os.stat("/proc/self/ns/mnt").st_ino


def check_header(raw: bytes, path: str | Path, cookie: bytes | None) -> int:
    """Validate `raw`, the header of the arena at `path`, and return its capacity in bytes. cookie: the expected one;
    None: any. Raises ValueError, `ArenaFormatError` for another format."""
    if len(raw) < HEADER.size:
        raise ValueError(f"{path}: not an arena")
    magic, version, header_bytes, stored_cookie, _, capacity, *_ = HEADER.unpack(raw)
    if magic != _MAGIC:
        raise ValueError(f"{path}: not an arena")
    if version != FORMAT or header_bytes != HEADER_BYTES:
        raise ArenaFormatError(f"has format {version}, but this version of rl-dataplane reads format {FORMAT}")
    if cookie is not None and stored_cookie != cookie:
        raise ValueError(f"{path}: the arena's cookie does not match; the path belongs to another arena")
    return int(capacity)


def _check_available(directory: str | Path, wanted_bytes: int) -> None:
    """Raise ArenaSpaceError if `directory` has less than `wanted_bytes` of memory available."""
    memory = available_memory(directory)
    if wanted_bytes > memory.free_bytes:
        raise ArenaSpaceError(
            directory=str(directory), found_bytes=memory.free_bytes, wanted_bytes=wanted_bytes, limit=memory.limit
        )


def _out_of_space(directory: str | Path, wanted_bytes: int, error: OSError) -> ArenaSpaceError:
    """Return the error for a request of `wanted_bytes` in `directory` that the system rejected with `error`."""
    limit = "file size limit, ulimit -f" if error.errno == errno.EFBIG else str(error.strerror)
    return ArenaSpaceError(
        directory=str(directory),
        found_bytes=available_memory(directory).free_bytes,
        wanted_bytes=wanted_bytes,
        limit=limit,
    )


def _round_down(value: int, unit: int) -> int:
    """Round down to a multiple of `unit`."""
    return value - value % unit
