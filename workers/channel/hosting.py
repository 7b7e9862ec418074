"""Brokers as Ray actors: one on each node, for all channels there."""

from __future__ import annotations

from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.channel.broker import ChannelBroker
from workers.channel.settings import broker_name
from workers.directory import DirectoryClient

START_S = 120.0


class BrokerActor:
    """A broker that the job's directory knows for as long as this process lives."""

    def __init__(self, directory_address: str, node_rank: int, capacity_bytes: int | None = None) -> None:
        self._directory = DirectoryClient(directory_address)
        self._broker = ChannelBroker(host=ray.util.get_node_ip_address(), capacity_bytes=capacity_bytes)
        self._directory.register_channel(broker_name(node_rank), (self._broker.endpoint,), {}, owned=True)

    def endpoint(self) -> str:
        """Where it is."""
        return self._broker.endpoint

    def close(self) -> None:
        """End the broker; what its channels hold is lost."""
        self._broker.close()
        self._directory.close()


def start_brokers(
    nodes: Mapping[int, str], directory_address: str, *, capacity_bytes: int | None = None
) -> dict[int, ActorHandle]:
    """A broker on each node: `nodes` are Ray's node ids by rank. Blocks until all of them are registered with the
    directory, for `START_S` at most: then `ray.exceptions.GetTimeoutError`; an actor's exception if it cannot start.

    They live as long as the calling process and the handles that come back: the one that owns the cluster is to call.
    They take no CPU of Ray's, import no torch, and end with `ray.kill`.
    """
    actor = ray.remote(num_cpus=0, max_concurrency=2)(BrokerActor)
    started = {
        rank: actor.options(
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
