"""Functions that create a client: `connect`, `connect_async`, `build_data_plane_client`."""

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
    """Return a connected client of the service at `address`.

    address: "host:port", or "actor:NAME[@NAMESPACE]" with the name of its Ray actor; default: TQ_ADDRESS. on_event:
    called with an `OpEvent` at the end of every operation. settings: fields of `DataPlaneConfig`; token and TLS files
    default to TQ_TOKEN and TQ_TLS_*. Raises ValueError if neither `address` nor TQ_ADDRESS is set,
    `ServiceUnavailableError` within `connect_timeout_s` if the service does not respond, and `AuthenticationError` if
    the token is wrong or only one end has one.
    """
    return DataPlaneClient(_client_config(address, settings), on_event=on_event).connect()


def connect_async(
    address: str | None = None, *, on_event: OnEvent | None = None, **settings: Any
) -> AsyncDataPlaneClient:
    """Return an asyncio client of the service at `address`. It connects at the first awaited call. Arguments: as for
    `connect`."""
    return AsyncDataPlaneClient(_client_config(address, settings), on_event=on_event)


def _client_config(address: str | None, settings: Mapping[str, Any]) -> DataPlaneConfig:
    """Return the config of a client, completed from the environment. Raise ValueError if there is no address."""
    config = DataPlaneConfig.of({**settings, "address": address}).with_environment()
    if config.address is None:
        raise ValueError("no service address: pass `address` or set TQ_ADDRESS")
    return config


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None = None, *, bootstrap: bool, on_event: OnEvent | None = None
) -> DataPlaneClient:
    """Return a connected client configured by `cfg`. With `bootstrap=True`, start a service in this process first
    (`cfg.address` has no effect); it stops when the client is closed. With `bootstrap=False`, attach to the service at
    `cfg.address` or TQ_ADDRESS; ValueError if neither is set. on_event: as for `connect`."""
    config = DataPlaneConfig.of(cfg)
    if not bootstrap:
        config = config.with_environment()
        if config.address is None:
            raise ValueError(
                "bootstrap=False requires the address of a running service: set `address` in the data plane config"
            )
        return DataPlaneClient(config, on_event=on_event).connect()
    server = serve(config)  # the client closes it, or this function after an error
    try:
        return DataPlaneClient(replace(config, address=server.address), owns=server, on_event=on_event).connect()
    except BaseException:
        server.close()
        raise
