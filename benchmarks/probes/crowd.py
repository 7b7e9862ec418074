"""Many clients at once: single-sample puts per second, and large puts and reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import PARTITION, Figure, service, side_by_side
from dataplane import DataPlaneClient, connect

CLIENTS = 64
PROCESSES = 4


def small_puts(*, quick: bool) -> list[Figure]:
    """Single-sample puts (three token rows and two scalars, 37 kB) by 64 sessions, 16 in each of 4 processes."""
    measured_s = 2.0 if quick else 5.0
    with service(capacity_bytes=2 << 30) as (running, _):
        counts = side_by_side(_putters, [(running.address, number, measured_s) for number in range(PROCESSES)])
    return [
        Figure(
            name=f"single-sample puts, {CLIENTS} clients",
            value=sum(counts) / measured_s,
            unit="/s",
            note=f"{CLIENTS} sessions in {PROCESSES} processes, one thread each, for {measured_s:.0f} s",
        )
    ]


def _putters(go: Callable[[], Any], address: str, number: int, measured_s: float) -> int:
    clients = [connect(address) for _ in range(CLIENTS // PROCESSES)]
    counts = [0] * len(clients)
    ready = threading.Barrier(len(clients) + 1)
    tokens = torch.arange(1848)
    fields = {"input_ids": [tokens], "token_mask": [tokens], "generation_logprobs": [tokens.float()]}
    scalars = {"reward": torch.zeros(1), "advantage": torch.zeros(1)}

    def put(index: int, client: DataPlaneClient) -> None:
        prefix = f"{number}-{index}"
        client.clear_samples(client.put_samples([prefix], PARTITION, {**fields, **scalars}), PARTITION)
        ready.wait()
        begun = time.monotonic()
        held = []
        while time.monotonic() - begun < measured_s:
            held.append(client.put_samples([f"{prefix}-{counts[index]}"], PARTITION, {**fields, **scalars}))
            counts[index] += 1
        for meta in held:
            client.clear_samples(meta, PARTITION)

    threads = [threading.Thread(target=put, args=each) for each in enumerate(clients)]
    for thread in threads:
        thread.start()
    go()
    ready.wait()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return sum(counts)


def large_batches(*, quick: bool) -> list[Figure]:
    """Put and whole read of 19 MB by 1, 2, 4, 8 clients at once, each in its own process; their bytes a second."""
    figures = []
    for count in (2,) if quick else (1, 2, 4, 8):
        with service(capacity_bytes=2 << 30) as (running, _):
            spans = side_by_side(_mover, [(running.address, number) for number in range(count)])
        moved = sum(size for _, _, size in spans)
        taken = max(end for _, end, _ in spans) - min(begun for begun, _, _ in spans)
        figures.append(
            Figure(
                name=f"put + read 19 MB, {count} client{'s' * (count > 1)}",
                value=moved / taken / 1e9,
                unit="GB/s",
                note="one process each",
            )
        )
    return figures


def _mover(go: Callable[[], Any], address: str, number: int) -> tuple[float, float, int]:
    batch = build(BatchSpec(shape=Shape.TOKENS, rows=512, length=1848))
    ids = [f"{number}-{name}" for name in batch.ids]
    rounds = 12
    with connect(address) as client:
        for _ in range(2):
            _move(client, ids, batch.columns)
        go()
        begun = time.monotonic()
        for _ in range(rounds):
            _move(client, ids, batch.columns)
        return begun, time.monotonic(), 2 * rounds * batch.nbytes


def _move(client: DataPlaneClient, ids: list[str], columns: Any) -> None:
    meta = client.put_samples(ids, PARTITION, columns)
    client.get_samples(meta, PARTITION, list(columns))
    client.clear_samples(meta, PARTITION)
