"""One session of an async client: performs the steps of operations by awaiting them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from dataplane.bulk.lock import SessionLock
from dataplane.config import DataPlaneConfig
from dataplane.connection import CopiesUnderWay, desks, session_lock
from dataplane.control.achannel import AsyncChannel
from dataplane.desk import Desk
from dataplane.ledger import commands as c
from dataplane.steps import Operation, Post, Send, Sent, Step, T, Work


class AsyncConnection:
    """An open session with its desk, for one event loop."""

    def __init__(self, config: DataPlaneConfig, channel: AsyncChannel, lock: SessionLock | None) -> None:
        """Use `open`."""
        self._channel = channel
        self._copies = CopiesUnderWay()
        self._detached: set[asyncio.Task[None]] = set()
        self._timeout_s = config.call_timeout_s
        self.desk = Desk(config, session=channel.session, lock=lock)
        self.desk.roads.learn(channel.units)
        desks().add(self.desk)

    @classmethod
    async def open(cls, config: DataPlaneConfig) -> AsyncConnection:
        """Connect. Errors as `DataPlaneClient.connect`."""
        lock = session_lock(config)
        try:
            channel = await AsyncChannel.open(config)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        return cls(config, channel, lock)

    async def run(self, operation: Operation[T]) -> T:
        """Perform the operation's steps until it returns. A cancelled call leaves at once; its copy, if one is under
        way, ends in the background, and then its clean-up is done."""
        self._release_dropped()
        with contextlib.ExitStack() as copying:
            try:
                step = next(operation)
                while True:
                    try:
                        outcome = await self._perform(step, operation, copying)
                    except _DetachedError:
                        raise asyncio.CancelledError from None
                    except BaseException as error:
                        step = operation.throw(error)
                    else:
                        step = operation.send(outcome)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]

    async def _perform(self, step: Step, operation: Operation[Any], copying: contextlib.ExitStack) -> Any:
        match step:
            case Send(command):
                number, result = await self._channel.call(command)
                return Sent(number, result)
            case Post(command):
                self._channel.post(command)
            case Work():
                copying.enter_context(self._copies)
                return await self._work(step, operation, copying)
        return None

    async def _work(self, step: Work, operation: Operation[Any], copying: contextlib.ExitStack) -> Any:
        running = asyncio.get_running_loop().run_in_executor(None, step.run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError as error:
            if running.done():
                raise
            finishing = self._finish(operation, running, error, copying.pop_all())
            task = asyncio.get_running_loop().create_task(finishing)
            self._detached.add(task)
            task.add_done_callback(self._detached.discard)
            raise _DetachedError from None

    async def _finish(
        self,
        operation: Operation[Any],
        running: asyncio.Future[Any],
        error: asyncio.CancelledError,
        copying: contextlib.ExitStack,
    ) -> None:
        """Wait for the copy of a cancelled call, then let the operation clean up."""
        with copying:
            await asyncio.wait([running])
            running.exception()
            try:
                step = operation.throw(error)
                while True:
                    step = operation.send(await self._perform(step, operation, copying))
            except (StopIteration, asyncio.CancelledError):
                return

    def _release_dropped(self) -> None:
        for number in self.desk.pins.dropped():
            self._channel.post(c.Release(located=number))

    async def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._copies.refuse_more()
        await asyncio.get_running_loop().run_in_executor(None, self._copies.wait, self._timeout_s)
        self._release_dropped()
        self.desk.close()
        await self._channel.close()


class _DetachedError(Exception):
    """The call was cancelled while its copy runs on; the operation is finished elsewhere."""
