"""Concurrent execution of jobs that wait for different peers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Together:
    """Runs jobs concurrently in up to `most` threads in addition to the calling threads. The threads start on first use
    and run until `close`. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._guard = threading.Lock()  # guards `_pool`
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run all jobs and return their results in order. The calling thread runs some of the jobs. After an error, no
        further job is started. The call returns, or raises the first error, after all started jobs have ended; this
        also holds for a KeyboardInterrupt."""
        if len(jobs) == 1:
            return [jobs[0]()]
        batch = _Batch(jobs)
        # Each thread of the pool, and this one, takes jobs until none is left. A busy pool only means that this thread
        # takes more of them.
        interrupt: BaseException | None = None  # one that was raised during `finish`
        try:
            pool = self._started_pool()
            for _ in jobs[1:]:
                pool.submit(batch.run_jobs)
            batch.run_jobs()
        finally:
            # A KeyboardInterrupt may be raised at any call, but must not leave this block before all jobs have ended.
            # Every step of `finish` can therefore be repeated.
            while True:
                try:
                    batch.finish()
                    break
                except BaseException as error:
                    interrupt = error
        failed = interrupt or batch.error
        if failed is not None:
            raise failed
        return [batch.results[number] for number in range(len(jobs))]

    def _started_pool(self) -> ThreadPoolExecutor:
        """Return the thread pool. The first call creates it."""
        with self._guard:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="tq-together")
            return self._pool

    def close(self) -> None:
        """Stop the threads after the submitted jobs. Does not block. Idempotent."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class _Batch(Generic[T]):
    """The jobs of one `run`. Several threads take jobs from it until none is left. results: by the number of the job;
    error: the first exception of a job. `_left` are the jobs that no thread has taken, with their numbers."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.results: dict[int, T] = {}
        self.error: BaseException | None = None
        self._left = list(enumerate(jobs))[::-1]  # `pop` takes the first job
        self._active: set[int] = set()  # threads that run a job, by their ident
        self._changed = threading.Condition()  # notified when a thread has ended a job

    def run_jobs(self) -> None:
        """Run jobs until none is left. After an error, the jobs that are left are discarded."""
        me = threading.get_ident()
        while True:
            with self._changed:
                if not self._left:
                    return
                number, job = self._left.pop()
                self._active.add(me)
            try:
                self.results[number] = job()
            except BaseException as error:  # `run` raises it in the calling thread
                self.error = self.error or error
                self._left.clear()  # start no further job
            finally:
                with self._changed:
                    self._active.discard(me)
                    self._changed.notify_all()

    def finish(self) -> None:
        """Discard the remaining jobs and wait for the jobs that run in other threads. A job of the calling thread has
        already ended, even if an interrupt prevented its removal from `_active`."""
        with self._changed:
            self._left.clear()
            while self._active - {threading.get_ident()}:
                self._changed.wait()
