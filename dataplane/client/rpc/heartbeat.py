"""Keeps a session alive: heartbeats, a watch over whether the service still is there, and finding it again."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import recv_monitor_message

from dataplane.client.rpc.handshake import Socket, go_on, is_slow
from dataplane.client.rpc.pending_calls import Calls
from dataplane.config import DataPlaneConfig
from dataplane.core.backoff import Backoff
from dataplane.core.failpoints import hit
from dataplane.core.wakeup import Waker
from dataplane.core.zmq_io import readable
from dataplane.errors import AuthenticationError, DataPlaneError, InternalError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.fd_limits import enough_for, none_left
from dataplane.protocol.pb import control_pb2 as pb

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Pauses before the service is looked for again: each twice the last, up to this or a heartbeat, with jitter."""


class HeartbeatThread:
    """A thread per session that sends a heartbeat every `session.heartbeat_s` and calls `maintain` with each.

    When heartbeats stay unanswered, are answered by another epoch of the service, the connection to one that keeps its
    state breaks, or `calls` has a doubt, it looks for the session at its address, resolved anew, and tells `calls` what
    it found: the session, where it is now; that the service is lost, meanwhile; or that the session is over. Then, and
    when calls need not wait for the service any longer, it calls `moved`: whoever waits must look again.

    It owns `dealer`, whose connection stands for this process: when it breaks, the service looks at once whether the
    process is gone.
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
        self._beat = zmq_frames.request(c.Heartbeat(session=calls.session.number))
        self._maintain = maintain
        self._moved = moved
        self._waker = Waker()
        self._pid = os.getpid()
        self._closing = False
        self._end_it: Callable[[], None] | None = None
        self._doubted = False
        self._missed = False
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._told = False
        self._heard = time.monotonic()
        self._look_at = self._heard + calls.session.heartbeat_s
        self._thread = threading.Thread(target=self._run, name="tq-heartbeat", daemon=True)
        calls.doubt = self.check
        self._thread.start()

    def check(self) -> None:
        """Find out now whether session and service are there. Any thread; does not block."""
        self._doubted = True
        self._waker.wake()

    def have_ended(self, end: Callable[[], None]) -> None:
        """Nobody refers to the client any more: have `end` called by a thread of its own. Takes no lock, as a finalizer
        may come at any moment of any thread; does nothing in a forked child."""
        if self._pid == os.getpid():
            self._end_it = end
            self._waker.wake()

    def close(self, timeout_s: float) -> bool:
        """End the thread and close its socket; whether that was done in time. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("looking for the service at %s takes long to stop", self._config.address)
            return False
        self._waker.close()
        return True

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # Without its heartbeats the session ends soon: say so to whoever calls.
            log.critical("what keeps session %d alive failed", self._calls.session.number, exc_info=True)
            self._end(InternalError(what=f"what keeps the session alive failed: {error!r}"))
        finally:
            self._let_go()

    def _turn(self) -> None:
        timeout_ms = max(0, int((self._look_at - time.monotonic()) * 1000) + 1)
        sources = (self._dealer, self._monitor, self._waker.fd)
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], timeout_ms)
        self._waker.clear()
        end, self._end_it = self._end_it, None
        if end is not None:
            threading.Thread(target=end, name="tq-close", daemon=True).start()
        self._listen()
        self._notice_disconnects()
        if not self._closing and (self._doubted or time.monotonic() >= self._look_at):
            self._look()

    def _let_go(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)

    def _notice_disconnects(self) -> None:
        while readable(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            # What refuses the ticket is another instance: a connection to it is not tried again.
            if self._calls.session.durable or event != zmq.EVENT_DISCONNECTED:
                self._doubted = True

    def _look(self) -> None:
        """One beat. Whatever goes wrong in it, the next one comes."""
        beat_s = self._calls.session.heartbeat_s
        self._look_at = time.monotonic() + beat_s
        try:
            self._send()
            if self._doubted or self._missed or time.monotonic() - self._heard >= 2 * beat_s:
                self._doubted = False
                self._find()
            self._maintain()
        except Exception:
            log.exception("a heartbeat of session %d failed", self._calls.session.number)

    def _send(self) -> None:
        try:
            self._dealer.send_multipart(self._beat, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("heartbeats of session %d pile up", self._calls.session.number)

    def _listen(self) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(zmq_frames.Reply.parse(frames))
            except DataPlaneError as error:
                self._end(error)
            except DecodeError:
                log.error("an answer to a heartbeat of session %d makes no sense", self._calls.session.number)
                self._doubted = True

    def _hear(self, reply: zmq_frames.Reply) -> None:
        self._here()
        self._calls.heard(reply)
        if isinstance(reply.error, AuthenticationError):
            raise reply.error
        if pb.HeartbeatReply.FromString(reply.good_body()).epoch != self._calls.session.epoch:
            self._doubted = True

    def _here(self) -> None:
        """The service is there."""
        self._heard = time.monotonic()
        self._missed = False
        self._backoff.reset()
        self._told = False

    # --- finding it again

    def _find(self) -> None:
        if self._calls.over:
            return
        before = self._calls.session
        try:
            with enough_for(self._config.address or ""):
                session, dealer = go_on(self._config, self._context, before, lambda: self._closing)
                monitor = _monitor(dealer)
        except ServiceUnavailableError as error:
            self._miss(str(error.why), lost=before.durable or not self._may_be_slow(error))
        except DataPlaneError as error:
            self._end(error)
        else:
            self._let_go()
            self._dealer, self._monitor = dealer, monitor
            self._here()
            if session.epoch != before.epoch:
                log.info("session %d goes on in epoch %d of the service", session.number, session.epoch)
            hit("session.found")
            self._calls.adopt(session)
            self._moved()

    def _may_be_slow(self, error: ServiceUnavailableError) -> bool:
        """A service without a state that is busy, or stopped, for less than a call may take, or that this process has
        no descriptor to look for: calls go on waiting, as to give them up would give up all they hold."""
        return (
            is_slow(error) or none_left(error.__cause__)
        ) and time.monotonic() - self._heard < self._config.call_timeout_s

    def _miss(self, why: str, *, lost: bool) -> None:
        """It is not there now, or at least does not answer."""
        if lost:
            self._calls.lose(why)
        self._missed = True
        self._doubted = False
        self._look_at = time.monotonic() + self._backoff.take(self._calls.session.heartbeat_s)
        if lost and not self._calls.waiting and not self._told:
            self._told = True
            self._moved()

    def _end(self, error: DataPlaneError) -> None:
        self._calls.end(error)
        self._moved()


def _monitor(dealer: Socket) -> Socket:
    """What happens to its connection. The socket is closed where nobody can be told."""
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    try:
        return dealer.get_monitor_socket(events, f"inproc://tq-{secrets.token_hex(8)}")
    except BaseException:
        dealer.close()
        raise
