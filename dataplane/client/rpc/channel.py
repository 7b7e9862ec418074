"""The command channel of a session, for threads."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
import traceback
from collections.abc import Callable

import zmq

from dataplane.client.rpc.call_socket import CLOSE_S, CallSocket, WaitingCall, say_bye
from dataplane.client.rpc.handshake import OpenedSession, open_session
from dataplane.client.rpc.heartbeat import HeartbeatThread
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCall
from dataplane.config import DataPlaneConfig
from dataplane.core.failpoints import armed, failpoint
from dataplane.core.zmq_io import Waker
from dataplane.errors import ClientClosedError, DataPlaneError, from_wire, to_wire
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for

log = logging.getLogger(__name__)


class _Waiting(WaitingCall):
    """A call whose thread waits: it polls for all threads, or sleeps until another one wakes it.

    It sets `waker` or `asleep` before it looks whether to wait; other threads change what it looks
    at before they call `wake`."""

    outcome: zmq_frames.Reply | DataPlaneError | None = None
    waker: Waker | None = None
    """Ends the poll of the thread, while it polls."""
    asleep: threading.Lock | None = None
    """Taken by the thread when it sleeps, released by the one that wakes it. None: not yet used."""

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def end(self, outcome: zmq_frames.Reply | DataPlaneError) -> None:
        if self.outcome is None:
            self.outcome = outcome
            if self.waker is not None or self.asleep is not None:
                self.wake()

    def wake(self) -> None:
        """End the sleep or the poll of the thread, now or the next time."""
        if self.asleep is not None:
            with contextlib.suppress(RuntimeError):  # it was released already
                self.asleep.release()
        waker = self.waker
        if waker is not None:
            waker.wake()


class ControllerChannel(OpenChannel):
    """An open session. Thread-safe: the threads share one socket. Requests of threads that send at the same moment
    share messages. One of the threads that wait for replies polls for all and wakes the others; when its own reply has
    arrived, another one polls. After a reconnection, pending calls are resent to the new endpoint under their ids.

    A forked child must open its own channel: in the child, every method of this object raises `ClientClosedError`,
    and `close` does nothing.

    After an interrupt in a thread that uses the channel, only `end` and `close` may be called (see `Session`).
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Create instances with `open`. dealer: the socket for heartbeats."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._socket: CallSocket[_Waiting] = CallSocket(context, self._calls)
        # Held by the thread that uses `_socket`, without blocking operations.
        self._use = threading.Lock()
        self._waker = Waker()
        # The call whose thread polls. `_guard` protects it.
        self._poller: _Waiting | None = None
        self._guard = threading.Lock()
        # For the thread that polls: watches `_waker`, and the socket's `_polled_fd` if it has one.
        self._poll = select.poll()
        self._polled_fd: int | None = None
        self._closing = False
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._maintain, moved=self._reconnect
        )

    @classmethod
    def open(cls, config: DataPlaneConfig, lock_path: str = "") -> ControllerChannel:
        """Connect to `config.address` and open a session. Block for at most `config.connect_timeout_s`. Raise as
        `open_session`. lock_path: see `open_session`."""
        context: zmq.Context[Socket] | None = None
        channel: ControllerChannel | None = None
        try:
            with enough_for(config.address or "", least=OF_A_CONTEXT):
                context = zmq.Context()
                session, dealer = open_session(config, context, lock_path)
                channel = cls(config, session, context, dealer)
                channel._heartbeat.start()
            return channel
        except BaseException as error:
            # An interrupt in a constructor may have left a socket that only its frame knows, and the context waits for.
            traceback.clear_frames(error.__traceback__)
            if channel is not None:
                channel.close()
            elif context is not None:
                context.destroy(linger=0)
            raise

    # --- calls

    def call(
        self,
        command: c.Command,
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, c.Result]:
        """Send a command, wait for its response and return its id and result.

        Resend the call under its id while no response arrives. Block for the command's own `timeout_s`
        (Allocate, FindCells, blocking Claim) plus `timeout_s` (default: config.call_timeout_s), then raise
        `CallTimeoutError`. Raise the error of the response; `ServiceUnavailableError` if the service is lost (for a
        durable service, after waiting `config.reconnect_s` for its restart); `ClientClosedError` if `close` is
        called in the meantime. On any failure, resources that the command may have acquired are released.
        """
        calls = self._calls
        if calls.ended is not None or calls.lost or self._pid != os.getpid():
            calls.check()
        if armed:
            failpoint(f"call.{type(command).__name__}.before")
        outgoing = calls.begin(command, timeout_s)
        try:
            reply = self._exchange(outgoing)
            if armed:
                failpoint(f"call.{type(command).__name__}.after")
            return outgoing.call_id, calls.settle(outgoing, reply)
        except Exception:
            self._abandon(outgoing)
            raise

    def _exchange(self, outgoing: OutgoingCall) -> zmq_frames.Reply:
        """Send the call and return its reply; resend it after silence and after a reconnection, until its deadline (see
        `prepare_resend`)."""
        waiting = _Waiting(outgoing)
        with waiting.active:
            self._socket.waiting[outgoing.call_id] = waiting
            try:
                # The call was added before: either it sees the session's end, or `end` sees it.
                if self._calls.ended is not None:
                    self._calls.check_open()
                self._send(outgoing.frames)
                while waiting.outcome is None:
                    self._wait(waiting)
                    if waiting.outcome is None:
                        self._calls.check()
                        if time.monotonic() >= outgoing.wake_at:
                            self._send(self._calls.prepare_resend(outgoing))
            finally:
                self._leave(waiting)
        if isinstance(waiting.outcome, DataPlaneError):
            raise from_wire(*to_wire(waiting.outcome))  # a new exception for each thread
        return waiting.outcome

    def _maintain(self) -> None:
        """Process responses to posted calls, resend the unanswered ones, post the commands of
        `leftovers`, and confirm the reads that have ended. The heartbeat thread calls this with
        every heartbeat."""
        self._use_socket()
        self._repeat_posted(self._calls.due())
        with contextlib.suppress(ClientClosedError):
            self._post_leftovers()
            self._confirm_reads()

    def _repeat_posted(self, due: list[OutgoingCall]) -> None:
        if not self._calls.over:
            for outgoing in due:
                self._send_once(outgoing)

    # --- the shared socket

    def _send(self, frames: list[bytes]) -> None:
        """Send a request, or leave it to another thread that is about to send. Replies to posted
        calls are read by the next call or by `_maintain`."""
        self._socket.outbox.append(frames)
        self._use_socket()

    def _use_socket(self) -> None:
        """Send the requests of all threads and process the replies that have arrived."""
        with self._use:
            try:
                self._socket.exchange()
            except BaseException:  # no socket could be opened, or an interrupt may have left half a message
                self._socket.close()
                self._resend_all()
                raise

    def _wait(self, waiting: _Waiting) -> None:
        """Wait until the call has ended or must be checked, and poll the socket unless another thread does."""
        with self._guard:
            if self._poller is None:
                self._poller = waiting
            elif self._poller is not waiting and waiting.asleep is None:
                waiting.asleep = threading.Lock()
                waiting.asleep.acquire()
        if self._poller is waiting:
            self._poll_socket(waiting)
        elif waiting.asleep is not None and waiting.outcome is None:
            waiting.asleep.acquire(timeout=max(0.0, waiting.outgoing.wake_at - time.monotonic()))

    def _poll_socket(self, waiting: _Waiting) -> None:
        """Wait until the call has ended or must be checked, in the thread that polls for all."""
        if self._polled_fd != self._socket.fd:
            self._poll = select.poll()
            self._poll.register(self._waker.fd, select.POLLIN)
            self._polled_fd = self._socket.fd
            if self._polled_fd >= 0:
                self._poll.register(self._polled_fd, select.POLLIN)
        waiting.waker = self._waker
        if waiting.outcome is None:
            left_s = max(0.0, waiting.outgoing.wake_at - time.monotonic())
            events = self._poll.poll(int(1000 * left_s) + 1)
            woken = (self._waker.fd, select.POLLIN) in events
            if woken and not self._closing:  # while it closes, all threads must wake up
                self._waker.clear()
        waiting.waker = None
        self._use_socket()

    def _leave(self, waiting: _Waiting) -> None:
        """Remove the call. If no thread polls for those that wait, wake one of them to poll."""
        self._socket.waiting.pop(waiting.outgoing.call_id, None)
        if self._poller is waiting:
            with self._guard:  # a thread that found this poller has set `asleep`
                self._poller = None
        if self._poller is None and self._socket.waiting:
            for other in self._waiting():
                if other.outcome is None:
                    other.wake()
                    break

    def _waiting(self) -> list[_Waiting]:
        return list(self._socket.waiting.values())  # a copy, because other threads add and remove calls

    def _resend_all(self) -> None:
        """Wake all threads that wait for replies. They check whether calls are possible, and resend theirs."""
        for waiting in self._waiting():
            waiting.outgoing.wake_at = 0.0
            waiting.wake()

    def _reconnect(self) -> None:
        """Resend pending and posted calls over a new socket to the session's endpoint, after the session moved, ended
        or was given up. The heartbeat thread calls this."""
        session = self._calls.session
        with self._use:
            self._socket.close()  # `exchange` opens another one
        self._resend_all()
        if not self._calls.unreachable:
            self.on_units(session.units)
            self._repeat_posted(self._calls.due(all_of_them=True))

    # --- closing

    def end_in_background(self, end: Callable[[], object]) -> None:
        """See `HeartbeatThread.end_in_background`."""
        self._heartbeat.end_in_background(end)

    def end(self, error: DataPlaneError) -> None:
        """Let all calls fail with this error, also those that wait. Free nothing, and do not block."""
        self._closing = True
        self._calls.end(error)
        self._waker.wake()
        self._resend_all()  # they raise

    def close(self) -> None:
        """Post the leftovers, end the session and free all resources. A pending call or the heartbeat
        thread that does not end keeps them. Block for a few seconds at most, even if the service does
        not respond. Idempotent. Does nothing in a forked child.

        Call it only when no copy into or out of shared memory is in progress, in one thread at a time
        that is not in a call.
        """
        if self._pid != os.getpid() or self._waker.fd < 0:
            return
        with contextlib.suppress(DataPlaneError):  # the session has ended and holds nothing
            self._post_leftovers()
        owes_bye = self._calls.owes_bye  # read before `end`, after which it is always False
        self.end(ClientClosedError())
        active = self._socket.wait_until_ended(CLOSE_S)
        if owes_bye:
            say_bye(self._context, self._calls)
        if active:
            log.error("Channel closed with %d pending calls that did not end within %.1f s", active, CLOSE_S)
        elif self._heartbeat.close(CLOSE_S):  # freeing sockets that a thread uses would be unsafe
            self._socket.close()
            self._waker.close()
            self._context.destroy()  # closes sockets that an interrupt left open, too
