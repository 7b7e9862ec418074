"""Brokers as Ray actors: one on each node for all of its channels."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.channels.broker import ChannelBroker

START_S = 120.0


class BrokerActor:
    """A node's broker. Its process exits when the broker fails, so that Ray restarts it."""

    def __init__(self, directory_address: str, node_rank: int, capacity_bytes: int | None = None) -> None:
        host = ray.util.get_node_ip_address()
        self._broker = ChannelBroker.of_node(directory_address, node_rank, host=host, capacity_bytes=capacity_bytes)
        threading.Thread(target=self._exit_after_failure, name="tq-broker-end", daemon=True).start()

    def endpoint(self) -> str:
        """Return the endpoint of the broker."""
        return self._broker.endpoint

    def close(self) -> None:
        """Close the broker. The items of its channels are lost."""
        self._broker.close()

    def _exit_after_failure(self) -> None:
        if not self._broker.wait():  # it was not closed
            os._exit(1)


def start_brokers(
    nodes: Mapping[int, str], directory_address: str, *, capacity_bytes: int | None = None
) -> dict[int, ActorHandle]:
    """Start a broker on each node and return their actors by rank; `nodes` are Ray's node ids by rank. Blocks until
    all of them are registered with the directory, at most `START_S`, then `ray.exceptions.GetTimeoutError`. If an
    actor cannot start, its exception is raised. Either error has a note that names the node, and the started actors
    are killed.

    The actors end with the calling process or with the returned handles, so the owner of the cluster must call this.
    Ray restarts an actor whose process dies; the new one registers again, without the old items. The actors take none
    of Ray's CPUs, import no torch, and end with `ray.kill`.
    """
    actor = ray.remote(num_cpus=0, max_concurrency=2)(BrokerActor)
    started: dict[int, ActorHandle] = {}
    try:
        for rank, node in nodes.items():
            placement = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            actor_on_node = actor.options(max_restarts=-1, scheduling_strategy=placement)  # -1: without a limit
            started[rank] = actor_on_node.remote(directory_address, rank, capacity_bytes)
        until = time.monotonic() + START_S
        for rank, actor_handle in started.items():
            _await_start(actor_handle, f"The channel broker on node {rank} ({nodes[rank]})", until)
    except BaseException:
        for actor_handle in started.values():
            with contextlib.suppress(Exception):
                ray.kill(actor_handle, no_restart=True)
        raise
    return started


def _await_start(broker: ActorHandle, name: str, until: float) -> None:
    """Wait until the actor `broker` has started. An error gets a note with `name`."""
    try:
        ray.get(broker.__ray_ready__.remote(), timeout=max(0.0, until - time.monotonic()))
    except Exception as error:
        error.add_note(f"{name} did not start")
        raise
