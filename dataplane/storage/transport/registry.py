"""The payload transports other than ZMQ frames, by the value of `bulk_transport`."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.config import DataPlaneConfig
from dataplane.storage.transport.interface import ClientTransport, UnitPayloads
from dataplane.storage.transport.mooncake.engine_transport import EngineTransport, UnitEngine

_CLIENT: dict[str, Callable[[DataPlaneConfig], ClientTransport]] = {"mooncake": EngineTransport}
_UNIT: dict[str, Callable[[DataPlaneConfig], UnitPayloads | None]] = {"mooncake": UnitEngine.open}


def client_transport(config: DataPlaneConfig) -> ClientTransport | None:
    """Return the client half of the configured transport; None: payload is sent in frames."""
    make = _CLIENT.get(config.bulk_transport)
    return None if make is None else make(config)


def unit_payloads(config: DataPlaneConfig) -> UnitPayloads | None:
    """Return the unit half of the configured transport; None: payload is sent in frames. If the transport cannot be
    opened, also return None and log the reason."""
    make = _UNIT.get(config.bulk_transport)
    return None if make is None else make(config)
