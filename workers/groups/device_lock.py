"""`DeviceLock`: the accelerators of a node, locked for one worker at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dataplane.core.durations import as_timeout
from dataplane.core.file_locks import HeldFile
from dataplane.core.private_dir import in_own_directory
from workers.errors import DeviceLockTimeoutError
from workers.transport.waiting import LoggedWait

TIMEOUT_S = 1800.0
RETRY_S = 0.1
"""Delay before a lock that another worker holds is tried again."""


class DeviceLock:
    """A lock of some accelerators. While a worker holds it, no other worker of the job can lock any of them.

    The lock belongs to the worker: its threads share it, until each of them has released it. A worker without
    accelerators acquires it at once. The kernel releases it when the worker's process ends, however it ends. A
    wait tries again every `RETRY_S`. In async code it blocks the event loop, as any thread lock does.
    A context manager.

    Accelerators are locked in ascending order, so workers that share several of them cannot deadlock.
    """

    def __init__(self, worker: str, devices: Sequence[str], job: str, folder: str | Path | None = None) -> None:
        """worker: its name, for messages; devices: identifiers of the accelerators on this node; job: equal for all
        workers of one job; folder: parent of this user's private directory, which has the lock files; default: the
        directory for temporary files."""
        self._worker = worker
        self._devices = sorted(set(devices))
        self._job = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._folder = folder or tempfile.gettempdir()
        self._guard = threading.Lock()  # held while a thread waits for the files; other threads wait for it
        self._count = 0  # the calls of `acquire` minus those of `release`
        self._held: list[tuple[Path, HeldFile]] = []  # one locked file per accelerator

    def acquire(self, timeout_s: float | None = TIMEOUT_S) -> None:
        """Block until the worker holds the lock. `DeviceLockTimeoutError`, which names a current holder, after
        `timeout_s`."""
        wait = LoggedWait(as_timeout("timeout_s", timeout_s))  # for all accelerators together
        with self._guard:
            if not self._count:
                try:
                    for device in self._devices:
                        self._held.append(self._lock_device(device, wait))
                except BaseException:
                    self._release_all()
                    raise
            self._count += 1

    def release(self) -> None:
        """Undo one `acquire`; the last one releases the lock. RuntimeError if this worker does not hold it."""
        with self._guard:
            if not self._count:
                raise RuntimeError(
                    f"cannot release the device_lock of worker {self._worker}: the worker does not hold it"
                )
            self._count -= 1
            if not self._count:
                self._release_all()

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _lock_device(self, device: str, wait: LoggedWait) -> tuple[Path, HeldFile]:
        """Lock the file of one accelerator and write the worker's name into it. Return its path and the
        open file. `DeviceLockTimeoutError` if another worker still holds it when `wait` is over."""
        device_hash = hashlib.sha256(device.encode()).hexdigest()[:16]
        name = f"tq-device-{self._job}-{device_hash}.lock"
        while True:
            path, file = in_own_directory(self._folder, lambda folder: _open_lock_file(folder / name))
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_current(file, path):
                    os.ftruncate(file.fd, 0)
                    os.pwrite(file.fd, self._worker.encode(), 0)
                    return path, file
                file.close()  # the previous holder has removed the file: lock the next one
                continue
            except BlockingIOError:
                # For messages only: it may be outdated.
                holder = os.pread(file.fd, 200, 0).decode(errors="replace") or "another worker"
                file.close()
            except BaseException:
                file.close()
                raise
            if wait.over(f"{self._worker}: accelerator {device}, held by {holder}"):
                raise DeviceLockTimeoutError(worker=self._worker, device=device, holder=holder, waited_s=wait.waited_s)
            time.sleep(wait.step_s(RETRY_S))

    def _release_all(self) -> None:
        """Unlock and remove the files of all accelerators."""
        while self._held:
            path, file = self._held.pop()
            # Before the unlock: a worker that gets the lock then finds that the path is another file (`_is_current`).
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            # A forked child may share the file description, so closing alone would not release the lock.
            fcntl.flock(file.fd, fcntl.LOCK_UN)
            file.close()


def _open_lock_file(path: Path) -> tuple[Path, HeldFile]:
    """Open the file, and create it if it does not exist. The `HeldFile` is not locked yet."""
    return path, HeldFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _is_current(file: HeldFile, path: Path) -> bool:
    """Return whether `path` still refers to this file. A worker that releases a lock removes its file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fd), os.stat(path, follow_symlinks=False))
    return False
