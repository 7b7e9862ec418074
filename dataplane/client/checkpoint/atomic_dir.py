"""Write a checkpoint to its path atomically.

All data is written to temporary names and synced; one rename publishes the checkpoint. If PATH does not exist, the
whole directory is written as PATH.partial-XXXX and renamed. If PATH is an older checkpoint (or an empty directory),
the new files go into a subdirectory of PATH, and the rename of the manifest switches to them. This only requires a
plain rename from the file system, unlike a swap of two directories.

    PATH/manifest.json                      lists the files of the current checkpoint
    PATH/data-XXXX/00000.safetensors ...    its files

All files are private to the user regardless of the umask: modes 0700 and 0600. Existing directories keep their
mode, and parent directories created above PATH follow the umask.

A crash before the rename leaves PATH unchanged, plus PATH.partial-XXXX or PATH/data-XXXX; a crash after it leaves
the new checkpoint and possibly the files of the older one. The next checkpoint to PATH removes such leftovers.
Directory locks, which end with their process, mark directories in use: a writer holds an exclusive lock on PATH (or
PATH.partial-XXXX), a reader a shared lock on PATH/data-XXXX. On a file system without locks (some NFS), leftovers
stay until they are removed by hand, so that readers need no lock. If locks work on one host only, only readers on
that host are protected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Self

from dataplane.client.checkpoint import files, manifest
from dataplane.core import failpoints
from dataplane.core.private_dir import MODE, private, refuse_link_of_another
from dataplane.errors import CheckpointError, CheckpointWriteError

_OURS = re.compile(r"data-[0-9a-f]{16}|manifest\.json(\.partial-[0-9a-f]{16})?")


class Place:
    """The target of one checkpoint in progress; `directory` is the base of its file names, `data` the name of the
    subdirectory with its data files. Every method blocks on the file system and raises `CheckpointWriteError` if that
    fails.

    _inside: the path existed at the start, so that the files go into a subdirectory of it. _placed: a rename has
    published the checkpoint. _lock: descriptor of the locked directory, None if the file system has no locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _absolute(path)
        self._tag = secrets.token_hex(8)
        self._placed = False
        self._lock: int | None = None
        self._inside = os.path.exists(self.path)  # False for a name that is too long; `prepare` reports it
        self.directory = self.path if self._inside else self._beside(self._tag)
        self.data = f"data-{self._tag}"

    def prepare(self) -> None:
        """Create the directories to write into, lock `directory`, and remove leftovers of crashed writers. Raise
        `CheckpointError` if the path is not replaceable (`_check_replaceable`), or another process is writing to it."""
        with files.translated(self.directory):
            refuse_link_of_another(self.path)
            if self._inside:
                self._check_replaceable()
            else:
                self.directory.mkdir(MODE, parents=True)
            self._take_lock()
            self._remove_leftovers()
            (self.directory / self.data).mkdir(MODE)

    def _beside(self, tag: str) -> Path:
        return self.path.with_name(f"{self.path.name}.partial-{tag}")

    def _check_replaceable(self) -> None:
        """Raise `CheckpointError` unless the path is a directory that is empty, has only files of a checkpoint, or is
        a valid checkpoint, possibly with foreign files."""
        names = os.listdir(self.path) if self.path.is_dir() else None  # None: the path is not a directory
        if names is None or (any(not _OURS.fullmatch(name) for name in names) and not self._is_checkpoint()):
            raise CheckpointError(
                file=str(self.path),
                why="the path exists, but is not a checkpoint; pass a new path, or that of an empty directory or an "
                "older checkpoint",
            )

    def _is_checkpoint(self) -> bool:
        """Return whether the path is a valid checkpoint; foreign files in its directory are then kept."""
        try:
            manifest.read(self.path)
        except CheckpointError:
            return False
        return True

    def _take_lock(self) -> None:
        """Lock the directory against other writers. On file systems without locks, concurrent writers are not
        detected and no leftovers are removed. Raise `CheckpointError` if another writer holds the lock."""
        try:
            self._lock = _locked(self.directory, fcntl.LOCK_EX)
        except BlockingIOError:
            raise CheckpointError(
                file=str(self.path),
                why="another process is writing a checkpoint to this path; wait for it, or pass another path",
            ) from None

    def _remove_leftovers(self) -> None:
        """Remove leftovers of crashed writers, in the path and beside it, that no process writes or reads."""
        if self._lock is None:  # whether they are in use cannot be determined
            return
        if self._inside:
            self._remove_data_except(self._current_data())
        partial = re.compile(re.escape(self.path.name) + r"\.partial-[0-9a-f]{16}")
        for name in os.listdir(self.path.parent):
            candidate = self.path.parent / name
            if partial.fullmatch(name) and candidate != self.directory and _unused(candidate):
                shutil.rmtree(candidate, ignore_errors=True)

    def _current_data(self) -> set[str]:
        """Return the data directories listed in the manifest at the path; for a damaged manifest, all of them."""
        if not (self.path / manifest.NAME).exists():
            return set()
        try:
            return {entry.name.partition("/")[0] for entry in manifest.read(self.path).files}
        except CheckpointError:
            return set(os.listdir(self.path))

    def _remove_data_except(self, kept: set[str]) -> None:
        """Remove from the path unfinished manifests, and the unused data directories that are not in `kept`."""
        for name in os.listdir(self.path):
            if name.startswith("data-") and name not in kept and _unused(self.path / name):
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif name.startswith(f"{manifest.NAME}.partial-"):
                (self.path / name).unlink(missing_ok=True)

    def finish(self, content: manifest.Manifest) -> None:
        """Publish the checkpoint after all of its data files are written: write and rename the manifest and, if the
        path did not exist, the whole directory. Then remove the files of an older checkpoint, and release the lock."""
        unfinished = self.directory / f"{manifest.NAME}.partial-{self._tag}"
        with files.translated(unfinished):
            with open(unfinished, "xb", buffering=0, opener=private) as file:
                files.write_all(file.fileno(), memoryview(manifest.encode(content)))
                os.fsync(file.fileno())
            _sync(self.directory / self.data)
            _sync(self.directory)
            failpoints.hit("checkpoint.before_rename")
            unfinished.rename(self.directory / manifest.NAME)
            self._placed = self._inside  # otherwise only the next rename publishes the checkpoint
            _sync(self.directory)
            if not self._inside:
                self._rename_directory()
                self._placed = True
                _sync(self.path.parent)
        failpoints.hit("checkpoint.after_rename")
        with contextlib.suppress(OSError):  # the checkpoint is complete; the next one removes what remains
            if self._inside and self._lock is not None:
                self._remove_data_except({self.data})  # the files of the older checkpoint
        self._release_lock()

    def _rename_directory(self) -> None:
        """Rename the temporary directory to the path. Raise `CheckpointWriteError` if that fails."""
        try:
            self.directory.rename(self.path)
        except OSError as error:
            created = ": another process created the path" if self.path.exists() else ""
            raise CheckpointWriteError(file=str(self.path), why=f"{error.strerror}{created}") from error

    def abandon(self) -> None:
        """Remove the written files unless they were published; an older checkpoint at the path stays."""
        if not self._placed:
            with contextlib.suppress(OSError):
                (self.directory / f"{manifest.NAME}.partial-{self._tag}").unlink(missing_ok=True)
            shutil.rmtree(self.directory / self.data if self._inside else self.directory, ignore_errors=True)
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None


class Reading:
    """A checkpoint that is read. Locks keep its files until `close`, even if another one is saved to its path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = _absolute(path)
        self._locks: list[int] = []

    def open(self) -> manifest.Manifest:
        """Lock the data of the current checkpoint and return its manifest. Block on the file system. Raise
        `CheckpointError` if there is no valid one."""
        while True:
            content = manifest.read(self.directory)
            self._lock_data({entry.name.partition("/")[0] for entry in content.files})
            # If it is still current, its files were locked before a writer could replace and remove them.
            if manifest.read(self.directory) == content:
                return content
            self.close()  # it was replaced meanwhile: unlock its data, and try the new one

    def _lock_data(self, names: set[str]) -> None:
        """Lock these data directories. Skip one that is missing or that a writer is removing."""
        for name in names:
            with contextlib.suppress(OSError):
                descriptor = _locked(self.directory / name, fcntl.LOCK_SH)
                if descriptor is not None:
                    self._locks.append(descriptor)

    def close(self) -> None:
        """Release the locks. Idempotent."""
        while self._locks:
            _unlock(self._locks.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raise `CheckpointError` for an empty path or one with a NUL character."""
    if "\0" in os.fspath(path):
        raise CheckpointError(
            file=repr(os.fspath(path)), why="the path contains a NUL character (\\0); pass a path without it"
        )
    if not os.fspath(path):
        raise CheckpointError(file="''", why="the path is empty (an unset variable?); pass the path of a directory")
    return Path(path).absolute()


def _locked(directory: Path, how: int) -> int | None:
    """Return a descriptor that locks the directory; None if the file system has no locks. Raise `BlockingIOError` if
    another lock conflicts, another OSError without such a directory. how: `fcntl.LOCK_EX` or `fcntl.LOCK_SH`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int) -> None:
    """Unlock explicitly, because a child process that was forked in the meantime also holds the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _unused(directory: Path) -> bool:
    """Return whether certainly no process uses the directory: whether it can be locked."""
    try:
        descriptor = _locked(directory, fcntl.LOCK_EX)
    except OSError:
        return False
    if descriptor is None:  # the file system has no locks
        return False
    _unlock(descriptor)
    return True


def _sync(directory: Path) -> None:
    """Force the entries of the directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system does not support it for directories
            raise
    finally:
        os.close(descriptor)
