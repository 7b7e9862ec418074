"""Jobs that wait for different peers, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Together:
    """Runs jobs with up to `most` threads besides the calling ones, started when first needed and kept until `close`.
    Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What each of the jobs returns, in order; the calling thread does some of them. After an error no more are
        begun. Returns, or raises the first error, when all that were begun have ended: also after a
        KeyboardInterrupt."""
        if len(jobs) == 1:
            return [jobs[0]()]
        batch = _Batch(jobs)
        interrupt: BaseException | None = None
        try:
            pool = self._threads()
            for _ in jobs[1:]:
                pool.submit(batch.work)
            batch.work()
        finally:
            # An interrupt may come at any call. Until the others have ended it must not leave this block, so every step
            # may be done again.
            while True:
                try:
                    batch.end()
                    break
                except BaseException as error:
                    interrupt = error
        failed = interrupt or batch.error
        if failed is not None:
            raise failed
        return [batch.results[number] for number in range(len(jobs))]

    def _threads(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="tq-together")
            return self._pool

    def close(self) -> None:
        """End the threads. Idempotent."""
        with self._guard:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class _Batch(Generic[T]):
    """Jobs of which each is done by whoever takes it first."""

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self.results: dict[int, T] = {}
        self.error: BaseException | None = None
        self._left = list(enumerate(jobs))[::-1]
        self._active: set[int] = set()
        self._changed = threading.Condition()

    def work(self) -> None:
        """Do jobs until there are none left."""
        me = threading.get_ident()
        while True:
            with self._changed:
                if not self._left:
                    return
                number, job = self._left.pop()
                self._active.add(me)
            try:
                self.results[number] = job()
            except BaseException as error:
                self.error = self.error or error
                self._left.clear()
            finally:
                with self._changed:
                    self._active.discard(me)
                    self._changed.notify_all()

    def end(self) -> None:
        """Let no more be begun, and wait for the end of those that other threads began. One of the calling thread has
        ended, also where an interrupt kept it from saying so."""
        with self._changed:
            self._left.clear()
            while self._active - {threading.get_ident()}:
                self._changed.wait()
