"""How a process without a directory in its environment joins a job. `workers` registers a function for Ray jobs."""

from __future__ import annotations

from collections.abc import Callable

_joins: list[Callable[[], str]] = []
"""The registered function, or nothing."""


def register_job(join: Callable[[], str]) -> None:
    """Make `job_directory` return the result of `join`: the address of the directory of this process's job, once its
    brokers are registered."""
    _joins[:] = [join]


def job_directory() -> str:
    """Return the address of the job's directory. LookupError if none is registered; raises the errors of `join`."""
    if not _joins:
        raise LookupError("this process has not joined a cluster of workers: import workers, or set TQ_DIRECTORY")
    return _joins[0]()
