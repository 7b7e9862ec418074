"""The service in one process: a controller and its storage units. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.protocol.fd_limits import enough_for
from dataplane.storage.unit import StorageUnit


class Server:
    """A running service. `address` is what `connect` takes. Close it, or use it as a context manager; when the process
    ends any other way, the next storage unit on the host sweeps what is left of its arena. A forked child does not
    serve: it has none of the listening sockets, and `close` does nothing there."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.config = config
        self._controller = Controller(config)
        self._units: list[StorageUnit] = []
        self._pid = os.getpid()

    def start(self) -> Self:
        """Returns when the controller answers and every unit is registered; on failure nothing is left running."""
        try:
            with enough_for(self.config.host):
                self._controller.start()
                for number in range(self.config.units):
                    unit = StorageUnit(self.config.of_unit(number), self.address, name=f"unit-{number}")
                    self._units.append(unit.start())
        except BaseException:
            self.close()
            raise
        return self

    @property
    def address(self) -> str:
        """ "host:port" of the controller."""
        return self._controller.address

    @property
    def http_address(self) -> str:
        """ "host:port" of its page, JSON and metrics; "" without `http_port`."""
        return self._controller.http_address

    def close(self) -> None:
        """End units and controller. Idempotent; takes a few seconds at most; clients then get
        `ServiceUnavailableError`."""
        if self._pid != os.getpid():
            return
        while self._units:
            self._units.pop().stop()
        self._controller.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(config: DataPlaneConfig | Mapping[str, Any] | None = None) -> Server:
    """Start the service in this process: threads of its own, an arena of its own, on loopback unless `host` is set.

    Raises `ArenaSpaceError` where there is too little shared memory, ValueError for a public host without token,
    TLS or `insecure`, or for files of TLS that cannot be used; `TlsError` where this ZMQ cannot encrypt.
    """
    return Server(DataPlaneConfig.of(config)).start()
