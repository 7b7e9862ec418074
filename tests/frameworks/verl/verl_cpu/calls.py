"""How long each call of the queue takes. Both packages' functions are wrapped alike, and do what they did."""

import functools
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

import transfer_queue

CALLS = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear")


def time_calls(file: str) -> None:
    """Each call adds a line to a file: name, milliseconds and number of keys."""
    for name in (*CALLS, *(f"async_{name}" for name in CALLS)):
        if (function := getattr(transfer_queue, name, None)) is not None:
            setattr(transfer_queue, name, _timed(name.removeprefix("async_"), function, file))


def _timed(name: str, function: Callable[..., Any], file: str) -> Callable[..., Any]:
    def note(begin: float, keys: Any) -> None:
        record = {"call": name, "ms": (time.perf_counter() - begin) * 1000, "keys": len(keys or ())}
        with open(file, "a") as lines:
            lines.write(json.dumps(record) + "\n")

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        found = function(*arguments, **named)
        note(begin, named.get("keys"))
        return found

    @functools.wraps(function)
    async def wait(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        found = await function(*arguments, **named)
        note(begin, named.get("keys"))
        return found

    return wait if inspect.iscoroutinefunction(function) else call
