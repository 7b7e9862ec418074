"""Lock files that show whether their process still runs. They are created already locked, and can be probed.

The lock is an `flock`, which belongs to the open file description. The kernel releases it when the last process that
has the description exits, for any reason. Closing another descriptor of the same file does not release it (as it would
release a POSIX record lock). The lock can be probed without owning the file. Holders lock exclusively and probes lock
shared, so that two concurrent probes never mistake each other for a holder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import secrets
import stat
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

LOCAL_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"})
"""File systems on which locks are visible to all processes of this host and to no other host."""

_FILE_SYSTEMS = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlay",
    0x9FA0: "proc",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x5346414F: "afs",
    0x73717368: "squashfs",
    0x958458F6: "hugetlbfs",
}
"""Names by the `f_type` of statfs(2); ext2, ext3 and ext4 share one number."""
_STATFS_BYTES = 256
"""More than the size of the result of statfs(2)."""

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EXDEV, errno.EPERM})
"""Error numbers of a file system that cannot create files without a name, or cannot link them."""

_NO_SUCH_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO})
"""Error numbers of `open` for a missing file, or for a file of another user. A user can always open own lock files."""

ARENA_NAME = re.compile(r"tq-arena-[0-9a-f]{32}")
RECORDED_ARENA_NAME = re.compile(r"tq-kept-[0-9a-f]{32}")
SESSION_LOCK_NAME = re.compile(r"tq-session-[0-9a-f]{32}\.lock")


def new_arena_name() -> str:
    """Return a unique file name for an arena, which matches `ARENA_NAME`."""
    return f"tq-arena-{secrets.token_hex(16)}"


def new_recorded_arena_name() -> str:
    """Return a unique file name for an arena that remains after its unit stops. `sweep` does not remove it."""
    return f"tq-kept-{secrets.token_hex(16)}"


def new_session_lock_name() -> str:
    """Return a unique file name for the lock of a session, which matches `SESSION_LOCK_NAME`."""
    return f"tq-session-{secrets.token_hex(16)}.lock"


def create_locked(path: Path) -> int:
    """Create an empty file at `path`, mode 0600, that is locked when it appears. Return the descriptor that holds the
    lock.

    The descriptor is close-on-exec. Raises FileExistsError if the path exists.
    """
    try:
        return _create_nameless(path)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    return _create_aside(path)


def _create_nameless(path: Path) -> int:
    """As `create_locked`. Create the file without a name and link it afterwards: if the process dies in between, no
    file remains."""
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # os.link follows the symbolic link in /proc only with a directory descriptor.
            os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_aside(path: Path) -> int:
    """As `create_locked`, for file systems without O_TMPFILE: create the file under a hidden temporary name, and link
    it to `path` when it is locked."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(hidden, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(hidden)  # the file stays under its name `path`, if it has one
    return fd


def is_held(fd: int) -> bool:
    """Whether the lock of the file is held. `fd` must be a separate open file description, not the holder's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def is_unheld(path: Path) -> bool:
    """Whether the file at `path` belongs to this user and no process holds its lock. Raises OSError like `open_own`."""
    fd = open_own(path)
    if fd is None:
        return False
    try:
        return not is_held(fd)
    finally:
        os.close(fd)


def unlink_unheld(path: Path) -> bool:
    """Remove the file at `path` if it belongs to this user and no process holds its lock. Return whether this call
    removed it."""
    try:
        fd = open_own(path)
    except OSError:
        fd = None
    if fd is None:
        return False
    try:
        if is_held(fd):
            return False
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()
            return True
        return False  # another process removed it first, or the directory permits no removal
    finally:
        os.close(fd)


def open_own(path: Path) -> int | None:
    """Open the regular file at `path` if it belongs to this process's user. Return a read-only, close-on-exec
    descriptor, or None if there is no such file (also for a link, a directory or another user's file). Raises OSError
    if this cannot be determined (for example, too many open files)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_SUCH_FILE:
            return None
        raise
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


def sweep(directory: str | Path) -> list[Path]:
    """Remove the arenas and session locks in `directory` that no process holds, and return their paths. Files of other
    users, locked files and files with other names remain. Raises OSError if the directory cannot be listed."""
    folder = Path(directory)
    names = [name for name in os.listdir(folder) if ARENA_NAME.fullmatch(name) or SESSION_LOCK_NAME.fullmatch(name)]
    return [folder / name for name in names if unlink_unheld(folder / name)]


def file_system(path: str | Path) -> str:
    """Return the type of the file system of `path`, or of its nearest existing parent; "" if it cannot be determined.
    An unknown type is returned as its hexadecimal number. The function calls statfs instead of reading a mount table,
    because a mount table may lack the file system of a process in a chroot."""
    absolute = Path(path).absolute()
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    for candidate in (absolute, *absolute.parents):
        if _statfs()(os.fsencode(candidate), buffer) == 0:  # else it does not exist
            number = int.from_bytes(buffer.raw[:4], sys.byteorder)  # 4 bytes of `f_type` (see `_statfs`)
            return _FILE_SYSTEMS.get(number, f"{number:#x}")
    return ""


@functools.cache
def _statfs() -> Callable[[bytes, ctypes.Array[ctypes.c_char]], int]:
    """Return the C function statfs(path, result), which returns 0 for success. `f_type` comes first in its result."""
    function = ctypes.CDLL(None, use_errno=True).statfs
    function.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return function


def is_local(path: str | Path) -> bool:
    """Whether `path` is on a file system local to this host, on which `flock` and shared mappings are reliable."""
    return file_system(path) in LOCAL_FILE_SYSTEMS


class HeldFile:
    """An open file that is locked until `close` or until this process exits. A forked child closes the file at once, so
    that the lock stands for this process alone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _held_files().add(self)

    @classmethod
    def take(cls, path: Path) -> HeldFile | None:
        """Open and lock the file at `path`, and create it (mode 0600) if it does not exist. Return None if another
        process holds the lock. Raises OSError if the file cannot be opened."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(fd)

    def close(self) -> None:
        """Close the file and release the lock. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@functools.cache
def _held_files() -> weakref.WeakSet[HeldFile]:
    """Return the registry of all held files. The first call registers the fork handler, which closes them in a
    child."""
    held: weakref.WeakSet[HeldFile] = weakref.WeakSet()

    def in_child() -> None:
        for file in held:
            file.close()
        held.clear()

    os.register_at_fork(after_in_child=in_child)
    return held
