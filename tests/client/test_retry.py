"""Operations that begin anew while a storage unit is coming back."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.client.operations import retry
from dataplane.client.operations.retry import with_retry
from dataplane.client.operations.steps import Operation, Work
from dataplane.config import DataPlaneConfig
from dataplane.errors import DataPlaneError, SampleNotFoundError, ServiceRestartedError, StorageUnitError

GONE = StorageUnitError(unit=1, endpoint="ipc://x", why="it cannot be reached")
RESTARTED = ServiceRestartedError(expected_epoch=1, got_epoch=2, what="storage unit 1")
ANEW = ServiceRestartedError(expected_epoch=1, got_epoch=2, what="the service", lost="everything")
MISSING = SampleNotFoundError(partition="p", samples=["a"], total=1)


def session_state(*, durable: bool = True, reconnect_s: float = 60.0) -> Any:
    return SimpleNamespace(durable=durable, config=DataPlaneConfig(reconnect_s=reconnect_s))


class Attempts:
    """An operation that fails so often, and then returns its arguments."""

    def __init__(self, *failures: DataPlaneError) -> None:
        self.left = list(failures)
        self.begun = 0

    def operation(self, session_state: Any, *args: Any, **kwargs: Any) -> Operation[Any]:
        self.begun += 1
        yield Work(lambda: None)
        if self.left:
            raise self.left.pop(0)
        return args, kwargs

    def run(self, session_state: Any, *args: Any, **kwargs: Any) -> Any:
        operation = Attempts.operation

        def bound(session_state: Any, *args: Any, **kwargs: Any) -> Operation[Any]:
            return (yield from operation(self, session_state, *args, **kwargs))

        running = with_retry(bound)(session_state, *args, **kwargs)
        try:
            while True:
                step = next(running)
                assert isinstance(step, Work)
                step.run()
        except StopIteration as stop:
            return stop.value


def clock(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """What `retry` has of `time`, and no other thread of this process."""
    monkeypatch.setattr(retry, "time", SimpleNamespace(**{"monotonic": time.monotonic, **functions}))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    clock(monkeypatch, sleep=made.append)
    return made


def test_it_goes_on_until_the_unit_is_back(pauses: list[float]) -> None:
    attempts = Attempts(GONE, RESTARTED, GONE)
    assert attempts.run(session_state(), 1, two=2) == ((1,), {"two": 2})
    assert attempts.begun == 4
    assert len(pauses) == 3
    assert all(0 < pause <= retry.LONGEST_PAUSE_S for pause in pauses)


@pytest.mark.parametrize("failure", [MISSING, ANEW])
def test_other_errors_are_raised_at_once(failure: DataPlaneError) -> None:
    attempts = Attempts(failure)
    with pytest.raises(type(failure)):
        attempts.run(session_state())
    assert attempts.begun == 1


def test_units_that_keep_nothing_are_not_waited_for() -> None:
    attempts = Attempts(GONE)
    with pytest.raises(StorageUnitError):
        attempts.run(session_state(durable=False))
    assert attempts.begun == 1


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock(monkeypatch, sleep=sleep, monotonic=lambda: now)
    attempts = Attempts(*[GONE] * 1000)
    with pytest.raises(StorageUnitError):
        attempts.run(session_state(reconnect_s=10.0))
    assert 8.0 < now <= 10.0
    assert attempts.begun > 10
