"""What a fuzz target is: a function of bytes that may raise named errors only, within bounded memory."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dataplane.errors import DataPlaneError

MEMORY_BYTES = 512 << 20
"""What one input may make a decoder take, address space included: inputs have some thousands of bytes."""
T = TypeVar("T")
PAGE_BYTES = resource.getpagesize()


class FindingError(Exception):
    """A target noticed what must not be. Never allowed, whatever the target allows."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """run: raises `allowed` errors only. seeds: good inputs, to be damaged; called once. examples: how many inputs
    pytest tries."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    allowed: tuple[type[Exception], ...] = (DataPlaneError,)
    examples: int = 150

    def attempt(self, data: bytes) -> None:
        """Run on one input. Raises what is a finding."""
        with bounded_memory(), quiet_log() as failures, suppress(*self.allowed):
            self.run(data)
        if failures:
            raise FindingError(f"logged as a failure: {failures[0].getMessage()}") from _cause(failures[0])


def _cause(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


@contextmanager
def bounded_memory(limit_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """What would need much more address space than there is now is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (now + limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Failures(logging.Handler):
    """Collects what was logged with a traceback: an exception that nobody expected."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


@contextmanager
def quiet_log() -> Iterator[list[logging.LogRecord]]:
    """Nothing of the package's log is printed; what was logged with a traceback meanwhile."""
    handler = _Failures()
    loggers = [logging.getLogger(name) for name in ("dataplane", "workers")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield handler.found
    finally:
        for logger, propagated in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagated


class Feed:
    """Takes an input apart. Where it ends there are zeros, and nothing."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there is more."""
        return self._at < len(self._data)

    def number(self, below: int) -> int:
        """In [0, below), below at most 256."""
        return self.take(1)[0] % below if self else 0

    def take(self, count: int) -> bytes:
        """Up to so many bytes."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def piece(self) -> bytes:
        """What `pieces` wrote: two bytes of length, then so many."""
        return self.take(int.from_bytes(self.take(2), "little"))

    def rest(self) -> bytes:
        return self.take(len(self._data))


def piece(content: bytes) -> bytes:
    """`content` for `Feed.piece`; it has less than 64 KiB."""
    return len(content).to_bytes(2, "little") + content


class Standing(Generic[T]):
    """A service that stands for all inputs of its targets: made when it is first asked for, until `end_all`."""

    _all: list[Standing[T]] = []  # noqa: RUF012

    def __init__(self, make: Callable[[ExitStack], T]) -> None:
        """make: enters what must be ended."""
        self._make = make
        self._ends = ExitStack()
        self._made: T | None = None
        self._all.append(self)

    def __call__(self) -> T:
        if self._made is None:
            self._made = self._make(self._ends)
        return self._made

    @classmethod
    def end_all(cls) -> None:
        """End those that were made; whoever asks again gets another."""
        for each in cls._all:
            each._made = None
            each._ends.close()
