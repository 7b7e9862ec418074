"""Keeps a session alive: heartbeats, detection of a lost service, and reconnection."""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.client.rpc.handshake import is_slow, resume_session
from dataplane.client.rpc.pending_calls import Calls
from dataplane.config import DataPlaneConfig
from dataplane.core.durations import Backoff
from dataplane.core.failpoints import failpoint
from dataplane.core.zmq_io import Waker, readable
from dataplane.errors import AuthenticationError, DataPlaneError, InternalError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket
from dataplane.protocol.fd_limits import enough_for, none_left

log = logging.getLogger(__name__)

CONFIRM_S = 0.05
"""Interval of the checks whether a call has confirmed the last read."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Backoff of reconnection attempts: doubled each time, up to this value or a heartbeat, with jitter."""


class HeartbeatThread:
    """One thread per session. Every `session.heartbeat_s` it sends a heartbeat and calls `maintain`. A service with
    many sessions asks for a longer time between heartbeats (`_min_heartbeat_s`); `maintain` is called as often.

    It reconnects when heartbeats remain unanswered, another epoch of the service responds, the connection to a
    durable service breaks, or `calls` requests a check (`on_doubt`). It resolves the address again, requests the
    session and reports the outcome to `calls`: the session and its current endpoint, a lost service, or the end of the
    session.

    After a read that no call confirms within `CONFIRM_S`, a heartbeat comes early, and `maintain`
    confirms the read.

    It calls `moved` when the session was found or has ended, and when calls no longer wait for a lost service:
    waiting callers must check again.

    The thread, which `start` starts, owns `dealer`. Its connection represents this process: when it breaks, the service
    checks immediately whether the process has ended. `_running` is held while the thread uses its sockets.
    """

    def __init__(
        self,
        calls: Calls,
        config: DataPlaneConfig,
        context: zmq.Context[Socket],
        dealer: Socket,
        *,
        maintain: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._config = config
        self._context = context
        self._dealer, self._monitor = dealer, _monitor(dealer)
        self._beat = zmq_frames.request(c.Heartbeat(session=calls.session.session_id))
        self._maintain = maintain
        self._moved = moved
        self._waker = Waker()
        self._pid = os.getpid()
        self._closing = False
        self._end_callback: Callable[[], object] | None = None  # set by `end_in_background`
        self._check_requested = False  # reconnect with the next heartbeat, which is sent at once
        self._missed = False  # the last reconnection attempt failed and no response has arrived since
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._reported_loss = False  # `moved` was called for the current loss of the service
        self._last_response = time.monotonic()
        self._min_heartbeat_s = 0.0  # the shortest time between two heartbeats, from the service
        self._beat_at = self._last_response  # the time of the last heartbeat
        self._next_beat_at = self._last_response + calls.session.heartbeat_s
        self._confirm_at = math.inf
        """When it checks next whether a call has confirmed the last read; inf: after the next
        read."""
        self._seen_read: int | None = None  # the unconfirmed read of the last check
        self._thread = threading.Thread(target=self._run, name="tq-heartbeat", daemon=True)
        self._running = threading.RLock()
        calls.on_doubt = self.check
        calls.on_ended_read = self._confirm_soon

    def start(self) -> None:
        """Start the thread. After any error, an interrupt included, call `close`."""
        self._thread.start()

    def check(self) -> None:
        """Check the session and the service now. May be called from any thread; does not block."""
        self._check_requested = True
        self._waker.wake()

    def _confirm_soon(self) -> None:
        """Have the reads confirmed that have ended. Any thread may call this; it does not block."""
        if self._confirm_at == math.inf:
            self._confirm_at = 0.0  # at once
            self._waker.wake()

    def end_in_background(self, end: Callable[[], object]) -> None:
        """Run `end` in a new thread after the last reference to the client was dropped. Take no lock, because a
        finalizer may run at any point of any thread. Do nothing in a forked child."""
        if self._pid == os.getpid():
            self._end_callback = end
            self._waker.wake()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread, whether or not it has started, and close its sockets. Return whether that finished in time.
        Idempotent; it can be repeated after an interrupt."""
        self._closing = True
        self._waker.wake()
        if not self._running.acquire(timeout=timeout_s):
            log.warning("Heartbeat thread for the service at %s did not stop in time", self._config.address)
            return False
        try:
            self._close_sockets()  # of a thread that has not run; it ends at once if it starts now
        finally:
            self._running.release()
        if self._thread.is_alive():
            self._thread.join()
        self._waker.close()
        return True

    def _run(self) -> None:
        """Run the thread until `close`, or until an unexpected error."""
        with self._running:
            try:
                while not self._closing:
                    self._run_once()
            except Exception as error:
                # Without heartbeats the session expires soon: fail all calls with this error.
                log.critical("Heartbeat thread of session %d failed", self._calls.session.session_id, exc_info=True)
                self._end(InternalError(what=f"the heartbeat thread of the session failed: {error!r}"))
            finally:
                self._close_sockets()

    def _run_once(self) -> None:
        """Wait for the next event or heartbeat and handle it."""
        wake_at = min(self._next_beat_at, self._confirm_at)
        timeout_ms = max(0, int((wake_at - time.monotonic()) * 1000) + 1)
        sources = (self._dealer, self._monitor, self._waker.fd)
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], timeout_ms)
        self._waker.clear()  # before the flags are read: a later `wake` ends the next poll
        end, self._end_callback = self._end_callback, None
        if end is not None:  # requested by `end_in_background`
            threading.Thread(target=end, name="tq-close", daemon=True).start()
        self._receive_replies()
        self._notice_disconnects()
        now = time.monotonic()
        is_due = self._check_requested or now >= self._next_beat_at
        if now >= self._confirm_at:
            is_due |= self._read_is_left()
        if is_due and not self._closing:
            self._send_heartbeat()

    def _read_is_left(self) -> bool:
        """Whether no call has confirmed a read since the last check. End the checks until the next
        read if so, or if nothing was read since."""
        self._confirm_at = time.monotonic() + CONFIRM_S
        seen = self._seen_read
        self._seen_read = self._calls.ended_read
        if self._seen_read != seen:
            return False
        next_at = self._confirm_at
        self._confirm_at = math.inf
        if seen is None and self._calls.ended_read is not None:  # it ended before this line
            self._confirm_at = next_at
        return seen is not None

    def _close_sockets(self) -> None:
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=0)

    def _notice_disconnects(self) -> None:
        """Read the events of the socket's monitor, and request a check if the connection to a durable service broke or
        a server rejected the socket's keys."""
        while readable(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            # A server that rejects the ticket is another instance; ZMQ does not reconnect to it.
            if self._calls.session.durable or event != zmq.EVENT_DISCONNECTED:
                self._check_requested = True

    def _send_heartbeat(self) -> None:
        """Send a heartbeat if it is due, reconnect if needed, and call `maintain`. Log errors; the thread continues."""
        now = time.monotonic()
        beat_s = self._calls.session.heartbeat_s
        self._next_beat_at = now + beat_s  # `_miss` may set another time
        try:
            doubtful = self._check_requested or self._missed
            if doubtful or now >= self._beat_at + self._min_heartbeat_s:
                self._send_beat()
            # Also after two heartbeats without a response.
            if doubtful or time.monotonic() - self._last_response >= 2 * (beat_s + self._min_heartbeat_s):
                self._check_requested = False
                self._reconnect()
            self._maintain()
        except Exception:
            log.exception("Heartbeat of session %d failed", self._calls.session.session_id)

    def _send_beat(self) -> None:
        if self._calls.over:  # the thread only waits for `close` and `end_in_background`
            return
        self._beat_at = time.monotonic()
        try:
            self._dealer.send_multipart(self._beat, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("Heartbeat of session %d dropped: the send queue is full", self._calls.session.session_id)

    def _receive_replies(self) -> None:
        """Handle the replies to heartbeats that have arrived. An error in a reply, and malformed frames, end the
        session; a malformed body only requests a check."""
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                for reply in zmq_frames.Reply.parse(frames):
                    self._handle_reply(reply)
            except DataPlaneError as error:
                self._end(error)

    def _handle_reply(self, reply: zmq_frames.Reply) -> None:
        """Record a response, and request a check if another epoch of the service sent it. Raise the errors that end
        the session."""
        self._record_response()
        self._calls.process_reply(reply)
        if isinstance(reply.error, AuthenticationError):
            raise reply.error
        body = reply.good_body()
        try:
            message = messages.decode_with(zmq_frames.HEARTBEAT_REPLY, body)
        except InternalError:
            log.error("Malformed heartbeat response for session %d", self._calls.session.session_id)
            self._check_requested = True
            return
        self._min_heartbeat_s = message.min_heartbeat_s
        if message.epoch != self._calls.session.epoch:
            self._check_requested = True

    def _record_response(self) -> None:
        """Record that the service responded."""
        self._last_response = time.monotonic()
        self._missed = False
        self._backoff.reset()
        self._reported_loss = False

    # --- reconnection

    def _reconnect(self) -> None:
        """Reconnect to the session at its resolved address and report the outcome to `calls`."""
        if self._calls.over:
            return
        before = self._calls.session
        try:
            with enough_for(self._config.address or ""):
                session, dealer = resume_session(self._config, self._context, before, lambda: self._closing)
                monitor = _monitor(dealer)
        except ServiceUnavailableError as error:
            # Calls of a durable service may wait for its restart. Without a state directory, a loss fails the calls.
            self._miss(str(error.why), lost=before.durable or not self._may_be_slow(error))
        except DataPlaneError as error:
            self._end(error)
        else:
            self._close_sockets()
            self._dealer = dealer
            self._monitor = monitor
            self._record_response()
            if session.epoch != before.epoch:
                log.info("Session %d resumed in epoch %d of the service", session.session_id, session.epoch)
            failpoint("session.found")
            self._calls.resume(session)
            self._moved()

    def _may_be_slow(self, error: ServiceUnavailableError) -> bool:
        """Return whether calls should keep waiting for a service without a state directory: it may be busy or
        paused for less than the call timeout, or this process may have no file descriptor for the check. Giving up
        its calls would drop everything that they hold."""
        return (
            is_slow(error) or none_left(error.__cause__)
        ) and time.monotonic() - self._last_response < self._config.call_timeout_s

    def _miss(self, why: str, *, lost: bool) -> None:
        """Record that the service did not respond, and schedule the next attempt. lost: calls fail, or wait for the
        service's restart; otherwise they continue to wait for responses."""
        if lost:
            self._calls.record_loss(why)
        self._missed = True
        self._check_requested = False
        self._next_beat_at = time.monotonic() + self._backoff.take(self._calls.session.heartbeat_s)
        if lost and not self._calls.waiting and not self._reported_loss:
            self._reported_loss = True
            self._moved()  # callers that wait for responses now fail

    def _end(self, error: DataPlaneError) -> None:
        """End the session with this error and wake up the callers."""
        self._calls.end(error)
        self._moved()


def _monitor(dealer: Socket) -> Socket:
    """Return a socket that receives the disconnections and rejections of `dealer`. Close `dealer` if that fails."""
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    try:
        return dealer.get_monitor_socket(events, f"inproc://tq-{secrets.token_hex(8)}")
    except BaseException:
        dealer.close()
        raise
