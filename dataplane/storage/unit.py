"""A storage unit: an arena, the bulk server that serves it, and the link to the controller that registers it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry

from dataplane.config import MIB, DataPlaneConfig
from dataplane.core.addresses import boot_id, reachable_host
from dataplane.core.failpoints import failpoint
from dataplane.core.metrics import Sheet
from dataplane.core.private_dir import in_own_directory, leave
from dataplane.errors import ClientClosedError
from dataplane.ledger import commands as c
from dataplane.protocol.auth import KeyPair
from dataplane.protocol.fd_limits import require_enough
from dataplane.protocol.http import HttpRequest, HttpServer, Response, metrics, plain
from dataplane.protocol.tls import server_context
from dataplane.storage.arena import PAGE_BYTES, Arena
from dataplane.storage.arena_record import Adopted, UnitRecord
from dataplane.storage.capacity import arena_capacity, sweep_directories
from dataplane.storage.controller_link import UnitLink
from dataplane.storage.metrics import BulkMetrics
from dataplane.storage.server import BulkServer
from dataplane.storage.session_lock import DEFAULT_LOCK_DIRECTORY
from dataplane.storage.transport.registry import unit_payloads

log = logging.getLogger(__name__)

FIRST_BACKING_BYTES = 64 * MIB  # of a new arena, before the controller orders more


class StorageUnit:
    """A storage unit. `start` returns when the controller has accepted it; `stop` is thread-safe.

    config: `capacity_bytes`, `arena_dir`, `host` and `port` (the address of its TCP server) and the token; with
    `http_port` it serves Prometheus metrics there. name: random by default. With `state_dir` a name is required
    (ValueError), because the next start finds the arena by it. Raises `ArenaSpaceError` if the directory or the
    container has too little space besides what running units may still take, `ServiceUnavailableError` if no controller
    answers, `PortTakenError` if the port is in use, `LimitError` if this process may open too few files.

    When the connection to the controller breaks, the unit tries to reconnect for `config.reconnect_s`. If the
    controller lost its record of the unit, the unit registers again with an empty arena; clients keep their mappings of
    the old arena.

    `_guard`: held by `stop` and by the callbacks of `_link`, to use `_bulk` and `_arena`; these are None while the unit
    does not run. `_record`: the arena record; None without `state_dir`. `_given_up`: `give_up` was called.
    """

    def __init__(self, config: DataPlaneConfig, controller_address: str, *, name: str | None = None) -> None:
        if config.state_dir is not None and not name:
            raise ValueError(
                f"a storage unit with a state directory ({config.state_dir}) needs a name, so that its next start "
                "finds its rows; pass name= or tq unit --name"
            )
        self._config = config
        self._controller = controller_address
        self.name = name or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self._arena: Arena | None = None
        self._bulk: BulkServer | None = None
        self._link: UnitLink | None = None
        self._record: UnitRecord | None = None
        self._counts = BulkMetrics(self._add_metrics)
        self._http: HttpServer | None = None
        self._guard = threading.Lock()
        self._pid = os.getpid()  # a forked child does not stop the unit
        self._stopped = self._given_up = self._started = False

    def start(self) -> Self:
        """Start the unit and return when the controller has accepted it. No-op if the unit is already started."""
        if self._link is not None:  # started already
            return self
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        """Open the arena, start the servers and register the unit at the controller."""
        self._stopped = False  # a stopped unit may be started again
        require_enough()  # files that this process may open
        config = self._config
        sweep_directories(config)
        self._link = UnitLink(self._controller, config.secret(), reconnect_s=config.reconnect_s)
        if self._given_up:  # read after `_link` is set: a later `give_up` closes the link
            raise ClientClosedError(why="the storage unit was stopped during its start")
        registration = self._start_server(self._link)  # also opens the arena
        self._link.open(
            registration,
            on_order=self._execute_order,
            on_service=self._check_service,
            on_added=self._set_unit_id,
            start_over=self._start_over,
        )
        if config.http_port is not None:
            self._http = self._create_http_server(config, config.http_port).start()
        self._started = True

    def _start_server(self, link: UnitLink, *, anew: bool = False) -> c.AddUnit:
        """Open the arena, start the bulk server, and return the unit's registration. anew: use an empty arena."""
        config = self._config
        config.check_server()
        keys = KeyPair.new() if config.encrypt_rows else None
        opened = self._open_arena(time.time_ns(), anew=anew)
        self._arena = opened.arena
        backed = self._arena.grow(min(FIRST_BACKING_BYTES, self._arena.capacity_bytes))
        self._bulk = BulkServer(
            self._arena,
            epoch=self._arena.epoch,
            token=config.secret(),
            insecure=config.insecure,
            keys=keys,
            engine=unit_payloads(config),
            tcp_host=config.host,
            tcp_port=config.port,
            advertise_host=reachable_host(config.host),
            counts=self._counts,
            report=link.report,
        )
        self._bulk.start()
        failpoint("unit.before_add")
        return c.AddUnit(
            name=self.name,
            host=boot_id(),
            epoch=self._arena.epoch,
            cookie=self._arena.cookie.hex(),
            capacity_bytes=self._arena.capacity_bytes,
            backed_bytes=backed,
            endpoints=tuple(self._bulk.endpoints),
            arena_path=str(self._arena.path),
            unit=opened.unit,
            instead_of=opened.lost,
            anew=opened.anew,
            curve_key="" if keys is None else keys.public,
        )

    def _execute_order(self, order: c.UnitOrder) -> None:
        """Pass the order to the bulk server."""
        with self._guard:
            if self._bulk is not None:
                self._bulk.order(order)

    def _check_service(self, service: str) -> None:
        """Check that the arena belongs to the service with this name."""
        with self._guard:
            if self._record is not None:
                self._record.set_service(service)

    def _set_unit_id(self, unit_id: int) -> None:
        """Use the id that the controller gave to the unit, and write it to the arena record."""
        with self._guard:
            # A reconnected unit keeps its id, which is recorded already.
            if self._bulk is not None and self._arena is not None and self._bulk.unit != unit_id:
                self._bulk.unit = unit_id
                if self._record is not None:
                    self._record.write(self._arena, unit_id)

    def _start_over(self) -> c.AddUnit:
        """Replace the arena by an empty one, after the controller lost its record of the unit. Return the new
        registration."""
        with self._guard:
            if self._stopped or self._link is None or self._bulk is None or self._arena is None:
                raise ClientClosedError(why="the storage unit is stopped")
            self._bulk.stop()  # first, because it accesses the arena
            self._arena.close()
            failpoint("unit.start_over")
            return self._start_server(self._link, anew=True)

    def _open_arena(self, epoch: int, *, anew: bool) -> Adopted:
        """Open the arena of the previous epoch, or create one, in any case if `anew`. epoch: the epoch of a new arena;
        that of an adopted one may be greater."""
        config = self._config

        def create(keeper: Path | None) -> Arena:  # keeper: the arena record, see `Arena.create`
            capacity = arena_capacity(config.arena_dir, config.capacity_bytes)
            return in_own_directory(
                config.arena_dir,
                lambda folder: Arena.create(folder, capacity, epoch=epoch, keeper=keeper),
            )

        if config.state_dir is None:
            return Adopted(arena=create(keeper=None))
        if anew and self._record is not None:  # the controller has no record of the unit, so no id or arena of it
            return Adopted(arena=self._record.create_arena(create))
        self._record = UnitRecord(
            config.state_dir,
            self.name,
            config.arena_dir,
            DEFAULT_LOCK_DIRECTORY,
            controller=self._controller,
        )
        opened = self._record.open(create, epoch=epoch)
        configured = config.capacity_bytes
        # An adopted arena of another capacity; a difference below a page is due to rounding.
        if opened.unit and configured and not 0 <= configured - opened.arena.capacity_bytes < PAGE_BYTES:
            log.warning(
                "Storage unit %s keeps its arena of %s bytes; the configured capacity of %s bytes applies to a new "
                "arena. To get one, run `tq drain %s` and `tq drop %s`, then restart the unit",
                self.name,
                f"{opened.arena.capacity_bytes:,}",
                f"{configured:,}",
                self.name,
                self.name,
            )
        return opened

    def _create_http_server(self, config: DataPlaneConfig, port: int) -> HttpServer:
        """Return the HTTP server for metrics, which require authorization, and health."""
        registry = CollectorRegistry()
        registry.register(self._counts)
        return HttpServer(
            {"/metrics": metrics(registry)},
            config.host,
            port,
            token=config.secret(),
            public={"/healthz": self._health},
            context=None if config.tls is None else server_context(config.tls),
        )

    def _add_metrics(self, sheet: Sheet) -> None:
        """Add samples of the unit and its arena to a scrape, if the unit is running."""
        bulk, arena = self._bulk, self._arena  # read once, because `stop` may reset them meanwhile
        if bulk is None or arena is None:
            return
        sheet.set("bulk_info", 1, str(bulk.unit), self.name)
        sheet.set("bulk_attached_sessions", bulk.attached)
        sheet.set("bulk_arena_capacity_bytes", arena.capacity_bytes)
        sheet.set("bulk_arena_backed_bytes", arena.backed_bytes)

    def _health(self, request: HttpRequest) -> Response:
        """Handle /healthz: success while the thread of the bulk server runs."""
        bulk = self._bulk
        if bulk is None or not bulk.alive:
            return plain("the storage unit is not serving\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return plain("ok\n")

    @property
    def http_url(self) -> str:
        """The URL of the HTTP server with the Prometheus metrics; "" without `http_port`."""
        return "" if self._http is None else self._http.url

    @property
    def unit_id(self) -> int:
        """The unit's id at the controller. It changes if the unit registers again with an empty arena."""
        with self._guard:
            assert self._bulk is not None, "not started"
            return self._bulk.unit

    @property
    def lost(self) -> threading.Event:
        """Set when the controller is unreachable for longer than `config.reconnect_s` or rejects the unit."""
        assert self._link is not None, "not started"
        return self._link.lost

    def give_up(self) -> None:
        """Make a `start` that is in progress, or that follows, raise a `DataPlaneError`. No-op once the unit is
        started. Callable from any thread."""
        self._given_up = True  # before `_link` is read: `start` sets `_link` and then reads this
        link = self._link
        if link is not None and not self._started:
            link.close()

    def stop(self, *, for_good: bool = False) -> None:
        """Disconnect from the controller, stop the server, and unlink the arena unless a state directory keeps it for
        the unit's next epoch. for_good: also delete the record and the arena, because the unit will not restart.
        Idempotent; no-op in a forked child."""
        if self._pid != os.getpid():
            return
        with self._guard:
            self._stopped = True
        if self._http is not None:
            self._http.stop()
            self._http = None
        if self._link is not None:
            self._link.close()  # without the guard, which the callbacks of the link need
        with self._guard:
            if self._bulk is not None:
                self._bulk.stop()
            if self._arena is not None:
                self._arena.close(unlink=self._record is None or for_good)
            if self._record is not None and for_good:
                self._record.remove()
            self._link = self._bulk = self._arena = None
        for shared in (self._config.arena_dir, DEFAULT_LOCK_DIRECTORY):
            leave(shared)  # removes this user's directory if it is empty

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
