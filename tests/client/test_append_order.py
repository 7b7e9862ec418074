"""Concurrent appends of one client to a sample: one after another, in the order of their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataplane import AsyncDataPlaneClient, DataPlaneClient, SchemaError, Server, connect_async
from tests.service import client, server  # noqa: F401

pytestmark = pytest.mark.integration


def piece(number: int, *samples: str) -> dict[str, Any]:
    return {
        "sample_ids": list(samples),
        "partition_id": "train",
        "fields": {"x": [torch.tensor([number])] * len(samples)},
        "tags": [{"last": number}] * len(samples),
        "mode": "append",
    }


@pytest.fixture
def rows(server: Server, client: DataPlaneClient) -> Iterator[Any]:
    client.register_partition("train", ["x"], None, [])
    yield lambda name: client.get_samples([name], "train", ["x"])["x"][0].tolist()
    client.clear_samples(None, "train")


@pytest.mark.parametrize("count", [2, 60])
def test_coroutines(server: Server, client: DataPlaneClient, rows: Any, count: int) -> None:
    async def main() -> None:
        async with connect_async(server.address) as mine:
            appends = [mine.put_samples(**piece(number, "a", f"{number % 2}")) for number in range(count)]
            tags = mine.put_samples(["a"], "train", tags=[{"last": "done"}], mode="append")
            await asyncio.gather(*appends, tags)
            await mine.put_samples(**piece(count, "a"))

    asyncio.run(main())
    assert rows("a") == [*range(count + 1)]
    assert rows("0") == [*range(0, count, 2)]
    assert rows("1") == [*range(1, count, 2)]


def test_calls_that_fail_or_are_cancelled_let_the_next_one_go(
    server: Server, client: DataPlaneClient, rows: Any
) -> None:
    async def main(mine: AsyncDataPlaneClient) -> list[Any]:
        wrong = piece(2, "a") | {"fields": {"x": [torch.ones(1)]}}
        calls = [piece(0, "a"), piece(1, "a"), wrong, piece(3, "a"), piece(4, "a", "b"), piece(5, "b")]
        tasks = [asyncio.create_task(mine.put_samples(**call)) for call in calls]
        await asyncio.sleep(0)  # each has taken its turn
        tasks[1].cancel()  # waits for 0
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def connected() -> list[Any]:
        async with connect_async(server.address) as mine:
            await mine.connect()
            return await main(mine)

    outcomes = asyncio.run(connected())
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert isinstance(outcomes[2], SchemaError)
    assert rows("a") == [0, 4]
    assert rows("b") == [4, 5]


def test_threads(client: DataPlaneClient, rows: Any) -> None:
    def work(who: int) -> None:
        for number in range(20):
            client.put_samples(**piece(who * 100 + number, "a"))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    for who in range(6):
        assert [each % 100 for each in rows("a") if each // 100 == who] == [*range(20)]
