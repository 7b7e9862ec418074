"""Keeps a session alive: heartbeats, and a watch over whether the service still is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from dataplane.control import wire
from dataplane.control.calls import Calls
from dataplane.control.opening import Socket, ask_epoch
from dataplane.control.waker import Waker
from dataplane.errors import AuthenticationError, DataPlaneError, ServiceRestartedError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.pb import control_pb2 as pb

log = logging.getLogger(__name__)

PROBE_S = 1.0
"""How long asking who is there may take."""


class Keeper:
    """A thread per session that sends a heartbeat every `session.heartbeat_s`, calls `maintain` with each, and tells
    `calls` when the service is lost, found again, or another one. It owns `dealer`, whose connection stands for this
    process: when it breaks, the service looks at once whether the process is gone."""

    def __init__(
        self,
        calls: Calls,
        context: zmq.Context[Socket],
        dealer: Socket,
        token: str | None,
        maintain: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._context = context
        self._token = token
        self._session = calls.session
        self._dealer = dealer
        self._beat = wire.request(c.Heartbeat(session=self._session.number), (token or "").encode())
        self._maintain = maintain
        self._waker = Waker()
        self._closing = False
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tq-heartbeat", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread and close its socket. Idempotent."""
        self._closing = True
        self._waker.wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._waker.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        beat_at = time.monotonic() + self._session.heartbeat_s
        try:
            while not self._closing:
                poller.poll(max(0, int((beat_at - time.monotonic()) * 1000) + 1))
                self._listen()
                if not self._closing and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._session.heartbeat_s
                    self._look()
        finally:
            self._dealer.close(linger=0)

    def _look(self) -> None:
        """One beat. Whatever goes wrong in it, the next one comes."""
        try:
            self._send()
            self._doubt()
            self._maintain()
        except Exception:
            log.exception("a heartbeat of session %d failed", self._session.number)

    def _send(self) -> None:
        try:
            self._dealer.send_multipart(self._beat, zmq.NOBLOCK)
        except zmq.Again:
            log.debug("heartbeats of session %d pile up", self._session.number)

    def _listen(self) -> None:
        while True:
            try:
                reply = wire.Reply.parse(self._dealer.recv_multipart(zmq.NOBLOCK))
                self._hear(reply)
            except zmq.Again:
                return
            except DataPlaneError as error:
                self._calls.end(error)

    def _hear(self, reply: wire.Reply) -> None:
        self._heard = time.monotonic()
        self._calls.heard(reply)
        if isinstance(reply.error, AuthenticationError):
            raise reply.error
        self._compare(pb.HeartbeatReply.FromString(reply.good_body()).epoch)

    def _doubt(self) -> None:
        """After a heartbeat without an answer, see who is at the service's address now."""
        session = self._session
        if time.monotonic() - self._heard < 2 * session.heartbeat_s:
            return
        try:
            self._compare(ask_epoch(session.address, session.number, self._token, self._context, PROBE_S))
        except ServiceUnavailableError as error:
            self._calls.lose(str(error.why))
        except DataPlaneError as error:
            self._calls.end(error)

    def _compare(self, epoch: int) -> None:
        if epoch != self._session.epoch:
            raise ServiceRestartedError(
                expected_epoch=self._session.epoch, got_epoch=epoch, what=f"the service at {self._session.address}"
            )
