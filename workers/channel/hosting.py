"""Brokers as Ray actors: one on each node, for all channels there."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.channel.hosted import HostedBroker

START_S = 120.0


class BrokerActor:
    """A node's broker, in a process that ends with it, so that Ray starts another."""

    def __init__(self, directory_address: str, node_rank: int, capacity_bytes: int | None = None) -> None:
        host = ray.util.get_node_ip_address()
        self._broker = HostedBroker(directory_address, node_rank, host=host, capacity_bytes=capacity_bytes)
        threading.Thread(target=self._end_with_broker, name="tq-broker-end", daemon=True).start()

    def endpoint(self) -> str:
        """Where it is."""
        return self._broker.endpoint

    def close(self) -> None:
        """End the broker; what its channels hold is lost."""
        self._broker.close()

    def _end_with_broker(self) -> None:
        if not self._broker.wait():
            os._exit(1)


def start_brokers(
    nodes: Mapping[int, str], directory_address: str, *, capacity_bytes: int | None = None
) -> dict[int, ActorHandle]:
    """A broker on each node: `nodes` are Ray's node ids by rank. Blocks until all of them are registered with the
    directory, for `START_S` at most: then `ray.exceptions.GetTimeoutError`; an actor's exception if it cannot start.

    They live as long as the calling process and the handles that come back: the one that owns the cluster is to call.
    One whose process dies is started again by Ray, without what it held, and registers again. They take no CPU of
    Ray's, import no torch, and end with `ray.kill`.
    """
    actor = ray.remote(num_cpus=0, max_concurrency=2)(BrokerActor)
    started = {
        rank: actor.options(
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote(directory_address, rank, capacity_bytes)
        for rank, node in nodes.items()
    }
    try:
        ray.get([each.__ray_ready__.remote() for each in started.values()], timeout=START_S)
    except BaseException:
        for each in started.values():
            ray.kill(each, no_restart=True)
        raise
    return started
