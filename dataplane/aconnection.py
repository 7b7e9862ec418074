"""One session of an async client: performs the steps of operations by awaiting them."""

from __future__ import annotations

import asyncio
from typing import Any

from dataplane.bulk.lock import SessionLock
from dataplane.config import DataPlaneConfig
from dataplane.connection import CopiesInFlight, desks
from dataplane.control.achannel import AsyncChannel
from dataplane.desk import Desk
from dataplane.ledger import commands as c
from dataplane.steps import Operation, Post, Send, Sent, Step, T, Work


class AsyncConnection:
    """An open session with its desk, for one event loop."""

    def __init__(self, config: DataPlaneConfig, channel: AsyncChannel, lock: SessionLock | None) -> None:
        """Use `open`."""
        self._channel = channel
        self._copies = CopiesInFlight()
        self._detached: set[asyncio.Task[None]] = set()
        self._timeout_s = config.call_timeout_s
        self.desk = Desk(config, session=channel.session, lock=lock)
        self.desk.roads.learn(channel.units)
        desks().add(self.desk)

    @classmethod
    async def open(cls, config: DataPlaneConfig) -> AsyncConnection:
        """Connect. Errors as `DataPlaneClient.connect`."""
        lock = None if config.force_remote else SessionLock.create()
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
        try:
            step = next(operation)
            while True:
                try:
                    outcome = await self._perform(step, operation)
                except _DetachedError:
                    raise asyncio.CancelledError from None
                except BaseException as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, step: Step, operation: Operation[Any]) -> Any:
        match step:
            case Send(command):
                number, result = await self._channel.call(command)
                return Sent(number, result)
            case Post(command):
                self._channel.post(command)
            case Work():
                return await self._work(step, operation)
        return None

    async def _work(self, step: Work, operation: Operation[Any]) -> Any:
        def counted() -> Any:
            with self._copies:
                return step.run()

        copying = asyncio.get_running_loop().run_in_executor(None, counted)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError as error:
            if copying.done():
                raise
            task = asyncio.get_running_loop().create_task(self._finish(operation, copying, error))
            self._detached.add(task)
            task.add_done_callback(self._detached.discard)
            raise _DetachedError from None

    async def _finish(
        self, operation: Operation[Any], copying: asyncio.Future[Any], error: asyncio.CancelledError
    ) -> None:
        """Wait for the copy of a cancelled call, then let the operation clean up."""
        await asyncio.wait([copying])
        copying.exception()
        try:
            step = operation.throw(error)
            while True:
                step = operation.send(await self._perform(step, operation))
        except (StopIteration, asyncio.CancelledError):
            return

    def _release_dropped(self) -> None:
        for number in self.desk.pins.dropped():
            self._channel.post(c.Release(located=number))

    async def close(self) -> None:
        """See `DataPlaneClient.close`."""
        self._copies.refuse_more()
        await asyncio.get_running_loop().run_in_executor(None, self._copies.wait, self._timeout_s)
        if self._detached:
            await asyncio.wait(self._detached)
        self._release_dropped()
        await self._channel.close()
        self.desk.close()


class _DetachedError(Exception):
    """The call was cancelled while its copy runs on; the operation is finished elsewhere."""
