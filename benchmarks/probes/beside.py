"""Work of this project beside the same work of the TransferQueue package (0.1.11), in two processes
that take turns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import MIN_REPETITIONS, Cost, cores, cost, median_cost, ratios
from benchmarks.payload import BatchSpec, Shape
from benchmarks.probes.base import Figure

TOKENS = 1000
REPETITIONS = 3
"""Repetitions of each operation in one turn. Their medians count."""
WARM_UP = 2
IN_FLIGHT = 64
PUTS_EACH = 4
"""Rollouts that a coroutine puts, one after another, in one repetition."""

SINGLES = 16
"""Calls for one sample in one repetition."""
KEYS = [f"single-{number}" for number in range(SINGLES)]
WIDE = BatchSpec(shape=Shape.DENSE, rows=512, length=4, fields=28)

Work = Callable[[], Cost]
"""Returns the cost of one call."""
Put = Callable[[str, dict[str, Tensor]], Awaitable[Any]]
"""Puts a sample under a key."""
Costs = Mapping[str, list[Cost]]
"""By name of the work, the cost of each round."""


def count_rounds(*, quick: bool) -> int:
    return MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1


def prepare_side() -> None:
    """Prepare the process of either side, before it imports the package."""
    os.environ.update({"TQ_NUM_THREADS": str(cores()), "TQ_LOGGING_LEVEL": "ERROR"})


def in_turns(go: Callable[[], Any], number: int, rounds: int, works: Mapping[str, Work]) -> Costs:
    """Return the costs of side `number`, 0 or 1. In the first half of a round one side works while
    the other waits, in the second half the other. Their order alternates."""
    taken: dict[str, list[Cost]] = {name: [] for name in works}
    for round_number in range(rounds + WARM_UP):
        for name, work in works.items():
            for half in range(2):
                go()
                if (half + round_number) % 2 == number:
                    taken[name].append(median_cost([work() for _ in range(REPETITIONS)]))
    go()
    return {name: costs[WARM_UP:] for name, costs in taken.items()}


def compared(kind: str, original: Costs, ours: Costs) -> list[Figure]:
    """Return the milliseconds of each work, and the speed of ours relative to the package. kind: of
    ours."""
    figures = []
    for name, theirs in original.items():
        seconds = ratios([each.seconds for each in theirs], [each.seconds for each in ours[name]])
        total = ratios([each.total for each in theirs], [each.total for each in ours[name]])
        figures += [
            *_milliseconds(f"{kind}: {name}", ours[name]),
            *_milliseconds(f"TransferQueue: {name}", theirs),
            Figure(name=f"{kind} : TransferQueue, {name}", rounds=seconds, unit="x"),
            Figure(name=f"{kind} : TransferQueue, {name}, CPU of all", rounds=total, unit="x"),
        ]
    return figures


def _milliseconds(name: str, costs: list[Cost]) -> list[Figure]:
    figures = []
    for place, part in enumerate(("", ", CPU of the client", ", CPU of all")):
        rounds = [1e3 * each[place] for each in costs]
        figures.append(Figure(name=name + part, rounds=rounds, unit="ms"))
    return figures


def rollout() -> dict[str, Tensor]:
    """Return the values of one sample."""
    tokens = torch.arange(TOKENS)
    return {
        "input_ids": tokens,
        "mask": tokens,
        "logprobs": tokens.float(),
        "reward": torch.tensor(1.0),
    }


def small_columns() -> dict[str, Tensor]:
    """Return the values of one sample with many fields."""
    return {f"column_{number}": torch.arange(4) for number in range(20)}


def in_flight(
    loop: asyncio.AbstractEventLoop,
    put: Put,
    clear: Callable[[list[str]], Any],
    make: Callable[[], dict[str, Tensor]],
) -> Cost:
    """Return the cost of one put, in each of many concurrent coroutines. make: returns the values
    of a sample."""
    keys = [[f"{lane}-{turn}" for turn in range(PUTS_EACH)] for lane in range(IN_FLIGHT)]

    async def one_after_another(mine: list[str]) -> None:
        for key in mine:
            await put(key, make())

    async def all_of_them() -> None:
        await asyncio.gather(*map(one_after_another, keys))

    used = cost(lambda: loop.run_until_complete(all_of_them()), IN_FLIGHT * PUTS_EACH)
    clear([key for mine in keys for key in mine])
    return used
