"""The class of a group's actors: the user's, with what a call from another process needs around its methods."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import AsyncGeneratorType, FrameType, GeneratorType, TracebackType
from typing import Any

import ray
from ray.actor import ActorClass

from workers.groups.remote_errors import methods_of, portable

SERVING_FILE = __file__
"""Whose functions are around the methods of a worker."""
DURATIONS_KEPT = 1024
"""Of so many calls a worker remembers how long they took."""
_CAUGHT_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DEVICES = "CUDA_VISIBLE_DEVICES"
Durations = dict[str, float]

logger = logging.getLogger(__name__)
_current: ContextVar[Durations | None] = ContextVar("tq_current_call", default=None)
"""Seconds by name of the call that this context serves; None outside of calls."""


def add_duration(name: str, seconds: float) -> None:
    """Count `seconds` under `name` to the call that is being served here, if any."""
    durations = _current.get()
    if durations is not None:
        durations[name] = durations.get(name, 0.0) + seconds


def is_serving() -> bool:
    """Whether this runs within a call from another process."""
    return _current.get() is not None


def hosted(cls: type, *, catch_failures: bool) -> type:
    """A subclass of `cls`, as an actor's class.

    Its first constructor argument is the environment to set before `cls` is constructed. What its public methods and
    its constructor raise can be brought to any process (`remote_errors.portable`), and is in the worker's log. How long
    the methods took is to be had from `_tq_durations`. A generator's items are returned as a list. catch_failures: an
    exit by a method is an error of that call, not the end of the worker, and a signal that ends the worker says in its
    log what it was doing.
    """
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_tq_catch_failures": catch_failures,
        "__new__": _new(cls),
        "__init__": _construct(cls),
        "_tq_durations": _durations,
    }
    for name in methods_of(cls):
        method = inspect.getattr_static(cls, name)
        if isinstance(method, staticmethod | classmethod):
            namespace[name] = type(method)(_served(name, method.__func__, catch_failures))
        else:
            namespace[name] = _served(name, method, catch_failures)
    return type(cls.__name__, (cls,), namespace)


def _new(base: Any) -> Callable[..., Any]:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Ray makes the object in the process's main thread, the only one that may take signals; and, where actors are
        only asked for, one of the actor class itself, which inherits this."""
        self: Any = base.__new__(cls)
        if issubclass(cls, ActorClass):
            return self
        self._tq_kept = CallDurations()
        if cls._tq_catch_failures:
            catch_signals()
        return self

    return new


def catch_signals() -> None:
    """Have signals that end this process say in its log what it was doing; a no-op in any but its main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in _CAUGHT_SIGNALS:
            signal.signal(number, _end_by_signal)


def _construct(cls: type) -> Callable[..., None]:
    def construct(self: Any, environment: Mapping[str, str], /, *args: Any, **kwargs: Any) -> None:
        os.environ.update(environment)
        os.environ[_DEVICES] = _on_this_machine(environment[_DEVICES])
        with Serving(f"{cls.__name__}.__init__", (), self._tq_catch_failures):
            cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
            self._tq_check()

    return construct


def _on_this_machine(devices: str) -> str:
    """Numbers of a node's accelerators as CUDA_VISIBLE_DEVICES has them, where the node itself may use some only."""
    began_with = dict(entry.partition("=")[::2] for entry in Path("/proc/self/environ").read_text().split("\0"))
    usable = [name for name in began_with.get(_DEVICES, "").split(",") if name]
    numbers = [int(number) for number in devices.split(",") if number]
    return devices if not usable else ",".join(usable[number] for number in numbers)


class CallDurations:
    """How long calls took, by the caller's id of them; the oldest are forgotten. Thread-safe."""

    def __init__(self) -> None:
        self._durations: OrderedDict[str, Durations] = OrderedDict()
        self._guard = threading.Lock()

    def keep(self, task: str, durations: Durations) -> None:
        with self._guard:
            self._durations[task] = durations
            while len(self._durations) > DURATIONS_KEPT:
                self._durations.popitem(last=False)

    def take(self, task: str) -> Durations:
        with self._guard:
            return self._durations.pop(task, {})


def _durations(self: Any, task: str) -> Durations:
    """Seconds by name of that call, once."""
    found: Durations = self._tq_kept.take(task)
    return found


def _served(name: str, method: Callable[..., Any], catch: bool) -> Callable[..., Any]:
    """`method`, as others call it; as it is for calls from within the worker."""

    @functools.wraps(method)
    def serve(*args: Any, **kwargs: Any) -> Any:
        if is_serving():
            return method(*args, **kwargs)
        with Serving(name, args, catch):
            return _sent(name, method(*args, **kwargs))

    @functools.wraps(method)
    async def serve_async(*args: Any, **kwargs: Any) -> Any:
        if is_serving():
            return await method(*args, **kwargs)
        with Serving(name, args, catch):
            return await method(*args, **kwargs)

    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        # Ray would take it for one, and its items for a stream.
        serve.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        del serve.__wrapped__
    return serve_async if inspect.iscoroutinefunction(method) else serve


def _sent(name: str, result: Any) -> Any:
    """What a method returned, or the items of a generator, which itself cannot be sent."""
    if isinstance(result, AsyncGeneratorType):
        raise TypeError(f"{name} is an asynchronous generator, whose items are not sent; have it return a list of them")
    return list(result) if isinstance(result, GeneratorType) else result


class Serving:
    """A call while it is served. (No generator of `contextlib`: it is around every call.)

    args: the call's, of which the first is the worker, unless the method is static.
    """

    def __init__(self, name: str, args: tuple[Any, ...], catch: bool) -> None:
        self._name = name
        self._kept: CallDurations | None = getattr(args[0], "_tq_kept", None) if args else None
        self._catch = catch
        self._durations: Durations = {}

    def __enter__(self) -> None:
        self._token = _current.set(self._durations)
        self._begun = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._durations.setdefault(self._name, time.perf_counter() - self._begun)
        _current.reset(self._token)
        if self._kept is not None:
            self._kept.keep(ray.get_runtime_context().get_task_id(), self._durations)
        if isinstance(error, Exception) or (self._catch and isinstance(error, SystemExit)):
            logger.error("%s raised %s", self._name, "".join(traceback.format_exception_only(error)).strip())
            sent = portable(error)
            if sent is not error:
                raise sent from error


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    name = f"{os.environ.get('GROUP_NAME')}:{os.environ.get('RANK')}"
    try:
        stack = "".join(traceback.format_stack(frame))
        logger.error("worker %s ends by %s at\n%s", name, signal.Signals(number).name, stack)
        logging.shutdown()
    finally:
        os._exit(128 + number)
