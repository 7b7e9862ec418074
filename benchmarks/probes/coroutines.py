"""Concurrent coroutines that each put finished rollouts, one after another, beside the TransferQueue package."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import torch

from benchmarks.measure import MIN_REPETITIONS, cores, cpu_seconds, percentile, ratios, uncollected
from benchmarks.probes.adapter import IN_FLIGHT, PARTITION, TOKENS, WARM_UP, Original
from benchmarks.probes.base import Figure, side_by_side
from benchmarks.systems.service import Service
from dataplane import connect_async

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
    with _Package() if number == 0 else _Native(loop) as side:
        turns: list[tuple[float, ...]] = []
        for round_number in range(rounds):
            for half in range(2):
                go()
                if (half + round_number) % 2 == number:
                    turns.append(_turn(side, loop))
        go()
    loop.close()
    return {name: [turn[place] for turn in turns] for place, name in enumerate(("seconds", "client", "service"))}


def _turn(side: _Package | _Native, loop: asyncio.AbstractEventLoop) -> tuple[float, ...]:
    """Return the medians of the repetitions of one turn: seconds, and processor seconds of client and service."""
    repetitions = []
    with uncollected():
        for repetition in range(REPETITIONS):
            keys = [[f"{lane}-{repetition}-{turn}" for turn in range(PUTS_EACH)] for lane in range(IN_FLIGHT)]
            before = _clocks(side)
            loop.run_until_complete(_put_all(side.put, keys))
            taken = [after - each for after, each in zip(_clocks(side), before, strict=True)]
            repetitions.append([each / (IN_FLIGHT * PUTS_EACH) for each in taken])
            loop.run_until_complete(side.clear([key for mine in keys for key in mine]))
    return tuple(percentile(list(values), 0.5) for values in zip(*repetitions, strict=True))


def _clocks(side: _Package | _Native) -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), cpu_seconds(side.pid)


async def _put_all(put: Put, keys: list[list[str]]) -> None:
    tokens = torch.arange(TOKENS)
    rollout = {"input_ids": tokens, "mask": tokens, "logprobs": tokens.float(), "reward": torch.tensor(1.0)}

    async def one_after_another(mine: list[str]) -> None:
        for key in mine:
            await put(key, rollout)

    await asyncio.gather(*map(one_after_another, keys))


class _Package:
    """The package's service, and its client in this process. pid: of this process, since the service has many."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._original = Original()

    async def put(self, key: str, rollout: dict[str, Any]) -> None:
        await self._module.async_kv_put(key, PARTITION, rollout)

    async def clear(self, keys: list[str]) -> None:
        await self._module.async_kv_clear(keys, PARTITION)

    def __enter__(self) -> Self:
        self._module = self._original.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._original.__exit__()


class _Native:
    """A service process with one unit, and an async client in this process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def put(self, key: str, rollout: dict[str, Any]) -> None:
        columns = {name: [value] for name, value in rollout.items()}
        await self._client.put_samples([key], PARTITION, columns)

    async def clear(self, keys: list[str]) -> None:
        await self._client.clear_samples(keys, PARTITION)

    def __enter__(self) -> Self:
        self._service = Service({"capacity_bytes": 1 << 30})
        self.pid = self._service.pid
        self._client = connect_async(self._service.address)
        names = ["input_ids", "mask", "logprobs", "reward"]
        self._loop.run_until_complete(self._client.register_partition(PARTITION, names, None, ["train"]))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._service.close()
