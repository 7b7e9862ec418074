"""Exceptions on their way from a worker to whoever called it."""

from __future__ import annotations

import copyreg
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Generator
from contextvars import ContextVar
from types import FunctionType, TracebackType
from typing import Any

from ray import cloudpickle

from workers.errors import WorkerCallError, WorkerExitError

METHODS = (staticmethod, classmethod, FunctionType)
_within: ContextVar[bool] = ContextVar("tq_within_a_call", default=False)


def methods_of(cls: type) -> frozenset[str]:
    """The names of its public methods: those that a group may be called by."""
    return frozenset(
        name for name in dir(cls) if not name.startswith("_") and isinstance(inspect.getattr_static(cls, name), METHODS)
    )


def raise_portably(cls: type) -> None:
    """Have what public methods of `cls` and its constructor raise be `portable`. Changes the class itself, once."""
    if "_tq_portable" in vars(cls):
        return
    cls._tq_portable = True  # type: ignore[attr-defined]
    for name in [*methods_of(cls), "__init__"]:
        method = inspect.getattr_static(cls, name)
        if isinstance(method, staticmethod | classmethod):
            setattr(cls, name, type(method)(_portably(method.__func__)))
        elif isinstance(method, FunctionType):
            setattr(cls, name, _portably(method))


def _portably(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` with `_Portably` around it, of the same kind."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Portably():
            return method(*args, **kwargs)

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with _Portably():
            return (yield from method(*args, **kwargs))

    @functools.wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        with _Portably():
            return await method(*args, **kwargs)

    @functools.wraps(method)
    async def generate_async(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with _Portably():
            async for item in method(*args, **kwargs):
                yield item

    if inspect.isgeneratorfunction(method):
        return generate
    if inspect.isasyncgenfunction(method):
        return generate_async
    return call_async if inspect.iscoroutinefunction(method) else call


class _Portably:
    """What leaves it for another process is raised as `portable` makes it; within another one it stays what it is."""

    def __enter__(self) -> None:
        self._outermost = not _within.get()
        _within.set(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._outermost:
            return
        _within.set(False)
        if isinstance(error, Exception):
            sent = portable(error)
            if sent is not error:
                raise sent from error


def portable(error: BaseException) -> BaseException:
    """`error`, fit to be pickled and to arrive with its type and its message.

    What it carries besides, and cannot be pickled, arrives as its `repr`. If even its type cannot be sent, it is a
    `WorkerCallError` that tells type and message; one that ends a process (SystemExit) is a `WorkerExitError`.
    """
    kind = type(error)
    if not isinstance(error, Exception):
        return WorkerExitError(kind=kind.__name__, message=_text(error))
    if _arrives(error, as_text=_text(error)):
        return error
    copyreg.pickle(kind, _reduced)
    if _arrives(error):
        return error
    return WorkerCallError(kind=f"{kind.__module__}.{kind.__qualname__}", message=_text(error))


def _arrives(error: Exception, as_text: str | None = None) -> bool:
    try:
        back = pickle.loads(cloudpickle.dumps(error))  # noqa: S301 (bytes of this line's own making)
        return type(back).__name__ == type(error).__name__ and as_text in (None, str(back))
    except Exception:
        return False


def _reduced(error: BaseException) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
    """For types whose own way fails: made again without their constructor, from what of them can be pickled."""
    args = tuple(_sendable(value) for value in error.args)
    return _again, (type(error), args, {name: _sendable(value) for name, value in vars(error).items()})


def _again(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _sendable(value: Any) -> Any:
    try:
        pickle.loads(cloudpickle.dumps(value))  # noqa: S301 (bytes of this line's own making)
        return value
    except Exception:
        return repr(value)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be made)"
