"""Ways to get a client: `connect`, `connect_async`, `build_data_plane_client`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataplane.client.async_client import AsyncDataPlaneClient
from dataplane.client.client import DataPlaneClient
from dataplane.client.events import OnEvent
from dataplane.config import DataPlaneConfig
from dataplane.service import serve


def connect(address: str | None = None, *, on_event: OnEvent | None = None, **settings: Any) -> DataPlaneClient:
    """A client of the service at `address` ("host:port" or "actor:NAME[@NAMESPACE]"; default: TQ_ADDRESS), connected.

    on_event: called with an `OpEvent` at the end of every operation. settings: those of `DataPlaneConfig`; token and
    TLS default to TQ_TOKEN and TQ_TLS_*. Raises `ServiceUnavailableError` within `connect_timeout_s` where nothing
    answers, `AuthenticationError` where the token is not the service's, `TlsError` where one end has no TLS or does not
    take the other's certificate.
    """
    return DataPlaneClient(_attached(address, settings), on_event=on_event).connect()


def connect_async(
    address: str | None = None, *, on_event: OnEvent | None = None, **settings: Any
) -> AsyncDataPlaneClient:
    """The same for asyncio code; it connects at the first awaited call."""
    return AsyncDataPlaneClient(_attached(address, settings), on_event=on_event)


def _attached(address: str | None, settings: Mapping[str, Any]) -> DataPlaneConfig:
    config = DataPlaneConfig.of({**settings, "address": address}).with_environment()
    if config.address is None:
        raise ValueError("no address to connect to: pass one or set TQ_ADDRESS")
    return config


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None = None, *, bootstrap: bool, on_event: OnEvent | None = None
) -> DataPlaneClient:
    """The client that `cfg` describes. With `bootstrap=True` starts a service in this process first, which ends when
    the client is closed; with False attaches to the one at `cfg`'s address, and is a ValueError without an
    address. on_event: as for `connect`."""
    config = DataPlaneConfig.of(cfg)
    if not bootstrap:
        config = config.with_environment()
        if config.address is None:
            raise ValueError("bootstrap=False attaches to a running service: set `address` in the data plane config")
        return DataPlaneClient(config, on_event=on_event).connect()
    server = serve(config)
    try:
        return DataPlaneClient(replace(config, address=server.address), owns=server, on_event=on_event).connect()
    except BaseException:
        server.close()
        raise
