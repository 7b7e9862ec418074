"""`rlinf.scheduler.manager`: a description of a worker, and a tracer that records nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from workers.rlinf.manager.worker_manager import WorkerAddress as WorkerAddress
from workers.rlinf.manager.worker_manager import WorkerInfo as WorkerInfo


class Tracer:
    """A tracer whose calls have no effect, like RLinf's tracer in a job without tracing."""

    @classmethod
    def trace_begin(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> None:
        """Do nothing."""

    @classmethod
    def trace_end(cls, name: str, cat: str = "default") -> None:
        """Do nothing."""

    @classmethod
    @contextlib.contextmanager
    def trace_span(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> Iterator[None]:
        """Return a context manager that has no effect."""
        yield

    @classmethod
    def trace_func(cls, func_or_cat: Any = None, cat: str = "default") -> Any:
        """Decorate a function without changing it, with or without arguments of the decorator."""
        if callable(func_or_cat):
            return func_or_cat

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        return decorate
