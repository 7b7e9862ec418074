"""What an operation asks of whoever runs it. Operations are generators, written once; the sync client performs each
step in the calling thread, the async client awaits it.

An operation yields a step and is sent its outcome, or has the step's error thrown in. It cleans up in `except` and
`finally` like any function, with `Post` and `Work` only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from dataplane.ledger.commands import Command

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command and wait for its answer, up to the channel's deadline for it. Outcome: `Sent`. `meanwhile` may be
    run while the answer is on its way, in the same thread, and raises nothing; it copies as `Work` does."""

    command: Command
    meanwhile: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The number a command went under, and its result; what `meanwhile` returned, None if it was not run."""

    number: int
    result: Any
    meanwhile: Any = None


@dataclass(frozen=True, slots=True)
class Post:
    """Send a command whose answer nobody waits for; it is repeated until answered. Outcome: None."""

    command: Command


def never() -> bool:
    """The `brief` of work that may take long."""
    return False


@dataclass(frozen=True, slots=True)
class Work:
    """Run `run` to its end, whatever happens to the caller: it copies bytes that nobody may take back meanwhile, or
    sees to it that nobody copies them any more. An operation that has begun one may begin more while the client closes.
    Outcome: what it returns. `brief` says whether it waits for nothing and takes less than to have another thread do
    it: then the async client runs it on its event loop."""

    run: Callable[[], Any]
    brief: Callable[[], bool] = never


Step = Send | Post | Work
Operation = Generator[Step, Any, T]
