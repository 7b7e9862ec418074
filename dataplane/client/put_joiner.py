"""Joins the small puts that the coroutines of an event loop offer at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from dataplane.client.operations.joined_puts import SmallPut, groups_of
from dataplane.errors import DataPlaneError, from_wire, to_wire
from dataplane.ledger import commands as c

Outcome = c.Committed | None
Store = Callable[[Sequence[SmallPut], Callable[[], bool]], Awaitable[list[c.Committed] | None]]
"""Stores several puts with one commit: see `put.store_joined`."""


class PutJoiner:
    """Forms groups of the puts that are offered in one turn of the event loop, and stores each group with one commit.

    `_offered`: the puts of this turn, each with the future of its outcome. `_tasks`: the groups that are being stored.
    """

    def __init__(self) -> None:
        self._offered: list[tuple[SmallPut, asyncio.Future[Outcome]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def offer(self, put: SmallPut, store: Store) -> Outcome:
        """Return the result of the put if it was stored together with others that were offered in the same turn. None:
        the caller must store it alone, because there are no others, or they could not be stored together. store: equal
        for all callers."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        if not self._offered:
            loop.call_soon(self._form_groups, store)  # runs after the coroutines that are ready now
        self._offered.append((put, outcome))
        return await outcome

    def _form_groups(self, store: Store) -> None:
        """Begin to store the puts that were offered in this turn; those without company return to their callers."""
        offered, self._offered = self._offered, []
        offered = [each for each in offered if not each[1].done()]  # done: the caller was cancelled
        for positions in groups_of([put for put, _ in offered]):
            group = [offered[position] for position in positions]
            if len(group) == 1:
                group[0][1].set_result(None)
                continue
            task = asyncio.get_running_loop().create_task(_store_group(group, store))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _store_group(group: list[tuple[SmallPut, asyncio.Future[Outcome]]], store: Store) -> None:
    """Store a group, and set the outcome of each put whose caller still waits."""
    futures = [outcome for _, outcome in group]

    def wanted() -> bool:
        """Whether no caller was cancelled. Once the commit has been sent, a cancelled put is stored, as one that is
        alone would be: before any later command of its caller."""
        return not any(outcome.done() for outcome in futures)

    try:
        results = await store([put for put, _ in group], wanted)
    except Exception as error:
        for outcome in futures:
            if not outcome.done():
                outcome.set_exception(_copy_of(error))
    except BaseException:  # the loop ends
        for outcome in futures:
            outcome.cancel()
        raise
    else:
        _set_results(futures, results)


def _set_results(futures: Sequence[asyncio.Future[Outcome]], results: Sequence[c.Committed] | None) -> None:
    """Set the result of each put whose caller was not cancelled. The first of them also gets the evicted samples."""
    if results is None:
        for outcome in futures:
            if not outcome.done():
                outcome.set_result(None)
        return
    evicted = results[0].evicted
    for outcome, result in zip(futures, results, strict=True):
        if not outcome.done():
            outcome.set_result(msgspec.structs.replace(result, evicted=evicted) if evicted else result)
            evicted = ()


def _copy_of(error: Exception) -> Exception:
    """Return the error to raise in one of several callers: an exception that is raised accumulates tracebacks."""
    return from_wire(*to_wire(error)) if isinstance(error, DataPlaneError) else error
