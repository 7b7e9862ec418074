"""Threads that help a calling thread with its jobs: copies of long runs, requests to several storage units."""

from __future__ import annotations

import collections
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Helpers:
    """Up to `most` helper threads. They start when they are needed, and wait for work until `close` or
    until this object is garbage-collected. Thread-safe.

    The caller of `run` takes jobs, too. It therefore never waits for a helper that starts late, and in
    a forked child, which has no helpers, it runs all jobs.
    """

    def __init__(self, most: int) -> None:
        # 0 after `close`.
        self.most = most
        self._guard = threading.Lock()
        self._started = 0
        # How many helpers wait for work.
        self._idle = threading.Semaphore(0)
        # A batch occurs once for each helper that may work on it; None ends the helpers.
        self._batches: queue.SimpleQueue[_Batch[Any] | None] = queue.SimpleQueue()
        # At exit the helpers end as daemon threads.
        weakref.finalize(self, self._batches.put, None).atexit = False

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run all jobs and return their results in order. After an error, no further job is started.
        Returns, or raises the first error, after all started jobs have ended, also if it is
        interrupted (KeyboardInterrupt)."""
        batch = _Batch(jobs)
        interrupted: BaseException | None = None
        try:
            for _ in range(min(self.most, len(jobs) - 1)):
                self._call_helper(batch)
            batch.run_jobs()
        finally:
            # An interrupt can arrive at any call, and must not leave this block before the helpers have
            # ended their jobs. Therefore every step can be repeated.
            while True:
                try:
                    batch.left.clear()
                    with batch.changed:
                        while batch.active:
                            batch.changed.wait()
                    break
                except BaseException as error:
                    interrupted = error
        failed = interrupted or batch.error
        if failed is not None:
            raise failed
        results = batch.results
        # The queue may hold the batch for longer.
        batch.results = []
        return cast(list[T], results)

    def _call_helper(self, batch: _Batch[Any]) -> None:
        """Offer the batch to a helper, which is started unless one is idle. With `most` helpers at
        work, the first one that is done takes it."""
        if not self._idle.acquire(blocking=False):
            with self._guard:
                if self._started < self.most:
                    args = (self._batches, self._idle)
                    threading.Thread(target=_help, args=args, name="tq-helper", daemon=True).start()
                    self._started += 1
        self._batches.put(batch)

    def close(self) -> None:
        """End the helpers; callers run all later jobs. Does not wait. Idempotent."""
        self.most = 0
        self._batches.put(None)


class _Batch(Generic[T]):
    """The jobs of one `run`, which several threads take until none is left."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        # By the number of the job.
        self.results: list[T | None] = [None] * len(jobs)
        # The jobs that no thread has taken, with their numbers.
        self.left = collections.deque(enumerate(jobs))
        # How many helpers may run a job; guarded by `changed`, which is notified when one has ended.
        self.active = 0
        self.changed = threading.Condition()
        # The first error of a job.
        self.error: BaseException | None = None

    def run_jobs(self) -> None:
        """Run jobs until none is left. After an error, the jobs that are left are discarded."""
        while self.left:
            try:
                number, job = self.left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                self.results[number] = job()
            except BaseException as error:  # raised by `Helpers.run`
                self.error = self.error or error
                self.left.clear()


def _help(batches: queue.SimpleQueue[_Batch[Any] | None], idle: threading.Semaphore) -> None:
    """Help with batches until the queue contains None. The body of a helper thread."""
    while (batch := batches.get()) is not None:
        with batch.changed:
            batch.active += 1
        batch.run_jobs()
        with batch.changed:
            batch.active -= 1
            batch.changed.notify_all()
        del batch  # its memory is not kept while this thread waits
        idle.release()
    batches.put(None)  # for the other helpers
