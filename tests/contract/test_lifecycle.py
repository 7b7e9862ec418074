"""Clients: closing while calls are under way, forked children, pickles, threads, many services' worth of reuse."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dataplane import DataPlaneClient, Server, connect, connect_async, serve
from dataplane.core import failpoints
from dataplane.errors import ClientClosedError
from tests.restarts import wait_until

from .conftest import settings_of, unit_transport
from .values import same_rows

pytestmark = pytest.mark.integration

MIB = 1 << 20


def names(count: int) -> list[str]:
    return [f"s{n}" for n in range(count)]


def nothing_is_held(client: DataPlaneClient) -> bool:
    """What clients held that have said goodbye is free once the unit has proof that they are gone."""
    (unit,) = client.stats().units
    return unit.reserved_bytes == unit.pinned_bytes == 0


def test_close_is_idempotent_and_ends_the_client(open_client: Callable[[], DataPlaneClient]) -> None:
    client = open_client()
    client.stats()
    client.close()
    client.close()


def test_a_closed_client_refuses(server: Server) -> None:
    client = connect(server.address)
    client.close()
    with pytest.raises(ClientClosedError):
        client.stats()


def test_one_client_closing_affects_nobody_else(
    client: DataPlaneClient, partition: str, open_client: Callable[[], DataPlaneClient]
) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    other = open_client()
    other.put_samples(names(3), partition, {"x": torch.arange(3)})
    other.close()
    assert client.get_samples(names(3), partition, ["x"])["x"].tolist() == [0, 1, 2]


def test_close_wakes_a_waiting_claim(server: Server, client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    waiting = connect(server.address)
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(waiting.claim_meta, partition, "train", ["x"], 1, timeout_s=600.0)
        while not any(part.waiting_claims for part in client.stats().partitions if part.partition == partition):
            assert not claim.done()
        waiting.close()
        with pytest.raises(ClientClosedError):
            claim.result(60)


@pytest.mark.parametrize("force_remote", [False, True])
def test_close_waits_for_a_copy_under_way(server: Server, force_remote: bool) -> None:
    watcher = connect(server.address)
    watcher.register_partition("closing", ["x"], None, [])
    closing = connect(server.address, force_remote=force_remote)
    copying, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        copying.set()
        assert go_on.wait(60)

    failpoints.arm("bulk.write.between_frames" if force_remote else "put.mid_copy", pause)
    value = torch.arange(3 * MIB).reshape(3, MIB)
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(closing.put_samples, names(3), "closing", {"x": value})
        assert copying.wait(60)
        failpoints.disarm()
        close = pool.submit(closing.close)
        go_on.set()
        close.result(60)
        assert put.result(60).size == 3
        assert torch.equal(watcher.get_samples(names(3), "closing", ["x"])["x"], value)
    watcher.clear_samples(None, "closing")
    wait_until(lambda: nothing_is_held(watcher))
    watcher.close()


def test_cancelled_puts_and_gets_leave_nothing(server: Server) -> None:
    async def scenario() -> None:
        watcher = connect_async(server.address)
        client = connect_async(server.address)
        await watcher.register_partition("cancel", ["x"], None, [])
        value = torch.arange(2 * MIB).reshape(2, MIB)
        loop = asyncio.get_running_loop()
        for place in ("put.mid_copy", "get.mid_copy"):
            copying, go_on = asyncio.Event(), threading.Event()

            def pause(copied: Callable[[], None] = copying.set, go_on: threading.Event = go_on) -> None:
                loop.call_soon_threadsafe(copied)
                assert go_on.wait(60)

            if place == "get.mid_copy":
                await client.put_samples(names(2), "cancel", {"x": value})
            failpoints.arm(place, pause)
            call = client.put_samples if place == "put.mid_copy" else client.get_samples
            argument = {"x": value} if place == "put.mid_copy" else ["x"]
            task = asyncio.ensure_future(call(names(2), "cancel", argument))
            await asyncio.wait_for(copying.wait(), 60)
            failpoints.disarm()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            if place == "put.mid_copy":
                await client.close()
                assert (await watcher.list_samples("cancel")).size == 0
                client = connect_async(server.address)
        await client.close()
        await watcher.clear_samples(None, "cancel")
        await watcher.close()

    asyncio.run(scenario())
    with connect(server.address) as onlooker:
        wait_until(lambda: nothing_is_held(onlooker))


def test_a_cancelled_claim_takes_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with connect_async(server.address) as client:
            await client.register_partition("cancelled", ["x"], None, ["train"])
            task = asyncio.ensure_future(client.claim_meta("cancelled", "train", ["x"], 2, timeout_s=600.0))
            while not any(p.waiting_claims for p in (await client.stats()).partitions if p.partition == "cancelled"):
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.put_samples(names(2), "cancelled", {"x": torch.arange(2)})
            assert (await client.claim_meta("cancelled", "train", ["x"], 2, timeout_s=60.0)).size == 2
            await client.clear_samples(None, "cancelled")

    asyncio.run(scenario())


def test_a_pickled_client_reconnects_where_it_lands(server: Server) -> None:
    with connect(server.address) as client:
        client.register_partition("shipped", ["x"], None, [])
        with pickle.loads(pickle.dumps(client)) as copy:
            copy.put_samples(["a"], "shipped", {"x": torch.arange(1)})
        assert client.list_samples("shipped").sample_ids == ["a"]
        client.clear_samples(None, "shipped")


def _use_inherited(client: DataPlaneClient, views: torch.Tensor) -> None:
    assert views.tolist() == [[1, 1]] * 4
    client.put_samples(["child"], "forked", {"x": torch.full((1, 2), 7)})
    assert client.get_samples(["child"], "forked", ["x"])["x"].tolist() == [[7, 7]]
    client.close()


@pytest.mark.parametrize("force_remote", [False, True])
def test_a_forked_child_opens_its_own_session(server: Server, force_remote: bool) -> None:
    with connect(server.address, force_remote=force_remote) as client:
        client.register_partition("forked", ["x"], None, [])
        client.put_samples(names(4), "forked", {"x": torch.ones(4, 2, dtype=torch.int64)})
        views = client.get_samples(names(4), "forked", ["x"], copy=False)["x"]
        child = multiprocessing.get_context("fork").Process(target=_use_inherited, args=(client, views))
        child.start()
        child.join(120)
        assert child.exitcode == 0
        assert client.get_samples(["child", "s0"], "forked", ["x"])["x"].tolist() == [[7, 7], [1, 1]]
        client.clear_samples(None, "forked")


def test_views_of_a_dead_parent_stay_in_its_child() -> None:
    """The parent dies; its forked child still sees the bytes, which are reused only when the child is gone, too."""
    with serve({"capacity_bytes": 4 * MIB, "reserve_fraction": 0.0, "heartbeat_s": 0.2}) as server:
        client = connect(server.address, heartbeat_s=0.2, put_timeout_s=60.0)
        client.register_partition("p", {"x": None}, None, [])
        client.put_samples(["s0"], "p", {"x": torch.ones(1, 2 * MIB, dtype=torch.uint8)})
        ready_r, ready_w = os.pipe()
        end_r, end_w = os.pipe()
        parent = os.fork()
        if parent == 0:
            _parent_with_child(server.address, ready_w, end_r)
        os.close(ready_w)
        assert os.read(ready_r, 1) == b"!"
        os.waitpid(parent, 0)
        client.clear_samples(None, "p")
        client.register_partition("p", {"x": None}, None, [])
        with connect(server.address, put_timeout_s=2.0) as hurried, pytest.raises(TimeoutError):
            hurried.put_samples(["s1"], "p", {"x": torch.zeros(1, 3 * MIB, dtype=torch.uint8)})
        os.write(end_w, b"!")
        client.put_samples(["s1"], "p", {"x": torch.zeros(1, 3 * MIB, dtype=torch.uint8)})
        assert os.read(ready_r, 1) == b"1"
        client.close()
        for fd in (ready_r, end_r, end_w):
            os.close(fd)


def _parent_with_child(address: str, ready: int, end: int) -> None:
    """In a forked process: read views, fork a child that keeps them, die."""
    client = connect(address, heartbeat_s=0.2)
    views = client.get_samples(["s0"], "p", ["x"], copy=False)["x"]
    if os.fork() == 0:
        os.write(ready, b"!")
        os.read(end, 1)
        os.write(ready, b"1" if bool((views.numpy() == 1).all()) else b"0")  # torch's thread pool is the parent's
        os._exit(0)
    os._exit(0)


@pytest.mark.usefixtures("poison")
def test_nearly_full_and_poisoned(connection_kind: str) -> None:
    """Space is reused at once, and overwritten first; readers that copy or hold views see their own rows."""
    settings = {"capacity_bytes": 2 * MIB, "reserve_fraction": 0.1, "bulk_transport": unit_transport()}
    with serve(settings) as server, connect(server.address, **settings_of(connection_kind)) as client:
        client.register_partition("p", ["input_ids"], None, [])
        generator = np.random.default_rng(0)
        kept: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for step in range(40):
            rows = [torch.full((int(size),), step * 100 + n) for n, size in enumerate(generator.integers(0, 4000, 12))]
            ids = [f"{step}-{n}" for n in range(12)]
            meta = client.put_samples(ids, "p", {"input_ids": rows})
            views = client.get_samples(meta, "p", ["input_ids"], copy=False)["input_ids"]
            kept.append((rows, views))
            assert same_rows(client.get_samples(ids[::-2], "p", ["input_ids"])["input_ids"], rows[::-2])
            client.clear_samples(meta, "p")
            for expected, seen in kept:
                assert same_rows(seen, expected)
            del kept[:-2]
        kept.clear()
        del views
        client.clear_samples(None, "p")
        assert client.stats().units[0].live_bytes == 0


def test_threads_share_a_client(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])

    def work(number: int) -> list[int]:
        mine = [f"{number}-{n}" for n in range(20)]
        for n, name in enumerate(mine):
            client.put_samples([name], partition, {"x": torch.tensor([100 * number + n])})
        values: list[int] = client.get_samples(mine, partition, ["x"])["x"].tolist()
        return values

    with ThreadPoolExecutor(8) as pool:
        for number, values in enumerate(pool.map(work, range(8))):
            assert values == [100 * number + n for n in range(20)]
    assert client.list_samples(partition).size == 160


def test_a_close_look(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x", "y"], num_samples=4, consumer_tasks=["train"])
    client.put_samples(["look-a", "look-b"], partition, {"x": torch.arange(2)}, tags=[{"group": "g"}, {"group": "h"}])
    seen = client.matrix(partition, columns=1)
    assert (seen.samples.tolist(), {name: n.tolist() for name, n in seen.produced.items()}) == (
        [2],
        {"x": [2], "y": [0]},
    )
    shown = client.show_sample("look-b")
    assert (shown.partition, shown.tags, shown.missing) == (partition, {"group": "h"}, ("y",))
    assert client.show_sample("look-b", partition).generation == shown.generation
    with pytest.raises(KeyError, match="nobody"):
        client.show_sample("nobody")
    drawn = client.memory_map(shown.cells[0].unit, cells=16)
    assert drawn.live.sum() >= shown.cells[0].size_bytes
    assert all(wait.partition != partition for wait in client.waits().waits)
