"""Exceptions on their way from a worker to whoever called it."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from workers.errors import WorkerCallError, WorkerExitError


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
