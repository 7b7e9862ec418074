"""Messages between workers: a broadcast to three receivers beside Gloo's, and the round trip of a small message."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import alternating, percentile, ratios
from benchmarks.probes.base import Figure, side_by_side
from workers.directory import Directory, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.messages import Messenger

WORLD = 4
NBYTES = 16 << 20
WARM_UP = 3
PER_TURN = 5
"""Broadcasts of one side in its turn. Their median counts."""
SMALL_MESSAGES = 2000


def broadcasts(*, quick: bool) -> list[Figure]:
    """Measure a broadcast of 16 MB from one worker to three, in turns with a broadcast of the same bytes in an
    initialized Gloo group."""
    rounds = 9 if quick else 31
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory, Directory.serve() as names:
        store = str(Path(directory) / "store")
        arguments = [(store, names.address, rank, rounds) for rank in range(WORLD)]
        ours, gloo = side_by_side(_rank, arguments)[0]
    return [
        Figure(
            name="broadcast of 16 MB to 3 workers, time",
            rounds=ratios(ours, gloo),
            unit="x Gloo broadcast",
            note=f"in a ready group, in turns of {PER_TURN}; {median(ours) * 1e3:.1f} ms, Gloo's "
            f"{median(gloo) * 1e3:.1f} ms",
        )
    ]


def small_messages(*, quick: bool) -> list[Figure]:
    """Measure round trips of a small object, one after another."""
    with Directory.serve() as names:
        count = SMALL_MESSAGES // 4 if quick else SMALL_MESSAGES
        seconds = side_by_side(_play, [(names.address, rank, count) for rank in range(2)])[0]
    return [
        Figure(
            name="small object to a worker and back", rounds=[seconds / count * 1e6], unit="us", note="one at a time"
        )
    ]


def _rank(go: Callable[[], Any], store: str, names: str, rank: int, rounds: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    everyone = [WorkerAddress("probe", each) for each in range(WORLD)]
    values = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8)
    buffer = values.clone() if rank == 0 else torch.zeros_like(values)
    ours: list[float] = []
    gloo: list[float] = []
    with DirectoryClient(names) as client, Messenger(everyone[rank], client) as messenger:

        def mine() -> Any:
            return messenger.broadcast(values if rank == 0 else None, everyone)

        go()
        assert torch.equal(mine(), values)
        sides = ((mine, ours), (lambda: dist.broadcast(buffer, 0), gloo))
        for order in alternating(sides, rounds + WARM_UP):
            for call, taken in order:
                taken.append(percentile([_timed(call) for _ in range(PER_TURN)], 0.5))
        assert torch.equal(buffer, values)
        dist.barrier()
    dist.destroy_process_group()
    return ours[WARM_UP:], gloo[WARM_UP:]


def _play(go: Callable[[], Any], names: str, rank: int, count: int) -> float:
    me, other = WorkerAddress("probe", rank), WorkerAddress("probe", 1 - rank)
    with DirectoryClient(names) as client, Messenger(me, client) as messenger:
        go()
        for turn in range(count + 50):
            if turn == 50:
                begun = time.perf_counter()
            if rank == 0:
                messenger.send(turn, other)
                messenger.recv(other)
            else:
                messenger.send(messenger.recv(other), other)
        return time.perf_counter() - begun


def _timed(call: Callable[[], object]) -> float:
    """Return the seconds from a barrier before the call to a barrier after it."""
    dist.barrier()
    begun = time.perf_counter()
    kept = call()
    dist.barrier()
    del kept
    return time.perf_counter() - begun
