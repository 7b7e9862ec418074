"""The time from a commit to the return of a claim that waited for it, with many waiting claims."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.measure import percentile
from benchmarks.probes.base import PARTITION, Figure, service, side_by_side
from benchmarks.systems.round_trip import RoundTrip, at_reference
from dataplane import connect, connect_async

PARKED = 100
CLAIM_S = 30.0
WARM_UP = "warm-up"
PER_ROUND = 200
"""Enough for two values above a p99."""
PAUSE_S = 0.004
"""Pause between commits, so that each commit finds all claims waiting again."""


def wake(*, quick: bool) -> list[Figure]:
    """Measure the milliseconds from the producer's call of put to the return of a claim in another process, scaled
    to a machine with the reference's round trip.

    A commit of tags alone copies nothing. A put of one row with data copies it before its command.
    """
    rounds = 5 if quick else 15
    figures = []
    variants = (("commit", False), ("put of one row", True))
    for what, with_data in variants:
        with service(fields=["x"]) as (running, _):
            produced, returned = side_by_side(_side, [(running.address, n, rounds, with_data) for n in (0, 1)])
        sent, round_trips = produced
        taken = [
            [(returned[_name(number, place)] - sent[_name(number, place)]) * 1e3 for place in range(PER_ROUND)]
            for number in range(rounds)
        ]
        note = (
            f"{rounds} rounds of {PER_ROUND} samples, {PARKED} claims parked in one process, producer in another; "
            f"as measured {median(median(each) for each in taken):.3g} ms at {median(round_trips) * 1e6:.0f} us a "
            "round trip"
        )
        for share in (0.5, 0.99):
            rounds_ms = at_reference([percentile(each, share) for each in taken], round_trips)
            name = f"{what} -> claim returns, p{share * 100:.0f}"
            figures.append(Figure(name=name, rounds=rounds_ms, unit="ms", note=note))
    return figures


def _name(number: int, place: int) -> str:
    return f"s{number}-{place}"


def _side(go: Callable[[], Any], address: str, number: int, rounds: int, with_data: bool) -> Any:
    if number == 0:
        return _produce(go, address, rounds, with_data)
    return asyncio.run(_consume(go, address, rounds, with_data))


def _produce(go: Callable[[], Any], address: str, rounds: int, with_data: bool) -> tuple[dict[str, float], list[float]]:
    """Return when each sample was sent, and the seconds of a ZMQ round trip in each round."""
    sent: dict[str, float] = {}
    round_trips: list[float] = []
    row = torch.zeros(1, 64)
    tags = [{"ready": 1}]
    pause = threading.Event()
    with connect(address) as client, RoundTrip() as echo:
        client.put_samples([WARM_UP], PARTITION, {"x": row})
        client.clear_samples([WARM_UP], PARTITION)
        go()
        pause.wait(1.0)
        for number in range(rounds):
            round_trips.append(echo.seconds())
            for place in range(PER_ROUND):
                sent[_name(number, place)] = time.monotonic()
                client.put_samples([_name(number, place)], PARTITION, {"x": row} if with_data else None, tags=tags)
                pause.wait(PAUSE_S)
    return sent, round_trips


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
            if len(returned) == rounds * PER_ROUND:
                done.set()

    async with connect_async(address) as client:
        tasks = [asyncio.create_task(claimer(client)) for _ in range(PARKED)]
        await asyncio.sleep(0.5)
        await asyncio.get_running_loop().run_in_executor(None, go)
        await asyncio.wait_for(done.wait(), CLAIM_S + rounds * PER_ROUND * PAUSE_S * 10)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return returned
