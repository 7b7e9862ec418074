"""Random delays in every Python process that has this folder on its PYTHONPATH (`make soak`).

A thread begins late, a wait of a condition returns late, a poll answers late, a message leaves late: what a busy
machine does now and then happens often here. Tests that rely on the order of threads and processes fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import random
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LONGEST_S = 1.5
_chance = random.SystemRandom()
_sleep = time.sleep


def _be_late(probability: float) -> None:
    if _chance.random() < probability:
        _sleep(LONGEST_S * _chance.random() ** 2)


def _delay(owner: Any, name: str, probability: float, *, before: bool = False) -> None:
    """Have the method sleep now and then, after its work or `before` it."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before:
            _be_late(probability)
        result = method(*args, **kwargs)
        if not before:
            _be_late(probability)
        return result

    setattr(owner, name, call)


class _ZmqLater(importlib.abc.MetaPathFinder):
    """Delays ZMQ's methods when a process imports it: most never do."""

    def __init__(self) -> None:
        self._methods = {
            "zmq.sugar.poll": ("Poller", "poll", False),
            "zmq.sugar.socket": ("Socket", "send_multipart", True),
        }

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._methods:
            return None
        owner, method, before = self._methods.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _delay(getattr(module, owner), method, 0.004, before=before)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_delay(threading.Thread, "_bootstrap_inner", 0.2, before=True)
_delay(threading.Thread, "start", 0.05)
_delay(threading.Condition, "wait", 0.01)
for _selector in (selectors.EpollSelector, selectors.PollSelector, selectors.SelectSelector):
    _delay(_selector, "select", 0.004)
sys.meta_path.insert(0, _ZmqLater())
