"""Processor time of the service for its commands."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure import cpu_seconds
from benchmarks.probes.base import PARTITION, Figure, service
from dataplane import DataPlaneClient, KVBatchMeta

COMMANDS = {"put": 2, "read": 2, "clear": 1}
"""Allocate and Commit; Locate and Release; Clear."""


def commands(*, quick: bool) -> list[Figure]:
    """Commands per second of processor time of the service's process: puts, reads and clears by shared memory, so that
    the storage unit has no part in it, of one row and of 512, with five fields."""
    figures = []
    for rows, rounds in ((1, 300 if quick else 2000), (512, 100 if quick else 500)):
        with service() as (running, client):
            for what, count in COMMANDS.items():
                used = _used(client, running.pid, what, rows, rounds)
                figures.append(
                    Figure(
                        name=f"commands of {what}, {rows} row{'s' * (rows > 1)}",
                        value=count * rounds / used,
                        unit="/s of CPU",
                        note=f"{count * rounds} commands",
                    )
                )
    return figures


def _used(client: DataPlaneClient, pid: int, what: str, rows: int, rounds: int) -> float:
    """CPU seconds of `rounds` operations, counted in pieces so that preparations are left out."""
    columns = {name: torch.arange(rows * 4).reshape(rows, 4) for name in ("a", "b", "c", "d", "e")}
    piece = 50
    used = 0.0
    for first in range(0, rounds, piece):
        ids = [[f"{what}-{first + n}-{row}" for row in range(rows)] for n in range(piece)]
        metas: list[KVBatchMeta] = []

        def put(ids: list[list[str]] = ids, metas: list[KVBatchMeta] = metas) -> None:
            metas.extend(client.put_samples(each, PARTITION, columns) for each in ids)

        def read(metas: list[KVBatchMeta] = metas) -> None:
            for each in metas:
                client.get_samples(each, PARTITION, list(columns))

        def clear(metas: list[KVBatchMeta] = metas) -> None:
            for each in metas:
                client.clear_samples(each, PARTITION)

        for name, step in (("put", put), ("read", read), ("clear", clear)):
            taken = _cpu(pid, step)
            used += taken if name == what else 0.0
    return max(used, 0.01)


def _cpu(pid: int, call: Callable[[], None]) -> float:
    begun = cpu_seconds(pid)
    call()
    return cpu_seconds(pid) - begun
