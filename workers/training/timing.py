"""Time the parts of a driver's call with an optional timer of the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Timer(Protocol):
    """A timer such as `nemo_rl.utils.timer.Timer`: `time` returns a context manager that measures one part of a call.
    The labels are those of NeMo-RL."""

    def time(self, label: str) -> AbstractContextManager[Any]: ...


class Timed:
    """Measure the parts of one call, if there is a timer, each under "PREFIX/PART". submit: the name of the part in
    which the calls are sent."""

    def __init__(self, timer: Timer | None, prefix: str, submit: str = "submit_futures") -> None:
        self._timer, self._prefix, self.submit = timer, prefix, submit

    def __call__(self, part: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._timer is None else self._timer.time(f"{self._prefix}/{part}")
