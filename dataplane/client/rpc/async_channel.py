"""The command channel of a session, for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable

import zmq

from dataplane.client.rpc.call_socket import CLOSE_S, CallSocket, WaitingCall, say_bye
from dataplane.client.rpc.handshake import OpenedSession, Socket, open_session
from dataplane.client.rpc.heartbeat import HeartbeatThread
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCall
from dataplane.config import DataPlaneConfig
from dataplane.core.failpoints import hit
from dataplane.errors import ClientClosedError, DataPlaneError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for

log = logging.getLogger(__name__)


class _Waiting(WaitingCall):
    """A pending call and the future of its reply."""

    def __init__(self, outgoing: OutgoingCall, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(outgoing)
        self.answered: asyncio.Future[zmq_frames.Reply] = loop.create_future()

    @property
    def ended(self) -> bool:
        return self.answered.done()

    def end(self, outcome: zmq_frames.Reply | DataPlaneError) -> None:
        if self.answered.done():
            return
        if isinstance(outcome, DataPlaneError):
            self.answered.set_exception(outcome)
        else:
            self.answered.set_result(outcome)


class AsyncChannel(OpenChannel):
    """An open session with awaitable calls: one socket for any number of concurrent calls. Use its methods only in
    the event loop that opened it. A thread keeps the session alive, so that a busy loop does not lose it. After a
    reconnection, pending calls are resent to the new endpoint under their numbers.

    A forked child must open its own channel: in the child, every method of this object raises `ClientClosedError`,
    and `close` does nothing.

    Requests of one turn of the event loop share messages. `_reads` is the descriptor of `_socket` that the loop
    watches, -1 if none. `_none_pending` is set while no call is pending; `close` waits for it.
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Create instances with `open`. dealer: the socket for heartbeats."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._socket: CallSocket[_Waiting] = CallSocket(context, self._calls)
        self._waiting = self._socket.waiting
        self._reads = -1
        self._none_pending = asyncio.Event()
        self._none_pending.set()
        self._closing: asyncio.Task[None] | None = None  # the task of `_close`, started by the last call of `close`
        # Called when an interrupt is raised outside of the calls, in a callback of the loop.
        # Returns None after the connection was dropped: the channel's thread must not keep it.
        self.on_interrupt: Callable[[], Callable[[], None] | None] = lambda: None
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._schedule_maintain, moved=self._schedule_reconnect
        )

    @classmethod
    async def open(cls, config: DataPlaneConfig, lock_path: str = "") -> AsyncChannel:
        """Connect to `config.address` and open a session within `config.connect_timeout_s`. Raise as
        `open_session`. lock_path: see `open_session`."""
        with enough_for(config.address or "", least=OF_A_CONTEXT):
            context: zmq.Context[Socket] = zmq.Context()
            opening = asyncio.get_running_loop().run_in_executor(None, open_session, config, context, lock_path)
            try:
                session, dealer = await asyncio.shield(opening)
            except BaseException:
                # After a cancellation, the thread still opens the session. After an error, only the context remains.
                opening.add_done_callback(lambda done: _discard(done, context))
                raise
            channel: AsyncChannel | None = None
            try:
                channel = cls(config, session, context, dealer)
                channel._heartbeat.start()
                return channel
            except BaseException:
                if channel is not None:
                    channel._heartbeat.close(CLOSE_S)
                context.destroy(linger=0)
                raise

    # --- calls

    async def call(self, command: c.Command, *, timeout_s: float | None = None) -> tuple[int, c.Result]:
        """Send a command as `ControllerChannel.call`. Cancellation releases the resources that the command may have
        acquired."""
        name = type(command).__name__
        self._calls.check()
        hit(f"call.{name}.before")
        outgoing = self._calls.begin(command, timeout_s)
        self._none_pending.clear()
        try:
            reply = await self._exchange(outgoing)
            hit(f"call.{name}.after")
            return outgoing.number, self._calls.settle(outgoing, reply)
        except (Exception, asyncio.CancelledError):
            self._abandon(outgoing)
            raise
        finally:
            self._waiting.pop(outgoing.number, None)
            if not self._waiting:
                self._none_pending.set()

    async def _exchange(self, outgoing: OutgoingCall) -> zmq_frames.Reply:
        """Send the call and return its reply; resend it after silence, until its deadline (see `prepare_resend`). The
        call stays in `_waiting` until `call` removes it."""
        waiting = self._waiting[outgoing.number] = _Waiting(outgoing, self._loop)
        answered = waiting.answered
        self._send(outgoing.frames)
        while True:
            await asyncio.wait([answered], timeout=max(0.0, outgoing.wake_at - time.monotonic()))
            if answered.done():
                return answered.result()
            self._calls.check()
            if time.monotonic() >= outgoing.wake_at:
                self._send(self._calls.prepare_resend(outgoing))

    def _send_once(self, outgoing: OutgoingCall) -> None:
        try:
            self._send(outgoing.frames)
        except ServiceUnavailableError as error:
            log.warning("%s will be sent later: %s", outgoing.method, error)

    def _send(self, frames: list[bytes]) -> None:
        """Send a request at the end of this turn of the event loop. Raises as `CallSocket.open`."""
        self._socket.open()
        if self._reads < 0:
            self._reads = self._socket.fd
            self._loop.add_reader(self._reads, self._use_socket)
        if self._socket.add(frames):
            self._loop.call_soon(self._use_socket)

    def _use_socket(self) -> None:
        """Send the added requests and process the replies that have arrived."""
        if self._calls.over:
            return
        try:
            self._socket.exchange()
        except Exception:
            raise
        except BaseException:  # an interrupt, which can leave half a message
            interrupt = self.on_interrupt()
            if interrupt is not None:
                interrupt()
            raise

    def _close_socket(self) -> None:
        if self._reads >= 0:
            self._loop.remove_reader(self._reads)
            self._reads = -1
        self._socket.close()

    def _schedule_maintain(self) -> None:
        """Schedule `_maintain` in the loop. The heartbeat thread calls this with every heartbeat."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no more calls can be made
            self._loop.call_soon_threadsafe(self._maintain)

    def _maintain(self) -> None:
        """Resend unanswered posted calls, and post the commands of `leftovers`."""
        if self._closing is None and not self._calls.over:
            for outgoing in self._calls.due():
                self._send_once(outgoing)
            self._post_leftovers()

    def _schedule_reconnect(self) -> None:
        """Schedule `_reconnect` in the loop; if the session has moved, first pass its storage units to `on_units`. The
        heartbeat thread calls this after the session moved, ended or was given up."""
        session = self._calls.session
        if not self._calls.unreachable:
            self.on_units(session.units)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._reconnect)

    def _reconnect(self) -> None:
        """Resend pending and posted calls over a new socket to the session's endpoint. Calls that are impossible now
        fail."""
        if self._closing is not None:
            return
        self._close_socket()  # `_send` opens another one
        for waiting in self._waiting.values():
            try:
                self._send(self._calls.prepare_resend(waiting.outgoing))
            except DataPlaneError as error:
                waiting.end(error)
        if not self._calls.unreachable:
            for outgoing in self._calls.due(all_of_them=True):
                self._send_once(outgoing)

    # --- closing

    def end_in_background(self, first: Callable[[], None]) -> None:
        """Close the channel after the last reference to the client was dropped: a new thread calls `first` and then
        schedules `close` in the loop (see `HeartbeatThread.end_in_background`). If that loop is closed, only free the
        local resources."""

        def end() -> None:
            first()
            closing = self.close()
            try:
                asyncio.run_coroutine_threadsafe(closing, self._loop)
            except RuntimeError:  # the loop is closed
                closing.close()  # the coroutine: it will never run
                self.free()

        self._heartbeat.end_in_background(end)

    def end(self, error: DataPlaneError) -> None:
        """Let all calls fail with this error, also those that wait, and close the socket."""
        self._calls.end(error)
        for waiting in self._waiting.values():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                waiting.end(error)
        self._close_socket()

    def free(self) -> None:
        """Report the end of the session to the service and free all resources, after `end` or after the loop was
        closed, in any thread. Blocks for a few seconds at most."""
        if self._calls.owes_bye:
            say_bye(self._context, self._calls)
        self._calls.end(ClientClosedError())
        self._socket.close()  # not by `_close_socket`, which needs the loop
        self._end_thread_and_context()

    async def close(self) -> None:
        """Close the session as `ControllerChannel.close`. If this call is cancelled, closing continues in a task of
        the loop. Idempotent; it can be repeated after a cancellation or an error."""
        if self._pid != os.getpid():
            return
        if self._closing is None or self._closing.done():  # done: repeating it has no effect if it was complete
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        """Close the session; free the local resources even if that fails or is cancelled."""
        with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
            self._post_leftovers()
        owes_bye = self._calls.owes_bye  # read before `end`, after which it is always False
        self._calls.end(ClientClosedError())
        for waiting in self._waiting.values():
            waiting.end(ClientClosedError())
        run = self._loop.run_in_executor
        try:
            await self._none_pending.wait()  # until the failed calls have cleaned up
            if owes_bye:
                await run(None, say_bye, self._context, self._calls)
        finally:
            self._close_socket()
            await run(None, self._end_thread_and_context)  # it blocks

    def _end_thread_and_context(self) -> None:
        """Stop the heartbeat thread, then free the ZMQ context, unless the thread still uses it. Blocks for up to
        `CLOSE_S`."""
        if self._heartbeat.close(CLOSE_S):
            self._context.term()


def _discard(opening: asyncio.Future[tuple[OpenedSession, Socket]], context: zmq.Context[Socket]) -> None:
    """Free the context of an opening that failed or whose caller was cancelled. If the session was opened, first close
    its socket, which the service detects."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
    context.destroy(linger=0)
