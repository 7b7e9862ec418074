"""How long puts wait for space: as the service says, unless the client says otherwise."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dataplane import DataPlaneConfig, Server, connect, connect_async, serve
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 * MIB, "put_timeout_s": 300.0}) as running:
        yield running


def blocking(address: str, **settings: Any) -> None:
    with connect(address, **settings) as client:
        client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)})


def awaiting(address: str, **settings: Any) -> None:
    async def put() -> None:
        async with connect_async(address, **settings) as client:
            await client.put_samples(["late"], "p", {"x": torch.zeros(1, MIB)})

    asyncio.run(put())


@pytest.mark.parametrize("put", [blocking, awaiting])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 300.0), ({"put_timeout_s": 200.0}, 200.0), ({"put_timeout_s": math.inf}, math.inf)],
)
def test_the_service_says_unless_the_client_does(
    server: Server, put: Callable[..., None], settings: dict[str, float], expected: float
) -> None:
    with connect(server.address) as client:
        client.register_partition("p", ["x"], None, ["train"])
        client.put_samples(["full"], "p", {"x": torch.zeros(1, MIB)})
        waiter = threading.Thread(target=put, args=(server.address,), kwargs=settings)
        waiter.start()
        wait_until(lambda: len(client.waits().waits) == 1)
        (wait,) = client.waits().waits
        assert wait.until - wait.since == pytest.approx(expected)
        client.clear_samples(["full"], "p")
        waiter.join(WAIT_S)
        assert not waiter.is_alive()
        client.clear_samples(None, "p")


def test_nobody_says() -> None:
    assert DataPlaneConfig().put_timeout_s is None
    with serve({"capacity_bytes": 8 * MIB, "units": 0}) as server, connect(server.address) as client:
        assert client._connections.get().session_state.put_timeout_s == 60.0
