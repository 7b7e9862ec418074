"""The command channel of a session, for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from dataplane.client.rpc.channel import CLOSE_S, arrived_replies, send
from dataplane.client.rpc.handshake import OpenedSession, Socket, dealer_socket, open_session
from dataplane.client.rpc.heartbeat import HeartbeatThread
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCall
from dataplane.config import DataPlaneConfig
from dataplane.core.failpoints import hit
from dataplane.errors import ClientClosedError, DataPlaneError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A pending call and the future of its reply."""

    outgoing: OutgoingCall
    answered: asyncio.Future[zmq_frames.Reply]

    def fail(self, error: BaseException) -> None:
        """Raise this error in the caller, unless the reply has arrived."""
        if not self.answered.done():
            self.answered.set_exception(error)


class AsyncChannel(OpenChannel):
    """An open session with awaitable calls: one socket for any number of concurrent calls. Use its methods only in
    the event loop that opened it. A thread keeps the session alive, so that a busy loop does not lose it. After a
    reconnection, pending calls are resent to the new endpoint under their numbers.

    A forked child must open its own channel: in the child, every method of this object raises `ClientClosedError`,
    and `close` does nothing.

    `_dealer` is the socket for commands; None until the first one is sent, and after a reconnection. `_outbox` has the
    requests to send at the end of this turn of the event loop, which share messages. `_none_pending` is set while no
    call is pending; `close` waits for it.
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Create instances with `open`. dealer: the socket for heartbeats."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._dealer: Socket | None = None
        self._outbox: list[list[bytes]] = []
        self._waiting: dict[int, _Waiting] = {}  # pending calls by number
        self._none_pending = asyncio.Event()
        self._none_pending.set()
        self._closing = False
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
            try:
                return cls(config, session, context, dealer)
            except BaseException:
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
        except BaseException:
            self._abandon(outgoing)
            raise
        finally:
            self._waiting.pop(outgoing.number, None)
            if not self._waiting:
                self._none_pending.set()

    async def _exchange(self, outgoing: OutgoingCall) -> zmq_frames.Reply:
        """Send the call and return its reply; resend it after silence, until its deadline (see `prepare_resend`). The
        call stays in `_waiting` until `call` removes it."""
        answered: asyncio.Future[zmq_frames.Reply] = self._loop.create_future()
        self._waiting[outgoing.number] = _Waiting(outgoing, answered)
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
        """Send a request at the end of this turn of the event loop, on a new socket if there is none. Raise
        `ServiceUnavailableError`, naming the remedy, if the process has no free file descriptors."""
        if self._dealer is None:
            with enough_for(self.endpoint):
                self._dealer = dealer_socket(self._context, self.endpoint, self._calls.session.keys)
            self._loop.add_reader(self._dealer.fileno(), self._receive)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(frames)

    def _flush(self) -> None:
        """Send the requests of the outbox."""
        outbox, self._outbox = self._outbox, []
        if self._dealer is not None:
            for message in zmq_frames.messages(outbox):
                send(self._dealer, message)
            self._receive()  # ZMQ's descriptor is edge-triggered, and sending may have consumed an edge

    def _close_socket(self) -> None:
        dealer, self._dealer = self._dealer, None
        self._outbox.clear()  # what it had is resent over the next socket
        if dealer is not None:
            self._loop.remove_reader(dealer.fileno())
            dealer.close()

    def _receive(self) -> None:
        """Process the replies that have arrived. The event loop calls this when the socket is readable."""
        if self._dealer is None:
            return
        try:
            for replies in arrived_replies(self._dealer):
                for reply in replies:
                    self._dispatch(reply)
        except DataPlaneError as error:
            # The call of this response is unknown, so all pending calls fail; more responses may follow.
            for waiting in self._waiting.values():
                waiting.fail(error)
            self._loop.call_soon(self._receive)

    def _dispatch(self, reply: zmq_frames.Reply) -> None:
        """Pass a reply to its pending call; if there is none, only record it."""
        if reply.number == 0:
            # The controller could not parse a message: each pending call may have sent it.
            for waiting in self._waiting.values():
                self._complete(waiting, reply)
        elif reply.number in self._waiting:
            self._complete(self._waiting[reply.number], reply)
        else:
            self._calls.process_reply(reply)

    def _complete(self, waiting: _Waiting, reply: zmq_frames.Reply) -> None:
        """Set the reply of a pending call, unless the call continues to wait (see `Calls.ends_call`)."""
        if not waiting.answered.done() and self._calls.ends_call(waiting.outgoing, reply):
            waiting.answered.set_result(reply)

    def _schedule_maintain(self) -> None:
        """Schedule `_maintain` in the loop. The heartbeat thread calls this with every heartbeat."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no more calls can be made
            self._loop.call_soon_threadsafe(self._maintain)

    def _maintain(self) -> None:
        """Resend unanswered posted calls, and post the commands of `leftovers`."""
        if not self._closing and not self._calls.over:
            for outgoing in self._calls.due():
                self._send_once(outgoing)
            # While the service is unreachable, leftovers are not taken; a later heartbeat posts them.
            if not self._calls.unreachable:
                for command in self.leftovers():
                    self.post(command)

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
        if self._closing:
            return
        self._close_socket()  # `_send` opens another one
        for waiting in self._waiting.values():
            try:
                self._send(self._calls.prepare_resend(waiting.outgoing))
            except DataPlaneError as error:
                waiting.fail(error)
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
                self._free_resources()

        self._heartbeat.end_in_background(end)

    def _free_resources(self) -> None:
        """Free the socket, the thread and the context like `close`, after the loop was closed. No Bye is sent: the
        session expires at the service."""
        self._closing = True
        self._calls.end(ClientClosedError())
        if self._dealer is not None:  # not by `_close_socket`, which needs the loop
            self._dealer.close()
        self._end_thread_and_context()

    async def close(self) -> None:
        """Close the session as `ControllerChannel.close`."""
        if self._closing or self._pid != os.getpid():
            return
        self._closing = True
        unreachable = self._calls.unreachable  # read before `end`, after which it is always True
        self._calls.end(ClientClosedError())
        for waiting in self._waiting.values():
            waiting.fail(ClientClosedError())
        await self._none_pending.wait()  # until the failed calls have cleaned up
        try:
            if not unreachable:
                await self._send_bye()
        finally:
            self._close_socket()
            await self._loop.run_in_executor(None, self._end_thread_and_context)  # it blocks

    def _end_thread_and_context(self) -> None:
        """Stop the heartbeat thread, then free the ZMQ context, unless the thread still uses it. Blocks for up to
        `CLOSE_S`."""
        if self._heartbeat.close(CLOSE_S):
            self._context.term()

    async def _send_bye(self) -> None:
        """Report the end of the session to the service. Wait up to `CLOSE_S` for its confirmation; log a failure."""
        bye = self._calls.begin(c.Bye(), CLOSE_S)
        answered: asyncio.Future[zmq_frames.Reply] = self._loop.create_future()
        self._waiting[bye.number] = _Waiting(bye, answered)
        try:
            self._send(bye.frames)
        except ServiceUnavailableError as error:
            log.warning("Session close could not be sent: %s", error)
            return
        await asyncio.wait([answered], timeout=CLOSE_S)
        if not answered.done():
            log.warning("Service at %s did not confirm the session close; the session will expire there", self.address)


def _discard(opening: asyncio.Future[tuple[OpenedSession, Socket]], context: zmq.Context[Socket]) -> None:
    """Free the context of an opening that failed or whose caller was cancelled. If the session was opened, first close
    its socket, which the service detects."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()
    context.destroy(linger=0)
