"""The controller: composes the ledger, its thread and the ZMQ, gRPC and HTTP servers."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Self

from dataplane.config import PUT_TIMEOUT_S, DataPlaneConfig
from dataplane.controller.durable_ledger import DurableLedger, LedgerSettings
from dataplane.controller.event_loop import LedgerLike, LedgerThread
from dataplane.controller.health import ServiceHealth
from dataplane.controller.http_server import HttpInterface
from dataplane.controller.metrics.recorder import Recorder
from dataplane.controller.requests import Facts
from dataplane.controller.zmq_server import ZmqServer
from dataplane.core.addresses import (
    boot_id,
    is_loopback,
    join_address,
    lasting_port,
    reachable_host,
    require_guard_beyond_loopback,
)
from dataplane.core.failpoints import failpoint
from dataplane.core.ports import listens_at, listens_no_more_at
from dataplane.core.types import Checksums
from dataplane.errors import PortTakenError
from dataplane.ledger.ledger import Ledger
from dataplane.protocol.fd_limits import require_enough
from dataplane.protocol.grpc_loader import import_with_grpc

if TYPE_CHECKING:
    from dataplane.controller.grpc_server import GrpcServer

log = logging.getLogger(__name__)

PORT_TRIES = 64  # for a free port below the ephemeral ones
PORT_WAIT_S = 5.0  # for the port of the previous epoch, tried every PORT_PAUSE_S
PORT_PAUSE_S = 0.1
STOP_S = 5.0
"""Time limit in seconds for each step of `Controller.stop`."""


class Controller:
    """Serves a ledger on `config.host` over ZMQ at `config.port` (0: any free port), and over gRPC at
    `config.grpc_port` and HTTP at `config.http_port` if these are set.

    `epoch` must increase with every start of the service (default: the current time). With `config.state_dir` the
    ledger is restored from there, and port 0 means the port of the previous epoch. A context manager.

    `_given_ledger`: the ledger given to the constructor; None: `start` opens one. `_durable`: the ledger of the state
    directory; None without one.
    """

    def __init__(self, config: DataPlaneConfig, *, epoch: int | None = None, ledger: LedgerLike | None = None) -> None:
        self._config = config
        self._epoch = time.time_ns() if epoch is None else epoch
        self._given_ledger = ledger
        self._durable: DurableLedger | None = None
        self._ledger_thread: LedgerThread | None = None
        self._grpc: GrpcServer | None = None
        self._http: HttpInterface | None = None
        self._address = ""
        self._listens_at: list[int | str] = []  # ports and ipc endpoints
        self._pid = os.getpid()  # a forked child does not stop the servers

    @property
    def address(self) -> str:
        """ "host:port" for clients; "" before `start`."""
        return self._address

    @property
    def grpc_address(self) -> str:
        """ "host:port" of the gRPC gateway; "" if it is not running."""
        return "" if self._grpc is None else self._grpc.address

    @property
    def http_address(self) -> str:
        """ "host:port" of the HTTP server; "" if it is not running."""
        return "" if self._http is None else self._http.server.address

    @property
    def http_url(self) -> str:
        """URL of the HTTP server; "" if it is not running."""
        return "" if self._http is None else self._http.server.url

    @property
    def recovered(self) -> bool:
        """Whether the ledger was restored from the state of an earlier epoch."""
        return self._durable is not None and self._durable.recovered

    @property
    def ended(self) -> threading.Event:
        """Event that is set when the controller no longer serves, after `stop` or a fatal error."""
        assert self._ledger_thread is not None, "not started"
        return self._ledger_thread.ended

    def start(self) -> Self:
        """Start the servers and return once they accept requests. On an error, everything is stopped again.

        Raises ValueError for a host beyond loopback without token or `insecure`, or a session timeout below the
        heartbeat, `PortTakenError` for a port in use, `StateDirError` for a state directory that cannot be restored,
        `LimitError` if the open-file limit of this process is too low."""
        config = self._config
        token = config.secret()
        if config.session_timeout_s < config.heartbeat_s:
            raise ValueError(
                f"session_timeout_s={config.session_timeout_s} is less than heartbeat_s={config.heartbeat_s}: sessions "
                "would expire between two heartbeats; set it to several heartbeats"
            )
        config.check_server()
        require_guard_beyond_loopback(config.host, guarded=config.guarded())
        if token is None and not is_loopback(config.host):
            log.warning(
                "insecure: any client that can connect to %s can read, change and drop all data of this service",
                config.host,
            )
        try:
            self._start(token)
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self, token: str | None) -> None:
        """Open the ledger, bind the ZMQ server, then start the ledger thread, gRPC and HTTP, in this order."""
        config = self._config
        require_enough()
        ledger = self._open_ledger()
        zmq_server = self._bind(token)
        self._address = join_address(reachable_host(config.host), zmq_server.port)
        self._listens_at = [zmq_server.port, *(name for name in zmq_server.endpoints if name.startswith("ipc://"))]
        listens_at(self._listens_at)  # forked children close these sockets
        facts = Facts(
            address=self._address,
            epoch=self._epoch,
            host=boot_id(),
            endpoints=zmq_server.endpoints,
            heartbeat_s=config.heartbeat_s,
            put_timeout_s=PUT_TIMEOUT_S if config.put_timeout_s is None else config.put_timeout_s,
            durable=self._durable is not None,
            service=self._service_name(),
        )
        zmq_server.introduce(facts)
        if self._durable is not None:
            self._durable.remember(port=zmq_server.port)
        failpoint("controller.bound")
        recorder = None if config.http_port is None else Recorder()
        self._ledger_thread = LedgerThread(ledger, zmq_server, facts, watch=recorder)
        self._ledger_thread.start()
        health = ServiceHealth(self._ledger_thread)
        if config.grpc_port is not None:
            grpc_server = import_with_grpc("dataplane.controller.grpc_server")
            self._grpc = grpc_server.GrpcServer(config.host, config.grpc_port, token, config.tls)
            self._grpc.serve(self._ledger_thread, facts, health.why_not)
        if recorder is not None:
            http = HttpInterface(config, self._ledger_thread, ledger, recorder, health.why_not)
            self._http = http.start()

    def _service_name(self) -> str:
        """Return the name of the service's state: a random text, which is stored in the state directory, if there is
        one, and reused by later epochs. A storage unit only belongs to the service with its name."""
        stored = None if self._durable is None else self._durable.recall_text("service")
        name = stored or secrets.token_urlsafe(16)
        if self._durable is not None and stored is None:
            self._durable.remember(service=name)
        return name

    def _open_ledger(self) -> LedgerLike:
        """Return the ledger given to the constructor, otherwise the ledger of the state directory, whose next epoch
        begins (this sets `_durable` and `_epoch`), otherwise a new one in memory."""
        config = self._config
        settings = LedgerSettings(
            reserve_fraction=config.reserve_fraction,
            heartbeat_s=config.heartbeat_s,
            session_timeout_s=config.session_timeout_s,
            checksums=Checksums(config.checksums),
            low_watermark=config.low_watermark,
            high_watermark=config.high_watermark,
        )
        if self._given_ledger is not None:
            return self._given_ledger
        if config.state_dir is None:
            return Ledger(self._epoch, **vars(settings))
        self._durable = DurableLedger.open(config.state_dir, settings)
        self._epoch = self._durable.epoch
        return self._durable

    def _bind(self, token: str | None) -> ZmqServer:
        """Return the ZMQ server, bound to the configured, the previous or any free port."""
        host = self._config.host
        if self._config.port:
            return ZmqServer(host, self._config.port, token)
        if self._durable is None:
            return ZmqServer(host, 0, token)
        previous = self._durable.recall("port")
        if previous is not None:
            return self._bind_previous_port(previous, token)
        for _ in range(PORT_TRIES):
            # The next epoch binds the same port. Outgoing connections never take a `lasting_port`.
            try:
                return ZmqServer(host, lasting_port(), token)
            except OSError as error:
                log.debug("Port is not free, trying another: %s", error)
        raise OSError(f"found no free port on {host} in {PORT_TRIES} tries; set port to one that is free")

    def _bind_previous_port(self, port: int, token: str | None) -> ZmqServer:
        """Bind the port of the previous epoch, to which existing clients reconnect. Retries for `PORT_WAIT_S`; OSError
        if another process still holds the port."""
        end = time.monotonic() + PORT_WAIT_S
        while True:
            try:
                return ZmqServer(self._config.host, port, token)
            except OSError as error:
                if time.monotonic() > end:
                    raise _with_port_hint(error, port) from error
                time.sleep(PORT_PAUSE_S)

    def stop(self) -> None:
        """Stop the servers and the ledger. Pending calls fail with `ServiceUnavailableError`. Blocks for a few seconds
        at most. Idempotent; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        ledger_thread, self._ledger_thread = self._ledger_thread, None
        grpc, self._grpc = self._grpc, None
        http, self._http = self._http, None
        if http is not None:
            http.stop()  # first, because it uses the ledger thread
        if ledger_thread is not None:
            ledger_thread.stop(STOP_S)  # before gRPC, which sends its last answers
        if grpc is not None:
            grpc.stop(STOP_S)
        listens_no_more_at(self._listens_at)
        durable, self._durable = self._durable, None
        if durable is not None:
            durable.close()  # last, because the ledger thread writes to it

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _with_port_hint(error: OSError, port: int) -> OSError:
    """Return the error of a failed bind, with a remedy if another process holds the port."""
    if not isinstance(error, PortTakenError):
        return error
    hint = f"The service had port {port} before, and clients reconnect to it: stop that process, or set another port."
    return PortTakenError(address=error.address, holder=error.holder, hint=hint)
