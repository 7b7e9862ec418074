"""The command channel of a session, for threads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from dataplane.client.rpc.handshake import OpenedSession, Socket, dealer_socket, open_session
from dataplane.client.rpc.heartbeat import HeartbeatThread
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCall
from dataplane.client.rpc.socket_pool import SocketPool
from dataplane.config import DataPlaneConfig
from dataplane.core import zmq_io
from dataplane.core.failpoints import hit
from dataplane.errors import ClientClosedError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Timeout of each stage of closing."""


MOST_SOCKETS = 4096
"""Maximum number of sockets, and thus of concurrent calls, of one session."""


class ControllerChannel(OpenChannel):
    """An open session. Thread-safe: each call takes its own socket and polls it. After a reconnection, pending
    calls are resent to the new endpoint under their numbers.

    A forked child must open its own channel: in the child, every method of this object raises `ClientClosedError`,
    and `close` does nothing.
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Create instances with `open`."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._pool = SocketPool(context, session.endpoint, session.keys)
        self._replaced_pools: list[SocketPool] = []
        self._guard = threading.Lock()
        self._closing = False
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._maintain, moved=self._look_again
        )

    @classmethod
    def open(cls, config: DataPlaneConfig, lock_path: str = "") -> ControllerChannel:
        """Connect to `config.address` and open a session. Block for at most `config.connect_timeout_s`. Raise as
        `open_session`. lock_path: see `open_session`."""
        with enough_for(config.address or "", least=OF_A_CONTEXT):
            context: zmq.Context[Socket] = zmq.Context()
            context.max_sockets = MOST_SOCKETS
            try:
                session, dealer = open_session(config, context, lock_path)
                return cls(config, session, context, dealer)
            except BaseException:
                context.destroy(linger=0)
                raise

    # --- calls

    def call(
        self,
        command: c.Command,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        given: list[tuple[int, c.Command]] | None = None,
    ) -> tuple[int, c.Result]:
        """Send a command, wait for its response and return its number and result. `meanwhile` is called after the
        command was sent. The number and the command are appended to `given` before that, because an interrupt may
        occur after the response arrived.

        Resend the call under its number while no response arrives. Block for the command's own `timeout_s`
        (Allocate, FindCells, Shrink, blocking Claim) plus `timeout_s` (default: config.call_timeout_s), then raise
        `CallTimeoutError`. Raise the error of the response; `ServiceUnavailableError` if the service is lost (for a
        durable service, after waiting `config.reconnect_s` for its restart); `ClientClosedError` if `close` is
        called in the meantime. On any failure, resources that the command may have acquired are released.
        """
        name = type(command).__name__
        self._calls.check()
        hit(f"call.{name}.before")
        outgoing = self._calls.begin(command, timeout_s)
        try:
            if given is not None:
                given.append((outgoing.number, command))
            reply = self._exchange(outgoing, meanwhile)
            hit(f"call.{name}.after")
            return outgoing.number, self._calls.settle(outgoing, reply)
        except BaseException:
            self._abandon(outgoing)
            raise

    def _exchange(self, outgoing: OutgoingCall, meanwhile: Callable[[], None]) -> zmq_frames.Reply:
        """Send the call and return its reply; resend it after silence and after a reconnection."""
        sent = answered = False
        while True:
            with (using := threading.Lock()):
                pool, dealer = self._take(using)
                try:
                    send(dealer, outgoing.frames)
                    if not sent:
                        sent = True
                        meanwhile()
                    while not pool.shut:
                        reply = self._poll_reply(pool, dealer, outgoing)
                        if reply is not None:
                            answered = True
                            return reply
                        self._calls.check()
                        if time.monotonic() >= outgoing.wake_at:
                            send(dealer, self._calls.again(outgoing))
                finally:
                    pool.put_back(dealer, using, sound=answered)
            outgoing.frames = self._calls.again(outgoing)

    def _poll_reply(self, pool: SocketPool, dealer: Socket, outgoing: OutgoingCall) -> zmq_frames.Reply | None:
        """Return the call's reply, or None if none arrives before the call must be checked."""
        timeout_ms = max(0, int((outgoing.wake_at - time.monotonic()) * 1000) + 1)
        zmq.zmq_poll([(dealer, zmq.POLLIN), (pool.waker.fd, zmq.POLLIN)], timeout_ms)
        for reply in arrived(dealer):
            if reply.number not in (outgoing.number, 0):
                self._calls.heard(reply)
            elif self._calls.answers(outgoing, reply):
                return reply
        return None

    def _send_once(self, outgoing: OutgoingCall) -> None:
        with (using := threading.Lock()):
            try:
                pool, dealer = self._take(using)
            except ServiceUnavailableError as error:
                log.warning("%s will be sent later: %s", outgoing.method, error)
                return
            sent = False
            try:
                send(dealer, outgoing.frames)
                sent = True
            finally:
                pool.put_back(dealer, using, sound=sent)

    def _maintain(self) -> None:
        """With every heartbeat, process responses to posted calls and resend the unanswered ones."""
        self._pool.serve_idle(self._take_in)
        self._repeat_posted(self._calls.due())
        with contextlib.suppress(ClientClosedError):
            for command in [] if self._calls.pointless else self.leftovers():
                self.post(command)

    def _take_in(self, dealer: Socket) -> None:
        for reply in arrived(dealer):
            self._calls.heard(reply)

    def _repeat_posted(self, due: list[OutgoingCall]) -> None:
        with contextlib.suppress(ClientClosedError):
            for outgoing in [] if self._calls.over else due:
                self._send_once(outgoing)

    # --- sockets

    def _take(self, using: threading.Lock) -> tuple[SocketPool, Socket]:
        """Return a socket of the current pool, and the pool to return it to."""
        while True:
            pool = self._pool
            dealer = pool.take(using)
            if dealer is not None:
                return pool, dealer
            if self._closing:
                raise ClientClosedError()

    def _look_again(self) -> None:
        """Replace the socket pool after the session moved, ended or was given up; pending calls switch to the new
        pool."""
        session = self._calls.session
        with self._guard:
            if self._closing:
                return
            left, self._pool = self._pool, SocketPool(self._context, session.endpoint, session.keys)
            left.close()
            self._replaced_pools = [pool for pool in [*self._replaced_pools, left] if pool.wait(0.0)]
        if not self._calls.pointless:
            self.learned(session.units)
            self._repeat_posted(self._calls.due(all_of_them=True))

    # --- closing

    def end_in_background(self, end: Callable[[], None]) -> None:
        """See `HeartbeatThread.end_in_background`."""
        self._heartbeat.end_in_background(end)

    def close(self) -> None:
        """Close the session and free all resources. Block for a few seconds at most, even if the service does not
        respond. Pending calls in other threads raise `ClientClosedError`. Idempotent; does nothing in a forked
        child.

        Call it only when no copy into or out of shared memory is in progress.
        """
        if self._pid != os.getpid():
            return
        with self._guard:
            if self._closing:
                return
            self._closing = True
        silent = self._calls.pointless
        self._calls.end(ClientClosedError())
        self._pool.close()
        end = time.monotonic() + CLOSE_S
        in_flight = sum(pool.wait(max(0.0, end - time.monotonic())) for pool in [self._pool, *self._replaced_pools])
        if not silent:
            self._say_bye()
        ended = self._heartbeat.close(CLOSE_S)
        if in_flight:
            log.error("Channel closed with %d pending calls that did not end within %.1f s", in_flight, CLOSE_S)
        elif ended:
            self._context.destroy()  # closes sockets that an interrupt left open, too

    def _say_bye(self) -> None:
        try:
            with enough_for(self.endpoint):
                dealer = dealer_socket(self._context, self.endpoint, self._calls.session.keys)
        except ServiceUnavailableError as error:
            log.warning("Session close could not be sent: %s", error)
            return
        bye = self._calls.begin(c.Bye(), CLOSE_S)
        try:
            send(dealer, bye.frames)
            while (left_s := bye.deadline - time.monotonic()) > 0:
                if not dealer.poll(int(left_s * 1000) + 1):
                    break
                if any(reply.number == bye.number for reply in arrived(dealer)):
                    return
        finally:
            dealer.close()
        log.warning("Service at %s did not confirm the session close; the session will expire there", self.address)


def send(dealer: Socket, frames: list[bytes]) -> None:
    """Send without blocking. If the queue is full, the message is dropped and resent with the call."""
    try:
        zmq_io.send(dealer, frames, zmq_io.NOBLOCK)
    except zmq.Again:
        log.debug("Send queue to the controller is full")


def arrived(dealer: Socket) -> Iterator[zmq_frames.Reply]:
    """Yield the replies that have arrived."""
    while True:
        try:
            frames = zmq_io.receive(dealer, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield zmq_frames.Reply.parse([frame.bytes for frame in frames])
