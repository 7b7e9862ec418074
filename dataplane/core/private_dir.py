"""Private per-user directory inside a shared directory. It contains arenas and session locks."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")

MODE = 0o700
FILE_MODE = 0o600
TRIES = 20
"""How often to create the directory again if another process removes it at the same time."""


def private(path: str | Path, flags: int) -> int:
    """Open a file with mode 0600; can be used as `opener` of `open`. Raises PermissionError for a symbolic link, which
    could point to any file of this user."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        if not os.path.islink(path):
            raise
        raise PermissionError(f"{path} is a symbolic link instead of a regular file: remove it") from error


def refuse_link_of_another(path: str | Path) -> None:
    """Raise PermissionError if `path` is a symbolic link of another user (except root), who controls its target."""
    with contextlib.suppress(FileNotFoundError):
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode) and info.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{path} is a symbolic link of another user ({info.st_uid}): remove it, or use another path"
            )


def make_private(path: str | Path) -> None:
    """Create the file at `path` if it does not exist, and set its mode to 0600."""
    fd = private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.fchmod(fd, FILE_MODE)
    finally:
        os.close(fd)


def own_path(parent: str | Path) -> Path:
    """Return the path of this user's directory in `parent`. The directory may not exist."""
    return Path(parent).absolute() / f"tq-{os.geteuid()}"


def own_directory(parent: str | Path) -> Path:
    """Return the path of this user's directory in `parent`, and create it (mode 0700) if it does not exist. Raises
    PermissionError, with the path and a remedy, if it is a link, belongs to another user or is accessible to others,
    because an attacker may have prepared it. Raises OSError if it cannot be created."""
    path = own_path(parent)
    info = _make_and_stat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{path} is {_kind(info.st_mode)} instead of a directory: remove it")
    if info.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {info.st_uid}, not to the current user {os.geteuid()}: remove it, or set another "
            "--arena-dir"
        )
    if not _is_private(info.st_mode):
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, so other users may have changed it: remove it, or, if "
            f"its content is yours, run chmod 700 {path}"
        )
    return path


def _make_and_stat(path: Path) -> os.stat_result:
    """Create a directory at `path` if nothing exists there, and return the stat result of the path. Retries, because
    another process may remove the directory concurrently."""
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, MODE)
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(path)
    return os.lstat(path)  # the last attempt raises its error


def in_own_directory(parent: str | Path, make: Callable[[Path], Made]) -> Made:
    """Call `make` with `own_directory(parent)` and return its result. Repeats both after a FileNotFoundError, because
    another process may remove the directory concurrently. Raises the errors of `own_directory` and `make`."""
    for _ in range(TRIES):
        with contextlib.suppress(FileNotFoundError):
            return make(own_directory(parent))
    return make(own_directory(parent))  # the last attempt raises its error


def leave(parent: str | Path) -> None:
    """Remove this user's directory in `parent` if it is empty. A directory that `own_directory` rejects remains."""
    path = own_path(parent)
    with contextlib.suppress(OSError):
        info = os.lstat(path)
        if info.st_uid == os.geteuid() and _is_private(info.st_mode):
            path.rmdir()


def _is_private(mode: int) -> bool:
    """Whether the mode denies access to other users. The set-group-ID bit is ignored: it is inherited from the parent
    directory, for example in Kubernetes volumes with an `fsGroup`, and grants no access."""
    return stat.S_IMODE(mode) & ~stat.S_ISGID == MODE


def _kind(mode: int) -> str:
    return "a symbolic link" if stat.S_ISLNK(mode) else "a file"


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk. Does nothing if the path does not exist."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
