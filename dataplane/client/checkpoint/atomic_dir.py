"""How a checkpoint comes to be at its path: whole, or not at all.

Everything is written aside and synced; one rename makes it the checkpoint. Where nothing is at PATH, the whole
directory is written as PATH.partial-XXXX and renamed. Where an older checkpoint (or an empty directory) is, the new
files go into a directory of their own inside, and the rename of the manifest switches from the old ones to them: that
needs no more of the file system than a rename, where swapping two directories would.

    PATH/manifest.json                      names the files of the one checkpoint that counts
    PATH/data-XXXX/00000.safetensors ...    its files

All of it is for this user only, whatever the umask: modes 0700 and 0600. A directory that is there already keeps its
mode, and directories that are made above PATH get what the umask says.

A crash before the rename leaves PATH as it was, and PATH.partial-XXXX or PATH/data-XXXX beside it; one after it leaves
the new checkpoint, and perhaps the files of the older one. The next checkpoint to PATH removes what is left over. Locks
on directories, which end with their process, show what is in use: a writer holds an exclusive lock on PATH (or
PATH.partial-XXXX), a reader a shared lock on PATH/data-XXXX. On a file system without locks (some NFS), left-over files
stay until they are removed by hand, so that a reader needs no lock. Where locks hold on one host only, only readers on
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
    """Where one checkpoint is being written; `directory` is what its file names are relative to. Every method blocks on
    the file system; `CheckpointWriteError` where that fails."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _absolute(path)
        self._tag = secrets.token_hex(8)
        self._placed = False
        self._lock: int | None = None
        self._inside = os.path.exists(self.path)  # False for a name that is too long, which `prepare` then names
        self.directory = self.path if self._inside else self._beside(self._tag)
        self.data = f"data-{self._tag}"

    def prepare(self) -> None:
        """Make space aside, and remove what crashed checkpoints left. `CheckpointError` if something that is no
        checkpoint is at the path, or another process is writing one there."""
        with files.translated(self.directory):
            refuse_link_of_another(self.path)
            if self._inside:
                self._check_ours()
            else:
                self.directory.mkdir(MODE, parents=True)
            self._take_lock()
            self._sweep()
            (self.directory / self.data).mkdir(MODE)

    def _beside(self, tag: str) -> Path:
        return self.path.with_name(f"{self.path.name}.partial-{tag}")

    def _check_ours(self) -> None:
        found = os.listdir(self.path) if self.path.is_dir() else None
        if found is None or (any(not _OURS.fullmatch(name) for name in found) and not self._is_checkpoint()):
            raise CheckpointError(
                file=str(self.path),
                why="exists and is no checkpoint; name a new directory, an empty one, or that of an older checkpoint",
            )

    def _is_checkpoint(self) -> bool:
        """Then what somebody else put beside its files stays there."""
        try:
            manifest.read(self.path)
        except CheckpointError:
            return False
        return True

    def _take_lock(self) -> None:
        """On file systems without locks two processes must not write to one path at once, and nothing is swept."""
        try:
            self._lock = _locked(self.directory, fcntl.LOCK_EX)
        except BlockingIOError:
            raise CheckpointError(
                file=str(self.path), why="another process is writing a checkpoint to this path"
            ) from None

    def _sweep(self) -> None:
        """Remove what nobody writes or reads."""
        if self._lock is None:
            return
        if self._inside:
            self._sweep_inside(self._current())
        partial = re.compile(re.escape(self.path.name) + r"\.partial-[0-9a-f]{16}")
        for name in os.listdir(self.path.parent):
            left = self.path.parent / name
            if partial.fullmatch(name) and left != self.directory and _unused(left):
                shutil.rmtree(left, ignore_errors=True)

    def _current(self) -> set[str]:
        """The directories that the manifest at the path names; of a damaged one, all that are there."""
        if not (self.path / manifest.NAME).exists():
            return set()
        try:
            return {entry.name.partition("/")[0] for entry in manifest.read(self.path).files}
        except CheckpointError:
            return set(os.listdir(self.path))

    def _sweep_inside(self, kept: set[str]) -> None:
        for name in os.listdir(self.path):
            if name.startswith("data-") and name not in kept and _unused(self.path / name):
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif name.startswith(f"{manifest.NAME}.partial-"):
                (self.path / name).unlink(missing_ok=True)

    def finish(self, content: manifest.Manifest) -> None:
        """All files are written: this is the checkpoint from now on."""
        aside = self.directory / f"{manifest.NAME}.partial-{self._tag}"
        with files.translated(aside):
            with open(aside, "xb", buffering=0, opener=private) as file:
                files.write_all(file.fileno(), memoryview(manifest.encode(content)))
                os.fsync(file.fileno())
            _sync(self.directory / self.data)
            _sync(self.directory)
            failpoints.hit("checkpoint.before_rename")
            aside.rename(self.directory / manifest.NAME)
            self._placed = self._inside
            _sync(self.directory)
            if not self._inside:
                self._rename()
                self._placed = True
                _sync(self.path.parent)
        failpoints.hit("checkpoint.after_rename")
        with contextlib.suppress(OSError):
            if self._inside and self._lock is not None:
                self._sweep_inside({self.data})
        self._let_go()

    def _rename(self) -> None:
        try:
            self.directory.rename(self.path)
        except OSError as error:
            raise CheckpointWriteError(file=str(self.path), why=f"{error.strerror}: it came to be meanwhile") from error

    def abandon(self) -> None:
        """Remove what was written; what was at the path stays. Raises nothing."""
        if not self._placed:
            with contextlib.suppress(OSError):
                (self.directory / f"{manifest.NAME}.partial-{self._tag}").unlink(missing_ok=True)
            shutil.rmtree(self.directory / self.data if self._inside else self.directory, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None


class Reading:
    """An open checkpoint. Its files are kept until `close`, even if another checkpoint is saved to its path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = _absolute(path)
        self._locks: list[int] = []

    def open(self) -> manifest.Manifest:
        """The manifest of the checkpoint that counts now. Blocks on the file system. `CheckpointError` where there is
        none."""
        while True:
            content = manifest.read(self.directory)
            self._lock({entry.name.partition("/")[0] for entry in content.files})
            # If it still counts, its files were locked before anybody could replace it and remove them.
            if manifest.read(self.directory) == content:
                return content
            self.close()

    def _lock(self, names: set[str]) -> None:
        """What cannot be opened is missing, or is being removed."""
        for name in names:
            with contextlib.suppress(OSError):
                descriptor = _locked(self.directory / name, fcntl.LOCK_SH)
                if descriptor is not None:
                    self._locks.append(descriptor)

    def close(self) -> None:
        """Idempotent."""
        while self._locks:
            _unlock(self._locks.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _absolute(path: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(path):
        raise CheckpointError(file=repr(os.fspath(path)), why="no path has a NUL character")
    if not os.fspath(path):
        raise CheckpointError(file="''", why="the path is empty (an unset variable?)")
    return Path(path).absolute()


def _locked(directory: Path, how: int) -> int | None:
    """A descriptor that locks the directory; None where the file system has no locks. `BlockingIOError` if another
    lock is in the way."""
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
    """Also for a child that was forked meanwhile and has the descriptor, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _unused(directory: Path) -> bool:
    """Whether no living process writes or reads there."""
    try:
        descriptor = _locked(directory, fcntl.LOCK_EX)
    except OSError:
        return False
    if descriptor is None:
        return False
    _unlock(descriptor)
    return True


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system has no such thing
            raise
    finally:
        os.close(descriptor)
