"""A session's commands, for threads."""

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
from dataplane.client.rpc.pending_calls import OpenChannel, OutgoingCalls
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
"""How long each part of closing may take."""


MOST_SOCKETS = 4096
"""Of one session, which may have as many calls in flight."""


class ControllerChannel(OpenChannel):
    """An open session. Thread-safe: each call takes a socket of its own and polls it itself. When the session is found
    again elsewhere, calls under way are repeated there, under their numbers.

    A forked child must open its own: here every method raises `ClientClosedError` in it, and `close` does nothing.
    """

    def __init__(
        self, config: DataPlaneConfig, session: OpenedSession, context: zmq.Context[Socket], dealer: Socket
    ) -> None:
        """Use `open`."""
        super().__init__(session, config)
        self._context = context
        self._pid = os.getpid()
        self._pool = SocketPool(context, session.endpoint, session.keys)
        self._left: list[SocketPool] = []
        self._guard = threading.Lock()
        self._closing = False
        self._heartbeat = HeartbeatThread(
            self._calls, config, context, dealer, maintain=self._maintain, moved=self._look_again
        )

    @classmethod
    def open(cls, config: DataPlaneConfig, lock_path: str = "") -> ControllerChannel:
        """Connect to `config.address` and open a session. Blocks for `config.connect_timeout_s` at most. Raises as
        `open_session`. lock_path: see there."""
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
        """Send a command and wait for its answer: its number and result. `meanwhile` is run once it is sent. `given`
        gets the number and the command before that: an interrupt may come when the answer is there.

        Repeats the number after some silence. Blocks for the command's own `timeout_s` (Allocate, Claim, Shrink) plus
        `timeout_s` (default: config.call_timeout_s), then `CallTimeoutError`. Raises the error the service answered;
        `ServiceUnavailableError` when the service is gone (where it keeps its state: for `config.reconnect_s`; until
        then the call waits for its return), `ClientClosedError` when `close` is called meanwhile. However it fails,
        what the command may have taken is given back.
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

    def post(self, command: c.Command) -> None:
        """Send a command and do not wait for its answer; it is repeated until there is one, also beyond a time in which
        the service cannot be reached. Does not block."""
        name = type(command).__name__
        self._calls.check_open()
        hit(f"call.{name}.before")
        self._send_once(self._calls.begin_post(command))
        hit(f"call.{name}.after")

    def _exchange(self, outgoing: OutgoingCalls, meanwhile: Callable[[], None]) -> zmq_frames.Reply:
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
                        reply = self._await(pool, dealer, outgoing)
                        if reply is not None:
                            answered = True
                            return reply
                        self._calls.check()
                        if time.monotonic() >= outgoing.wake_at:
                            send(dealer, self._calls.again(outgoing))
                finally:
                    pool.put_back(dealer, using, sound=answered)
            outgoing.frames = self._calls.again(outgoing)

    def _await(self, pool: SocketPool, dealer: Socket, outgoing: OutgoingCalls) -> zmq_frames.Reply | None:
        """The call's answer, if it comes before the call must be looked at."""
        timeout_ms = max(0, int((outgoing.wake_at - time.monotonic()) * 1000) + 1)
        zmq.zmq_poll([(dealer, zmq.POLLIN), (pool.waker.fd, zmq.POLLIN)], timeout_ms)
        for reply in arrived(dealer):
            if reply.number not in (outgoing.number, 0):
                self._calls.heard(reply)
            elif self._calls.answers(outgoing, reply):
                return reply
        return None

    def _abandon(self, outgoing: OutgoingCalls) -> None:
        """Nobody waits for this call any more: give back what it may have taken."""
        undo = self._calls.abandon(outgoing.number)
        if undo is not None and not self._calls.over:
            self._send_once(undo)

    def _send_once(self, outgoing: OutgoingCalls) -> None:
        """What finds no socket, as this process may open no more files, is repeated like what got lost."""
        with (using := threading.Lock()):
            try:
                pool, dealer = self._take(using)
            except ServiceUnavailableError as error:
                log.warning("%s: sent later: %s", outgoing.method, error)
                return
            sent = False
            try:
                send(dealer, outgoing.frames)
                sent = True
            finally:
                pool.put_back(dealer, using, sound=sent)

    def _maintain(self) -> None:
        """With every heartbeat: take in answers to posted calls, and repeat what has none."""
        self._pool.serve_idle(self._take_in)
        self._repeat_posted(self._calls.due())
        with contextlib.suppress(ClientClosedError):
            for command in [] if self._calls.pointless else self.leftovers():
                self.post(command)

    def _take_in(self, dealer: Socket) -> None:
        for reply in arrived(dealer):
            self._calls.heard(reply)

    def _repeat_posted(self, due: list[OutgoingCalls]) -> None:
        with contextlib.suppress(ClientClosedError):
            for outgoing in [] if self._calls.over else due:
                self._send_once(outgoing)

    # --- sockets

    def _take(self, using: threading.Lock) -> tuple[SocketPool, Socket]:
        """A socket to the pool there is now, to be put back there."""
        while True:
            pool = self._pool
            dealer = pool.take(using)
            if dealer is not None:
                return pool, dealer
            if self._closing:
                raise ClientClosedError()

    def _look_again(self) -> None:
        """The session is elsewhere, or over, or not waited for any longer: calls under way leave the pool they wait
        at."""
        session = self._calls.session
        with self._guard:
            if self._closing:
                return
            left, self._pool = self._pool, SocketPool(self._context, session.endpoint, session.keys)
            left.close()
            self._left = [pool for pool in [*self._left, left] if pool.wait(0.0)]
        if not self._calls.pointless:
            self.learned(session.units)
            self._repeat_posted(self._calls.due(all_of_them=True))

    # --- the end

    def have_ended(self, end: Callable[[], None]) -> None:
        """See `HeartbeatThread.have_ended`."""
        self._heartbeat.have_ended(end)

    def close(self) -> None:
        """Say Bye and let go of everything. Blocks for some seconds at most, also when the service does not answer.
        Calls under way in other threads raise `ClientClosedError`. Idempotent; does nothing in a forked child.

        Call it when no copy into or out of shared memory is under way.
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
        in_flight = sum(pool.wait(max(0.0, end - time.monotonic())) for pool in [self._pool, *self._left])
        if not silent:
            self._say_bye()
        ended = self._heartbeat.close(CLOSE_S)
        if in_flight:
            log.error("closed with %d calls under way that did not end in %.1f s", in_flight, CLOSE_S)
        elif ended:
            self._context.destroy()  # with sockets that an interrupt left behind

    def _say_bye(self) -> None:
        try:
            with enough_for(self.endpoint):
                dealer = dealer_socket(self._context, self.endpoint, self._calls.session.keys)
        except ServiceUnavailableError as error:
            log.warning("goodbye is not said: %s", error)
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
        log.warning("the service at %s did not answer goodbye; it will find out by itself", self.address)


def send(dealer: Socket, frames: list[bytes]) -> None:
    """Never blocks: what finds the queue full is lost, and repeated with the call."""
    try:
        zmq_io.send(dealer, frames, zmq_io.NOBLOCK)
    except zmq.Again:
        log.debug("the queue to the controller is full")


def arrived(dealer: Socket) -> Iterator[zmq_frames.Reply]:
    """The replies that are there now."""
    while True:
        try:
            frames = zmq_io.receive(dealer, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield zmq_frames.Reply.parse([frame.bytes for frame in frames])
