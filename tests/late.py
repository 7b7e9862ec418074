"""A future that is done the moment after a wait for it ran out."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any


class Late(Future[Any]):
    """Its result is `value`, which no wait with a bound sees come."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def _run_out(self, timeout: float | None) -> None:
        if timeout is not None and not self.done():
            self.set_result(self._value)
            raise FutureTimeout

    def result(self, timeout: float | None = None) -> Any:
        self._run_out(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run_out(timeout)
        return super().exception()
