"""The ZMQ server: a ROUTER that our own clients send their commands to, and that notices when they are cut off."""

from __future__ import annotations

import functools
import logging
import secrets
from collections import Counter
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from dataplane.controller.requests import Facts, Reply, heartbeat_reply, message_of, parse
from dataplane.core.addresses import resolve_host
from dataplane.core.limited_log import Complaints
from dataplane.core.ports import cannot_listen
from dataplane.core.zmq_io import NOBLOCK, bind_tcp, readable, receive, send
from dataplane.errors import DataPlaneError, InternalError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.protocol import zmq_frames
from dataplane.protocol.curve import ServerKeys
from dataplane.protocol.proof import Ticket
from dataplane.protocol.unauthenticated import Unauthenticated
from dataplane.protocol.zap import Admission

log = logging.getLogger(__name__)

BEFORE_DISCONNECTS = 256
"""The most requests that are handled in one look at the ends of connections, before those ends are."""
LOOKS = 8
"""The most looks in one call: connections may begin or end while the requests of a look are handled."""
BACKLOG = 4096
"""A client connects twice, and a thousand may come in one second."""
GOODBYE_MS = 500
"""How long closing waits for the last replies to leave."""


_STRANGER = "it does not begin with this protocol's handshake; an older client does so: install the same release there"


class Handler(Protocol):
    """Who applies inputs, in the thread that calls `ZmqServer.serve`."""

    def handle(self, item: c.Input, reply: Reply | None, *, caller: object) -> None: ...


class ZmqServer:
    """Binds at once, to `host`:`port` (0: any free one) and an ipc name. One thread serves: it polls `socket`
    and `monitor` and calls `serve` and `notice_disconnects`.

    The connection that a session's heartbeats come from stands for its client: when it ends before the session said
    Bye, the handler gets `SessionSilent`. With a `ticket` it talks to those only who show it, encrypted with `keys`.
    Raises `PortTakenError` if the port is in use.
    """

    def __init__(self, host: str, port: int, ticket: Ticket | None = None, keys: ServerKeys | None = None) -> None:
        self._facts: Facts | None = None
        self._refusals, self._failures = Complaints(), Complaints()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.BACKLOG, BACKLOG)
        self.socket.set(zmq.MAXMSGSIZE, zmq_frames.MAX_REQUEST_FRAME_BYTES)
        self._admission: Admission | None = None
        self._sessions: dict[int, int] = {}
        self._heard: set[int] = set()  # descriptors that heartbeats came from since the monitor was read
        self._is_stranger = False
        self._closed = False
        try:
            guarded = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if ticket else 0
            self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | guarded)
            if ticket is not None:
                self._admission = Admission(self._context, "the controller", keys)
                self._admission.admit(ticket)
                self._admission.guard(self.socket)
            self.port = self._bind_tcp(host, port)
            ipc = f"ipc://@tq-control-{secrets.token_hex(16)}"
            self.socket.bind(ipc)
        except BaseException:
            self.close()
            raise
        self.endpoints = (ipc, f"tcp://*:{self.port}")
        self._unauthenticated = Unauthenticated(
            self.endpoints, zmq_frames.MAX_REQUEST_FRAME_BYTES, curve=keys is not None
        )

    def _bind_tcp(self, host: str, port: int) -> int:
        try:
            return bind_tcp(self.socket, resolve_host(host), port)
        except zmq.ZMQError as error:
            raise cannot_listen(host, port, error.errno) from error

    def introduce(self, facts: Facts) -> None:
        """What the server tells of the service; before `serve`."""
        self._facts = facts

    def serve(self, handler: Handler) -> bool:
        """Handle one message, whenever `socket` is readable; whether there was one. Does not block."""
        try:
            frames = receive(self.socket, NOBLOCK)
        except zmq.Again:
            return False
        self._take(handler, *frames)
        return True

    def notice_disconnects(self, handler: Handler) -> None:
        """Handle which connections have ended, whenever `monitor` is readable, after what came through them before.
        Does not block."""
        events: list[tuple[int, int]] = []
        for _ in range(LOOKS):
            # What came through a connection was there before its end was told, and its beginning before that.
            told = self._told()
            if not told:
                break
            events += told
            for _ in range(BEFORE_DISCONNECTS):
                if not self.serve(handler):
                    break
        later = Counter(descriptor for event, descriptor in events if event == zmq.EVENT_ACCEPTED)
        for event, descriptor in events:
            match event:
                case zmq.EVENT_ACCEPTED:
                    later[descriptor] -= 1
                    if self._admission is not None:
                        self._unauthenticated.began(descriptor)
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._is_stranger = True  # the next connection that ends is its
                case zmq.EVENT_DISCONNECTED:
                    # The last heartbeat may have come from a later connection that has the same descriptor.
                    replaced = later[descriptor] > 0 and descriptor in self._heard
                    self._end_connection(handler, descriptor, replaced)
        self._heard.clear()

    def _told(self) -> list[tuple[int, int]]:
        """What the monitor says: events, each with its descriptor."""
        events = []
        while readable(self.monitor):
            told = recv_monitor_message(self.monitor)
            events.append((int(told["event"]), int(told["value"])))
        return events

    def _end_connection(self, handler: Handler, descriptor: int, replaced: bool) -> None:
        peer = self._unauthenticated.ended(descriptor)
        if self._admission is not None and self._is_stranger:
            self._is_stranger = False
            self._admission.complain(f"a peer at {peer or 'an unknown address'}", _STRANGER)
        session = None if replaced else self._sessions.pop(descriptor, None)
        if session is not None and session not in self._sessions.values():
            handler.handle(c.SessionSilent(session=session), None, caller=None)

    def pause_ms(self, most: int | None) -> int | None:
        """How long to wait before `hang_up` is called: `most` at most (None: for ever)."""
        return self._unauthenticated.pause_ms(most)

    def hang_up(self) -> None:
        """End connections of peers that have not shown the ticket, where there are too many. Does not block."""
        self._unauthenticated.hang_up()

    def _take(self, handler: Handler, peer: zmq.Frame, *frames: zmq.Frame) -> None:
        caller = peer.bytes
        try:
            if self._admission is not None:
                self._unauthenticated.spoke(int(peer.get(zmq.SRCFD)))
            if len(frames) < 2:
                raise InvalidRequestError(f"a request has 2 or more frames (method, message), not {len(frames)}")
            method, *parts = [frame.bytes for frame in frames]
            item = parse(method.decode(errors="replace"), parts[0] if len(parts) == 1 else b"".join(parts))
            if isinstance(item, c.Heartbeat):
                self._beat(handler, item, peer)
            else:
                handler.handle(item, functools.partial(self._reply, caller), caller=caller)
        except DataPlaneError as error:
            self._complain(error)
            self._send(caller, zmq_frames.refusal(0, error))
        except Exception as error:
            line = self._failures.take("failed on a request")
            if line is not None:
                log.exception("%s", line)
            self._send(caller, zmq_frames.refusal(0, InternalError(what=repr(error))))

    def _complain(self, error: DataPlaneError) -> None:
        line = self._refusals.take(f"refused a request: {error}")
        if line is not None:
            log.warning("%s", line)

    def _beat(self, handler: Handler, item: c.Heartbeat, peer: zmq.Frame) -> None:
        assert self._facts is not None
        # Nobody else has this connection's descriptor now, so whatever session it stood for before is not meant.
        descriptor = int(peer.get(zmq.SRCFD))
        self._sessions[descriptor] = item.session
        self._heard.add(descriptor)
        handler.handle(item, None, caller=peer.bytes)
        self._send(peer.bytes, zmq_frames.answer(0, heartbeat_reply(self._facts).SerializeToString()))

    def _reply(self, caller: bytes, output: c.Output) -> None:
        assert self._facts is not None
        number = output.number if isinstance(output, c.Answer) else 0
        try:
            body = message_of(output, self._facts).SerializeToString()
            zmq_frames.check_size(body, "the answer")
            frames = zmq_frames.answer(number, body)
        except DataPlaneError as error:
            frames = zmq_frames.refusal(number, error)
        self._send(caller, frames)

    def _send(self, caller: bytes, frames: list[bytes]) -> None:
        """Never blocks: a ROUTER drops what its peer does not take, and the peer asks again."""
        send(self.socket, [caller, *frames])

    def close(self) -> None:
        """Let the last replies leave, then close. Idempotent; only in the thread that served, or before it did."""
        if self._closed:
            return
        self._closed = True
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=GOODBYE_MS)
        if self._admission is not None:
            self._admission.close()
        self._context.term()
