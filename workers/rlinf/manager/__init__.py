"""`rlinf.scheduler.manager`: what is known of a worker, and a tracer that records nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from workers.rlinf.manager.worker_manager import WorkerAddress as WorkerAddress
from workers.rlinf.manager.worker_manager import WorkerInfo as WorkerInfo


class Tracer:
    """Its calls do nothing, as RLinf's do in a job whose configuration does not turn tracing on."""

    @classmethod
    def trace_begin(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> None:
        """Nothing."""

    @classmethod
    def trace_end(cls, name: str, cat: str = "default") -> None:
        """Nothing."""

    @classmethod
    @contextlib.contextmanager
    def trace_span(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> Iterator[None]:
        """Runs the block."""
        yield

    @classmethod
    def trace_func(cls, func_or_cat: Any = None, cat: str = "default") -> Any:
        """The function as it is; also with arguments before it."""
        if callable(func_or_cat):
            return func_or_cat

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        return decorate
