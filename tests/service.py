"""A service and a client of it, for a whole test module. Fixtures are imported by the files that use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dataplane
from dataplane import DataPlaneClient, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with dataplane.serve({"capacity_bytes": 32 << 20}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[DataPlaneClient]:
    with dataplane.connect(server.address) as connected:
        yield connected
