"""The session lock, which proves to a storage unit that a client process on its host has ended.

The client creates and locks the file before it opens its session. The unit opens the file while it is locked and keeps
the descriptor. When the unit later finds the lock free, every process that mapped the arena through this session has
ended. Children forked by the client deliberately share the lock, because they inherit its mappings.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dataplane.core.file_locks import (
    SESSION_LOCK_NAME,
    create_locked,
    is_held,
    is_local,
    new_session_lock_name,
    open_own,
    unlink_unheld,
)
from dataplane.core.private_dir import in_own_directory, leave, own_directory

DEFAULT_LOCK_DIRECTORY = "/dev/shm"
"""Session locks are in this user's directory below it."""

log = logging.getLogger(__name__)


def lock_directories(arenas: Path) -> set[Path]:
    """Return the directories from which a unit with its arena in `arenas` accepts session locks."""
    try:
        return {arenas, own_directory(DEFAULT_LOCK_DIRECTORY)}
    except OSError as error:
        log.warning("Storage unit accepts session locks only from %s; other clients are remote: %s", arenas, error)
        return {arenas}


class SessionLock:
    """The client's side. Held from `create` until `close`, or until the last process that inherited it has ended."""

    def __init__(self, path: Path, fd: int) -> None:
        """Use `create`."""
        self.path = path
        self._fd = fd
        self._owner = os.getpid()

    @classmethod
    def create(cls, directory: str | Path | None = None) -> SessionLock:
        """Create and lock a file in `directory`. The unit must accept the directory: the arena's directory, or this
        user's directory in /dev/shm (the default). Raises OSError."""

        def make(folder: Path) -> SessionLock:
            path = folder / new_session_lock_name()
            return cls(path, create_locked(path))

        if directory is None:
            return in_own_directory(DEFAULT_LOCK_DIRECTORY, make)
        return make(Path(directory).absolute())

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock."""
        return self._fd >= 0

    @property
    def stands(self) -> bool:
        """Whether the lock file still exists. A unit that finds the lock free removes the file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock, which declares that this process no longer accesses shared memory through this session.
        The file is removed unless a forked child, which may have views, still holds the lock. Call it when no copy is
        in progress and no view exists. Idempotent.
        """
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if os.getpid() == self._owner:
            unlink_unheld(self.path)
            leave(DEFAULT_LOCK_DIRECTORY)  # removes this user's directory if it is empty

    def __enter__(self) -> SessionLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(eq=False)
class PeerLock:
    """The unit's side: a descriptor of a client's lock file."""

    path: Path
    fd: int

    @classmethod
    def open(cls, path: str, *, directories: Iterable[Path]) -> PeerLock | str:
        """Open the lock that a client claims to hold. If it is not acceptable, return a readable reason.

        `path` comes from the wire. It is only opened if it is directly in one of `directories`, has the name of a
        session lock and is a regular file of this user on a local file system. Raises OSError if it is unreadable.
        """
        lock_path = Path(path)
        if not SESSION_LOCK_NAME.fullmatch(lock_path.name) or lock_path.parent not in set(directories):
            return "its session lock is not in a directory that this unit accepts"
        if not is_local(lock_path.parent):
            return f"{lock_path.parent} is not on a local file system"
        fd = open_own(lock_path)
        if fd is None:
            return "its session lock file was not found (another container or another user)"
        lock = cls(lock_path, fd)
        if not lock.held():
            lock.drop()
            return "its session lock is not held"
        return lock

    def held(self) -> bool:
        """Whether any process still holds the client's lock."""
        return is_held(self.fd)

    def same_file(self, other: PeerLock) -> bool:
        return os.path.samestat(os.fstat(self.fd), os.fstat(other.fd))

    def bury(self) -> None:
        """Remove the lock file of a client that has ended, and close the descriptor."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.drop()

    def drop(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
