"""Accelerators of a node, used by one worker at a time."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from dataplane.core.durations import seconds
from dataplane.core.file_locks import HeldFile
from dataplane.core.private_dir import in_own_directory
from workers.errors import DeviceLockTimeoutError

TIMEOUT_S = 1800.0
LOG_EVERY_S = 30.0

log = logging.getLogger(__name__)


class DeviceLock:
    """While it is held, no other worker of the job holds a lock of any of the same accelerators. A context manager.

    It is the worker's: a thread of it that acquires it while another has it has it too, until each has released it. A
    worker without accelerators has it at once. The kernel releases it when the worker's process ends, in any way.
    Waiting takes no processor time. In async code it blocks the event loop, as any lock of threads does.

    Accelerators are locked in ascending order, so that workers that share some of several cannot wait for each other.
    """

    def __init__(self, worker: str, devices: Sequence[str], job: str, folder: str | Path | None = None) -> None:
        """worker: its name, for messages; devices: what names the accelerators on this node; job: equal for all workers
        of one job; folder: of the files whose locks these are, by default this user's own in the one for temporary
        files."""
        self._worker = worker
        self._devices = sorted(set(devices))
        self._job = hashlib.sha256(job.encode()).hexdigest()[:16]
        self._folder = folder or tempfile.gettempdir()
        self._guard = threading.Lock()
        self._count = 0
        self._held: list[tuple[Path, HeldFile]] = []

    def acquire(self, timeout_s: float = TIMEOUT_S) -> None:
        """Blocks until no other worker holds it; `DeviceLockTimeoutError`, which names one that does, after
        `timeout_s`."""
        until = time.monotonic() + seconds("timeout_s", timeout_s)
        with self._guard:
            if not self._count:
                try:
                    for device in self._devices:
                        self._held.append(self._lock(device, until))
                except BaseException:
                    self._let_go()
                    raise
            self._count += 1

    def release(self) -> None:
        """RuntimeError where this worker does not hold it."""
        with self._guard:
            if not self._count:
                raise RuntimeError(
                    f"worker {self._worker} releases the lock of its accelerators, which it does not hold"
                )
            self._count -= 1
            if not self._count:
                self._let_go()

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _lock(self, device: str, until: float) -> tuple[Path, HeldFile]:
        name = f"tq-device-{self._job}-{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"
        begun = time.monotonic()
        while True:
            path, file = in_own_directory(self._folder, lambda folder: _opened(folder / name))
            try:
                if not _wait_for(file, until, functools.partial(self._log_wait, device, path, begun)):
                    raise DeviceLockTimeoutError(
                        worker=self._worker, device=device, holder=_holder(path), waited_s=time.monotonic() - begun
                    )
                if _is_at(file, path):
                    os.ftruncate(file.fd, 0)
                    os.pwrite(file.fd, self._worker.encode(), 0)
                    return path, file
            except BaseException:
                file.close()
                raise
            file.close()  # its last holder has removed it

    def _log_wait(self, device: str, path: Path, begun: float) -> None:
        waited_s = time.monotonic() - begun
        what = "%s: waiting for accelerator %s, which %s holds, for %.0f s so far"
        log.warning(what, self._worker, device, _holder(path), waited_s)

    def _let_go(self) -> None:
        while self._held:
            path, file = self._held.pop()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            # A child that was forked meanwhile may have the description, too.
            fcntl.flock(file.fd, fcntl.LOCK_UN)
            file.close()


def _opened(path: Path) -> tuple[Path, HeldFile]:
    return path, HeldFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _is_at(file: HeldFile, path: Path) -> bool:
    """Whether the file is still the one of that name: who releases a lock removes it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fd), os.stat(path, follow_symlinks=False))
    return False


def _holder(path: Path) -> str:
    """The worker that wrote its name into the file; a guess, for messages."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:200] or "another worker"
    return "another worker"


def _wait_for(file: HeldFile, until: float, log_wait: Callable[[], None]) -> bool:
    """Lock the file; False where another process still has it at `until`."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    waiting = _Waiting(file)
    try:
        while not waiting.locked.wait(min(max(until - time.monotonic(), 0.0), LOG_EVERY_S)):
            if time.monotonic() >= until:
                return waiting.leave()
            log_wait()
    except BaseException:
        waiting.leave()
        raise
    return True


class _Waiting:
    """A thread that blocks until the lock is there: `flock` takes no timeout. It has a descriptor of its own, so that
    the caller's may be closed meanwhile."""

    def __init__(self, file: HeldFile) -> None:
        self.locked = threading.Event()
        self._own = HeldFile(os.dup(file.fd))
        self._guard = threading.Lock()
        self._left = False
        threading.Thread(target=self._run, name="tq-device-lock", daemon=True).start()

    def leave(self) -> bool:
        """The lock is of no use to the caller: it is released as soon as it comes. Whether it had come before."""
        with self._guard:
            self._left = True
            return self.locked.is_set()

    def _run(self) -> None:
        fcntl.flock(self._own.fd, fcntl.LOCK_EX)
        with self._guard:
            if self._left:
                fcntl.flock(self._own.fd, fcntl.LOCK_UN)
            else:
                self.locked.set()
        self._own.close()
