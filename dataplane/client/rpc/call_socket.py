"""The socket for the commands of one session, and the calls that wait for their replies on it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

import zmq

from dataplane.client.rpc.pending_calls import Calls, OutgoingCall
from dataplane.core import zmq_io
from dataplane.core.in_flight import wait_for_end
from dataplane.core.zmq_io import poll_ms
from dataplane.errors import DataPlaneError, InternalError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import Socket, dealer_socket
from dataplane.protocol.fd_limits import enough_for

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Timeout of each stage of closing."""


class WaitingCall(ABC):
    """A pending call whose caller waits for the reply. `active` is held while the call runs."""

    def __init__(self, outgoing: OutgoingCall) -> None:
        self.outgoing = outgoing
        self.active = threading.Lock()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the call has a reply or an error, or its caller is gone."""

    @abstractmethod
    def end(self, outcome: zmq_frames.Reply | DataPlaneError) -> None:
        """Pass the reply or the error to the caller. Does nothing if the call has ended."""


W = TypeVar("W", bound=WaitingCall)


class CallSocket(Generic[W]):
    """One socket for all calls of a session. Requests that are added to `outbox` between two calls
    of `exchange` share messages. One thread at a time may use it; only `outbox` and `waiting` are
    free for all."""

    def __init__(self, context: zmq.Context[Socket], calls: Calls) -> None:
        self.waiting: dict[int, W] = {}
        """The pending calls by id. Callers add and remove their own."""
        self.outbox: deque[list[bytes]] = deque()
        """The requests for the next `exchange`."""
        self.fd = -1
        """Readable when replies have arrived; -1 while there is no socket. It is edge-triggered:
        `exchange` reads all replies."""
        self._context = context
        self._calls = calls
        self._dealer: Socket | None = None

    def open(self) -> Socket:
        """Return the socket; if there is none, open one to the session's current endpoint. Raise
        `ServiceUnavailableError`, naming the remedy, if the process has no free file
        descriptors."""
        dealer = self._dealer
        if dealer is None:
            session = self._calls.session
            with enough_for(session.endpoint):
                dealer = dealer_socket(self._context, session.endpoint, session.token)
            self._dealer = dealer
            self.fd = int(dealer.fileno())
        return dealer

    def exchange(self) -> None:
        """Send the requests of `outbox` and process the replies that have arrived. Do not block.
        Raise as `open`. After an error or an interrupt, which can leave half a message, `close`
        the socket."""
        outbox = self.outbox
        if outbox:
            dealer = self.open()
            requests = [outbox.popleft()]
            while outbox:
                requests.append(outbox.popleft())
            for message in requests if len(requests) == 1 else zmq_frames.joined(requests):
                send(dealer, message)
        if self._dealer is not None:
            # Also because sending may have consumed an edge of `fd`.
            while int(self._dealer.get(zmq_io.EVENTS)) & zmq_io.POLLIN:
                self._receive(self._dealer)

    def _receive(self, dealer: Socket) -> None:
        """Receive a reply that has arrived, and pass it to its call."""
        try:
            reply = zmq_frames.decode_reply(dealer.recv(zmq_io.NOBLOCK))
        except InternalError as error:  # malformed, of an unknown call
            for waiting in list(self.waiting.values()):
                waiting.end(error)
            return
        pending = self.waiting.get(reply.call_id)
        if pending is None:
            self._process(reply)
        elif reply.outcome == zmq_frames.OK:
            pending.end(reply)
        else:
            self._end(pending, reply)

    def _process(self, reply: zmq_frames.Reply) -> None:
        """Process a reply that no pending call waits for."""
        if reply.call_id:
            self._calls.process_reply(reply)
            return
        # The controller could not parse a message: each pending call may have sent it.
        for waiting in list(self.waiting.values()):
            self._end(waiting, reply)

    def _end(self, waiting: WaitingCall, refusal: zmq_frames.Reply) -> None:
        """Pass an error to a pending call, unless it continues to wait (see `Calls.ends_call`)."""
        if not waiting.ended and self._calls.ends_call(waiting.outgoing, refusal):
            waiting.end(refusal)

    def wait_until_ended(self, timeout_s: float) -> int:
        """Wait until all pending calls have ended, for at most `timeout_s`. Return the number of
        those still active. Call it in any thread, after `Calls.end`: later calls fail."""
        end = time.monotonic() + timeout_s
        return sum(not wait_for_end(waiting.active, end) for waiting in list(self.waiting.values()))

    def close(self) -> None:
        """Close the socket. The next `open` opens another one. Added requests are dropped: their calls resend them."""
        self.fd = -1
        self.outbox.clear()
        dealer = self._dealer
        self._dealer = None
        if dealer is not None:
            dealer.close()


def send(dealer: Socket, frames: list[bytes]) -> None:
    """Send without blocking. If the queue is full, the message is dropped and resent with the call."""
    try:
        zmq_io.send(dealer, frames, zmq_io.NOBLOCK)
    except zmq.Again:
        log.debug("Send queue to the controller is full")


def say_bye(context: zmq.Context[Socket], calls: Calls) -> None:
    """Report the end of the session to the service on a socket of its own. Block up to `CLOSE_S` for its confirmation;
    log a failure. The unanswered posted calls are sent again before it, on the same socket, so that the service
    executes them before the session ends."""
    session = calls.session
    requests = [outgoing.frames for outgoing in calls.due(all_of_them=True)]
    bye = calls.begin(c.Bye(), CLOSE_S)
    try:
        with enough_for(session.endpoint):
            dealer = dealer_socket(context, session.endpoint, session.token)
    except ServiceUnavailableError as error:
        log.warning("Session close could not be sent: %s", error)
        return
    try:
        for message in zmq_frames.joined([*requests, bye.frames]):
            send(dealer, message)
        while (left_s := bye.deadline - time.monotonic()) > 0 and dealer.poll(poll_ms(left_s)):
            while int(dealer.get(zmq_io.EVENTS)) & zmq_io.POLLIN:
                if zmq_frames.decode_reply(dealer.recv(zmq_io.NOBLOCK)).call_id == bye.call_id:
                    return
    finally:
        dealer.close()
    log.warning("Service at %s did not confirm the session close; the session will expire there", session.address)
