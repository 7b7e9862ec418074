"""Copies of long byte runs with several threads: one core cannot use the full memory bandwidth of a machine."""

from __future__ import annotations

import collections
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence

from dataplane.core.row_copy import Run, copy_runs

MAX_DEFAULT_THREADS = 4
FROM_BYTES = 2 << 20
"""If the long runs have fewer bytes than this, the calling thread copies them: waking threads takes as long."""
LONG_BYTES = 256 << 10
"""The calling thread copies shorter runs: several threads would contend for the interpreter lock between them."""
_PIECE_BYTES = 1 << 20


def default_threads() -> int:
    """Return the number of cores that this process may use, at most 4: beyond that the memory is the bottleneck."""
    return min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


class Copier:
    """Copies with up to `threads` threads, including the calling one. Thread-safe.

    Helper threads start on first use and wait for work until `close` or until the copier is garbage-collected. The
    caller copies every piece that no helper has started. It therefore never waits for a helper that starts late, and
    in a forked child, which has no helpers, it copies alone.

    _helpers: maximum number of helper threads, 0 after `close`. _started: number of helper threads started so far.
    _jobs: a job occurs once for each helper that may work on it; None ends the helpers.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self._helpers = threads - 1
        self._started = 0
        self._start_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # None ends the helper threads; at exit they end as daemon threads.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def copy(self, runs: Sequence[Run]) -> None:
        """Copy every run, a (target, source) pair of byte arrays. Returns or raises only after every helper has stopped
        copying, even on a KeyboardInterrupt. The calling thread copies, too."""
        # Without helpers, no run counts as long: the calling thread copies all.
        long = [run for run in runs if run[0].nbytes >= LONG_BYTES] if self._helpers else []
        if sum(target.nbytes for target, _ in long) < FROM_BYTES:
            copy_runs(runs)
            return
        copy_runs(run for run in runs if run[0].nbytes < LONG_BYTES)
        self._start_helpers()
        self._copy_with_helpers(_Job(_pieces(long)))

    def _start_helpers(self) -> None:
        with self._start_lock:
            while self._started < self._helpers:
                threading.Thread(target=_run_helper, args=(self._jobs,), name="tq-copy", daemon=True).start()
                self._started += 1

    def _copy_with_helpers(self, job: _Job) -> None:
        """Copy the pieces of `job` with the helpers and wait until they have stopped. Raises the error of a helper."""
        interrupted: BaseException | None = None
        try:
            for _ in range(min(self._helpers, len(job.pieces) - 1)):  # the caller takes one piece at least
                self._jobs.put(job)
            job.work()
        finally:
            # An interrupt can arrive at any call and must not leave this block before the helpers have stopped.
            # Therefore the block calls no Python functions of this module, and every step can be repeated.
            while True:  # again after each interrupt
                try:
                    job.pieces.clear()  # left after an error: helpers only finish the piece that they are copying
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
        """Stop the helper threads; the calling thread performs all later copies. Idempotent."""
        self._helpers = 0
        self._jobs.put(None)


class _Job:
    """The remaining pieces of one copy. `active` counts the helpers that are copying pieces; `changed` guards it and
    signals its changes. error: what a helper raised."""

    def __init__(self, pieces: collections.deque[Run]) -> None:
        self.pieces = pieces
        self.active = 0
        self.changed = threading.Condition()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Copy pieces until none are left."""
        pieces = self.pieces
        while pieces:
            try:
                target, source = pieces.popleft()
            except IndexError:  # another thread took the last piece
                return
            target[...] = source

    def help(self) -> None:
        """Run `work` in a helper thread, and record its error. The calling thread waits until `active` is 0."""
        with self.changed:
            self.active += 1
        try:
            self.work()
        except BaseException as error:
            self.error = error
            self.pieces.clear()  # the other threads stop, too
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()


def _run_helper(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Help with jobs until the queue contains None. The body of a helper thread."""
    while (job := jobs.get()) is not None:
        job.help()
        del job  # do not keep its memory alive while waiting
    jobs.put(None)  # for the other helpers


def _pieces(runs: Iterable[Run]) -> collections.deque[Run]:
    """Cut the runs into pieces of at most `_PIECE_BYTES`, for the threads to take one by one."""
    return collections.deque(
        (target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        for target, source in runs
        for start in range(0, target.nbytes, _PIECE_BYTES)
    )
