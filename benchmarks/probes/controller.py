"""Processor time of the service for its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.measure import MIN_REPETITIONS, cpu_seconds
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, KVBatchMeta

COMMANDS = {"put": 2, "read": 1, "clear": 1}
"""Allocate and Commit; Locate; Clear."""
PER_ROUND = {1: 250, 512: 50}
"""Operations of each kind in a round, by their rows: about 50 ms of processor time."""
WARM_UP = 2


def commands(*, quick: bool) -> list[Figure]:
    """Return the commands per second of processor time of the service's process. Puts, reads and clears of one row
    and of 512, with five fields, use shared memory, so the storage unit takes no part."""
    rounds = MIN_REPETITIONS if quick else 3 * MIN_REPETITIONS
    rates: dict[str, list[float]] = {}
    with service() as (running, client):
        for number in range(rounds + WARM_UP):
            for rows, count in PER_ROUND.items():
                for what, step in _steps(client, f"{number}", rows, count):
                    begun = cpu_seconds(running.pid)
                    step()
                    used = cpu_seconds(running.pid) - begun
                    name = f"commands of {what}, {rows} row{'s' * (rows > 1)}"
                    rates.setdefault(name, []).append(COMMANDS[what] * count / used)
    return [
        Figure(name=name, rounds=each[WARM_UP:], unit="/s of CPU", note=f"{rounds} rounds")
        for name, each in rates.items()
    ]


def _steps(client: DataPlaneClient, prefix: str, rows: int, count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield `count` operations of each kind, on the same samples."""
    columns = {name: torch.arange(rows * 4).reshape(rows, 4) for name in ("a", "b", "c", "d", "e")}
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
