"""A service whose host has several addresses, the first of which is dead: clients and storage units try the next."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dataplane import DataPlaneConfig, Server, connect, serve
from dataplane.config import MIB
from dataplane.storage.unit import StorageUnit

pytestmark = pytest.mark.integration

NAME = "two.test"
SERVICES: dict[str, dict[str, Any]] = {"plain": {}, "token": {"token": "x"}}


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NAME` has them in Python only: ZMQ could not look it up."""
    honest = socket.getaddrinfo

    def found(host: Any, port: Any, *more: Any, **named: Any) -> list[Any]:
        if host != NAME:
            return honest(host, port, *more, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.fixture(params=SERVICES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "units": 0, **SERVICES[request.param]}) as started:
        yield started


def test_clients_and_units_try_the_next(server: Server, two_addresses: None) -> None:
    config = server.config
    more = {"token": config.token}
    address = f"{NAME}:{server.address.rpartition(':')[2]}"
    unit = StorageUnit(DataPlaneConfig(capacity_bytes=8 * MIB, **more), address, name="extra")
    with unit, connect(address, heartbeat_s=0.1, **more) as client:
        client.register_partition("p", ["x"], 2, ["t"])
        client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        assert client.get_samples(["b", "a"], "p", ["x"])["x"].tolist() == [1, 0]
        assert [found.name for found in client.stats().units] == ["extra"]
