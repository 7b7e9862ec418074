"""How a process that no environment names a directory comes to a job: `workers` registers the way for Ray's."""

from __future__ import annotations

from collections.abc import Callable

_ways: list[Callable[[], str]] = []


def register_job(join: Callable[[], str]) -> None:
    """From now on `job_directory` answers with what `join()` does: the address of the directory of this process's job,
    once its brokers are there."""
    _ways[:] = [join]


def job_directory() -> str:
    """LookupError where no way is registered; what `join` raises."""
    if not _ways:
        raise LookupError("this process belongs to no cluster of workers: import workers, or set TQ_DIRECTORY")
    return _ways[0]()
