"""An async client belongs to one event loop, says so in others, and can be closed from anywhere."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dataplane import (
    AsyncDataPlaneClient,
    CallTimeoutError,
    ClientClosedError,
    DataPlaneClient,
    KVBatchMeta,
    Server,
    ServiceUnavailableError,
    connect,
    connect_async,
    serve,
)
from dataplane.client import async_session, preallocated, unit_connections
from dataplane.client.rpc.async_channel import AsyncChannel
from dataplane.client.unit_connections import UnitConnections
from tests.restarts import WAIT_S, wait_until

pytestmark = pytest.mark.integration

NOBODY = "127.0.0.1:1"
META = KVBatchMeta("p", "train", ["a"], fields=["x"])
ARGUMENTS: dict[str, Any] = {
    "path": "nowhere",
    "meta": META,
    "sample_ids": ["a"],
    "sample_id": "a",
    "partition_id": "p",
    "fields": ["x"],
    "select_fields": ["x"],
    "required_fields": ["x"],
    "num_samples": 1,
    "consumer_tasks": ["train"],
    "task_name": "train",
    "task_names": ["train"],
    "batch_size": 1,
    "lease_s": 1.0,
    "tags": [{}],
    "unit": 1,
    "version": 1,
}
METHODS = [
    name
    for name, method in inspect.getmembers(AsyncDataPlaneClient, inspect.iscoroutinefunction)
    if not name.startswith("_") and name not in ("close", "perform")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve({"capacity_bytes": 8 << 20, "heartbeat_s": 0.2}) as running:
        yield running


@pytest.fixture(scope="module")
def looking(server: Server) -> Iterator[DataPlaneClient]:
    with connect(server.address) as opened:
        yield opened


def sessions(client: DataPlaneClient) -> int:
    return len(client.stats().sessions)


def calling(client: AsyncDataPlaneClient, name: str) -> Callable[[], Coroutine[Any, Any, Any]]:
    method = getattr(client, name)
    parameters = inspect.signature(method).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return lambda: method(**{name: ARGUMENTS[name] for name in wanted})


async def refused(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    with pytest.raises(ClientClosedError, match="another event loop"):
        await asyncio.wait_for(call(), 60)


def test_every_call_in_a_second_loop_is_refused(server: Server, looking: DataPlaneClient) -> None:
    before = sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(connected(client))
    for name in METHODS:
        asyncio.run(refused(calling(client, name)))
    asyncio.run(client.close())
    loop.close()
    with pytest.raises(ClientClosedError, match=r"close\(\) was called"):
        asyncio.run(connected(client))
    wait_until(lambda: sessions(looking) == before, "no session of a client whose loop is gone")


def test_a_closed_loop_ends_the_session_and_the_next_call_opens_another_one(
    server: Server, looking: DataPlaneClient
) -> None:
    before = sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    asyncio.run(connected(client))
    wait_until(lambda: sessions(looking) == before, "the session of the closed loop ends")
    asyncio.run(connected(client))
    asyncio.run(connected(client))
    asyncio.run(client.close())
    wait_until(lambda: sessions(looking) == before, "the last session ends")


def test_cancelling_while_it_opens_leaves_nothing(server: Server, looking: DataPlaneClient) -> None:
    before = sessions(looking)

    async def main() -> None:
        client = connect_async(server.address)
        opening = asyncio.create_task(client.connect())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await client.close()

    asyncio.run(main())
    assert sessions(looking) == before


async def connected(client: AsyncDataPlaneClient) -> None:
    await client.connect()


def test_beside_a_loop_that_runs_only_that_one_works(server: Server, looking: DataPlaneClient) -> None:
    before = sessions(looking)
    client = connect_async(server.address, heartbeat_s=0.2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(60)

    try:
        there(client.connect())
        asyncio.run(refused(client.stats))
        assert there(client.stats()).sessions
        asyncio.run(client.close())
        wait_until(lambda: sessions(looking) == before, "the session ended in its own loop")
        there(others_end())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def others_end() -> None:
    """The tasks of this loop but this one, of which one may be closing a connection."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=60)


def test_closing_after_a_failed_connection_raises_nothing() -> None:
    async def fail(*, wait: bool) -> None:
        client = connect_async(NOBODY, connect_timeout_s=0.5)
        if wait:
            with pytest.raises(ServiceUnavailableError):
                await client.connect()
        else:
            opening = asyncio.create_task(client.connect())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await client.close()
        await client.close()

    asyncio.run(fail(wait=True))
    asyncio.run(fail(wait=False))


async def close_and_cancel(client: AsyncDataPlaneClient, patch: pytest.MonkeyPatch) -> None:
    """Cancel `close` while it waits for the copies in progress."""
    loop, waits, end_copies = asyncio.get_running_loop(), asyncio.Event(), async_session.end_copies

    def seen(*arguments: Any) -> None:
        loop.call_soon_threadsafe(waits.set)
        end_copies(*arguments)

    patch.setattr(async_session, "end_copies", seen)
    closing = asyncio.create_task(client.close())
    await asyncio.wait_for(waits.wait(), WAIT_S)
    patch.setattr(async_session, "end_copies", end_copies)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


def test_a_close_that_was_cancelled_can_be_repeated(
    server: Server, looking: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sessions(looking)

    async def main() -> None:
        client = connect_async(server.address)
        await client.connect()
        connection = await client._connection()
        with (copy := threading.Lock()):  # for which `close` waits
            connection._copies.enter(copy)
            await close_and_cancel(client, monkeypatch)
        await client.close()
        await client.close()
        assert connection._channel._context.closed

    asyncio.run(main())
    assert sessions(looking) == before


def test_a_close_that_waited_in_vain_for_a_copy_can_be_repeated(server: Server) -> None:
    async def main() -> None:
        client = connect_async(server.address, call_timeout_s=0.05)
        connection = await client._connection()
        connection._config = replace(connection._config, connect_timeout_s=0.05)
        with (copy := threading.Lock()):
            connection._copies.enter(copy)
            with pytest.raises(CallTimeoutError):
                await client.close()
        await client.close()
        assert connection._channel._context.closed

    asyncio.run(main())


def test_a_client_whose_close_was_cancelled_ends_when_it_is_dropped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> tuple[AsyncDataPlaneClient, AsyncChannel]:
        client = connect_async(server.address)
        connection = await client._connection()
        with (copy := threading.Lock()):
            connection._copies.enter(copy)
            await close_and_cancel(client, monkeypatch)
        return client, connection._channel

    client, channel = asyncio.run(main())
    del client
    gc.collect()
    wait_until(lambda: channel._context.closed, "the thread and the sockets of the dropped client end")


def test_a_connection_that_failed_in_one_loop_is_tried_again_in_another(server: Server) -> None:
    client = connect_async(NOBODY, connect_timeout_s=0.5)

    async def fails() -> None:
        with pytest.raises(ServiceUnavailableError):
            await client.connect()

    asyncio.run(fails())
    asyncio.run(fails())
    asyncio.run(client.close())


def test_small_copies_are_made_on_the_loop_and_large_ones_elsewhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hand a few kilobytes to another thread takes longer than to copy them; more would hold up the loop."""
    copied_by: dict[str, int] = {}
    read_by: dict[str, int] = {}
    write, gather = UnitConnections._write, unit_connections.gather

    def seen(self: UnitConnections, placements: Any, columns: Any, *more: Any) -> None:
        copied_by[columns[0].name] = threading.get_ident()
        write(self, placements, columns, *more)

    def seen_reading(connections: Any, located: Any, *more: Any) -> Any:
        read_by[located[0].name] = threading.get_ident()
        return gather(connections, located, *more)

    monkeypatch.setattr(UnitConnections, "_write", seen)
    monkeypatch.setattr(unit_connections, "gather", seen_reading)
    # On a busy machine puts count as soon after one another, too, and those ask again who ask before the service knows
    # that this client is on the unit's host.
    monkeypatch.setattr(preallocated, "SOON_S", 600.0)
    monkeypatch.setattr(preallocated.PreallocatedBuffer, "record_rejection", lambda self: None)

    async def puts() -> None:
        async with connect_async(server.address) as client:
            await client.register_partition("copies", ["small", "large"], None, [])
            for _ in range(600):  # until there is preallocated space
                await client.put_samples(["s0"], "copies", {"small": torch.zeros(1, 100)})
                if copied_by["small"] == threading.get_ident():
                    break
                await asyncio.sleep(0.1)
            await client.put_samples(["s0"], "copies", {"large": torch.zeros(1, 100_000)})
            for name in ("small", "large"):
                await client.get_samples(["s0"], "copies", [name])
            await client.clear_samples(None, "copies")

    asyncio.run(puts())
    assert copied_by["small"] == threading.get_ident()
    assert copied_by["large"] != threading.get_ident()
    assert read_by["small"] == threading.get_ident()
    assert read_by["large"] != threading.get_ident()
