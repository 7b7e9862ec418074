"""The service in one process: a controller and its storage units. This module does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from dataplane.config import DataPlaneConfig
from dataplane.controller.controller import Controller
from dataplane.protocol.fd_limits import enough_for
from dataplane.storage.capacity import unit_configs, unit_name
from dataplane.storage.unit import StorageUnit


class Server:
    """A running service. Pass `address` to `connect`. Close the server or use it as a context manager. If the process
    exits without `close`, the next storage unit that starts on the host removes the remaining arena files. A forked
    child does not serve: the child has no listening sockets, and `close` does nothing there. `_pid` is the process that
    created the server; `_units` are the storage units that were started."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.config = config
        self._controller = Controller(config)
        self._units: list[StorageUnit] = []
        self._pid = os.getpid()

    def start(self) -> Self:
        """Start controller and storage units. Block until the controller accepts requests and every unit is registered.
        On failure, stop everything that was started."""
        try:
            with enough_for(self.config.host):  # a lack of open files becomes `ServiceUnavailableError`
                self._controller.start()
                for number, config in enumerate(unit_configs(self.config, self.config.units)):
                    unit = StorageUnit(config, self.address, name=unit_name(number))
                    self._units.append(unit.start())
        except BaseException:
            self.close()
            raise
        return self

    @property
    def address(self) -> str:
        """Address of the controller, "host:port"."""
        return self._controller.address

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC gateway, "host:port"; "" without `grpc_port`."""
        return self._controller.grpc_address

    @property
    def http_address(self) -> str:
        """Address of the HTTP server (dashboard, JSON and metrics), "host:port"; "" without `http_port`."""
        return self._controller.http_address

    def close(self) -> None:
        """Stop storage units and controller. Idempotent; takes a few seconds at most. Clients then receive
        `ServiceUnavailableError`."""
        if self._pid != os.getpid():  # a forked child
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
    """Start the service in background threads of this process, on loopback unless `host` is set.

    Raises `ArenaSpaceError` if the available memory is too small for all units and what running units may still take,
    ValueError for a public host without token or `insecure`, for unusable TLS files, and for a token if the installed
    ZMQ does not support encryption.
    """
    return Server(DataPlaneConfig.of(config)).start()
