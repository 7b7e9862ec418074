"""A storage unit's side of its link to the controller."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.control.grpc_import import import_grpc_link
from dataplane.control.resolve import resolve
from dataplane.errors import CallTimeoutError, ClientClosedError, DataPlaneError
from dataplane.ledger import commands as c

if TYPE_CHECKING:
    from dataplane.control.grpc_link import GrpcLink

log = logging.getLogger(__name__)

Order = c.FenceSession | c.GrowArena

CLOSE_S = 5.0


class UnitLink:
    """Registers a unit and carries its reports and orders, in order, as long as it is open. Thread-safe.

    When the controller goes, `lost` is set; reports are then dropped.
    """

    def __init__(self, address: str, token: str | None, *, timeout_s: float = 10.0) -> None:
        self._address = address
        self._token = token
        self._timeout_s = timeout_s
        self._reports: queue.SimpleQueue[c.Input | None] = queue.SimpleQueue()
        self._answered = threading.Event()
        self._outcome: int | DataPlaneError = ClientClosedError(why="the link was never opened")
        self._thread: threading.Thread | None = None
        self._closed = False
        self.lost = threading.Event()

    def open(self, add: c.AddUnit, on_order: Callable[[Order], None]) -> int:
        """Offer the unit to the controller; its number there. `on_order` is called in the link's thread, in order.

        Blocks for `timeout_s` at most. Raises `ServiceUnavailableError` (at once where nothing listens),
        `AuthenticationError`, `InvalidRequestError` for an arena that is there already, `CallTimeoutError`.
        """
        assert self._thread is None, "opened twice"
        if self._closed:
            raise ClientClosedError()
        address = resolve(self._address)
        link = import_grpc_link()(address, self._token, add, self._reports)
        self._thread = threading.Thread(target=self._run, args=(link, on_order), name="tq-unit-link", daemon=True)
        self._thread.start()
        if not self._answered.wait(self._timeout_s):
            self.close()
            raise CallTimeoutError(what="AddUnit", waited_s=self._timeout_s, peer=f"the controller at {address}")
        if isinstance(self._outcome, DataPlaneError):
            self.close()
            raise self._outcome
        return self._outcome

    def _run(self, link: GrpcLink, on_order: Callable[[Order], None]) -> None:
        # `link` lives in this frame: a forked child has the frame for ever and never takes gRPC's objects apart.
        try:
            for order in link.orders():
                if isinstance(order, c.UnitAdded):
                    self._outcome = order.unit
                    self._answered.set()
                elif isinstance(order, c.FenceSession | c.GrowArena):
                    on_order(order)
        except DataPlaneError as error:
            if self._answered.is_set() and not self._closed:
                log.warning("the link to the controller broke: %s", error)
            self._outcome = error
        finally:
            self.lost.set()
            self._answered.set()
            self._reports.put(None)
            link.close()

    def report(self, item: c.Input) -> None:
        """Tell the controller `SessionAttached`, `SessionGone`, `SessionAlive` or `Grown`. Does not block."""
        if not self.lost.is_set():
            self._reports.put(item)

    def close(self) -> None:
        """Leave the controller: what was reported before still gets there. Takes some seconds at most. Idempotent."""
        self._closed = True
        self._reports.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the link to the controller did not close within %.1f s", CLOSE_S)
