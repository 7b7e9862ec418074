"""The directory in a shared one that is this user's alone: arenas and session locks lie in it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

MODE = 0o700
FILE_MODE = 0o600


def private(path: str | Path, flags: int) -> int:
    """An opener (see `open`) of files that are for this user only."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


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
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, MODE)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(f"{path} is {_kind(info.st_mode)}, where a directory of this user is to be: remove it")
    if info.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {info.st_uid}, not to this one, {os.geteuid()}: remove it, or name another "
            "--arena-dir"
        )
    if stat.S_IMODE(info.st_mode) != MODE:
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, others may have reached into it: remove it, or, if "
            f"what is in it is yours, chmod 700 {path}"
        )
    return path


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a file"
