"""A storage unit's link: its connection to the ZMQ server of the controller.

The unit sends `AddUnit`, which the controller answers with the unit's id, then reports, each of which is confirmed, and
it receives orders. If one end dies, the other one notices at once that the connection closes. If its host vanishes or
the process is stopped, ZMQ closes the connection, after `SILENT_S` at the latest.
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import zmq

from dataplane.core.addresses import resolve
from dataplane.core.durations import LONGEST_S, Backoff
from dataplane.core.failpoints import failpoint
from dataplane.core.types import PROTOCOL_VERSION
from dataplane.core.zmq_io import NOBLOCK, Waker, arrived, poll_ms, readable, receive_event, send
from dataplane.errors import (
    AuthenticationError,
    CallTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceRestartedError,
    ServiceUnavailableError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.encoding import messages
from dataplane.protocol import zmq_frames
from dataplane.protocol.controller_socket import (
    FAILED,
    REJECTIONS,
    Socket,
    is_rejected,
    unconnected_dealer,
    wrong_token,
)
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for
from dataplane.protocol.greeting import keeps_connections, reach

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Maximum time that `close` waits until the controller has confirmed the reports."""
OPENING_S = 60.0
"""Timeout of the first registration. It is long because the machine of a starting service may be very busy."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Maximum backoff between connection attempts. The backoff doubles from `FIRST_PAUSE_S`, with jitter."""
PING_S = 5.0
SILENT_S = 30.0
"""ZMQ pings the controller every `PING_S`. An end that receives nothing closes the connection `SILENT_S` after the last
ping that was answered."""
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
"""Events of a connection that has ended."""
FINAL = (AuthenticationError, InvalidRequestError, ProtocolVersionError)
"""Permanent errors of a registration, which is not retried."""
TRANSIENT = (ServiceRestartedError, ServiceUnavailableError)
"""Transient errors, after which `open` registers the unit again."""


class LinkState(enum.Enum):
    """The state of a link."""

    NEW = "new"  # `open` was not called
    OPENING = "opening"  # `open` registers the unit, in its caller's thread
    REGISTERED = "registered"  # reports and orders flow, in the link's thread
    BROKEN = "broken"  # the connection ended; the link's thread registers the unit again
    CLOSING = "closing"  # `close` was called: a registered link sends the queued reports, others end
    ENDED = "ended"


_NEXT = {
    LinkState.NEW: {LinkState.OPENING, LinkState.ENDED},
    LinkState.OPENING: {LinkState.REGISTERED, LinkState.CLOSING, LinkState.ENDED},
    LinkState.REGISTERED: {LinkState.BROKEN, LinkState.CLOSING, LinkState.ENDED},
    LinkState.BROKEN: {LinkState.REGISTERED, LinkState.CLOSING, LinkState.ENDED},
    LinkState.CLOSING: {LinkState.ENDED},
    LinkState.ENDED: set(),
}
_OVER = (LinkState.CLOSING, LinkState.ENDED)


class UnitLink:
    """Registers a unit and carries its reports and orders, in order, while it is open. Thread-safe.

    When the connection breaks, the link resolves the address again and reconnects. The unit registers under its id,
    then sends its attached sessions and the reports that were not confirmed, so the controller may receive a report
    twice. A controller that lost its state has no record of the unit, so the unit registers as a new one. If the link
    cannot reconnect within `reconnect_s`, or the controller rejects the unit, the link sets `lost` and drops further
    reports.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        *,
        timeout_s: float = 10.0,
        opening_s: float = OPENING_S,
        reconnect_s: float = 60.0,
    ) -> None:
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._opening_s = opening_s
        self._reconnect_s = reconnect_s
        self._state = LinkState.NEW
        """Changes in `_become` only, while `_changed` is held."""
        self._changed = threading.Condition()
        self._waker = Waker()
        """Ends a poll of the link after a new report and after `close`. Closed when the link has ended."""
        self._add: c.AddUnit | None = None
        """The next registration: with the unit's id once it has one, and with the memory that it reported last."""
        self._attached: dict[int, c.SessionAttached] = {}
        """The attached sessions by id. A registration of a known unit is followed by these."""
        self._reports: deque[c.UnitReport] = deque()
        """The reports without a confirmation, oldest first. `_changed` is held to use these three."""
        self._sent = 0
        """How many of `_reports`, from the first, were sent over the current connection."""
        self._close_by = 0.0  # in state CLOSING: when the link ends, by time.monotonic()
        self._context: zmq.Context[Socket] | None = None
        self._connection: _Connection | None = None
        """The current connection, or the last one. Used by `open`, then by the link's thread."""
        self._thread: threading.Thread | None = None
        self.lost = threading.Event()
        """The link has ended, also after `close`."""

    def __repr__(self) -> str:
        return f"<UnitLink to {self._address}: {self._state.value}, {len(self._reports)} reports>"

    def open(
        self,
        add: c.AddUnit,
        on_order: Callable[[c.UnitOrder], None],
        *,
        on_service: Callable[[str], None] = lambda service: None,
        on_added: Callable[[int], None] = lambda unit: None,
        start_over: Callable[[], c.AddUnit] | None = None,
    ) -> int:
        """Register the unit at the controller and return its id. `on_service` is called with the name of the service's
        state before each registration; `on_added` with the id after each; `on_order` for each order, in order;
        `start_over` when the controller has no record of the id: it empties the unit and returns its new registration.
        The callbacks run in this thread, later in the link's. An exception of a callback ends the link.

        Blocks for at most `opening_s`, and registers again until then if the service restarts meanwhile. Later attempts
        are abandoned after about twice `timeout_s` without a reply. Raises `ServiceUnavailableError` (at once if
        nothing listens), `AuthenticationError`, `ProtocolVersionError`, `InvalidRequestError` if the arena is already
        registered, `ServiceRestartedError` if the controller has no record of the unit's id and there is no
        `start_over`, `CallTimeoutError`, `ClientClosedError` after `close`, and the errors of the callbacks.
        """
        self._become(LinkState.OPENING)
        self._add = add
        self._on_order = on_order
        self._on_added = on_added
        self._start_over = start_over
        self._on_service = on_service
        try:
            with enough_for(self._address, least=OF_A_CONTEXT):
                self._context = zmq.Context()
            self._open(time.monotonic() + self._opening_s)
        except BaseException:
            self._end()
            raise
        unit = self._add.unit
        self._thread = threading.Thread(target=self._run, name="tq-unit-link", daemon=True)
        self._thread.start()
        return unit

    def report(self, item: c.UnitReport) -> None:
        """Queue a report for the controller. Does not block. Does nothing once the link has ended."""
        with self._changed:
            if self._state is LinkState.ENDED:
                return
            match item:
                case c.SessionAttached(session=session):
                    self._attached[session] = item
                case c.SessionGone(session=session):
                    self._attached.pop(session, None)
                case c.Grown(backed_bytes=backed) if self._add is not None:
                    self._add = msgspec.structs.replace(self._add, backed_bytes=max(backed, self._add.backed_bytes))
            self._reports.append(item)
            self._waker.wake()

    def close(self) -> None:
        """Close the connection after the controller has confirmed the queued reports, unless it is broken. Blocks for
        about `CLOSE_S` at most. Idempotent."""
        with self._changed:
            if self._state is LinkState.NEW:
                self._end()
            elif self._state not in _OVER:
                self._close_by = time.monotonic() + CLOSE_S
                self._become(LinkState.CLOSING)
        # A callback may call this in the link's thread, which cannot wait for itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * CLOSE_S)
            if self._thread.is_alive():
                log.error("Connection to the controller did not close within %.1f s", 2 * CLOSE_S)

    def _become(self, state: LinkState) -> None:
        """Change the state. Raises `ClientClosedError` if the link was closed."""
        with self._changed:
            if self._state in _OVER and state is not LinkState.ENDED:
                raise ClientClosedError()
            assert state in _NEXT[self._state], (self._state, state)
            self._state = state
            self._changed.notify_all()
            self._waker.wake()

    def _end(self) -> None:
        """End the link and free its resources."""
        if self._connection is not None:
            self._connection.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        with self._changed:
            self._become(LinkState.ENDED)
            self._reports.clear()
            self._waker.close()
        self.lost.set()

    # --- registration

    def _open(self, deadline: float) -> None:
        """Register the unit for the first time."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        rejections = 0
        while True:
            connection = self._connect(deadline)
            try:
                self._register(connection, deadline)
                return
            except _BrokenError as broken:
                error = broken.cause
                rejections += broken.rejected and keeps_connections(resolve(self._address), self._check_open)
            if rejections == REJECTIONS:
                raise wrong_token(self._address)
            if not isinstance(error, TRANSIENT) or self._end_reason(error, deadline):
                raise error
            self._pause(backoff.take())

    def _reconnect(self, error: DataPlaneError) -> bool:
        """Register the unit again after its connection broke with `error`. Return False if the link has to end."""
        deadline = time.monotonic() + self._reconnect_s
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            why = self._end_reason(error, deadline)
            if why:
                log.error("Controller at %s %s: %s", self._address, why, error)
                return False
            self._pause(backoff.take())
            attempt_ends = time.monotonic() + self._timeout_s
            try:
                connection = self._connect(attempt_ends)
            except ClientClosedError:
                raise
            except Exception as caught:  # another process may listen at the controller's address for a while
                error = ServiceUnavailableError(address=self._address, why=str(caught))
                continue
            try:
                self._register(connection, attempt_ends + self._timeout_s)
                return True
            except _BrokenError as broken:
                error = broken.cause

    def _end_reason(self, error: DataPlaneError, deadline: float) -> str:
        """Return why the unit is not registered again after `error`, "" if it is. Empty the unit if the controller lost
        its record of it. deadline: of the registration."""
        if isinstance(error, FINAL):
            return "rejected this storage unit"
        if isinstance(error, ServiceRestartedError):
            if self._start_over is None:
                return "has no record of this storage unit"
            log.warning("Storage unit registers again with an empty arena: %s", error)
            add = self._start_over()
            with self._changed:
                self._reports.clear()
                self._attached.clear()
                self._add = add
        elif time.monotonic() >= deadline:
            return "was unreachable for too long; giving up"
        return ""

    def _pause(self, pause_s: float) -> None:
        """Wait. Raises `ClientClosedError` once the link is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in _OVER, pause_s)
        self._check_open()

    def _check_open(self) -> None:
        """Raise `ClientClosedError` if the link is closed."""
        if self._state in _OVER:
            raise ClientClosedError()

    def _connect(self, deadline: float) -> _Connection:
        """Connect to the ZMQ server of the service at the resolved address."""
        assert self._context is not None
        address = resolve(self._address)
        reached = reach(address, self._token, deadline, self._check_open)
        with enough_for(address):
            self._connection = _Connection(self._context, address, f"tcp://{reached}", self._token)
        return self._connection

    def _register(self, connection: _Connection, deadline: float) -> None:
        """Ask for the service's name, which `_exchange` answers with the registration, and wait until the controller
        accepts it. Raises `_BrokenError` if it does not."""
        began = time.monotonic()
        connection.send(c.Identify(protocol_version=PROTOCOL_VERSION))
        while self._state is not LinkState.REGISTERED:
            self._check_open()
            now = time.monotonic()
            if now >= deadline:
                peer = f"the controller at {self._address}"
                what = "registration of the storage unit"
                connection.close()
                raise _BrokenError(CallTimeoutError(what=what, waited_s=now - began, peer=peer))
            self._exchange(connection, deadline - now)

    def _accept(self, unit: int) -> None:
        """Record that the controller has registered the unit under this id."""
        with self._changed:
            assert self._add is not None
            self._add = msgspec.structs.replace(self._add, unit=unit)
            self._sent = 0
            if self._state is LinkState.BROKEN:
                queued = {report.session for report in self._reports if isinstance(report, c.SessionAttached)}
                known = [attached for session, attached in self._attached.items() if session not in queued]
                self._reports.extendleft(reversed(known))
        self._on_added(unit)
        self._become(LinkState.REGISTERED)

    # --- the link's thread

    def _run(self) -> None:
        """Serve one connection after another, until the link is closed or fails permanently."""
        try:
            while True:
                assert self._connection is not None
                try:
                    self._serve(self._connection)
                    return
                except _BrokenError as broken:
                    error = broken.cause
                if self._state is LinkState.CLOSING:
                    return
                log.warning("Connection to the controller at %s broke: %s", self._address, error)
                self._become(LinkState.BROKEN)
                if not self._reconnect(error):
                    return
        except Exception:
            if self._state not in _OVER:
                log.exception("Connection to the controller failed and is not retried")
        finally:
            self._end()

    def _serve(self, connection: _Connection) -> None:
        """Send reports and execute orders until the link is closed. Raises `_BrokenError` when the connection ends."""
        while True:
            closing = self._state is LinkState.CLOSING  # read first: earlier reports are queued now
            self._send_reports(connection)
            if not closing:
                self._exchange(connection)
                continue
            left_s = self._close_by - time.monotonic()
            if not self._reports or left_s <= 0:
                return
            self._exchange(connection, left_s)

    def _send_reports(self, connection: _Connection) -> None:
        """Send the reports that were not sent over this connection."""
        while self._sent < len(self._reports):
            failpoint("unit.report.before")
            if not connection.send(self._reports[self._sent]):
                return  # the queue of the connection is full; confirmations empty it
            self._sent += 1
            failpoint("unit.report.after")

    def _exchange(self, connection: _Connection, timeout_s: float = LONGEST_S) -> None:
        """Wait for a message, a report or `close`, and handle the messages."""
        connection.wait(self._waker.fd, timeout_s)
        self._waker.clear()
        for message in connection.received():
            match message:
                case zmq_frames.Identity():
                    self._on_service(message.service)
                    assert self._add is not None
                    connection.send(self._add)
                case zmq_frames.ReportHandled():
                    with self._changed:
                        self._reports.popleft()
                        self._sent -= 1
                case c.UnitAdded():
                    self._accept(message.unit)
                case _:
                    self._on_order(message)


class _BrokenError(Exception):
    """The connection ended, the controller rejected a message (`cause` is its error), or it did not answer in time.
    rejected: it rejected the handshake. Only within this module."""

    def __init__(self, cause: DataPlaneError, *, rejected: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.rejected = rejected


class _Connection:
    """One connection to the ZMQ server of the controller at `address`. ZMQ does not restore it. For one thread."""

    def __init__(self, context: zmq.Context[Socket], address: str, endpoint: str, token: str | None) -> None:
        self._address = address
        self._began = time.monotonic()
        self._dealer = unconnected_dealer(context, endpoint, token)
        self._dealer.set(zmq.RECONNECT_IVL, -1)
        self._dealer.set(zmq.RCVHWM, 0)  # a unit that executes an order delays no other one in the controller
        self._dealer.set(zmq.HEARTBEAT_IVL, int(1000 * PING_S))
        self._dealer.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * (SILENT_S - PING_S)))
        self._dealer.set(zmq.HEARTBEAT_TTL, int(1000 * SILENT_S))
        self._monitor = self._dealer.get_monitor_socket(ENDS, f"inproc://tq-{secrets.token_hex(8)}")
        self._dealer.connect(endpoint)

    def send(self, item: c.Identify | c.Input) -> bool:
        """Send a registration or report. Return False if the queue is full. Does not block."""
        try:
            send(self._dealer, zmq_frames.request(item), NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wait(self, fd: int, timeout_s: float) -> None:
        """Wait until a message has arrived, the connection has ended, or `fd` is readable."""
        sources = [(source, zmq.POLLIN) for source in (self._dealer, self._monitor, fd)]
        zmq.zmq_poll(sources, poll_ms(timeout_s))

    def received(self) -> Iterator[zmq_frames.UnitMessage]:
        """Yield the messages that have arrived. Raises `_BrokenError` after the last one of an ended connection, and
        for an error reply."""
        event = receive_event(self._monitor)[0] if readable(self._monitor) else None  # before the last messages
        try:
            for frames in arrived(self._dealer):
                for reply in zmq_frames.Reply.parse([frame.bytes for frame in frames]):
                    yield messages.decode_with(zmq_frames.UNIT_MESSAGE, reply.good_body())
        except DataPlaneError as error:
            self.close()
            raise _BrokenError(error) from error
        if event is not None:
            self.close()
            has_failed = bool(event & FAILED)
            why = "it ended the handshake; it may have another token" if has_failed else "it closed the connection"
            rejected = has_failed and is_rejected(time.monotonic() - self._began)
            raise _BrokenError(ServiceUnavailableError(address=self._address, why=why), rejected=rejected)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=0)
