"""The socket for the commands of one session, and the calls that wait for their replies on it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import zmq

from dataplane.client.rpc.handshake import Socket, dealer_socket
from dataplane.client.rpc.pending_calls import Calls, OutgoingCall
from dataplane.core import zmq_io
from dataplane.core.zmq_io import poll_ms
from dataplane.errors import DataPlaneError, ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.fd_limits import enough_for

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Timeout of each stage of closing."""


class WaitingCall(ABC):
    """A pending call whose caller waits for the reply. ended: it has a reply or an error, or its caller is gone."""

    def __init__(self, outgoing: OutgoingCall) -> None:
        self.outgoing = outgoing

    @property
    @abstractmethod
    def ended(self) -> bool: ...

    @abstractmethod
    def end(self, outcome: zmq_frames.Reply | DataPlaneError) -> None:
        """Pass the reply or the error to the caller. Does nothing if the call has ended."""


W = TypeVar("W", bound=WaitingCall)


class CallSocket(Generic[W]):
    """One socket for all calls of a session. Requests that are added between two calls of `exchange` share messages.
    One thread at a time may use it; only `add` and `waiting` are free for all.

    `waiting` are the pending calls by id; callers add and remove their own. `fd` is readable when replies have
    arrived, and -1 while there is no socket. It is edge-triggered: `exchange` reads all replies.
    """

    def __init__(self, context: zmq.Context[Socket], calls: Calls) -> None:
        self.waiting: dict[int, W] = {}
        self.fd = -1
        self._context = context
        self._calls = calls
        self._outbox: deque[list[bytes]] = deque()
        self._dealer: Socket | None = None

    def add(self, frames: list[bytes]) -> bool:
        """Add a request for the next `exchange`. Return whether it is the first. Thread-safe."""
        self._outbox.append(frames)
        return len(self._outbox) == 1

    def open(self) -> None:
        """Open a socket to the session's current endpoint, unless there is one. Raise `ServiceUnavailableError`, naming
        the remedy, if the process has no free file descriptors."""
        if self._dealer is None:
            session = self._calls.session
            with enough_for(session.endpoint):
                dealer = dealer_socket(self._context, session.endpoint, session.keys)
            self._dealer, self.fd = dealer, int(dealer.fileno())

    def exchange(self) -> None:
        """Send the added requests and process the replies that have arrived. Does not block. Raises as `open`. After
        an error or an interrupt, which can leave half a message, `close` the socket."""
        requests = []
        while self._outbox:
            requests.append(self._outbox.popleft())
        if requests:
            self.open()
        if self._dealer is not None:
            for message in zmq_frames.joined(requests):
                send(self._dealer, message)
            self._receive(self._dealer)  # also because sending may have consumed an edge of `fd`

    def _receive(self, dealer: Socket) -> None:
        while True:
            try:
                for replies in arrived_replies(dealer):
                    for reply in replies:
                        self._dispatch(reply)
                return
            except DataPlaneError as error:  # a malformed message, of an unknown call; more messages may follow
                for waiting in list(self.waiting.values()):
                    waiting.end(error)

    def _dispatch(self, reply: zmq_frames.Reply) -> None:
        """Pass a reply to its pending call; if there is none, only record it."""
        if reply.call_id == 0:
            # The controller could not parse a message: each pending call may have sent it.
            for waiting in list(self.waiting.values()):
                self._end(waiting, reply)
        elif (pending := self.waiting.get(reply.call_id)) is not None:
            self._end(pending, reply)
        else:
            self._calls.process_reply(reply)

    def _end(self, waiting: WaitingCall, reply: zmq_frames.Reply) -> None:
        """Pass the reply to a pending call, unless the call continues to wait (see `Calls.ends_call`)."""
        if not waiting.ended and self._calls.ends_call(waiting.outgoing, reply):
            waiting.end(reply)

    def close(self) -> None:
        """Close the socket. The next `open` opens another one. Added requests are dropped: their calls resend them."""
        self.fd = -1
        self._outbox.clear()
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            dealer.close()


def send(dealer: Socket, frames: list[bytes]) -> None:
    """Send without blocking. If the queue is full, the message is dropped and resent with the call."""
    try:
        zmq_io.send(dealer, frames, zmq_io.NOBLOCK)
    except zmq.Again:
        log.debug("Send queue to the controller is full")


def arrived_replies(dealer: Socket) -> Iterator[list[zmq_frames.Reply]]:
    """Yield the replies of each message that has arrived on the socket. Do not block. Raise a `DataPlaneError` for a
    malformed one."""
    for frames in zmq_io.arrived(dealer):
        yield zmq_frames.Reply.parse([frame.bytes for frame in frames])


def say_bye(context: zmq.Context[Socket], calls: Calls) -> None:
    """Report the end of the session to the service on a socket of its own. Block up to `CLOSE_S` for its confirmation;
    log a failure. The unanswered posted calls are sent again before it, on the same socket, so that the service
    executes them before the session ends."""
    session = calls.session
    requests = [outgoing.frames for outgoing in calls.due(all_of_them=True)]
    bye = calls.begin(c.Bye(), CLOSE_S)
    try:
        with enough_for(session.endpoint):
            dealer = dealer_socket(context, session.endpoint, session.keys)
    except ServiceUnavailableError as error:
        log.warning("Session close could not be sent: %s", error)
        return
    try:
        for message in zmq_frames.joined([*requests, bye.frames]):
            send(dealer, message)
        while (left_s := bye.deadline - time.monotonic()) > 0 and dealer.poll(poll_ms(left_s)):
            for replies in arrived_replies(dealer):
                if any(reply.call_id == bye.call_id for reply in replies):
                    return
    finally:
        dealer.close()
    log.warning("Service at %s did not confirm the session close; the session will expire there", session.address)
