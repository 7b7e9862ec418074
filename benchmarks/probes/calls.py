"""A call of a worker group beside a bare call of a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ray

from benchmarks.measure import ratios
from benchmarks.probes.base import Figure
from benchmarks.systems.ray_session import RaySession
from workers import Cluster, Worker

CALLS_PER_TURN = 50
WARM_UP = 4


class _Member(Worker):
    def rank(self) -> int:
        return self._rank


class _Bare:
    def rank(self) -> int:
        return 0


def round_trips(*, quick: bool) -> list[Figure]:
    """Measure calls of an empty method of one worker, in turns with the same calls of a plain Ray actor."""
    session = RaySession()
    turns = 20 if quick else 60
    try:
        with Cluster(num_nodes=1) as cluster, _Member.create_group().launch(cluster, name="probe") as group:
            actor = ray.remote(num_cpus=0)(_Bare).remote()
            ours, bare = [], []
            for _ in range(turns + WARM_UP):
                bare.append(_seconds(lambda: ray.get(actor.rank.remote())))
                ours.append(_seconds(lambda: group.rank().wait()))
    finally:
        session.close()
    ours, bare = ours[WARM_UP:], bare[WARM_UP:]
    return [
        Figure(
            name="call of a worker group",
            rounds=ratios(ours, bare),
            unit="x bare Ray call",
            note=f"of one worker, in turns; {median(ours) * 1e6:.0f} us, a bare call {median(bare) * 1e6:.0f} us",
        )
    ]


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    for _ in range(CALLS_PER_TURN):
        call()
    return (time.perf_counter() - begun) / CALLS_PER_TURN
