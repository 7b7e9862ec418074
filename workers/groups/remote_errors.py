"""Transport of exceptions from a worker to the caller of its method."""

from __future__ import annotations

import copyreg
import inspect
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

from workers.errors import WorkerCallError, WorkerExitError
from workers.transport.by_value import cloudpickle

METHODS = (staticmethod, classmethod, FunctionType)


def methods_of(cls: type) -> frozenset[str]:
    """Return the names of the public methods of `cls`, which are the methods that a group can call."""
    return frozenset(
        name for name in dir(cls) if not name.startswith("_") and isinstance(inspect.getattr_static(cls, name), METHODS)
    )


def portable(error: BaseException) -> BaseException:
    """Return `error`, or a replacement that can be pickled and that keeps type and message.

    Attributes and arguments that cannot be pickled are replaced by their `repr`. If even the type cannot be sent,
    return a `WorkerCallError` with the type's name and the message. For an error that ends a process (SystemExit),
    return a `WorkerExitError`.
    """
    kind = type(error)
    if not isinstance(error, Exception):
        return WorkerExitError(kind=kind.__name__, message=_text(error))
    if _survives_pickle(error, text=_text(error)):
        return error
    # From now on, pickle uses `_reduce` for this type. The text may change if an attribute becomes its `repr`.
    copyreg.pickle(kind, _reduce)
    if _survives_pickle(error):
        return error
    return WorkerCallError(kind=f"{kind.__module__}.{kind.__qualname__}", message=_text(error))


def _survives_pickle(error: Exception, text: str | None = None) -> bool:
    """Return whether `error` can be pickled and loaded, and keeps its type's name and, unless None, its `text`. False
    also if `str` of the loaded error fails."""
    try:
        copy = pickle.loads(cloudpickle().dumps(error))  # noqa: S301 (the bytes are created on this line)
        copied_text = str(copy)
        return type(copy).__name__ == type(error).__name__ and text in (None, copied_text)
    except Exception:
        return False


def _reduce(error: BaseException) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
    """Reduce an exception for pickle, because its own reduction fails. It is rebuilt without its constructor; values
    that cannot be pickled become their `repr`."""
    args = tuple(_value_or_repr(value) for value in error.args)
    return _rebuild, (type(error), args, {name: _value_or_repr(value) for name, value in vars(error).items()})


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Return an exception of type `kind` with these `args` and attributes, without a call of its constructor."""
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _value_or_repr(value: Any) -> Any:
    """Return `value` if it can be pickled and loaded, otherwise its `repr`."""
    try:
        pickle.loads(cloudpickle().dumps(value))  # noqa: S301 (the bytes are created on this line)
        return value
    except Exception:
        return repr(value)


def _text(error: BaseException) -> str:
    """Return `str(error)`, or a substitute if that fails."""
    try:
        return str(error)
    except Exception:
        return "(str() of the exception failed)"
