"""Processor time of the service for its commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from benchmarks.measure import MIN_REPETITIONS, cpu_seconds
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, KVBatchMeta, connect, connect_async

COMMANDS = {1: {"put": 1, "read": 1, "clear": 1}, 512: {"put": 2, "read": 1, "clear": 1}}
"""By rows, those of an operation. One row: PutRows; LocateRows; Clear. 512 rows: Allocate and
Commit; Locate; Clear."""
PER_ROUND = {1: 250, 512: 50}
"""Operations of each kind in a round, by their rows: about 50 ms of processor time."""
PIPELINED = 16
"""Clients that put at the same time, each in messages of one command."""
GROUPED = 64
"""Coroutines of one client, whose puts share messages."""
TURNS = 32
"""Puts of each of these in a round, one after another."""
WARM_UP = 2


def commands(*, quick: bool) -> list[Figure]:
    """Return the commands per second of processor time of the service's process. Puts, reads and clears of one row
    and of 512, with five fields, use shared memory, so the storage unit takes no part."""
    rounds = MIN_REPETITIONS if quick else 3 * MIN_REPETITIONS
    rates: dict[str, list[float]] = {}
    with service() as (running, client), _Crowd(running.address) as crowd:
        for number in range(rounds + WARM_UP):
            for how, put_all in (("pipelined", crowd.pipelined), ("in groups", crowd.in_groups)):
                begun = cpu_seconds(running.pid)
                ids = put_all(f"{number}")
                used = cpu_seconds(running.pid) - begun
                rates.setdefault(f"commands of put, 1 row, {how}", []).append(len(ids) / used)
                client.clear_samples(ids, PARTITION)
            for rows, count in PER_ROUND.items():
                for what, step in _steps(client, f"{number}", rows, count):
                    begun = cpu_seconds(running.pid)
                    step()
                    used = cpu_seconds(running.pid) - begun
                    name = f"commands of {what}, {rows} row{'s' * (rows > 1)}"
                    rates.setdefault(name, []).append(COMMANDS[rows][what] * count / used)
    return [
        Figure(name=name, rounds=each[WARM_UP:], unit="/s of CPU", note=f"{rounds} rounds")
        for name, each in rates.items()
    ]


class _Crowd:
    """Puts of one row at the same time, by several clients and by the coroutines of one."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = ExitStack()
        self._clients = [self._stack.enter_context(connect(address)) for _ in range(PIPELINED)]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(PIPELINED))
        self._async = connect_async(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._async.close())
        self._loop.close()
        self._stack.close()

    def pipelined(self, prefix: str) -> list[str]:
        """Put by several clients, each in its own thread. Return the ids."""
        ids = [[f"{prefix}-p{lane}-{turn}" for turn in range(TURNS)] for lane in range(PIPELINED)]

        def put(client: DataPlaneClient, mine: list[str]) -> None:
            for each in mine:
                client.put_samples([each], PARTITION, _columns(1))

        list(self._threads.map(put, self._clients, ids))
        return [each for mine in ids for each in mine]

    def in_groups(self, prefix: str) -> list[str]:
        """Put by the coroutines of one client. Return the ids."""
        ids = [[f"{prefix}-g{lane}-{turn}" for turn in range(TURNS)] for lane in range(GROUPED)]

        async def put(mine: list[str]) -> None:
            for each in mine:
                await self._async.put_samples([each], PARTITION, _columns(1))

        async def put_all() -> None:
            await asyncio.gather(*map(put, ids))

        self._loop.run_until_complete(put_all())
        return [each for mine in ids for each in mine]


def _columns(rows: int) -> dict[str, Tensor]:
    return {name: torch.arange(rows * 4).reshape(rows, 4) for name in ("a", "b", "c", "d", "e")}


def _steps(client: DataPlaneClient, prefix: str, rows: int, count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield `count` operations of each kind, on the same samples."""
    columns = _columns(rows)
    ids = [[f"{prefix}-{rows}-{number}-{row}" for row in range(rows)] for number in range(count)]
    metas: list[KVBatchMeta] = []

    def put() -> None:
        metas.extend(client.put_samples(each, PARTITION, columns) for each in ids)

    def read() -> None:
        for each in metas:
            client.get_samples(each, PARTITION, list(columns))

    def clear() -> None:
        for each in metas:
            client.clear_samples(each, PARTITION)

    yield from (("put", put), ("read", read), ("clear", clear))
