"""The actor class of a group: the user's class, with wrappers around its public methods for remote calls."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import AsyncGeneratorType, FrameType, GeneratorType, TracebackType
from typing import Any

import ray
from ray.actor import ActorClass

from dataplane.core.bounded import Bounded
from dataplane.core.devices import VISIBLE_DEVICES
from workers.groups.remote_errors import METHODS, methods_of, portable

SERVING_FILE = __file__
"""The file whose functions wrap the methods of a worker."""
DURATIONS_KEPT = 1024
"""A worker keeps the durations of this many calls."""
_CAUGHT_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
Durations = dict[str, float]

logger = logging.getLogger(__name__)
_current: ContextVar[Durations | None] = ContextVar("tq_current_call", default=None)
"""Seconds by name for the call that this context serves; None outside of calls."""


def add_duration(name: str, seconds: float) -> None:
    """Add `seconds` under `name` to the durations of the call that this context serves. A no-op outside of calls."""
    durations = _current.get()
    if durations is not None:
        durations[name] = durations.get(name, 0.0) + seconds


def serving_class(cls: type, *, catch_failures: bool) -> type:
    """Return a subclass of `cls` to use as an actor class: a worker is an object of it.

    Its first constructor argument is the environment to set before `cls` is constructed. Exceptions of its
    constructor and public methods are made portable (`remote_errors.portable`) and are logged by the worker.
    `_tq_durations` returns how long a call took. The items of a generator are returned as a list. catch_failures:
    SystemExit in a method becomes an error of that call instead of the end of the worker, and a signal that ends the
    worker logs its stack.
    """
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_tq_catch_failures": catch_failures,
        "__new__": _make_new(cls),
        "__init__": _make_init(cls),
        "_tq_durations": _take_durations,
    }
    for name in methods_of(cls):
        namespace[name] = served(cls, name, catch=catch_failures, lists=True)
    return type(cls.__name__, (cls,), namespace)


def raise_portably(cls: type) -> None:
    """Wrap the constructor and the public methods of `cls` so that their exceptions are `portable`. Modifies the
    class. A no-op on a second call."""
    if "_tq_portable" in vars(cls):
        return
    cls._tq_portable = True  # type: ignore[attr-defined]
    for name in [*methods_of(cls), "__init__"]:
        if isinstance(inspect.getattr_static(cls, name), METHODS):  # else the `__init__` of `object` or of a C type
            setattr(cls, name, served(cls, name))


def served(cls: type, name: str, *, catch: bool = False, lists: bool = False) -> Any:
    """Return the method `name` of `cls` wrapped for calls from other processes, see `Serving`.

    The wrapper is of the same kind: a function, a generator, a coroutine function or an asynchronous generator, static
    or a class method. lists: a generator becomes a function that returns the list of its items instead.
    """
    found = inspect.getattr_static(cls, name)
    if isinstance(found, staticmethod | classmethod):
        return type(found)(_serving_wrapper(name, found.__func__, catch, lists))
    return _serving_wrapper(name, found, catch, lists)


def _make_new(base: Any) -> Callable[..., Any]:
    """Return the `__new__` of the subclass of `base`."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Install signal handlers here, because Ray creates the object in the main thread, the only thread that can.
        Ray also creates an instance of the actor class, which inherits this method, when it declares an actor."""
        self: Any = base.__new__(cls)
        if issubclass(cls, ActorClass):  # the instance that only declares the actor
            return self
        self._tq_call_durations = CallDurations()
        if cls._tq_catch_failures:
            catch_signals()
        return self

    return new


def catch_signals() -> None:
    """Install handlers that log this process's stack before a signal ends it. A no-op outside of the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in _CAUGHT_SIGNALS:
            signal.signal(number, _end_by_signal)


def _make_init(cls: type) -> Callable[..., None]:
    """Return the `__init__` of the subclass of `cls`. It sets `environment`, then calls `cls.__init__`."""

    def init(self: Any, environment: Mapping[str, str], /, *args: Any, **kwargs: Any) -> None:
        """Set `environment`, and construct the worker with the other arguments."""
        os.environ.update(environment)
        os.environ.update(_visible_devices(environment))
        with Serving(f"{cls.__name__}.__init__", (), self._tq_catch_failures):
            cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
            self._tq_check()  # raises if `cls` did not call the constructor of `Worker`

    return init


def _visible_devices(environment: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES and its siblings for a worker that may see the accelerators which `environment` has
    there, given as indices separated by commas.

    On a node that was restricted to some devices, index i is the i-th of these. Their names are in the environment with
    which this process started; `os.environ` has other values by now.
    """
    initial_environment = {}
    for entry in Path("/proc/self/environ").read_text().split("\0"):
        name, _, value = entry.partition("=")
        initial_environment[name] = value
    visible = {}
    for variable in VISIBLE_DEVICES.values():
        indices = [int(index) for index in environment[variable].split(",") if index]
        names = [name for name in initial_environment.get(variable, "").split(",") if name]
        # Without names, the node was not restricted.
        visible[variable] = ",".join(names[index] if names else str(index) for index in indices)
    return visible


class CallDurations:
    """Durations of calls by Ray task id. The oldest are dropped beyond `DURATIONS_KEPT`. Thread-safe."""

    def __init__(self) -> None:
        self._durations: Bounded[str, Durations] = Bounded(DURATIONS_KEPT)
        self._guard = threading.Lock()

    def keep(self, task: str, durations: Durations) -> None:
        """Store the durations of a call."""
        with self._guard:
            self._durations.store(task, durations)

    def take(self, task: str) -> Durations:
        """Remove and return the durations of a call; empty if there are none."""
        with self._guard:
            return self._durations.pop(task, {})


def _take_durations(self: Any, task: str) -> Durations:
    """Return the seconds by name of the call with that Ray task id. A second request returns nothing. The method
    `_tq_durations` of workers."""
    durations: Durations = self._tq_call_durations.take(task)
    return durations


def _serving_wrapper(name: str, method: Callable[..., Any], catch: bool, lists: bool) -> Callable[..., Any]:
    """Return the wrapper of a function for `served`."""

    @functools.wraps(method)
    def serve(*args: Any, **kwargs: Any) -> Any:
        with Serving(name, args, catch) as outermost:
            result = method(*args, **kwargs)
            return _sendable_result(name, result) if lists and outermost else result

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with Serving(name, args, catch):
            return (yield from method(*args, **kwargs))

    @functools.wraps(method)
    async def serve_async(*args: Any, **kwargs: Any) -> Any:
        with Serving(name, args, catch):
            return await method(*args, **kwargs)

    @functools.wraps(method)
    async def generate_async(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with Serving(name, args, catch):
            async for item in method(*args, **kwargs):
                yield item

    if inspect.iscoroutinefunction(method):
        return serve_async
    generates = inspect.isgeneratorfunction(method)
    if not generates and not inspect.isasyncgenfunction(method):
        return serve
    if lists:
        # Otherwise Ray would find the generator through `__wrapped__`, and stream its items.
        serve.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        del serve.__wrapped__
        return serve
    return generate if generates else generate_async


def _sendable_result(name: str, result: Any) -> Any:
    """Return a method's result, or the list of a generator's items, because a generator cannot be sent."""
    if isinstance(result, AsyncGeneratorType):
        raise TypeError(f"{name} is an asynchronous generator, which cannot be called remotely; return a list instead")
    return list(result) if isinstance(result, GeneratorType) else result


class Serving:
    """The context of one call from another process: it measures the call, and makes its exception portable. It has no
    effect within another one, which is a call of the worker's own code. A class, because a `contextlib` generator
    would slow down every call.

    name: of the method, for durations and messages. args: arguments of the call. The first one is the worker, unless
    the method is static. catch: whether SystemExit becomes an error of the call.

    `_durations` collects the seconds by name of this call; `_stored`, the durations of the worker's calls, gets them at
    the end.
    """

    def __init__(self, name: str, args: tuple[Any, ...], catch: bool) -> None:
        self._name = name
        # None in static methods, class methods and the constructor: their durations are not stored.
        self._stored: CallDurations | None = getattr(args[0], "_tq_call_durations", None) if args else None
        self._catch = catch
        self._durations: Durations = {}

    def __enter__(self) -> bool:
        """Return whether this is the outermost context."""
        self._outermost = _current.get() is None
        if self._outermost:
            _current.set(self._durations)
            self._begun = time.perf_counter()
        return self._outermost

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Store the durations. Log an Exception of the method (with `catch` also SystemExit), and raise a portable one
        instead if it is not portable itself. Other BaseExceptions pass unchanged."""
        if not self._outermost:
            return
        # `setdefault`: the method may have a `worker_timer` with its own name.
        self._durations.setdefault(self._name, time.perf_counter() - self._begun)
        # No reset by a token: an asynchronous generator may end in another context than it began.
        _current.set(None)
        if self._stored is not None:
            self._stored.keep(ray.get_runtime_context().get_task_id(), self._durations)
        if isinstance(error, Exception) or (self._catch and isinstance(error, SystemExit)):
            logger.error("%s raised %s", self._name, "".join(traceback.format_exception_only(error)).strip())
            portable_error = portable(error)
            if portable_error is not error:
                raise portable_error from error


def _end_by_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal: log the stack of `frame` and end the process."""
    name = f"{os.environ.get('GROUP_NAME')}:{os.environ.get('RANK')}"
    try:
        stack = "".join(traceback.format_stack(frame))
        logger.error("Worker %s ended by %s at\n%s", name, signal.Signals(number).name, stack)
        logging.shutdown()
    finally:
        os._exit(128 + number)
