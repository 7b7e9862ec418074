"""Small operations of the native clients, beside the same of the TransferQueue package."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.measure import Cost, cost
from benchmarks.payload import Batch, BatchSpec, Shape, build
from benchmarks.probes.base import Figure, side_by_side
from benchmarks.probes.beside import (
    IN_FLIGHT,
    KEYS,
    SINGLES,
    TOKENS,
    WIDE,
    Costs,
    Put,
    Work,
    compared,
    count_rounds,
    in_flight,
    in_turns,
    prepare_side,
    rollout,
    small_columns,
)
from benchmarks.systems.base import System
from benchmarks.systems.dataplane_system import PARTITION, DataPlane
from dataplane import connect_async

READS = 8
"""Reads of a batch in one repetition."""
STORED = BatchSpec(shape=Shape.TOKENS, rows=512, length=TOKENS)


def beside_the_original(*, quick: bool) -> list[Figure]:
    """Measure the client for threads, and the puts of many coroutines of the async client."""
    original, ours = side_by_side(_side, [(number, count_rounds(quick=quick)) for number in (0, 1)])
    return compared("native", original, ours)


def _side(go: Callable[[], Any], number: int, rounds: int) -> Costs:
    """Return the costs with the package (0) or with this project (1)."""
    prepare_side()
    loop = asyncio.new_event_loop()
    with _native(loop) if number else _package() as (system, put):
        costs = in_turns(go, number, rounds, _works(system, loop, put))
    loop.close()
    return costs


@contextmanager
def _package() -> Iterator[tuple[System, Put]]:
    module = importlib.import_module("benchmarks.systems.transfer_queue_system")
    system = module.TransferQueue()
    system.open()

    async def put(key: str, values: dict[str, Tensor]) -> None:
        await module.transfer_queue.async_kv_put(key, PARTITION, values)

    yield system, put
    system.close()


@contextmanager
def _native(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[System, Put]]:
    system = DataPlane()
    system.open()
    client = connect_async(system.address)

    async def put(key: str, values: dict[str, Tensor]) -> None:
        columns = {name: [value] for name, value in values.items()}
        await client.put_samples([key], PARTITION, columns)

    yield system, put
    loop.run_until_complete(client.close())
    system.close()


def _works(system: System, loop: asyncio.AbstractEventLoop, put: Put) -> Mapping[str, Work]:
    batch = build(STORED)
    held = system.put(batch)
    part = system.part(held, 0, 64)
    ones = [system.part(held, row, row + 1) for row in range(SINGLES)]

    def put_ones() -> Cost:
        stored: list[Any] = []
        used = cost(lambda: stored.extend([system.put(_one(key)) for key in KEYS]), SINGLES)
        for each in stored:
            system.drop(each)
        return used

    def read_ones() -> Cost:
        return cost(lambda: [system.read(one, batch.names) for one in ones], SINGLES)

    def read_batch(rows: Any) -> Cost:
        def read() -> None:
            for _ in range(READS):
                system.read_padded(rows, batch.names)

        return cost(read, READS)

    def clear() -> Cost:
        wide = system.put(build(WIDE))
        return cost(lambda: system.drop(wide))

    def puts(make: Callable[[], dict[str, Tensor]]) -> Cost:
        return in_flight(loop, put, system.drop, make)

    return {
        "put of one sample": put_ones,
        "get of one sample": read_ones,
        "get_batch of 64 rows": partial(read_batch, part),
        "get_batch of 512 rows": partial(read_batch, held),
        "clear of 512 samples x 28 fields": clear,
        f"{IN_FLIGHT} coroutines, one rollout": partial(puts, rollout),
        f"{IN_FLIGHT} coroutines, 20 small columns": partial(puts, small_columns),
    }


def _one(key: str) -> Batch:
    return Batch(ids=[key], columns={name: value[None] for name, value in rollout().items()})
