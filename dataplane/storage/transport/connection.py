"""One socket from a client to a storage unit, for one call at a time. ZMQ's monitor reports a lost peer at once."""

from __future__ import annotations

import secrets
import time
import traceback
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import recv_monitor_message

from dataplane.core.failpoints import failpoint
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import AuthenticationError, ClientClosedError, from_wire
from dataplane.protocol.auth import Ticket
from dataplane.protocol.pb import bulk_pb2 as pb
from dataplane.protocol.zap import REFUSED, present
from dataplane.storage.transport.request_chunks import Bytes

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_OVERTAKING = ("written", "not_fetched", "error")
"""Outcomes of writes, which may arrive out of order: the unit stores a payload sent in frames at once, while it still
fetches an earlier one."""

SEND_MS = 10_000
"""Send timeout in ms. Few requests are in flight, so a send blocks only while the connection cannot be established."""


class WireLostError(Exception):
    """The peer is unreachable or closed the connection. Never leaves this package."""


class WireSilentError(Exception):
    """The peer did not reply in time. Never leaves this package."""


class Wire:
    """A client's socket to a storage unit. After a method raises, only `close` may be called.

    `_last_call`: the id of the last request. `_early_replies`: replies that arrived before the reply to an older
    call, by call. `_monitor`: receives the events `_LOST` of the connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        wake: int,
        ticket: Ticket | None = None,
        curve_key: str = "",
    ) -> None:
        """`wake`: a file descriptor that becomes and stays readable when waiting calls must end. `ticket`: the ticket
        for this epoch of the unit. `curve_key`: the unit's public key; "": no encryption."""
        self._endpoint = endpoint
        self._last_call = 0
        self._early_replies: dict[int, pb.BulkReply] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndtimeo = SEND_MS
        present(self._socket, ticket, curve_key)
        if endpoint.startswith("tcp://["):
            self._socket.set(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(_LOST, f"inproc://tq-lost-{secrets.token_hex(8)}")
        self._monitor.linger = 0
        self._wake = wake
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(endpoint)

    def request(self, *, session: int, epoch: int) -> pb.BulkRequest:
        """Return a header for the next call, without its verb."""
        self._last_call += 1
        return pb.BulkRequest(protocol_version=PROTOCOL_VERSION, session=session, epoch=epoch, call=self._last_call)

    def send(
        self, header: pb.BulkRequest, frames: Sequence[memoryview | bytes] = (), *, held: list[zmq.MessageTracker]
    ) -> None:
        """Queue a request. Frames other than short `bytes` are not copied: before ZMQ receives such a frame, its
        tracker is appended to `held`; the tracker reports when ZMQ releases the frame. Raises the errors of
        `_send_head`, and WireLostError if the unit accepts no request within SEND_MS."""
        # copy=None: ZMQ copies a short frame, which is cheaper than tracking it.
        unsent = deque(
            zmq.Frame(frame, track=True, copy=None if isinstance(frame, bytes) else False) for frame in frames
        )
        held.extend(frame.tracker for frame in unsent if frame.tracker is not None)
        try:
            self._send_head(header.SerializeToString(), zmq.SNDMORE if unsent else 0)
            while unsent:
                failpoint("bulk.write.between_frames")
                self._socket.send(unsent.popleft(), zmq.SNDMORE if unsent else 0, copy=False)
        except BaseException as error:
            if isinstance(error, zmq.Again):
                error = WireLostError("the unit accepts no requests; check its process and its host")
            # ZMQ releases an unsent frame when nothing refers to it, the stack frames of the traceback included.
            unsent.clear()
            traceback.clear_frames(error.__traceback__)
            raise error

    def _send_head(self, head: bytes, flags: int) -> None:
        """Send the first frame of a request. If the queue is full, raise the error of a rejected or lost connection at
        once, and zmq.Again after SEND_MS."""
        try:
            self._socket.send(head, flags | zmq.NOBLOCK)
        except zmq.Again:
            # A full queue may mean that no connection exists, for example because the unit has rejected it.
            if self._monitor.poll(0):
                self._raise_for_event()
            self._socket.send(head, flags)  # waits for up to SEND_MS

    def receive(self, call: int, deadline: float) -> pb.BulkReply:
        """Return the reply to `call`, which must be the oldest unanswered call. Its payload frame, if any, remains to
        be received. Replies to later writes may arrive first; they are kept until they are requested.

        Raises the error in the unit's reply, WireLostError, WireSilentError at `deadline` (of time.monotonic), and
        ClientClosedError when `wake` becomes readable.
        """
        while call not in self._early_replies:
            try:
                reply = pb.BulkReply.FromString(self._next_frame(deadline))
            except DecodeError as error:
                raise WireLostError(f"malformed reply ({error})") from error
            if not self._is_expected(reply, call):
                raise WireLostError(f"the unit replied to call {reply.call}, expected call {call}")
            self._early_replies[reply.call] = reply
        reply = self._early_replies.pop(call)
        if reply.WhichOneof("outcome") == "error":
            raise from_wire(reply.error.name, reply.error.facts)
        return reply

    def _is_expected(self, reply: pb.BulkReply, call: int) -> bool:
        """Whether `reply` answers `call`, or a later write whose reply may overtake it."""
        overtakes = call < reply.call <= self._last_call and reply.call not in self._early_replies
        return reply.call == call or (overtakes and reply.WhichOneof("outcome") in _OVERTAKING)

    def _next_frame(self, deadline: float) -> bytes:
        """Wait for the next frame and return it. Raises the errors of `receive`."""
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._wait(deadline)  # may return without a frame

    def _wait(self, deadline: float) -> None:
        """Block until a frame arrives or the deadline is reached; the first call after the deadline raises
        WireSilentError. Raises the other errors of `receive` as soon as their cause is noticed."""
        left_s = deadline - time.monotonic()
        ready: dict[Any, int] = {}
        if left_s > 0:
            ready = dict(self._poller.poll(int(left_s * 1000) + 1))  # ms, rounded up
        if self._socket in ready:  # first: a reply that arrived before an event counts
            return
        if self._wake in ready:
            raise ClientClosedError
        if self._monitor in ready:
            self._raise_for_event()
        if left_s <= 0:
            raise WireSilentError

    def _raise_for_event(self) -> None:
        """Raise the error for the monitor's event: AuthenticationError for a wrong token, otherwise WireLostError."""
        event = recv_monitor_message(self._monitor)
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise WireLostError("the unit cannot be reached; check its process and its host")
        if event["value"] == int(REFUSED):
            raise AuthenticationError(peer=f"the storage unit at {self._endpoint}", why="the token is wrong")
        raise WireLostError("the unit was restarted")  # the ticket is that of an earlier epoch

    def payload(self, nbytes: int) -> Bytes:
        """Return the payload frame of the reply just received, without a copy. Raises WireLostError unless it has
        `nbytes`."""
        failpoint("bulk.read.between_frames")
        if not self._more():
            raise WireLostError("the reply has no payload frame")
        frame = np.frombuffer(self._socket.recv(copy=False).buffer, np.uint8)
        further = self._more()
        if len(frame) != nbytes or further:
            more = " and further frames" if further else ""
            raise WireLostError(f"the reply has a payload of {len(frame):,} bytes{more}, expected {nbytes:,} bytes")
        return frame

    def _more(self) -> bool:
        """Whether the reply has further frames. (The attribute `rcvmore` costs three times as much.)"""
        return bool(self._socket.getsockopt(zmq.RCVMORE))

    @property
    def idle_and_sound(self) -> bool:
        """Whether, between calls, the connection is intact and no reply is outstanding. False after `close`."""
        return (
            not self._socket.closed
            and not self._early_replies
            and not dict(self._poller.poll(0)).keys() & {self._socket, self._monitor}  # no frame, no event
        )

    def close(self) -> None:
        """Drop queued messages and close the socket. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=0)
