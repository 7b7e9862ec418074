"""One fetch for a replica group of two ranks: its bytes and collectives, and its time beside a bare Gloo
broadcast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import ratios
from benchmarks.payload import BatchSpec, Shape, build
from benchmarks.probes.base import Figure, side_by_side
from dataplane import BatchedDataDict
from workers.training.replica_group import NO_DIGEST, RankFetch, ReplicaGroup

WORLD = 2
REPETITIONS = 9
TOKENS = BatchSpec(shape=Shape.TOKENS, rows=512, length=1848)


def leader_broadcast(*, quick: bool) -> list[Figure]:
    """Measure the broadcast of the leader's 19 MB of jagged columns to one sibling over Gloo on loopback."""
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        store = str(Path(directory) / "store")
        moved, collectives, fetches, bare = side_by_side(_rank, [(store, rank) for rank in range(WORLD)])[0]
    size = build(TOKENS).nbytes
    return [
        Figure(
            name="leader broadcast, bytes",
            rounds=[moved / size],
            unit="x jagged bytes",
            note="all collectives together",
        ),
        Figure(name="leader broadcast, payload collectives", rounds=[collectives], unit=""),
        Figure(
            name="leader broadcast, time",
            rounds=ratios(fetches, bare),
            unit="x Gloo broadcast",
            note="of the same bytes in one tensor, in turns",
        ),
    ]


def _rank(go: Callable[[], Any], store: str, rank: int) -> tuple[float, float, list[float], list[float]]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    batch = build(TOKENS)
    flat = torch.zeros(batch.nbytes, dtype=torch.uint8)
    group = ReplicaGroup(dist.group.WORLD)
    part = RankFetch(leads=lambda: rank == 0, digest=lambda: NO_DIGEST, read=lambda: batch.columns)
    fetches = []
    bare = []
    sizes: list[tuple[str, int]] = []  # the collectives of one fetch
    go()
    with _recorded(sizes):
        group.fetch(part, "leader_broadcast", _kept)
    for _ in range(REPETITIONS + 2):
        fetches.append(_timed(lambda: group.fetch(part, "leader_broadcast", _kept)))
        bare.append(_timed(lambda: dist.broadcast(flat, 0)))
    moved = sum(nbytes for _, nbytes in sizes)
    collectives = [name for name, _ in sizes].count("broadcast")
    dist.destroy_process_group()
    return moved, collectives, fetches[2:], bare[2:]


@contextmanager
def _recorded(sizes: list[tuple[str, int]]) -> Iterator[None]:
    """A context that appends the name of each collective and the bytes of its buffers."""
    all_gather = dist.all_gather
    broadcast = dist.broadcast

    def recorded_all_gather(gathered: list[torch.Tensor], own: torch.Tensor, **options: Any) -> Any:
        sizes.append(("all_gather", len(gathered) * own.nbytes))
        return all_gather(gathered, own, **options)

    def recorded_broadcast(tensor: torch.Tensor, **options: Any) -> Any:
        sizes.append(("broadcast", tensor.nbytes))
        return broadcast(tensor, **options)

    dist.all_gather = recorded_all_gather
    dist.broadcast = recorded_broadcast
    try:
        yield
    finally:
        dist.all_gather = all_gather
        dist.broadcast = broadcast


def _kept(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    return batch


def _timed(call: Callable[[], Any]) -> float:
    """Return the seconds from a barrier before the call to a barrier after it."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begun
