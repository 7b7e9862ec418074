"""One session of an async client: executes the steps of operations by awaiting them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dataplane.client.operations.steps import EndRead, Operation, Post, Send, Sent, Step, T, Wait, Work
from dataplane.client.rpc.async_channel import AsyncChannel, complete, in_thread, until_done
from dataplane.client.session import (
    Phase,
    Session,
    end_copies,
    is_interrupt,
    leave_blocks,
    session_lock,
)
from dataplane.client.session_state import check_pickles
from dataplane.config import DataPlaneConfig
from dataplane.core.in_flight import InFlight
from dataplane.errors import DataPlaneError, SessionInterruptedError
from dataplane.storage.session_lock import SessionLock

log = logging.getLogger(__name__)


class AsyncConnection(Session):
    """An open session, bound to one event loop.

    An interrupt that strikes in frames of asyncio itself loses one callback at most. Then the call goes on, or its
    coroutine can never continue: nothing refers to it, so that the interpreter destroys it, which ends the session like
    an interrupt in the call. Therefore nothing here keeps a task alive but what will wake it. A closed loop ends the
    session, too."""

    def __init__(self, config: DataPlaneConfig, channel: AsyncChannel, lock: SessionLock | None) -> None:
        """Create instances with `open`."""
        super().__init__(config, channel, lock)
        self._channel = channel
        # The copies that run in threads.
        self._running = InFlight()
        # The operations whose coroutines were destroyed.
        self._destroyed: list[Operation[Any]] = []
        channel.on_error = weakref.WeakMethod(self._note)
        channel.on_closed_loop = weakref.WeakMethod(self._interrupt)
        # Closes the session after the last reference to this object was dropped, unless `close` was called.
        self._finalizer = weakref.finalize(self, channel.end_in_background, self.session_state.close)
        self._finalizer.atexit = False

    @classmethod
    def open(cls, config: DataPlaneConfig, loop: asyncio.AbstractEventLoop) -> AsyncConnection:
        """Open a session for this loop. Block, in another thread, and raise as `DataPlaneClient.connect`."""
        check_pickles(config)
        lock = session_lock(config)  # held while the session may use shared memory; None if it uses none
        try:
            channel = AsyncChannel.open(config, loop, "" if lock is None else str(lock.path))
            try:
                return cls(config, channel, lock)  # its `close` releases the lock
            except BaseException:
                channel.free()
                raise
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    async def run(self, operation: Operation[T]) -> T:
        """Execute the operation's steps until it returns. A cancelled call ends immediately; if its copy is in
        progress, the copy and the clean-up of the operation finish in the background. An interrupt ends the session."""
        try:
            with (call := threading.Lock()):  # held as long as the call runs
                try:
                    if any(self.session_state.releasable):
                        self._post_leftovers()
                    result = await self._resume(operation, call)
                finally:
                    self._copies.leave(call)
            return result
        except BaseException as error:
            self._note(error, operation)
            raise

    def _note(self, error: BaseException, operation: Operation[Any] | None = None) -> None:
        """End the session if this error, of this operation, is an interrupt or its coroutine is destroyed."""
        if isinstance(error, GeneratorExit):
            self._end_soon(operation)
        elif is_interrupt(error):
            self._interrupt(operation)

    def _end_soon(self, operation: Operation[Any] | None) -> None:
        """End the session in its loop: the coroutine of the operation was destroyed, at any point of any thread. If the
        loop is closed, the channel's thread ends the session."""
        if operation is not None:
            self._destroyed.append(operation)
        self._channel.end_in_loop(self._interrupt)

    def _interrupt(self, operation: Operation[Any] | None = None) -> None:
        super()._interrupt(operation)
        while self._destroyed:
            leave_blocks(self._destroyed.pop(), SessionInterruptedError())

    async def _resume(self, operation: Operation[T], call: threading.Lock, thrown: BaseException | None = None) -> T:
        """Execute the remaining steps of the operation, after throwing `thrown` into it, and return its result. call:
        see `_begin_copy`."""
        try:
            step = next(operation) if thrown is None else operation.throw(thrown)
            while True:
                try:
                    if type(step) is Send:
                        outcome: Any = Sent(*await self._channel.call(step.command))
                    else:
                        outcome = await self._perform(step, operation, call)
                except _DetachedError:
                    # Not thrown into the operation: `_finish` continues it in the background.
                    raise asyncio.CancelledError from None
                except BaseException as error:
                    if isinstance(error, GeneratorExit) or is_interrupt(error):
                        raise
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:  # the operation has returned
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, step: Step, operation: Operation[Any], call: threading.Lock) -> Any:
        """Execute one step other than `Send` and return its outcome."""
        match step:
            case Post(command):
                self._channel.post(command)
            case EndRead(call_id):
                self._channel.end_read(call_id)
            case Work():
                if self._phase is Phase.INTERRUPTED:
                    raise SessionInterruptedError()
                self._begin_copy(call)
                if step.brief():  # it does not block the event loop
                    return step.run()
                return await self._work(step, operation, call)
            case Wait(future):
                await until_done(future)
        return None

    async def _work(self, step: Work, operation: Operation[Any], call: threading.Lock) -> Any:
        """Run a copy in the executor and return its result. If the call is cancelled before the copy has ended, hand
        the operation over to a background task and raise `_DetachedError`."""
        copied: Future[Any] = Future()
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._copy, copied, step.run)
        try:
            await until_done(copied)
        except asyncio.CancelledError as error:
            if copied.done():
                raise  # the copy has ended: the operation can clean up now
            finishing = self._finish(operation, copied, error, self._copies.hand_over(call))
            loop.create_task(finishing)  # noqa: RUF006  `copied` refers to the task, and nothing else may
            raise _DetachedError from None
        return copied.result()

    def _copy(self, copied: Future[Any], run: Callable[[], Any]) -> None:
        """Run a copy in this thread. After an interrupt, none begins."""
        with (running := threading.Lock()):
            self._running.enter(running)
            if self._phase is Phase.INTERRUPTED:  # read after `enter`: see `_close_interrupted`
                copied.set_exception(SessionInterruptedError())
            else:
                complete(copied, run)
            self._running.leave(running)

    async def _finish(
        self,
        operation: Operation[Any],
        copied: Future[Any],
        error: asyncio.CancelledError,
        call: threading.Lock,
    ) -> None:
        """Wait for the copy of a cancelled call, then let the operation clean up. If that is cancelled or destroyed,
        end the session. call: lock that represents the call from now on; it is held and is released at the end (see
        `InFlight.hand_over`)."""
        try:
            await until_done(copied)
            await self._resume(operation, call, error)
        except asyncio.CancelledError:  # `error`, which the operation raises again
            pass
        except DataPlaneError as failed:
            log.warning("Clean-up of a cancelled call failed: %s", failed)
        finally:
            if inspect.getgeneratorstate(operation) != inspect.GEN_CLOSED:
                self._end_soon(operation)
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
        try:
            ended = in_thread(self._end_copies, "tq-end-copies")
            await until_done(ended)
            ended.result()
            await self._channel.close()
            self._finalizer.detach()
            if self.usable:
                self._become(Phase.CLOSED)
        except BaseException as error:
            self._note(error)
            raise

    def _end_copies(self) -> None:
        """In a thread: no interrupt reaches the finalizer that releases the lock, which would swallow it."""
        end_copies(self._copies, self._config)  # first: the clean-up of these calls still needs the session
        self.session_state.close()

    @property
    def _interrupted_copies(self) -> InFlight:
        return self._running

    def _fail_calls(self, error: DataPlaneError) -> None:
        self._finalizer.detach()
        self._channel.end(error)

    def _free(self) -> None:
        self.session_state.close()
        self._channel.free()


class _DetachedError(Exception):
    """The call was cancelled while its copy is in progress; a background task finishes the operation."""
