"""A storage unit's connection to the controller."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from dataplane.config import TlsFiles
from dataplane.core.addresses import resolve
from dataplane.core.durations import Backoff
from dataplane.core.failpoints import failpoint
from dataplane.errors import (
    AuthenticationError,
    CallTimeoutError,
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    ProtocolVersionError,
    ServiceRestartedError,
    ServiceUnavailableError,
    TlsError,
)
from dataplane.ledger import commands as c
from dataplane.protocol.grpc_loader import import_with_grpc
from dataplane.protocol.server_keys import ConnectionKeys, keys_of

if TYPE_CHECKING:
    from dataplane.storage.grpc_stream import GrpcLink

log = logging.getLogger(__name__)


CLOSE_S = 5.0
OPENING_S = 60.0
"""Timeout of the first reply. It is long because the machine of a starting service may be very busy."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Maximum backoff between connection attempts. The backoff doubles from `FIRST_PAUSE_S`, with jitter."""
FINAL = (AuthenticationError, InvalidRequestError, ProtocolVersionError, TlsError)
"""Permanent errors, which are not retried."""
TRANSIENT = (ServiceRestartedError, ServiceUnavailableError)
"""Transient errors, after which `open` registers the unit again."""


class Outbox:
    """The ordered queue of a unit's reports, sent through one stream at a time. The next stream repeats the report at
    which a stream broke, so the controller may receive a report twice. Thread-safe. `_stream_id`: the id of the
    current stream; a stream of another id ends."""

    def __init__(self) -> None:
        self._items: deque[c.Input | None] = deque()
        self._stream_id = 0
        self._changed = threading.Condition()

    def put(self, item: c.Input | None) -> None:
        """Append a report. None marks the end of the queue."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def clear(self) -> None:
        """Drop the reports that were not sent."""
        with self._changed:
            self._items.clear()

    def stream(self, first: Iterable[c.Input]) -> Iterator[c.Input]:
        """Return an iterator over `first` and then the reports, until the queue's end or the next `stream` or `end`."""
        with self._changed:
            self._stream_id += 1
            self._changed.notify_all()
            return self._items_of(self._stream_id, list(first))

    def end(self) -> None:
        """End the current stream."""
        with self._changed:
            self._stream_id += 1
            self._changed.notify_all()

    def _items_of(self, stream: int, first: list[c.Input]) -> Iterator[c.Input]:
        """Yield the items of stream `stream`: `first`, then the queue. A report leaves the queue when the next
        one is requested."""
        yield from first
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._stream_id != stream)
                if self._stream_id != stream:  # `stream` or `end` was called
                    return
                item = self._items[0]
            if item is None:  # it stays in the queue, so that later streams end, too
                return
            failpoint("unit.report.before")
            yield item
            failpoint("unit.report.after")
            with self._changed:
                if self._stream_id == stream:
                    self._items.popleft()


class UnitLink:
    """Registers a unit and carries its reports and orders, in order, while it is open. Thread-safe.

    When the connection breaks, the link resolves the address again and reconnects. The unit registers under its id,
    then sends its attached sessions and the reports queued meanwhile. A controller that lost its state has no record of
    the unit, so the unit registers as a new one. If the link cannot reconnect within `reconnect_s`, or the controller
    rejects the unit, the link sets `lost` and drops further reports.

    `_add`: the registration with which the next stream begins. `_attached`: the attached sessions by id. `_guard`:
    held to use both. `_answered`: the first registration succeeded or failed; `_outcome` is then the unit's id or
    the error. `_settled`: the current stream was accepted or has ended. `_busy`: the error of the last attempt, if the
    service was unavailable. `_closed`: `close` was called. `lost`: the link has ended, also after `close`.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        *,
        tls: TlsFiles | None = None,
        timeout_s: float = 10.0,
        opening_s: float = OPENING_S,
        reconnect_s: float = 60.0,
    ) -> None:
        self._address = address
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._opening_s = opening_s
        self._opening_end = 0.0  # when `opening_s` ends, by time.monotonic()
        self._reconnect_s = reconnect_s
        self._add: c.AddUnit | None = None
        self._outbox = Outbox()
        self._guard = threading.Lock()
        self._attached: dict[int, c.SessionAttached] = {}
        self._answered = threading.Event()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._outcome: int | Exception = ClientClosedError(why="open() was not called")
        self._busy: ServiceUnavailableError | None = None
        self._thread: threading.Thread | None = None
        self.lost = threading.Event()

    def open(
        self,
        add: c.AddUnit,
        on_order: Callable[[c.UnitOrder], None],
        *,
        on_proven: Callable[[ConnectionKeys], None] = lambda keys: None,
        on_added: Callable[[int], None] = lambda unit: None,
        start_over: Callable[[], c.AddUnit] | None = None,
    ) -> int:
        """Register the unit at the controller and return its id. `on_proven` is called with the service's proven
        keys before each registration. The other callbacks run in the link's thread: `on_order` for each order, in
        order; `on_added` with the id after each registration; `start_over` when the controller has no record of the
        id: it empties the unit and returns its new registration. An exception of a callback ends the link.

        Blocks for at most `opening_s` and retries a busy service until then. Later connection attempts are abandoned
        after about twice `timeout_s` without a reply. Raises `ServiceUnavailableError` (at once if nothing listens),
        `AuthenticationError`, `TlsError`, `ProtocolVersionError`, `InvalidRequestError` if the arena is already
        registered, `ServiceRestartedError` if the controller has no record of the unit's id and there is no
        `start_over`, `CallTimeoutError`, and the errors of the callbacks.
        """
        assert self._thread is None, "opened twice"
        if self._closed.is_set():
            raise ClientClosedError()
        self._add = add
        self._on_order = on_order
        self._on_added = on_added
        self._start_over = start_over
        self._on_proven = on_proven
        self._opening_end = time.monotonic() + self._opening_s
        address = resolve(self._address)
        link = self._open_stream(address)
        self._thread = threading.Thread(target=self._run, args=(link,), name="tq-unit-link", daemon=True)
        self._thread.start()
        if not self._answered.wait(self._limit_s()):
            busy = self._busy
            self.close()
            if busy is not None:
                raise busy
            what = "registration of the storage unit"
            raise CallTimeoutError(what=what, waited_s=self._opening_s, peer=f"the controller at {address}")
        if isinstance(self._outcome, Exception):
            self.close()
            raise self._outcome
        return self._outcome

    def report(self, item: c.Input) -> None:
        """Queue a report for the controller. Does not block. Also records what the next registration (`_add`) and the
        next stream (`_attached`) must tell the controller."""
        if self.lost.is_set():
            return
        with self._guard:
            match item:
                case c.SessionAttached(session=session):
                    self._attached[session] = item
                case c.SessionGone(session=session):
                    self._attached.pop(session, None)
                case c.Grown(backed_bytes=backed) if self._add is not None:
                    self._add = msgspec.structs.replace(self._add, backed_bytes=max(backed, self._add.backed_bytes))
            self._outbox.put(item)

    def close(self) -> None:
        """Close the connection after sending the queued reports, unless it is broken. Blocks for up to `CLOSE_S`.
        Idempotent."""
        self._closed.set()
        self._settled.set()  # after `_closed`, see `_run_stream`
        self._outbox.put(None)  # ends the stream after the reports
        # A callback may call this in the link's thread, which cannot wait for itself.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("Connection to the controller did not close within %.1f s", CLOSE_S)

    # --- the link's thread

    def _run(self, link: GrpcLink | None) -> None:
        """Run one stream after another, with backoff, until the link is closed or fails permanently."""
        # Only this frame refers to `link`. A forked child keeps the frame forever and so never finalizes gRPC objects.
        error: Exception | None = None  # of the last stream, or of the last attempt to connect; `link` is then None
        # `broke_at`: when the last accepted stream ended; before that, the start of the link.
        broke_at = time.monotonic()
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while True:
                if link is not None:
                    accepted, error = self._run_stream(link)
                    link.close()
                    if not self._answered.is_set() and not isinstance(error, TRANSIENT):
                        return  # the first registration failed permanently; `open` raises the error
                    if accepted:
                        broke_at = time.monotonic()
                        backoff.reset()
                if self._closed.is_set() or not self._should_reconnect(error, time.monotonic() - broke_at):
                    return
                if self._closed.wait(backoff.take()):
                    return
                self._busy = error if isinstance(error, ServiceUnavailableError) else None
                link, error = self._reconnect()
        except Exception as failed:
            error = failed
            if self._answered.is_set() and not self._closed.is_set():
                log.exception("Connection to the controller failed and is not retried")
        finally:
            if error is not None:
                self._outcome = error  # before `_answered` is set, because `open` then reads it
            self.lost.set()
            self._answered.set()
            self._outbox.end()
            if link is not None:
                link.close()

    def _should_reconnect(self, error: Exception | None, broken_s: float) -> bool:
        """Log the state of the connection, broken for `broken_s`, and return whether to reconnect. Empty the unit if
        the controller lost its record of it."""
        if isinstance(error, FINAL):
            log.error("Controller at %s rejected this storage unit: %s", self._address, error)
            return False
        if isinstance(error, ServiceRestartedError):
            if self._start_over is None:
                log.error("Controller at %s has no record of this storage unit: %s", self._address, error)
                return False
            log.warning("Storage unit registers again with an empty arena: %s", error)
            add = self._start_over()
            with self._guard:
                self._outbox.clear()
                self._attached.clear()
                self._add = add
        elif broken_s >= self._reconnect_s:
            log.error("Controller at %s was unreachable for %.1f s; giving up: %s", self._address, broken_s, error)
            return False
        return True

    def _reconnect(self) -> tuple[GrpcLink | None, DataPlaneError | None]:
        """Reconnect, or return the error. Every error counts as transient here, because another process may listen
        at the controller's address for a while."""
        try:
            return self._open_stream(resolve(self._address)), None
        except FINAL as error:
            return None, ServiceUnavailableError(address=self._address, why=str(error))
        except DataPlaneError as error:
            return None, error
        except Exception as error:
            return None, ServiceUnavailableError(address=self._address, why=f"cannot resolve the address: {error}")

    def _open_stream(self, address: str) -> GrpcLink:
        """Verify the service at `address` and open a stream that begins with the registration."""
        deadline = time.monotonic() + self._limit_s()
        keys = keys_of(address, self._token, self._tls, deadline=deadline, check=self._check)
        self._on_proven(keys)
        with self._guard:
            add = self._add
            assert add is not None
            attached = list(self._attached.values()) if add.unit else []  # a new unit has no sessions
            grpc_stream = import_with_grpc("dataplane.storage.grpc_stream")
            link: GrpcLink = grpc_stream.GrpcLink(address, keys, self._outbox.stream([add, *attached]), self._tls)
            return link

    def _limit_s(self) -> float:
        """Return the timeout for the controller's reply: `timeout_s`; for the first reply, the rest of `opening_s`."""
        if self._answered.is_set():
            return self._timeout_s
        return max(0.0, self._opening_end - time.monotonic())

    def _check(self) -> None:
        """Raise `ClientClosedError` after `close`, to end a wait for the service's keys."""
        if self._closed.is_set():
            raise ClientClosedError()

    def _run_stream(self, link: GrpcLink) -> tuple[bool, DataPlaneError | None]:
        """Run one stream, from AddUnit to its end. Return whether the unit was accepted, and the error that ended the
        stream, or None."""
        accepted = threading.Event()
        self._settled.clear()
        if self._closed.is_set():  # `close` may have set `_settled` before it was cleared
            self._settled.set()
        threading.Thread(target=self._enforce_limit, args=(link, accepted), name="tq-unit-limit", daemon=True).start()
        error: DataPlaneError | None = None
        try:
            for order in link.orders():
                if isinstance(order, c.UnitAdded):
                    accepted.set()
                    self._record_registration(order.unit)
                elif isinstance(order, c.UnitOrder):
                    self._on_order(order)
        except DataPlaneError as caught:
            error = caught
            if accepted.is_set() and not self._closed.is_set():
                log.warning("Connection to the controller at %s broke: %s", self._address, error)
        finally:
            self._settled.set()
        return accepted.is_set(), error

    def _record_registration(self, unit: int) -> None:
        """Record the id under which the controller registered the unit, and end the wait of `open`."""
        with self._guard:
            assert self._add is not None
            self._add = msgspec.structs.replace(self._add, unit=unit)
        self._outcome = unit
        self._on_added(unit)  # before `open` returns
        self._settled.set()
        self._answered.set()

    def _enforce_limit(self, link: GrpcLink, accepted: threading.Event) -> None:
        """Close the stream if the controller does not accept the unit within twice the timeout and before `close`."""
        self._settled.wait(2 * self._limit_s())
        if not accepted.is_set():
            link.close()
