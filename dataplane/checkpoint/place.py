"""How a checkpoint comes to be at its path: whole, or not at all.

Everything is written aside and synced; one rename makes it the checkpoint. Where nothing is at PATH, the whole
directory is written as PATH.partial-XXXX and renamed. Where an older checkpoint (or an empty directory) is, the new
files go into a directory of their own inside, and the rename of the manifest switches from the old ones to them: that
needs no more of the file system than a rename, where swapping two directories would.

    PATH/manifest.json                      names the files of the one checkpoint that counts
    PATH/data-XXXX/00000.safetensors ...    its files

A crash before the rename leaves PATH as it was, and PATH.partial-XXXX or PATH/data-XXXX beside it; one after it leaves
the new checkpoint, and perhaps the files of the older one. The next checkpoint to PATH removes what is left over: a
lock on the directory, which goes with the process, tells what is being written.
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

from dataplane import failpoints
from dataplane.checkpoint import files, manifest
from dataplane.errors import CheckpointError, CheckpointWriteError
from dataplane.folder import refuse_link_of_another

_OURS = re.compile(r"data-[0-9a-f]{16}|manifest\.json(\.partial-[0-9a-f]{16})?")


class Place:
    """Where one checkpoint is being written; `directory` is what its file names are relative to. Every method blocks on
    the file system; `CheckpointWriteError` where that fails."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._tag = secrets.token_hex(8)
        self._placed = False
        self._lock: int | None = None
        self._inside = self.path.exists()
        self.directory = self.path if self._inside else self._beside(self._tag)
        self.data = f"data-{self._tag}"

    def prepare(self) -> None:
        """Make room aside, and remove what crashed checkpoints left. `CheckpointError` if something that is no
        checkpoint is at the path, or another process is writing one there."""
        with files.translated(self.directory):
            refuse_link_of_another(self.path)
            if self._inside:
                self._check_ours()
            else:
                self.directory.mkdir(parents=True)
            self._take_lock()
            self._sweep()
            (self.directory / self.data).mkdir()

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
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                file=str(self.path), why="another process is writing a checkpoint to this path"
            ) from None
        except OSError:
            os.close(descriptor)
            return
        self._lock = descriptor

    def _sweep(self) -> None:
        """Remove what nobody writes any more."""
        if self._lock is None:
            return
        if self._inside:
            self._sweep_inside(self._current())
        partial = re.compile(re.escape(self.path.name) + r"\.partial-[0-9a-f]{16}")
        for name in os.listdir(self.path.parent):
            left = self.path.parent / name
            if partial.fullmatch(name) and left != self.directory and _abandoned(left):
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
            if name.startswith("data-") and name not in kept:
                shutil.rmtree(self.path / name, ignore_errors=True)
            elif name.startswith(f"{manifest.NAME}.partial-"):
                (self.path / name).unlink(missing_ok=True)

    def finish(self, content: manifest.Manifest) -> None:
        """All files are written: this is the checkpoint from now on."""
        aside = self.directory / f"{manifest.NAME}.partial-{self._tag}"
        with files.translated(aside):
            with aside.open("xb", buffering=0) as file:
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
            os.close(self._lock)
            self._lock = None


def _abandoned(directory: Path) -> bool:
    """Whether no living process writes there."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
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
