"""Many concurrent clients: single-sample puts per second, and large puts and reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.measure import MIN_REPETITIONS
from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import PARTITION, Figure, service, side_by_side
from dataplane import DataPlaneClient, KVBatchMeta, connect

CLIENTS = 64
PROCESSES = 4
ROUND_S = 0.5
WARM_UP = 2


def small_puts(*, quick: bool) -> list[Figure]:
    """Measure single-sample puts (three token rows and two scalars, 37 kB) by 64 sessions, 16 in each of 4
    processes. All samples are cleared between the rounds: after the first rounds the pages are warm, as in a long
    run."""
    rounds = MIN_REPETITIONS if quick else 2 * MIN_REPETITIONS + 1
    with service(capacity_bytes=2 << 30) as (running, _):
        counts = side_by_side(_putters, [(running.address, number, rounds + WARM_UP) for number in range(PROCESSES)])
    return [
        Figure(
            name=f"single-sample puts, {CLIENTS} clients",
            rounds=[sum(each) / ROUND_S for each in zip(*counts, strict=True)][WARM_UP:],
            unit="/s",
            note=f"{CLIENTS} sessions in {PROCESSES} processes, one thread each, {rounds} rounds of {ROUND_S} s",
        )
    ]


def _putters(go: Callable[[], Any], address: str, number: int, rounds: int) -> list[int]:
    """Return the puts in each round, of all sessions of this process."""
    tokens = torch.arange(1848)
    fields = {"input_ids": [tokens], "token_mask": [tokens], "generation_logprobs": [tokens.float()]}
    columns = {**fields, "reward": torch.zeros(1), "advantage": torch.zeros(1)}

    def put(index: int, client: DataPlaneClient) -> list[KVBatchMeta]:
        end = time.monotonic() + ROUND_S
        held: list[KVBatchMeta] = []
        while time.monotonic() < end:
            held.append(client.put_samples([f"{number}-{index}-{len(held)}"], PARTITION, columns))
        return held

    counts = []
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(CLIENTS // PROCESSES)]
        threads = stack.enter_context(ThreadPoolExecutor(len(clients)))
        for _ in range(rounds):
            go()
            held = list(threads.map(put, range(len(clients)), clients))
            counts.append(sum(map(len, held)))
            for client, metas in zip(clients, held, strict=True):
                client.clear_samples(KVBatchMeta.concat(metas), PARTITION)
    return counts


def large_batches(*, quick: bool) -> list[Figure]:
    """Measure the bytes per second of puts and whole reads of 19 MB by 1, 2, 4, 8 concurrent clients, each in its
    own process."""
    figures = []
    for count in (2,) if quick else (1, 2, 4, 8):
        with service(capacity_bytes=2 << 30) as (running, _):
            spans = side_by_side(_mover, [(running.address, number) for number in range(count)])
        moved = sum(size for _, _, size in spans)
        taken = max(end for _, end, _ in spans) - min(begun for begun, _, _ in spans)
        figures.append(
            Figure(
                name=f"put + read 19 MB, {count} client{'s' * (count > 1)}",
                rounds=[moved / taken / 1e9],
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
