"""The session lock: how a storage unit knows, beyond doubt, that a process on its host is gone.

The client creates and holds the file before it opens its session; the unit opens it while it is held and keeps that
descriptor. When the unit later finds the lock free, every process that had the client's memory mapped through this
session is gone. Children forked by the client share the lock, on purpose: they inherited its mappings, too.
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
"""Session locks lie in this user's own directory there."""

log = logging.getLogger(__name__)


def lock_directories(arenas: Path) -> set[Path]:
    """Where a unit whose arena is in `arenas` takes session locks from."""
    try:
        return {arenas, own_directory(DEFAULT_LOCK_DIRECTORY)}
    except OSError as error:
        log.warning("no client is local to this storage unit, unless its lock is in %s: %s", arenas, error)
        return {arenas}


class SessionLock:
    """The client's side. Held from `create` until `close`, or until the last process that inherited it is gone."""

    def __init__(self, path: Path, fd: int) -> None:
        """Use `create`."""
        self.path = path
        self._fd = fd
        self._owner = os.getpid()

    @classmethod
    def create(cls, directory: str | Path | None = None) -> SessionLock:
        """A new lock file in `directory`, held. The directory must be one that the unit accepts: the arena's own, or,
        the default, this user's in /dev/shm. Raises OSError."""

        def make(folder: Path) -> SessionLock:
            path = folder / new_session_lock_name()
            return cls(path, create_locked(path))

        return in_own_directory(DEFAULT_LOCK_DIRECTORY, make) if directory is None else make(Path(directory).absolute())

    @property
    def held(self) -> bool:
        """Whether this process still holds it."""
        return self._fd >= 0

    @property
    def stands(self) -> bool:
        """Whether no unit can have found it free so far: a unit that does removes the file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Say that nothing of this process touches shared memory through this session any more: drop the lock, and
        remove the name unless a forked child, which may have views, still holds it. Call it when no copy is under way
        and no view is left. Idempotent.
        """
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if os.getpid() == self._owner:
            unlink_unheld(self.path)
            leave(DEFAULT_LOCK_DIRECTORY)

    def __enter__(self) -> SessionLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(eq=False)
class PeerLock:
    """The unit's side: its own descriptor of a client's lock file."""

    path: Path
    fd: int

    @classmethod
    def open(cls, path: str, *, directories: Iterable[Path]) -> PeerLock | str:
        """The lock that a client says it holds, or why it cannot be taken as one, for a person.

        `path` comes from the wire: nothing is opened unless it lies directly in one of `directories`, is named as a
        session lock and is a regular file of this user on a local file system. OSError if it cannot be looked at.
        """
        there = Path(path)
        if not SESSION_LOCK_NAME.fullmatch(there.name) or there.parent not in set(directories):
            return "its session lock is not in a directory this unit looks into"
        if not is_local(there.parent):
            return f"{there.parent} is not on a local file system"
        fd = open_own(there)
        if fd is None:
            return "its session lock is not there (another container, or another user)"
        lock = cls(there, fd)
        if not lock.held():
            lock.drop()
            return "its session lock is not held"
        return lock

    def held(self) -> bool:
        """Whether some process still holds the client's lock."""
        return is_held(self.fd)

    def same_file(self, other: PeerLock) -> bool:
        return os.path.samestat(os.fstat(self.fd), os.fstat(other.fd))

    def bury(self) -> None:
        """The client is gone: remove what is left of its file."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.drop()

    def drop(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
