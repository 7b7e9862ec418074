"""From a commit to the return of a claim that waited for it, with many claims parked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Spread, percentile
from benchmarks.probes.base import PARTITION, Figure, service, side_by_side
from dataplane import connect, connect_async

PARKED = 100
CLAIM_S = 30.0
WARM_UP = "warm-up"
PAUSE_S = 0.004
"""Between commits, so that each finds the claims parked again."""


def wake(*, quick: bool) -> list[Figure]:
    """Latency in milliseconds from the moment the producer calls put to the return of a claim in another process.

    A commit of tags alone is one command; a put of one row with data is two and a copy."""
    rounds = 150 if quick else 2000
    figures = []
    variants = (("commit", False), ("put of one row", True))
    for what, with_data in variants[:1] if quick else variants:
        with service() as (running, _):
            sent, returned = side_by_side(_side, [(running.address, n, rounds, with_data) for n in (0, 1)])
        taken = [(returned[name] - sent[name]) * 1e3 for name in sent]
        spread = Spread.of(taken)
        note = f"{rounds} samples, {PARKED} claims parked in one process, producer in another"
        figures.append(
            Figure(
                name=f"{what} -> claim returns, p50",
                value=spread.median,
                unit="ms",
                spread=(spread.p10, spread.p90),
                note=note,
            )
        )
        figures.append(
            Figure(name=f"{what} -> claim returns, p99", value=percentile(taken, 0.99), unit="ms", note=note)
        )
    return figures


def _side(go: Callable[[], Any], address: str, number: int, rounds: int, with_data: bool) -> dict[str, float]:
    if number == 0:
        return _produce(go, address, rounds, with_data)
    return asyncio.run(_consume(go, address, rounds, with_data))


def _produce(go: Callable[[], Any], address: str, rounds: int, with_data: bool) -> dict[str, float]:
    sent: dict[str, float] = {}
    row = torch.zeros(1, 64)
    tags = [{"ready": 1}]
    pause = threading.Event()
    with connect(address) as client:
        client.put_samples([WARM_UP], PARTITION, {"x": row})
        client.clear_samples([WARM_UP], PARTITION)
        go()
        pause.wait(1.0)
        for number in range(rounds):
            name = f"s{number}"
            sent[name] = time.monotonic()
            client.put_samples([name], PARTITION, {"x": row} if with_data else None, tags=tags)
            pause.wait(PAUSE_S)
    return sent


async def _consume(go: Callable[[], Any], address: str, rounds: int, with_data: bool) -> dict[str, float]:
    returned: dict[str, float] = {}
    fields = ["x"] if with_data else []
    done = asyncio.Event()

    async def claimer(client: Any) -> None:
        while True:
            meta = await client.claim_meta(PARTITION, "task", fields, 1, timeout_s=CLAIM_S)
            if meta.sample_ids[0] == WARM_UP:
                continue
            returned[meta.sample_ids[0]] = time.monotonic()
            if len(returned) == rounds:
                done.set()

    async with connect_async(address) as client:
        tasks = [asyncio.create_task(claimer(client)) for _ in range(PARKED)]
        await asyncio.sleep(0.5)
        await asyncio.get_running_loop().run_in_executor(None, go)
        await asyncio.wait_for(done.wait(), CLAIM_S + rounds * PAUSE_S * 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return returned
