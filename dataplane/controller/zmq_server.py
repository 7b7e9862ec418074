"""The ZMQ server: a ROUTER socket for the commands of Python clients and the reports of storage units. It detects the
end of their connections."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import zmq

from dataplane.controller.requests import Facts, Reply, frame_of
from dataplane.core.addresses import resolve_host
from dataplane.core.limited_log import LimitedLog
from dataplane.core.ports import cannot_listen
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.core.zmq_io import NOBLOCK, bind_tcp, readable, receive_event, send
from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.auth import controller_keys
from dataplane.protocol.zap import HANDSHAKE_MS, Handshakes

log = logging.getLogger(__name__)

BEFORE_DISCONNECTS = 256
"""Maximum number of requests handled after each read of the monitor, before disconnects are handled."""
LOOKS = 8
"""Maximum number of monitor reads per call: connections may open or close while requests are handled."""
BACKLOG = 4096
"""Listen backlog. A client opens two connections, and a thousand clients may start within one second."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 20,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 2,
}
"""A connection whose host vanishes is closed after 30 s, also before the first ping of a storage unit."""
GOODBYE_MS = 500
"""Time in milliseconds that closing waits for the last replies to be sent."""


_MORE = int(zmq.SNDMORE) | NOBLOCK
_UNREACHABLE = (errno.EHOSTUNREACH, errno.EAGAIN)
"""Errors of a send: the connection has ended, or its peer does not read."""


class Handler(Protocol):
    """Applies inputs, in the thread that calls `ZmqServer.serve`."""

    def handle(self, item: c.Input, reply: Reply | None, *, caller: object, record: bytes | None = None) -> None: ...

    @property
    def min_heartbeat_s(self) -> float: ...


@dataclass(eq=False)
class _UnitLink:
    """The connection of a registered storage unit. `caller` is its routing id, `descriptor` its file descriptor."""

    caller: bytes
    descriptor: int
    unit: int = 0


class ZmqServer:
    """Binds in the constructor, to `host`:`port` (0: any free port) and an ipc endpoint. One thread must serve: it
    polls `socket` and `monitor` and calls `serve` and `notice_disconnects`.

    The connection that carries a session's heartbeats represents its client: if it closes before the session sends Bye,
    the handler receives `SessionSilent`. A connection over which a unit was added represents the unit: if it closes,
    the handler receives `UnitLost`. With a `token`, only peers that have it are served (see `auth`). Raises
    `PortTakenError` if the port is in use.
    """

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self._facts: Facts | None = None
        self._is_guarded = token is not None
        self._refusals = LimitedLog(log)
        self._failures = LimitedLog(log)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.BACKLOG, BACKLOG)
        self.socket.set(zmq.MAXMSGSIZE, zmq_frames.MAX_REQUEST_FRAME_BYTES)
        for option, value in KEEPALIVE.items():
            self.socket.set(option, value)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # `send` raises for an unreachable peer, see `_note_unreachable`
        self._session_of: dict[int, int] = {}  # by the descriptor of the connection that carries its heartbeats
        self._connections: Counter[int] = Counter()  # of each session in `_session_of`
        self._fresh_descriptors: set[int] = set()
        """Carried a heartbeat or `AddUnit` since the last `notice_disconnects`."""
        self._link_of: dict[int, _UnitLink] = {}
        """By unit, the link over which it was added last."""
        self._link_at: dict[int, _UnitLink] = {}
        """The same links by descriptor."""
        self._unreachable: list[_UnitLink] = []
        """Links to which a message could not be sent. `_end_unreachable` ends them."""
        self._closed = False
        self._held: dict[bytes, list[bytes]] | None = None  # the frames of replies by caller, see `replies_together`
        try:
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            if token is not None:  # otherwise any peer is served
                events |= Handshakes.EVENTS
            self.monitor = self.socket.get_monitor_socket(events)
            if token is not None:
                self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
                controller_keys(token).serve(self.socket)
            self.port = self._bind_tcp(host, port)
            ipc = f"ipc://@tq-control-{secrets.token_hex(16)}"
            self.socket.bind(ipc)
        except BaseException:
            self.close()
            raise
        self.endpoints = (ipc, f"tcp://*:{self.port}")
        self._handshakes = Handshakes(self.endpoints, zmq_frames.MAX_REQUEST_FRAME_BYTES)

    def _bind_tcp(self, host: str, port: int) -> int:
        try:
            return bind_tcp(self.socket, resolve_host(host), port)
        except zmq.ZMQError as error:
            raise cannot_listen(host, port, error.errno) from error

    def introduce(self, facts: Facts) -> None:
        """Set the facts that replies contain. Must be called before `serve`."""
        self._facts = facts

    def serve(self, handler: Handler) -> bool:
        """Handle one message and return whether there was one. Call it when `socket` is readable. Does not block."""
        if self._unreachable:
            self._end_unreachable(handler)
        receive = self.socket.recv
        try:
            peer = receive(NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frame = receive(copy=False)  # does not block: a message arrives as a whole
        request = frame.bytes
        if frame.more or request == zmq_frames.JOINED:
            frames = [request]
            while frame.more:
                frame = receive(copy=False)
                frames.append(frame.bytes)
            self._handle_several(handler, peer, frames)
        else:
            self._handle_request(handler, peer, request)
        return True

    def notice_disconnects(self, handler: Handler) -> None:
        """Handle closed connections, after the messages that they sent before. Call it when `monitor` is readable. Does
        not block."""
        events: list[tuple[int, int]] = []
        for _ in range(LOOKS):
            # A connection's messages are queued before its disconnect event, so these are handled after the read. They
            # are queued after its accept event, so the monitor is read again: a message that was handled may be from
            # a connection that was accepted after the last read.
            new = self._monitor_events()
            if not new:
                break
            events += new
            for _ in range(BEFORE_DISCONNECTS):
                if not self.serve(handler):
                    break
        # How often each descriptor is accepted after the event that the loop handles.
        later_accepts = Counter(descriptor for event, descriptor in events if event == zmq.EVENT_ACCEPTED)
        for event, descriptor in events:
            match event:
                case zmq.EVENT_ACCEPTED:
                    later_accepts[descriptor] -= 1
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._log_failed_handshake(descriptor)  # of this event it is the reason
                case zmq.EVENT_DISCONNECTED:
                    # Whether a later connection reuses the descriptor and has already sent a heartbeat or `AddUnit`
                    # over it. Then the descriptor already stands for that connection's session or unit.
                    replaced = later_accepts[descriptor] > 0 and descriptor in self._fresh_descriptors
                    self._end_connection(handler, descriptor, replaced)
        self._fresh_descriptors.clear()

    def _monitor_events(self) -> list[tuple[int, int]]:
        """Read the pending events of the monitor. Return (event, descriptor) pairs."""
        events = []
        while readable(self.monitor):
            event, descriptor = receive_event(self.monitor)
            if self._is_guarded and event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._handshakes.note(event, descriptor)
            events.append((event, descriptor))
        return events

    def _end_connection(self, handler: Handler, descriptor: int, replaced: bool) -> None:
        """Handle a closed connection: report its unit as lost, and report its session as silent unless another
        connection has the session too. replaced: a later connection reuses the descriptor, which already stands for
        that connection's session or unit."""
        if replaced:
            return
        if descriptor in self._link_at:
            self._end_link(handler, self._link_at[descriptor])
        session = self._forget(descriptor)
        if session is not None and session not in self._connections:
            handler.handle(c.SessionSilent(session=session), None, caller=None)

    def _forget(self, descriptor: int) -> int | None:
        """Remove the session of a descriptor, and return it if there was one."""
        session = self._session_of.pop(descriptor, None)
        if session is not None:
            self._connections[session] -= 1
            if not self._connections[session]:
                del self._connections[session]
        return session

    def _handle_several(self, handler: Handler, peer: zmq.Frame, frames: list[bytes]) -> None:
        """Handle a message of several frames: one long request, or several. Reply with the error if
        the message is malformed."""
        try:
            requests = zmq_frames.split_requests(frames)
        except DataPlaneError as error:
            self._log_rejection(peer.bytes, error)
            self._send(peer.bytes, zmq_frames.refusal(0, error))
            return
        with self.replies_together():
            for request in requests:
                self._handle_request(handler, peer, request)

    def _handle_request(self, handler: Handler, peer: zmq.Frame, request: bytes) -> None:
        """Decode one request and pass it to `handler`; reply with the error if it is malformed."""
        caller = peer.bytes
        try:
            item = messages.decode_request(request)
            if isinstance(item, c.Call | c.OpenSession | c.DropUnit):
                handler.handle(item, functools.partial(self._reply, caller), caller=caller, record=request)
            elif isinstance(item, c.Heartbeat):
                self._handle_heartbeat(handler, item, peer)
            elif isinstance(item, c.Identify):
                self._identify(item, caller)
            elif isinstance(item, c.AddUnit):
                self._add_unit(handler, item, peer, request)
            else:
                self._handle_report(handler, item, peer, request)
        except DataPlaneError as error:
            self._log_rejection(caller, error)
            self._send(caller, zmq_frames.refusal(messages.call_id_of(request), error))
        except Exception as error:
            self._failures.write(logging.ERROR, "Failed on a request", error)
            self._send(caller, zmq_frames.refusal(messages.call_id_of(request), InternalError(what=repr(error))))

    def _log_failed_handshake(self, reason: int) -> None:
        """Log a peer whose handshake failed, unless too many were logged recently."""
        why = "it did not send the handshake of ZMQ"
        if reason == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            why = "wrong token"
        elif reason == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            why = "it has no token" if self._is_guarded else "it has a token, and this service has none"
        self._refusals.write(logging.WARNING, f"Rejected a peer: {why}")

    def _log_rejection(self, caller: bytes, error: DataPlaneError) -> None:
        """Log a rejected request, unless too many were logged recently."""
        why = zmq_frames.TLS if zmq_frames.is_tls(caller) else str(error)
        self._refusals.write(logging.WARNING, f"Rejected a request: {why}")

    def _handle_heartbeat(self, handler: Handler, item: c.Heartbeat, peer: zmq.Frame) -> None:
        """Pass a heartbeat to the handler and reply to it. This connection now represents the session's client."""
        assert self._facts is not None
        descriptor = self._take_descriptor(handler, peer)
        self._session_of[descriptor] = item.session
        self._connections[item.session] += 1
        handler.handle(item, None, caller=peer.bytes)
        reply = zmq_frames.HeartbeatReply(epoch=self._facts.epoch, min_heartbeat_s=handler.min_heartbeat_s)
        self._send(peer.bytes, zmq_frames.answer(0, reply))

    def _take_descriptor(self, handler: Handler, peer: zmq.Frame) -> int:
        """Return the descriptor of the connection of `peer`. Only this connection has it now, so the session or unit of
        an earlier connection with this descriptor is removed."""
        descriptor = int(peer.get(zmq.SRCFD))
        link = self._link_at.get(descriptor)
        if link is not None and link.caller != peer.bytes:
            self._end_link(handler, link)
        self._forget(descriptor)
        self._fresh_descriptors.add(descriptor)
        return descriptor

    # --- storage units

    def _identify(self, item: c.Identify, caller: bytes) -> None:
        """Tell a storage unit the name of the service. Raises `ProtocolVersionError` for a unit of another version."""
        assert self._facts is not None
        if item.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(client_version=item.protocol_version, service_version=PROTOCOL_VERSION)
        self._send(caller, zmq_frames.answer(0, zmq_frames.Identity(service=self._facts.service)))

    def _add_unit(self, handler: Handler, item: c.AddUnit, peer: zmq.Frame, request: bytes) -> None:
        """Pass the registration of a unit to the handler. If it is accepted, its connection now represents the unit."""
        link = _UnitLink(peer.bytes, self._take_descriptor(handler, peer))
        if link.descriptor in self._link_at:
            unit = self._link_at[link.descriptor].unit
            raise InvalidRequestError(f"this connection has registered storage unit {unit}; open another one")
        handler.handle(item, functools.partial(self._accept, link), caller=link.caller, record=request)

    def _accept(self, link: _UnitLink, output: c.Output) -> None:
        """Record the link of a unit that the ledger has accepted, and send the unit the ledger's output."""
        if isinstance(output, c.UnitAdded) and output.error is None:
            link.unit = output.unit
            earlier = self._link_of.get(link.unit)
            if earlier is not None:
                del self._link_at[earlier.descriptor]
            self._link_at[link.descriptor] = link
            self._link_of[link.unit] = link
        self._reply(link.caller, output)

    def _handle_report(self, handler: Handler, item: c.UnitReport, peer: zmq.Frame, request: bytes) -> None:
        """Pass a report to the handler and confirm it. A connection may report for its own unit only."""
        link = self._link_at.get(int(peer.get(zmq.SRCFD)))
        if link is None or link.caller != peer.bytes:  # see `_end_unreachable`
            assert self._facts is not None
            raise ServiceUnavailableError(address=self._facts.address, why="this connection has no storage unit")
        if item.unit != link.unit:
            got = f"{type(item).__name__} of unit {item.unit}"
            raise InvalidRequestError(f"the connection of storage unit {link.unit} accepts only its reports, got {got}")
        handler.handle(item, None, caller=link.caller, record=request)
        self._send(link.caller, zmq_frames.answer(0, zmq_frames.ReportHandled()))

    def order(self, order: c.UnitOrder) -> None:
        """Send an order to its unit, if the unit is connected."""
        link = self._link_of.get(order.unit)
        if link is not None:
            self._send(link.caller, zmq_frames.answer(0, order))

    def _end_link(self, handler: Handler, link: _UnitLink) -> None:
        """Remove the link and report its unit as lost."""
        del self._link_at[link.descriptor]
        del self._link_of[link.unit]
        handler.handle(c.UnitLost(unit=link.unit), None, caller=None)

    def _end_unreachable(self, handler: Handler) -> None:
        """Remove the links to which a message could not be sent. A unit whose connection is still open learns it from
        the reply to its next report, and registers again."""
        while self._unreachable:
            link = self._unreachable.pop()
            if self._link_at.get(link.descriptor) is link:
                self._end_link(handler, link)

    def _note_unreachable(self, caller: bytes, error: zmq.ZMQError) -> None:
        """Drop a message that could not be sent. A client repeats its request; the link of a unit must end."""
        if error.errno not in _UNREACHABLE:
            raise error
        self._unreachable += [link for link in self._link_at.values() if link.caller == caller]

    # --- replies

    def _reply(self, caller: bytes, output: c.Output) -> None:
        """Send the caller the reply for an output, or the error if it failed or is too large."""
        assert self._facts is not None
        self._send(caller, frame_of(output, self._facts))

    def _send(self, caller: bytes, frame: bytes) -> None:
        """Send a reply, or hold it (see `replies_together`). Does not block. A message that the peer does not accept is
        dropped (see `_note_unreachable`)."""
        if self._held is None:
            try:
                self.socket.send(caller, _MORE)
                self.socket.send(frame)
            except zmq.ZMQError as error:
                self._note_unreachable(caller, error)
        else:
            self._held.setdefault(caller, [caller]).append(frame)

    @contextlib.contextmanager
    def replies_together(self) -> Iterator[None]:
        """Hold the replies that are sent in this context, and send those of each caller as one message at its end."""
        if self._held is not None:  # an outer context sends them
            yield
            return
        self._held = {}
        try:
            yield
        finally:
            held, self._held = self._held, None
            for caller, frames in held.items():
                try:
                    send(self.socket, frames, NOBLOCK)
                except zmq.ZMQError as error:
                    self._note_unreachable(caller, error)

    def close(self) -> None:
        """Send the last replies, then close. Idempotent. Only for the serving thread, or before it starts."""
        if self._closed:
            return
        self._closed = True
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=GOODBYE_MS)
        self._context.term()
