"""Concurrent coroutines that each put finished rollouts, one after another, beside the TransferQueue package."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from benchmarks.measure import MIN_REPETITIONS, cores, cpu_seconds, percentile, ratios, uncollected
from benchmarks.probes.adapter import IN_FLIGHT, PARTITION, TOKENS, WARM_UP, Original
from benchmarks.probes.base import Figure, side_by_side
from benchmarks.systems.service import Service
from dataplane import AsyncDataPlaneClient, connect_async

PUTS_EACH = 4
"""Rollouts that a coroutine puts in one repetition."""
REPETITIONS = 3
"""Repetitions in one turn. Their medians count."""

Put = Callable[[str, dict[str, Any]], Awaitable[Any]]


def puts_in_flight(*, quick: bool) -> list[Figure]:
    """Return the puts per second, and the processor time of client and controller for each, round by round."""
    rounds = MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1
    original, ours = side_by_side(_side, [(number, rounds + WARM_UP) for number in range(2)])
    seconds, theirs = ours["seconds"][WARM_UP:], original["seconds"][WARM_UP:]
    name, note = f"{IN_FLIGHT} coroutines, puts of one rollout", f"{rounds} rounds"
    return [
        Figure(name=name, rounds=[1 / each for each in seconds], unit="/s", note=note),
        Figure(name=f"{name}: TransferQueue", rounds=[1 / each for each in theirs], unit="/s"),
        Figure(name=f"{name} : TransferQueue", rounds=ratios(theirs, seconds), unit="x"),
        Figure(name=f"{name}, CPU of the client", rounds=[1e3 * each for each in ours["client"][WARM_UP:]], unit="ms"),
        Figure(
            name=f"{name}, CPU of the service", rounds=[1e3 * each for each in ours["service"][WARM_UP:]], unit="ms"
        ),
    ]


def _side(go: Callable[[], Any], number: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds, and the processor seconds of client and service, of one put in each round, with the package
    (0) or with `AsyncDataPlaneClient` (1). The order of the two alternates."""
    os.environ.update({"TQ_NUM_THREADS": str(cores()), "TQ_LOGGING_LEVEL": "ERROR"})
    loop = asyncio.new_event_loop()
    with Original() if number == 0 else _Native(loop) as side:
        turns: list[tuple[float, float, float]] = []
        for round_number in range(rounds):
            for half in range(2):
                go()
                if (half + round_number) % 2 == number:
                    turns.append(_turn(side, loop, number))
        go()
    loop.close()
    return {name: [turn[place] for turn in turns] for place, name in enumerate(("seconds", "client", "service"))}


def _turn(side: Any, loop: asyncio.AbstractEventLoop, number: int) -> tuple[float, float, float]:
    """Return the medians of the repetitions of one turn."""
    put = _put_with_the_package(side) if number == 0 else side.put
    repetitions = []
    with uncollected():
        for repetition in range(REPETITIONS):
            keys = [[f"{lane}-{repetition}-{turn}" for turn in range(PUTS_EACH)] for lane in range(IN_FLIGHT)]
            count, pid = IN_FLIGHT * PUTS_EACH, side.pid if number else os.getpid()
            begun, client, service = time.perf_counter(), time.process_time(), cpu_seconds(pid)
            loop.run_until_complete(_put_all(put, keys))
            now = time.perf_counter(), time.process_time(), cpu_seconds(pid)
            repetitions.append(
                tuple((each - before) / count for each, before in zip(now, (begun, client, service), strict=True))
            )
            every = [key for mine in keys for key in mine]
            if number == 0:
                side.kv_clear(every, PARTITION)
            else:
                loop.run_until_complete(side.client.clear_samples(every, PARTITION))
    return tuple(percentile([each[place] for each in repetitions], 0.5) for place in range(3))  # type: ignore[return-value]


async def _put_all(put: Put, keys: list[list[str]]) -> None:
    tokens = torch.arange(TOKENS)
    rollout = {"input_ids": tokens, "mask": tokens, "logprobs": tokens.float(), "reward": torch.tensor(1.0)}

    async def one_after_another(mine: list[str]) -> None:
        for key in mine:
            await put(key, rollout)

    await asyncio.gather(*map(one_after_another, keys))


def _put_with_the_package(module: Any) -> Put:
    async def put(key: str, rollout: dict[str, Any]) -> None:
        await module.async_kv_put(key, PARTITION, rollout)

    return put


class _Native:
    """A service process with one unit, and an async client in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.client: AsyncDataPlaneClient

    async def put(self, key: str, rollout: dict[str, Any]) -> None:
        columns = {name: [value] for name, value in rollout.items()}
        await self.client.put_samples([key], PARTITION, columns)

    def __enter__(self) -> _Native:
        self._service = Service({"capacity_bytes": 1 << 30})
        self.pid = self._service.pid
        self.client = connect_async(self._service.address)
        names = ["input_ids", "mask", "logprobs", "reward"]
        self._loop.run_until_complete(self.client.register_partition(PARTITION, names, None, ["train"]))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self.client.close())
        self._service.close()
