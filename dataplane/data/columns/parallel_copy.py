"""Copying long runs of bytes with several threads: one core does not use all of a machine's memory bandwidth."""

from __future__ import annotations

import collections
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence

from dataplane.core.row_copy import Run, copy_runs

MOST_BY_DEFAULT = 4
FROM_BYTES = 2 << 20
"""Less than this in long runs is copied by the calling thread: waking others takes as long."""
LONG_BYTES = 256 << 10
"""Shorter runs are: between them threads would wait for each other's turn with the interpreter."""
_PIECE_BYTES = 1 << 20


def default_threads() -> int:
    """One for each core that this process may use, up to a few: then the memory is the limit."""
    return min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0)))


class Copier:
    """Copies with up to `threads` threads, the calling one included; the others are started when first needed and wait
    for work until `close`, or until nothing refers to this. Thread-safe.

    The caller copies whatever no other thread has begun. So it never waits for one that is late, and in a forked child,
    where there are no others, it copies alone.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self._helpers = threads - 1
        self._started = 0
        self._guard = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def copy(self, runs: Sequence[Run]) -> None:
        """Copy every run. Returns, or raises, when each thread that copies any of them has ended: also after a
        KeyboardInterrupt. Blocks for the copy only."""
        long = [run for run in runs if run[0].nbytes >= LONG_BYTES] if self._helpers else []
        if sum(target.nbytes for target, _ in long) < FROM_BYTES:
            copy_runs(runs)
            return
        copy_runs(run for run in runs if run[0].nbytes < LONG_BYTES)
        self._start()
        self._together(_Job(_pieces(long)))

    def _start(self) -> None:
        with self._guard:
            while self._started < self._helpers:
                threading.Thread(target=_serve, args=(self._jobs,), name="tq-copy", daemon=True).start()
                self._started += 1

    def _together(self, job: _Job) -> None:
        interrupted: BaseException | None = None
        try:
            for _ in range(min(self._helpers, len(job.pieces) - 1)):
                self._jobs.put(job)
            job.work()
        finally:
            # An interrupt may come at any call. Until the helpers have ended it must not leave this block, so nothing
            # here is done by a function of our own, and every step may be done again.
            while True:
                try:
                    job.pieces.clear()
                    with job.changed:
                        while job.active:
                            job.changed.wait()
                    break
                except BaseException as error:
                    interrupted = error
        failed = interrupted or job.error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the threads; what is copied from now on is copied by the calling thread. Idempotent."""
        self._helpers = 0
        self._jobs.put(None)


class _Job:
    """Pieces that are left to copy. Whoever has counted itself in `active` takes them one by one."""

    def __init__(self, pieces: collections.deque[Run]) -> None:
        self.pieces = pieces
        self.active = 0
        self.changed = threading.Condition()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Copy pieces until there are none left."""
        pieces = self.pieces
        while pieces:
            try:
                target, source = pieces.popleft()
            except IndexError:
                return
            target[...] = source

    def help(self) -> None:
        """The same, by a thread that the caller waits for."""
        with self.changed:
            self.active += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
            self.pieces.clear()
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.help()
        del job
    jobs.put(None)


def _pieces(runs: Iterable[Run]) -> collections.deque[Run]:
    return collections.deque(
        (target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        for target, source in runs
        for start in range(0, target.nbytes, _PIECE_BYTES)
    )
