"""The transports beside ZMQ, which every connection has: a row for each of the values of `bulk_transport`."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.config import DataPlaneConfig
from dataplane.storage.transport.interface import ClientTransport, UnitPayloads
from dataplane.storage.transport.mooncake.engine_transport import EngineTransport, UnitEngine

_CLIENT: dict[str, Callable[[DataPlaneConfig], ClientTransport]] = {"mooncake": EngineTransport}
_UNIT: dict[str, Callable[[DataPlaneConfig], UnitPayloads | None]] = {"mooncake": UnitEngine.open}


def client_transport(config: DataPlaneConfig) -> ClientTransport | None:
    """The client's half of the transport that the settings name; None: payload travels in frames."""
    make = _CLIENT.get(config.bulk_transport)
    return None if make is None else make(config)


def unit_payloads(config: DataPlaneConfig) -> UnitPayloads | None:
    """The unit's half, likewise; None, too, if it cannot be had, which the log says."""
    make = _UNIT.get(config.bulk_transport)
    return None if make is None else make(config)
