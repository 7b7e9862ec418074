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

    `_pool` has the sockets to the current endpoint. `_replaced_pools` are shut pools of earlier endpoints that still
    have sockets in use. `_guard` protects both, and `_closing`, against concurrent changes.
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Create instances with `open`. dealer: the socket for heartbeats."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._pool = SocketPool(context, session.endpoint, session.keys)
        self._replaced_pools: list[SocketPool] = []
        self._guard = threading.Lock()
        self._closing = False
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._maintain, moved=self._replace_pool
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
        acquired: list[tuple[int, c.Command]] | None = None,
    ) -> tuple[int, c.Result]:
        """Send a command, wait for its response and return its number and result. `meanwhile` is called once, after
        the command was first sent. The number and the command are appended to `acquired` before the command is sent,
        because an interrupt may occur after the response arrived.

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
            if acquired is not None:
                acquired.append((outgoing.number, command))
            reply = self._exchange(outgoing, meanwhile)
            hit(f"call.{name}.after")
            return outgoing.number, self._calls.settle(outgoing, reply)
        except BaseException:
            self._abandon(outgoing)
            raise

    def _exchange(self, outgoing: OutgoingCall, meanwhile: Callable[[], None]) -> zmq_frames.Reply:
        """Send the call and return its reply; resend it after silence and after a reconnection, until its deadline (see
        `prepare_resend`)."""
        sent = answered = False
        while True:  # once per socket pool: a reconnection replaces the pool
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
                            send(dealer, self._calls.prepare_resend(outgoing))
                finally:
                    pool.put_back(dealer, using, sound=answered)
            # The pool is shut: continue with the next one, unless calls are impossible now.
            outgoing.frames = self._calls.prepare_resend(outgoing)

    def _poll_reply(self, pool: SocketPool, dealer: Socket, outgoing: OutgoingCall) -> zmq_frames.Reply | None:
        """Wait for the call's reply and return it. Return None if none arrives before the call must be checked, or
        when the pool is shut."""
        timeout_ms = max(0, int((outgoing.wake_at - time.monotonic()) * 1000) + 1)
        zmq.zmq_poll([(dealer, zmq.POLLIN), (pool.waker.fd, zmq.POLLIN)], timeout_ms)
        last = None
        for replies in arrived_replies(dealer):
            for reply in replies:
                if reply.number not in (outgoing.number, 0):  # 0: the service could not parse the message
                    self._calls.process_reply(reply)  # a late reply to an earlier call on this socket
                elif self._calls.ends_call(outgoing, reply):
                    last = reply
            if last is not None:
                break
        return last

    def _send_once(self, outgoing: OutgoingCall) -> None:
        """See `OpenChannel`. The reply is read later, by `_maintain` or by the next call on this socket."""
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
        """Process responses to posted calls, resend the unanswered ones, and post the commands of `leftovers`. The
        heartbeat thread calls this with every heartbeat."""
        self._pool.serve_idle(self._process_replies)
        self._repeat_posted(self._calls.due())
        with contextlib.suppress(ClientClosedError):
            # While the service is unreachable, leftovers are not taken; a later heartbeat posts them.
            if not self._calls.unreachable:
                for command in self.leftovers():
                    self.post(command)

    def _process_replies(self, dealer: Socket) -> None:
        for replies in arrived_replies(dealer):
            for reply in replies:
                self._calls.process_reply(reply)

    def _repeat_posted(self, due: list[OutgoingCall]) -> None:
        if not self._calls.over:
            with contextlib.suppress(ClientClosedError):
                for outgoing in due:
                    self._send_once(outgoing)

    # --- sockets

    def _take(self, using: threading.Lock) -> tuple[SocketPool, Socket]:
        """Return the current pool and a socket of it, which the caller puts back into this pool. using: lock that the
        caller holds in the meantime (see `SocketPool.take`). Raise `ClientClosedError` if the channel is closing."""
        while True:
            pool = self._pool
            dealer = pool.take(using)
            if dealer is not None:
                return pool, dealer
            # The pool is shut: either the channel is closing, or `_replace_pool` has set another one.
            if self._closing:
                raise ClientClosedError()

    def _replace_pool(self) -> None:
        """Replace the socket pool after the session moved, ended or was given up; pending calls switch to the new
        pool. Resend all posted calls. The heartbeat thread calls this."""
        session = self._calls.session
        with self._guard:
            if self._closing:
                return
            replaced, self._pool = self._pool, SocketPool(self._context, session.endpoint, session.keys)
            replaced.close()  # wakes up the pending calls; they find the new pool, which is set already
            # Keep the pools that still have sockets in use (`wait` counts them): `close` waits for these.
            self._replaced_pools = [pool for pool in [*self._replaced_pools, replaced] if pool.wait(0.0)]
        if not self._calls.unreachable:
            self.on_units(session.units)
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
        unreachable = self._calls.unreachable  # read before `end`, after which it is always True
        self._calls.end(ClientClosedError())
        self._pool.close()
        end = time.monotonic() + CLOSE_S
        in_flight = sum(pool.wait(max(0.0, end - time.monotonic())) for pool in [self._pool, *self._replaced_pools])
        if not unreachable:
            self._send_bye()
        thread_ended = self._heartbeat.close(CLOSE_S)
        if in_flight:
            log.error("Channel closed with %d pending calls that did not end within %.1f s", in_flight, CLOSE_S)
        elif thread_ended:  # destroying the context while another thread uses its sockets would be unsafe
            self._context.destroy()  # closes sockets that an interrupt left open, too

    def _send_bye(self) -> None:
        """Report the end of the session to the service. Wait up to `CLOSE_S` for its confirmation; log a failure."""
        try:
            with enough_for(self.endpoint):  # a socket of its own, because the pool is shut
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
                if any(reply.number == bye.number for replies in arrived_replies(dealer) for reply in replies):
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


def arrived_replies(dealer: Socket) -> Iterator[list[zmq_frames.Reply]]:
    """Yield the replies of each message that has arrived on the socket. Do not block. Raise a `DataPlaneError` for a
    malformed one."""
    while True:
        try:
            frames = zmq_io.receive(dealer, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield zmq_frames.Reply.parse([frame.bytes for frame in frames])
