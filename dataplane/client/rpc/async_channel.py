"""The command channel of a session, for one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

from dataplane.client.rpc.call_socket import CLOSE_S, CallSocket, WaitingCall, say_bye
from dataplane.client.rpc.handshake import OpenedSession, open_session
from dataplane.client.rpc.heartbeat import HeartbeatThread
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCall
from dataplane.config import DataPlaneConfig
from dataplane.core.failpoints import armed, failpoint
from dataplane.errors import ClientClosedError, DataPlaneError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for

T = TypeVar("T")

WAKE_S = 2.0
"""Time after which a coroutine looks again at what a thread does for it: an interrupt in frames of
asyncio can lose the callback that wakes it."""


def in_thread(run: Callable[[], T], name: str) -> Future[T]:
    """Start a thread that completes the returned future with the outcome of `run`."""
    future: Future[T] = Future()
    threading.Thread(target=complete, args=(future, run), name=name, daemon=True).start()
    return future


def complete(future: Future[T], run: Callable[[], T]) -> None:
    """Complete the future with the outcome of `run`."""
    try:
        result = run()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def until_done(future: Future[Any]) -> None:
    """Wait for a future that a thread completes. A cancelled caller does not cancel it."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(done: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(woken.set_result, None)

    future.add_done_callback(wake)
    while not future.done():
        await asyncio.wait([woken], timeout=WAKE_S)


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
    its event loop. A thread keeps the session alive, so that a busy loop does not lose it, and ends it after the loop
    was closed. After a reconnection, pending calls are resent to the new endpoint under their ids.

    A forked child must open its own channel: in the child, every method of this object raises `ClientClosedError`,
    and `close` does nothing.

    Requests of one turn of the event loop share messages. Nothing relies on one callback of the
    loop, which an interrupt in asyncio can lose: every heartbeat does what is due.
    """

    def __init__(
        self,
        config: DataPlaneConfig,
        session: OpenedSession,
        context: zmq.Context[Socket],
        dealer: Socket,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Create instances with `open`. dealer: the socket for heartbeats."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._loop = loop
        self._socket: CallSocket[_Waiting] = CallSocket(context, self._calls)
        self._waiting = self._socket.waiting
        # The descriptor of `_socket` that the loop watches, -1 if none.
        self._reads = -1
        # Calls `_check_waiting` at `_check_at`, which is at most the `wake_at` of any waiting call.
        self._timer: asyncio.TimerHandle | None = None
        self._check_at = math.inf
        # See `end_in_loop`.
        self._ending: Callable[[], object] | None = None
        # Completed by the thread that closes the channel.
        self._closed: Future[None] | None = None
        # Held while a thread frees the resources; after an interrupt of `begin_close`, two do.
        self._freeing = threading.RLock()
        # Called with what is raised in a callback of the loop, outside of the calls. Returns None after the connection
        # was dropped: the channel's thread must not keep it.
        self.on_error: Callable[[], Callable[[BaseException], None] | None] = lambda: None
        # Called in the channel's thread after the loop was closed. As above.
        self.on_closed_loop: Callable[[], Callable[[], None] | None] = lambda: None
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._schedule_maintain, moved=self._schedule_reconnect
        )

    @classmethod
    def open(cls, config: DataPlaneConfig, loop: asyncio.AbstractEventLoop, lock_path: str = "") -> AsyncChannel:
        """Connect to `config.address` and open a session for this loop. Call it in another thread: it blocks for at
        most `config.connect_timeout_s`. Raise as `open_session`. lock_path: see `open_session`."""
        with enough_for(config.address or "", least=OF_A_CONTEXT):
            context: zmq.Context[Socket] = zmq.Context()
            channel: AsyncChannel | None = None
            try:
                session, dealer = open_session(config, context, lock_path)
                channel = cls(config, session, context, dealer, loop)
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
        calls = self._calls
        if calls.ended is not None or calls.lost or self._pid != os.getpid():
            calls.check()
        if armed:
            failpoint(f"call.{type(command).__name__}.before")
        outgoing = calls.begin(command, timeout_s)
        waiting = _Waiting(outgoing, self._loop)
        with waiting.active:
            self._waiting[outgoing.call_id] = waiting
            try:
                self._send(outgoing.frames)
                if outgoing.wake_at < self._check_at:
                    self._check_by(outgoing.wake_at)
                reply = await waiting.answered
                if armed:
                    failpoint(f"call.{type(command).__name__}.after")
                return outgoing.call_id, calls.settle(outgoing, reply)
            except (Exception, asyncio.CancelledError):
                self._abandon(outgoing)
                raise
            finally:
                self._waiting.pop(outgoing.call_id, None)

    def _check_by(self, when: float) -> None:
        """Check the waiting calls at this time (`time.monotonic`), earlier than planned."""
        if self._timer is not None:
            self._timer.cancel()
        self._check_at = when
        delay_s = max(0.0, when - time.monotonic())
        self._timer = self._loop.call_later(delay_s, self._run_callback, self._check_waiting)

    def _check_waiting(self) -> None:
        """Resend the waiting calls without a reply whose `wake_at` has come. Those that are
        impossible now, or whose deadline has passed, fail (see `prepare_resend`)."""
        self._check_at = math.inf
        for waiting in list(self._waiting.values()):
            outgoing = waiting.outgoing
            try:
                if time.monotonic() >= outgoing.wake_at and not waiting.ended:
                    self._send(self._calls.prepare_resend(outgoing))
            except DataPlaneError as error:
                waiting.end(error)
            if outgoing.wake_at < self._check_at and not waiting.ended:
                self._check_by(outgoing.wake_at)
        self._use_socket()

    def _send(self, frames: list[bytes]) -> None:
        """Send a request at the end of this turn of the event loop. Raises as `CallSocket.open`."""
        if self._reads < 0:
            self._socket.open()
            self._reads = self._socket.fd
            self._loop.add_reader(self._reads, self._use_socket)
        self._socket.outbox.append(frames)
        if len(self._socket.outbox) == 1:
            self._loop.call_soon(self._use_socket)

    def _use_socket(self) -> None:
        """Send the added requests and process the replies that have arrived."""
        if self._calls.over:
            return
        try:
            self._socket.exchange()
        except BaseException as error:  # an interrupt can leave half a message
            self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        on_error = self.on_error()
        if on_error is not None:
            on_error(error)

    def _close_socket(self) -> None:
        if self._reads >= 0:
            self._loop.remove_reader(self._reads)
            self._reads = -1
        self._socket.close()

    def _schedule_maintain(self) -> None:
        """Schedule `_maintain` in the loop. The heartbeat thread calls this with every heartbeat."""
        self._schedule(self._maintain)

    def _schedule(self, callback: Callable[[], None]) -> None:
        """Schedule a callback in the loop, from the heartbeat thread. If the loop is closed, end the session."""
        try:
            self._loop.call_soon_threadsafe(self._run_callback, callback)
        except RuntimeError:  # no more calls can be made
            on_closed_loop = self.on_closed_loop()
            if on_closed_loop is not None:
                on_closed_loop()
            else:  # its connection was dropped before
                in_thread(self.free, "tq-close")

    def _run_callback(self, callback: Callable[[], None]) -> None:
        if self._closed is not None:
            return
        try:
            callback()
        except BaseException as error:
            self._report(error)
            raise

    def _maintain(self) -> None:
        """Resend unanswered calls, post the commands of `leftovers`, confirm the reads that have
        ended, and read what has arrived; or end the session (see `end_in_loop`)."""
        if self._ending is not None:
            self._ending()
        if not self._calls.over:
            for outgoing in self._calls.due():
                self._send_once(outgoing)
            self._post_leftovers()
            self._confirm_reads()
            self._check_waiting()

    def _schedule_reconnect(self) -> None:
        """Schedule `_reconnect` in the loop; if the session has moved, first pass its storage units to `on_units`. The
        heartbeat thread calls this after the session moved, ended or was given up."""
        session = self._calls.session
        if not self._calls.unreachable:
            self.on_units(session.units)
        self._schedule(self._reconnect)

    def _reconnect(self) -> None:
        """Resend pending and posted calls over a new socket to the session's endpoint. Calls that are impossible now
        fail."""
        self._close_socket()  # `_send` opens another one
        for waiting in list(self._waiting.values()):
            waiting.outgoing.wake_at = 0.0
        self._check_waiting()
        if not self._calls.unreachable:
            for outgoing in self._calls.due(all_of_them=True):
                self._send_once(outgoing)

    # --- closing

    def end_in_background(self, first: Callable[[], None]) -> None:
        """Close the channel after the last reference to the client was dropped: a new thread calls `first` and then
        schedules `begin_close` in the loop (see `HeartbeatThread.end_in_background`). If that loop is closed, only
        free the local resources."""

        def end() -> None:
            first()
            if self._loop.is_closed():
                self.free()
            else:
                self.end_in_loop(self.begin_close)

        self._heartbeat.end_in_background(end)

    def end_in_loop(self, ending: Callable[[], object]) -> None:
        """Call `ending`, which ends the session, in the loop: now, or with a heartbeat if an interrupt loses this
        callback. May be called at any point of any thread."""
        self._ending = ending
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._run_callback, self._maintain)

    def end(self, error: DataPlaneError) -> None:
        """Let all calls fail with this error, also those that wait, and close the socket. Call it in the loop, or in
        any thread after the loop was closed."""
        self._calls.end(error)
        for waiting in list(self._waiting.values()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                waiting.end(error)
        self._close_socket()

    def free(self) -> None:
        """Report the end of the session to the service and free all resources, after `end` or after the loop was
        closed, in any thread. Blocks for a few seconds at most."""
        if self._closed is not None:
            concurrent.futures.wait([self._closed])
            return
        with self._freeing:
            owes_bye = self._calls.owes_bye  # read before `end`, after which it is always False
            self._calls.end(ClientClosedError())
            self._free(owes_bye)

    async def close(self) -> None:
        """Close the session as `ControllerChannel.close`. If this call is cancelled, closing continues. Idempotent; it
        can be repeated after a cancellation or an error."""
        if self._pid == os.getpid():
            closed = self.begin_close()
            await until_done(closed)
            closed.result()

    def begin_close(self) -> Future[None]:
        """Let all calls fail, and a thread close the session. Return a future of its end."""
        # Repeating it has no effect if it was complete.
        if self._closed is None or self._closed.done():
            with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
                self._post_leftovers()
            owes_bye = self._calls.owes_bye
            self.end(ClientClosedError())
            self._closed = in_thread(functools.partial(self._close, owes_bye), "tq-close")
        return self._closed

    def _close(self, owes_bye: bool) -> None:
        self._socket.wait_until_ended(CLOSE_S)  # until the failed calls have cleaned up
        self._free(owes_bye)

    def _free(self, owes_bye: bool) -> None:
        with self._freeing:
            try:
                if owes_bye:
                    say_bye(self._context, self._calls)
            finally:
                self._socket.close()  # not by `_close_socket`, which needs the loop
                # Free the ZMQ context, unless the heartbeat thread still uses it.
                if self._heartbeat.close(CLOSE_S):
                    self._context.term()
