"""The steps that operations yield. Operations are generators, written once; the sync client executes each step in
the calling thread, the async client awaits it.

An operation yields a step and receives its outcome, or the step's error is thrown into it. An operation cleans up
in `except` and `finally` like any function, with `Post`, `EndRead` and `Work` only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from dataplane.ledger.commands import Command

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command and wait for its response, up to the channel's deadline for the command. Outcome: `Sent`."""

    command: Command


@dataclass(frozen=True, slots=True)
class Sent:
    """The call id of a command and its result."""

    call_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Post:
    """Send a command without waiting for its response; it is resent until it is answered. Outcome: None."""

    command: Command


@dataclass(frozen=True, slots=True)
class EndRead:
    """End the brief read (see `Locate`) that began as call `call_id`: its bytes are not used any longer.
    Does not raise. Outcome: None."""

    call_id: int


def always() -> bool:
    """Return True: the `brief` of work that is always short."""
    return True


def never() -> bool:
    """Return False: the `brief` of work that may take long."""
    return False


@dataclass(frozen=True, slots=True)
class Work:
    """Run `run` to completion, even if the caller is cancelled: it copies bytes whose space must not be reused
    meanwhile, or it stops other copies. An operation that has started one `Work` may start more while the client
    closes. Outcome: the return value of `run`. If `brief` returns True, `run` does not block and costs less than a
    switch to another thread: the async client then executes it on its event loop."""

    run: Callable[[], Any]
    brief: Callable[[], bool] = never


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a future that another operation of the session completes. Outcome: None."""

    future: Future[None]


Step = Send | Post | EndRead | Work | Wait
Operation = Generator[Step, Any, T]
