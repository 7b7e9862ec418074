"""How long the parts of a driver's call take, measured by a timer that the caller may give."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Timer(Protocol):
    """What measures the parts of a call: `time` gives a context manager around each. For `nemo_rl.utils.timer.Timer`
    and its like; the labels are those that NeMo-RL uses."""

    def time(self, label: str) -> AbstractContextManager[Any]: ...


class Timed:
    """A timer's labels within one call, or nothing without a timer. submit: what sending the calls is called."""

    def __init__(self, timer: Timer | None, prefix: str, submit: str = "submit_futures") -> None:
        self._timer, self._prefix, self.submit = timer, prefix, submit

    def __call__(self, part: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._timer is None else self._timer.time(f"{self._prefix}/{part}")
