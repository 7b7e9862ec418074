"""A storage unit's side of its link to the controller."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from dataplane.config import TlsFiles
from dataplane.core.backoff import Backoff
from dataplane.core.failpoints import hit
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
from dataplane.protocol.resolver import resolve
from dataplane.protocol.server_keys import ConnectionKeys, keys_of

if TYPE_CHECKING:
    from dataplane.storage.grpc_stream import GrpcLink

log = logging.getLogger(__name__)


CLOSE_S = 5.0
OPENING_S = 60.0
"""How long the first answer may take: the machine of a service that is just starting may be very busy."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Pauses before the link is tried again: each twice the last, up to this, with jitter."""
FINAL = (AuthenticationError, InvalidRequestError, ProtocolVersionError, TlsError)
"""Refusals that trying again would not change."""
PASSING = (ServiceRestartedError, ServiceUnavailableError)
"""Refusals after which a unit that is being opened offers itself again."""


class Outbox:
    """What a unit has to say, in order, through one stream at a time. What a stream broke off with is said again in the
    next: every report may come twice. Thread-safe."""

    def __init__(self) -> None:
        self._items: deque[c.Input | None] = deque()
        self._stream = 0
        self._changed = threading.Condition()

    def put(self, item: c.Input | None) -> None:
        """To be said after all before; None: nothing more."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget what was not said yet."""
        with self._changed:
            self._items.clear()

    def stream(self, first: Iterable[c.Input]) -> Iterator[c.Input]:
        """`first`, then what is put, until None or the next `stream` or `end`."""
        with self._changed:
            self._stream += 1
            self._changed.notify_all()
            return self._items_of(self._stream, list(first))

    def end(self) -> None:
        """End the stream there is."""
        with self._changed:
            self._stream += 1
            self._changed.notify_all()

    def _items_of(self, stream: int, first: list[c.Input]) -> Iterator[c.Input]:
        yield from first
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._stream != stream)
                if self._stream != stream:
                    return
                item = self._items[0]
            if item is None:
                return
            hit("unit.report.before")
            yield item
            hit("unit.report.after")
            with self._changed:
                if self._stream == stream:
                    self._items.popleft()


class UnitLink:
    """Registers a unit and carries its reports and orders, in order, as long as it is open. Thread-safe.

    A link that breaks is made again, to whatever the address resolves to then: the unit offers itself under the number
    it has, says which sessions are attached, and then what it had to report meanwhile. A controller that lost its state
    does not know the unit; then it starts over as another. When the link is not there again within `reconnect_s`, or is
    refused, `lost` is set; reports are dropped from then on.
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
        self._opening_end = 0.0
        self._reconnect_s = reconnect_s
        self._add: c.AddUnit | None = None
        self._outbox = Outbox()
        self._guard = threading.Lock()
        self._attached: dict[int, c.SessionAttached] = {}
        self._answered = threading.Event()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._outcome: int | Exception = ClientClosedError(why="the link was never opened")
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
        """Offer the unit to the controller; its number there. `on_proven` is called with what the service proved
        each time before the unit is offered. The other callbacks are called in the link's thread: `on_order`
        in order; `on_added` with the number, each time the unit was accepted; `start_over` to make the unit anew, with
        nothing of what it held, when the controller does not know the number: how it presents itself then. What they
        raise ends the link.

        Blocks for `opening_s` at most; a service that is busy is asked again until then. Links that are made later are
        given up after some `timeout_s` without an answer. Raises `ServiceUnavailableError` (at once where nothing
        listens), `AuthenticationError`, `TlsError`, `ProtocolVersionError`, `InvalidRequestError` for an arena that is
        there already, `ServiceRestartedError` for one with a number that the controller does not know and no
        `start_over`, `CallTimeoutError`, what the callbacks raise.
        """
        assert self._thread is None, "opened twice"
        if self._closed.is_set():
            raise ClientClosedError()
        self._add = add
        self._on_order, self._on_added, self._start_over = on_order, on_added, start_over
        self._on_proven = on_proven
        self._opening_end = time.monotonic() + self._opening_s
        address = resolve(self._address)
        link = self._stream(address)
        self._thread = threading.Thread(target=self._run, args=(link,), name="tq-unit-link", daemon=True)
        self._thread.start()
        if not self._answered.wait(self._limit_s()):
            busy = self._busy
            self.close()
            late = CallTimeoutError(what="AddUnit", waited_s=self._opening_s, peer=f"the controller at {address}")
            raise busy or late
        if isinstance(self._outcome, Exception):
            self.close()
            raise self._outcome
        return self._outcome

    def report(self, item: c.Input) -> None:
        """Tell the controller what the unit has to report. Does not block."""
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
                case c.Shrunk(number=number, backed_bytes=backed) if self._add is not None:
                    self._add = msgspec.structs.replace(self._add, backed_bytes=backed, shrinks=number)
                case c.Compacted(number=number) if self._add is not None:
                    self._add = msgspec.structs.replace(self._add, compactions=max(number, self._add.compactions))
            self._outbox.put(item)

    def close(self) -> None:
        """Leave the controller: what was reported before still gets there, unless the link is broken. Takes some
        seconds at most. Idempotent."""
        self._closed.set()
        self._settled.set()
        self._outbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the link to the controller did not close within %.1f s", CLOSE_S)

    # --- the link's thread

    def _run(self, link: GrpcLink | None) -> None:
        # `link` lives in this frame: a forked child has the frame for ever and never takes gRPC's objects apart.
        error: Exception | None = None
        broke_at, backoff = time.monotonic(), Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while True:
                if link is not None:
                    accepted, error = self._converse(link)
                    link.close()
                    if not self._answered.is_set() and not isinstance(error, PASSING):
                        return
                    if accepted:
                        broke_at = time.monotonic()
                        backoff.reset()
                if self._closed.is_set() or not self._worth_trying(error, time.monotonic() - broke_at):
                    return
                if self._closed.wait(backoff.take()):
                    return
                self._busy = error if isinstance(error, ServiceUnavailableError) else None
                link, error = self._again()
        except Exception as failed:
            error = failed
            if self._answered.is_set() and not self._closed.is_set():
                log.exception("the link to the controller ends")
        finally:
            if error is not None:
                self._outcome = error
            self.lost.set()
            self._answered.set()
            self._outbox.end()
            if link is not None:
                link.close()

    def _worth_trying(self, error: Exception | None, broken_s: float) -> bool:
        """Say that the link is broken; whether to make it again."""
        if isinstance(error, FINAL):
            log.error("the controller at %s refuses this storage unit: %s", self._address, error)
            return False
        if isinstance(error, ServiceRestartedError):
            if self._start_over is None:
                log.error("the controller at %s does not know this storage unit any more: %s", self._address, error)
                return False
            log.warning("starting over with an empty arena: %s", error)
            add = self._start_over()
            with self._guard:
                self._outbox.clear()
                self._attached.clear()
                self._add = add
        elif broken_s >= self._reconnect_s:
            log.error("no controller at %s within %.1f s: %s", self._address, broken_s, error)
            return False
        return True

    def _again(self) -> tuple[GrpcLink | None, DataPlaneError | None]:
        """The link once more, or why it cannot be made now: that may change, also where somebody else has taken the
        controller's place."""
        try:
            return self._stream(resolve(self._address)), None
        except FINAL as error:
            return None, ServiceUnavailableError(address=self._address, why=str(error))
        except DataPlaneError as error:
            return None, error
        except Exception as error:
            return None, ServiceUnavailableError(address=self._address, why=f"the address cannot be resolved: {error}")

    def _stream(self, address: str) -> GrpcLink:
        deadline = time.monotonic() + self._limit_s()
        keys = keys_of(address, self._token, self._tls, deadline=deadline, check=self._check)
        self._on_proven(keys)
        with self._guard:
            add = self._add
            assert add is not None
            again = list(self._attached.values()) if add.unit else []
            grpc_stream = import_with_grpc("dataplane.storage.grpc_stream")
            link: GrpcLink = grpc_stream.GrpcLink(address, keys, self._outbox.stream([add, *again]), self._tls)
            return link

    def _limit_s(self) -> float:
        """How long to wait for the controller's answer: `timeout_s`; for its first one, what is left of `opening_s`."""
        if self._answered.is_set():
            return self._timeout_s
        return max(0.0, self._opening_end - time.monotonic())

    def _check(self) -> None:
        if self._closed.is_set():
            raise ClientClosedError()

    def _converse(self, link: GrpcLink) -> tuple[bool, DataPlaneError | None]:
        """One stream, from AddUnit to its end: whether the unit was accepted, and the error the stream ended with."""
        accepted = threading.Event()
        self._settled.clear()
        if self._closed.is_set():
            self._settled.set()
        threading.Thread(target=self._limit, args=(link, accepted), name="tq-unit-limit", daemon=True).start()
        error: DataPlaneError | None = None
        try:
            for order in link.orders():
                if isinstance(order, c.UnitAdded):
                    accepted.set()
                    self._accept(order.unit)
                elif isinstance(order, c.UnitOrder):
                    self._on_order(order)
        except DataPlaneError as caught:
            error = caught
            if accepted.is_set() and not self._closed.is_set():
                log.warning("the link to the controller at %s broke: %s", self._address, error)
        finally:
            self._settled.set()
        return accepted.is_set(), error

    def _accept(self, unit: int) -> None:
        with self._guard:
            assert self._add is not None
            self._add = msgspec.structs.replace(self._add, unit=unit)
        self._outcome = unit
        self._on_added(unit)
        self._settled.set()
        self._answered.set()

    def _limit(self, link: GrpcLink, accepted: threading.Event) -> None:
        """A link that is not answered for long, or not wanted any more, is given up."""
        self._settled.wait(2 * self._limit_s())
        if not accepted.is_set():
            link.close()
