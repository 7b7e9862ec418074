"""Clients that nobody closed: what they had goes back once nothing refers to them."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from dataplane import AsyncDataPlaneClient, DataPlaneClient, connect, connect_async, serve
from dataplane.client.preallocated import PreallocatedBuffer
from tests.restarts import wait_until

pytestmark = pytest.mark.integration

SETTINGS = {"heartbeat_s": 0.2, "capacity_bytes": 16 << 20}
OTHERS: set[threading.Thread] = set()
"""Threads of clients that were there before the test."""


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    OTHERS.clear()
    OTHERS.update(client_threads())
    with serve(SETTINGS) as server, connect(server.address, heartbeat_s=0.2) as made:
        made.register_partition("p", ["x"], None, ["t"])
        made.put_samples(["a"], "p", {"x": torch.ones(1, 4)})
        made.get_samples(["a"], "p", ["x"])
        yield made


def client_threads() -> set[threading.Thread]:
    """Of all clients in this process."""
    return {thread for thread in threading.enumerate() if thread.name in ("tq-heartbeat", "tq-close")}


def held(client: DataPlaneClient) -> tuple[int, int]:
    """Sessions at the service, and threads of clients that this test made: those of others may end meanwhile."""
    return len(client.stats().sessions), len(client_threads() - OTHERS)


def test_what_dropped_clients_had_goes_back(client: DataPlaneClient) -> None:
    before, files = held(client), len(os.listdir("/proc/self/fd"))
    others = [pickle.loads(pickle.dumps(client)) for _ in range(5)]
    for other in others:
        assert torch.equal(other.get_samples(["a"], "p", ["x"])["x"], torch.ones(1, 4))
    assert held(client) == (before[0] + 5, before[1] + 5)
    del others, other
    gc.collect()
    wait_until(lambda: held(client) == before, "sessions and threads of dropped clients end")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files + 4, "their files are closed")


def test_a_view_outlives_its_dropped_client(client: DataPlaneClient) -> None:
    before = held(client)
    view = pickle.loads(pickle.dumps(client)).get_samples(["a"], "p", ["x"], copy=False)["x"]
    gc.collect()
    wait_until(lambda: held(client)[1] == before[1], "the dropped client ends")
    client.put_samples(["a"], "p", {"x": torch.zeros(1, 4)})
    client.put_samples(["b"], "p", {"x": torch.full((1, 4), 7.0)})
    assert torch.equal(view, torch.ones(1, 4))


def test_a_dropped_client_whose_view_lives_keeps_no_unused_space(
    client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.client.preallocated.SOON_S", 1e9)
    monkeypatch.setattr(PreallocatedBuffer, "give_up_idle", lambda self: None)
    other = pickle.loads(pickle.dumps(client))

    def reserves(writer: DataPlaneClient) -> bool:
        writer.put_samples(["b"], "p", {"x": torch.zeros(1, 4)})
        return client.stats().units[0].reserved_bytes > 0

    # The service grants preallocated space once the unit has reported the client.
    wait_until(partial(reserves, other), "space is preallocated")
    view = other.get_samples(["a"], "p", ["x"], copy=False)["x"]
    del other
    gc.collect()
    wait_until(lambda: client.stats().units[0].reserved_bytes == 0, "its unused space is free")
    assert torch.equal(view, torch.ones(1, 4))


async def use(client: AsyncDataPlaneClient) -> None:
    got = await client.get_samples(["a"], "p", ["x"])
    assert torch.equal(got["x"], torch.ones(1, 4))


def test_a_dropped_async_client_ends_in_its_loop(client: DataPlaneClient) -> None:
    before = held(client)

    async def drop() -> None:
        other = connect_async(client._config.address, heartbeat_s=0.2)
        await use(other)
        del other
        gc.collect()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, wait_until, lambda: held(client) == before, "the dropped client ends")

    asyncio.run(drop())


def test_an_async_client_whose_loop_is_closed_lets_go_of_what_it_had(client: DataPlaneClient) -> None:
    before = held(client)
    kept: list[AsyncDataPlaneClient] = []

    async def leave() -> None:
        kept.append(connect_async(client._config.address, heartbeat_s=0.2))
        await use(kept[0])

    asyncio.run(leave())
    kept.clear()
    gc.collect()
    wait_until(lambda: held(client) == before, "the dropped client ends")
