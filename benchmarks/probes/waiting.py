"""The cost of waiting calls for other calls: one-row puts beside them, with few stored samples and with many."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.measure import MIN_REPETITIONS, alternating, seconds, steady
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, DataPlaneError, connect
from dataplane.client.async_client import AsyncDataPlaneClient

CHUNK = 10_000
ROW_BYTES = 8
CLAIMS = 16
CLAIMS_EACH = 2_000
"""Waiting claims of one session, whose number of pending calls is limited."""
WARM_UP = 2
TURN_S = 0.03
WAIT_S = 600.0
"""Longer than the probe runs."""


@dataclass(frozen=True, kw_only=True)
class Waited:
    """A client of a service in which other calls wait, and the partition that it puts into."""

    client: DataPlaneClient
    partition: str


def beside(*, quick: bool) -> list[Figure]:
    """Measure the milliseconds of a put of one row: beside a put that waits for the eviction of consumed samples of
    another partition, and into a partition in which claims of fresh samples and of groups wait."""
    kinds: tuple[tuple[str, Callable[[DataPlaneClient, DataPlaneClient, int], Waited], tuple[int, ...]], ...] = (
        ("put beside a put that waits for eviction", _full, (1_000, 20_000 if quick else 200_000)),
        (f"put beside {CLAIMS} claims that wait", _stale, (100, 20_000)),
        ("put beside claims of one task that wait", _unsatisfied, (0, 8_000)),
    )
    figures = []
    for name, prepare, sizes in kinds:
        with contextlib.ExitStack() as stack:
            found = {f"{name} at {size:,}": stack.enter_context(_waited(prepare, size)) for size in sizes}
            taken = _taken(found, MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1)
        figures += [Figure(name=each, rounds=ms, unit="ms", note="one client") for each, ms in taken.items()]
    return figures


def _taken(found: Mapping[str, Waited], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by figure."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for order in alternating(list(found.items()), rounds + WARM_UP):
        for name, waited in order:
            taken[name].append(steady(partial(_put, waited), turn_s=TURN_S) * 1e3)
    return {name: each[WARM_UP:] for name, each in taken.items()}


def _put(waited: Waited) -> float:
    row = {"x": torch.zeros(1, dtype=torch.int64)}
    tags = [{"weight_version": 0, "group": -1}]
    taken = seconds(lambda: waited.client.put_samples(["one"], waited.partition, row, tags=tags))
    waited.client.clear_samples(["one"], waited.partition)
    return taken


@contextlib.contextmanager
def _waited(prepare: Callable[[DataPlaneClient, DataPlaneClient, int], Waited], size: int) -> Iterator[Waited]:
    with (
        service() as (running, client),
        connect(running.address, put_timeout_s=WAIT_S) as waiting,
    ):
        yield prepare(client, waiting, size)


def _full(client: DataPlaneClient, waiting: DataPlaneClient, size: int) -> Waited:
    """Fill a partition with unconsumed samples, and begin a put of half as many that exceeds its budget."""
    client.register_partition("full", ["x"], None, ["task"], budget_bytes=size * ROW_BYTES * 5 // 4, when_full="evict")
    _fill(client, "full", size)
    columns = {"x": torch.zeros(size // 2, dtype=torch.int64)}
    _wait(client, waiting.put_samples, [f"late-{row}" for row in range(size // 2)], "full", columns)
    return Waited(client=client, partition=PARTITION)


def _stale(client: DataPlaneClient, waiting: DataPlaneClient, size: int) -> Waited:
    """Fill a partition with samples that are too old for half of the claims, and in groups too small for the other
    claims."""
    client.register_partition("stale", ["x"], None, ["task"])
    client.set_version("stale", CLAIMS)
    _fill(client, "stale", size)
    for number in range(CLAIMS // 2):
        claim = partial(waiting.claim_meta, "stale", "task", ["x"], timeout_s=WAIT_S)
        _wait(client, claim, 1, max_lag=number)
        _wait(client, claim, 2 + number, group_size=2 + number)
    return Waited(client=client, partition="stale")


def _unsatisfied(client: DataPlaneClient, waiting: DataPlaneClient, size: int) -> Waited:
    """Let many claims of one task wait for a field that the puts do not have."""
    client.register_partition("unsatisfied", ["x", "y"], None, ["task"])

    async def claim(count: int) -> None:
        async with AsyncDataPlaneClient(waiting.config) as claiming:
            one = partial(claiming.claim_meta, "unsatisfied", "task", ["y"], 1, timeout_s=WAIT_S)
            await asyncio.gather(*[one() for _ in range(count)], return_exceptions=True)

    for first in range(0, size, CLAIMS_EACH):
        count = min(CLAIMS_EACH, size - first)
        _wait(client, asyncio.run, claim(count), calls=count)
    return Waited(client=client, partition="unsatisfied")


def _fill(client: DataPlaneClient, partition: str, size: int) -> None:
    for first in range(0, size, CHUNK):
        rows = range(first, min(first + CHUNK, size))
        tags = [{"weight_version": 0, "group": row} for row in rows]
        ids = [f"{partition}-{row}" for row in rows]
        client.put_samples(ids, partition, {"x": torch.zeros(len(rows), dtype=torch.int64)}, tags=tags)


def _wait(
    client: DataPlaneClient,
    call: Callable[..., Any],
    *arguments: Any,
    calls: int = 1,
    **options: Any,
) -> None:
    """Begin a call that ends when its client or the service closes. Return once the service has
    received the `calls` that it makes."""

    def run() -> None:
        with contextlib.suppress(DataPlaneError):
            call(*arguments, **options)

    before = client.waits().total
    threading.Thread(target=run, daemon=True).start()
    pause = threading.Event()
    while client.waits().total < before + calls:
        pause.wait(0.01)
