"""The directory in a shared one that is this user's alone: arenas and session locks lie in it."""

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


def private(path: str | Path, flags: int) -> int:
    """An opener (see `open`) of files that are for this user only. PermissionError for a link: it could lead to any
    file of this user."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        if not os.path.islink(path):
            raise
        raise PermissionError(f"{path} is a link, where a file of this user is to be: remove it") from error


def refuse_link_of_another(path: str | Path) -> None:
    """PermissionError where `path` is a link that another user made, root apart: it leads where that user wants."""
    with contextlib.suppress(FileNotFoundError):
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode) and info.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{path} is a link that user {info.st_uid} made: remove it, or name another path")


def make_private(path: str | Path) -> None:
    """The file at `path` is there, and for this user only."""
    fd = private(path, os.O_RDWR | os.O_CREAT)
    try:
        os.fchmod(fd, FILE_MODE)
    finally:
        os.close(fd)


def own_path(parent: str | Path) -> Path:
    """Where this user's directory in `parent` is, whether it is there or not."""
    return Path(parent).absolute() / f"tq-{os.geteuid()}"


def own_directory(parent: str | Path) -> Path:
    """This user's directory in `parent`, mode 0700, made if it is not there. PermissionError, naming it and what to do,
    for one that is a link, another user's, or open to others: somebody may have prepared it. OSError where none can be
    made."""
    path = own_path(parent)
    info = _made(path)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{path} is {_kind(info.st_mode)}, where a directory of this user is to be: remove it")
    if info.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {info.st_uid}, not to this one, {os.geteuid()}: remove it, or name another "
            "--arena-dir"
        )
    if not _is_private(info.st_mode):
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, others may have reached into it: remove it, or, if "
            f"what is in it is yours, chmod 700 {path}"
        )
    return path


def _made(path: Path) -> os.stat_result:
    """What is at `path`, a directory made there if need be: who leaves last may just be removing it."""
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, MODE)
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(path)
    return os.lstat(path)


def in_own_directory(parent: str | Path, make: Callable[[Path], Made]) -> Made:
    """What `make` makes in `own_directory(parent)`, which another process may just be removing. Raises as both do."""
    for _ in range(TRIES):
        with contextlib.suppress(FileNotFoundError):
            return make(own_directory(parent))
    return make(own_directory(parent))


def leave(parent: str | Path) -> None:
    """Remove this user's directory in `parent` if nothing is in it any more. One that `own_directory` refuses stays."""
    path = own_path(parent)
    with contextlib.suppress(OSError):
        info = os.lstat(path)
        if info.st_uid == os.geteuid() and _is_private(info.st_mode):
            path.rmdir()


def _is_private(mode: int) -> bool:
    """Whether nobody else gets in. A directory that is made in one with the set-group-ID bit, as volumes of pods with
    an `fsGroup` have it, has that bit too, which lets nobody in."""
    return stat.S_IMODE(mode) & ~stat.S_ISGID == MODE


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a file"
