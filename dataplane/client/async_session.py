"""One session of an async client: executes the steps of operations by awaiting them.

`PutJoiner` joins the small puts that the coroutines of an event loop offer at the same moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from dataplane.client.operations.joined_puts import SmallPut, groups_of
from dataplane.client.operations.put import store_joined
from dataplane.client.operations.steps import Join, Operation, Post, Send, Sent, Step, T, Wait, Work
from dataplane.client.rpc.async_channel import AsyncChannel
from dataplane.client.session import Phase, Session, end_copies, is_interrupt, session_lock
from dataplane.client.session_state import check_pickles
from dataplane.config import DataPlaneConfig
from dataplane.errors import DataPlaneError, from_wire, to_wire
from dataplane.ledger import commands as c
from dataplane.storage.session_lock import SessionLock

log = logging.getLogger(__name__)


class AsyncConnection(Session):
    """An open session, bound to one event loop."""

    joins_puts = True

    def __init__(self, config: DataPlaneConfig, channel: AsyncChannel, lock: SessionLock | None) -> None:
        """Create instances with `open`."""
        super().__init__(config, channel, lock)
        self._channel = channel
        self._joiner = PutJoiner()
        self._detached: set[asyncio.Task[None]] = set()  # the tasks of `_finish`, which nothing else refers to
        channel.on_interrupt = weakref.WeakMethod(self._interrupt)
        # Closes the session after the last reference to this object was dropped, unless `close` was called.
        self._finalizer = weakref.finalize(self, channel.end_in_background, self.session_state.close)
        self._finalizer.atexit = False

    @classmethod
    async def open(cls, config: DataPlaneConfig) -> AsyncConnection:
        """Open a session. Raise the same errors as `DataPlaneClient.connect`."""
        check_pickles(config)
        lock = session_lock(config)  # held while the session may use shared memory; None if it uses none
        channel: AsyncChannel | None = None
        try:
            channel = await AsyncChannel.open(config, lock_path="" if lock is None else str(lock.path))
            return cls(config, channel, lock)  # its `close` releases the lock
        except BaseException:
            if channel is not None:  # an interrupt
                threading.Thread(target=channel.free, name="tq-close", daemon=True).start()
            if lock is not None:
                lock.close()
            raise

    async def run(self, operation: Operation[T]) -> T:
        """Execute the operation's steps until it returns. A cancelled call ends immediately; if its copy is in
        progress, the copy and the clean-up of the operation finish in the background. An interrupt ends the session."""
        with (call := threading.Lock()):  # held as long as the call runs
            try:
                self._post_leftovers()
                return await self._resume(operation, call)
            except BaseException as error:
                if is_interrupt(error):
                    self._interrupt(operation)
                raise
            finally:
                self._copies.leave(call)

    async def _resume(self, operation: Operation[T], call: threading.Lock, thrown: BaseException | None = None) -> T:
        """Execute the remaining steps of the operation, after throwing `thrown` into it, and return its result. call:
        see `_begin_copy`."""
        try:
            step = next(operation) if thrown is None else operation.throw(thrown)
            while True:
                try:
                    outcome = await self._perform(step, operation, call)
                except _DetachedError:
                    # Not thrown into the operation: `_finish` continues it in the background.
                    raise asyncio.CancelledError from None
                except BaseException as error:
                    if is_interrupt(error):
                        raise
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:  # the operation has returned
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, step: Step, operation: Operation[Any], call: threading.Lock) -> Any:
        """Execute one step and return its outcome."""
        match step:
            case Send(command):
                number, result = await self._channel.call(command)
                return Sent(number, result)
            case Post(command):
                self._channel.post(command)
            case Work():
                self._begin_copy(call)
                if step.brief():  # it does not block the event loop
                    return step.run()
                return await self._work(step, operation, call)
            case Join(put):
                return await self._joiner.offer(put, self._store_joined)
            case Wait(future):
                await asyncio.shield(asyncio.wrap_future(future))  # a cancelled call does not cancel the future
        return None

    async def _store_joined(self, puts: Sequence[SmallPut], wanted: Callable[[], bool]) -> list[c.Committed] | None:
        """See `store_joined`."""
        return await self.run(store_joined(self.session_state, puts, wanted))

    async def _work(self, step: Work, operation: Operation[Any], call: threading.Lock) -> Any:
        """Run a copy in the executor and return its result. If the call is cancelled before the copy has ended, hand
        the operation over to a background task and raise `_DetachedError`."""
        running = asyncio.get_running_loop().run_in_executor(None, step.run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError as error:
            if running.done():
                raise  # the copy has ended: the operation can clean up now
            finishing = self._finish(operation, running, error, self._copies.hand_over(call))
            task = asyncio.get_running_loop().create_task(finishing)
            self._detached.add(task)
            task.add_done_callback(self._detached.discard)
            raise _DetachedError from None

    async def _finish(
        self,
        operation: Operation[Any],
        running: asyncio.Future[Any],
        error: asyncio.CancelledError,
        call: threading.Lock,
    ) -> None:
        """Wait for the copy of a cancelled call, then let the operation clean up. call: lock that represents the call
        from now on; it is held and is released at the end (see `InFlight.hand_over`)."""
        try:
            await asyncio.wait([running])
            running.exception()  # marks an error of the copy as retrieved; otherwise asyncio logs it
            with contextlib.suppress(asyncio.CancelledError):  # `error`, which the operation raises again
                try:
                    await self._resume(operation, call, error)
                except DataPlaneError as failed:
                    log.warning("Clean-up of a cancelled call failed: %s", failed)
        finally:
            self._copies.leave(call)
            call.release()

    def _post_leftovers(self) -> None:
        for command in self.session_state.leftovers():
            self._channel.post(command)

    async def close(self) -> None:
        """See `DataPlaneClient.close`. It can be repeated after a cancellation or an error; until it is complete, the
        finalizer closes the session of a dropped client."""
        if not self.usable:
            return
        # First: the clean-up of these calls still needs the session.
        await asyncio.get_running_loop().run_in_executor(None, end_copies, self._copies, self._config)
        self.session_state.close()
        await self._channel.close()
        self._finalizer.detach()
        if self.usable:
            self._become(Phase.CLOSED)

    def _fail_calls(self, error: DataPlaneError) -> None:
        self._finalizer.detach()
        self._channel.end(error)

    def _free(self) -> None:
        self.session_state.close()
        self._channel.free()


class _DetachedError(Exception):
    """The call was cancelled while its copy is in progress; a background task finishes the operation."""


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
