"""Items through a channel between two worker processes, beside Ray's queue between the same processes."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from ray.util.queue import Queue

from benchmarks.measure import MIN_REPETITIONS, alternating, ratios
from benchmarks.probes.base import Figure
from benchmarks.systems.ray_session import RaySession
from workers.channels import Channel, start_brokers
from workers.directory import Directory, DirectoryClient

PLACES = 16
"""Capacity of both queues, in items."""
SIZES = (("64 KB", 64 << 10, 4000, 300), ("4 MB", 4 << 20, 400, 40))
"""Name, bytes of an item, and the numbers of items that pass the channel and Ray's queue in each turn."""
WARM_UP = 2
WAIT_S = 120.0


def channels_and_queues(*, quick: bool) -> list[Figure]:
    """Measure uint8 tensors that one Ray actor puts and another gets, one after another, with blocking calls."""
    session = RaySession()
    directory = Directory.serve()
    try:
        with DirectoryClient(directory.address) as client:
            brokers = start_brokers({0: ray.get_runtime_context().get_node_id()}, directory.address)
            with Channel.create("probe", maxsize=PLACES, directory=client) as channel:
                figures = _measure(channel, MIN_REPETITIONS if quick else 4 * MIN_REPETITIONS)
            ray.get([each.close.remote() for each in brokers.values()], timeout=WAIT_S)
        return figures
    finally:
        session.close()
        directory.close()


class _Worker:
    """An actor at one end of the channel and of the queue."""

    def put(self, side: Any, count: int, nbytes: int) -> None:
        item = torch.zeros(nbytes, dtype=torch.uint8)
        for _ in range(count):
            side.put(item)

    def get(self, side: Any, count: int) -> float:
        """Return the seconds for all items but the first, which arrives before the clock starts."""
        side.get()
        begun = time.perf_counter()
        for _ in range(count - 1):
            side.get()
        return time.perf_counter() - begun


def _measure(channel: Channel, repetitions: int) -> list[Figure]:
    actor = ray.remote(num_cpus=1)(_Worker)
    producer, consumer = actor.remote(), actor.remote()
    queue = Queue(maxsize=PLACES)

    def rate(side: Any, count: int, nbytes: int) -> float:
        taken = consumer.get.remote(side, count)
        ray.get(producer.put.remote(side, count, nbytes), timeout=WAIT_S)
        return (count - 1) / float(ray.get(taken, timeout=WAIT_S))

    figures = []
    for name, nbytes, through_channel, through_queue in SIZES:
        sides: list[tuple[Any, int, list[float]]] = [(channel, through_channel, []), (queue, through_queue, [])]
        for order in alternating(sides, repetitions + WARM_UP):
            for side, count, rates in order:
                rates.append(rate(side, count, nbytes))
        figures += _figures(name, nbytes, *(rates[WARM_UP:] for _, _, rates in sides))
    queue.shutdown()
    return figures


def _figures(name: str, nbytes: int, ours: list[float], theirs: list[float]) -> list[Figure]:
    note = f"{len(ours)} turns each, queues of {PLACES} places; two Ray actors, calls that wait"

    return [
        Figure(name=f"channel, {name} items", rounds=ours, unit="/s", note=note),
        Figure(name=f"channel, {name} items, bytes", rounds=[each * nbytes / 1e6 for each in ours], unit="MB/s"),
        Figure(name=f"ray.util.queue.Queue, {name} items", rounds=theirs, unit="/s", note=note),
        Figure(name=f"channel : ray.util.queue.Queue, {name} items", rounds=ratios(ours, theirs), unit="x", note=note),
    ]
