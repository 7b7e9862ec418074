"""Start of the actors of a `WorkerGroup`, and the registration of its name in the job's directory.

These groups share nodes and accelerators. Their workers are placed by node id and use none of Ray's resources.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.core.devices import VISIBLE_DEVICES
from workers.channels.discovery import NODE_RANK_VARIABLE, NODES_VARIABLE
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient, DirectoryEntry, Facts, Kind
from workers.directory.address import WorkerAddress
from workers.directory.registry import WORLD_SIZE
from workers.directory.wire import EntryState
from workers.errors import DirectoryLostError, NameInUseError, NameNotFoundError, WorkerLostError
from workers.groups.actor_class import serving_class
from workers.groups.cluster import Cluster
from workers.groups.started_group import StartedGroup
from workers.placement.strategies import WorkerPlacement

IN_USE_S = 2.0
"""A worker that does not respond within this time is busy, not dead; its group's name is in use."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The parameters of a launch. cls, args, kwargs: class and constructor arguments of the workers; placements: one
    per worker, by rank; the others: see `WorkerGroup.launch`."""

    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    placements: Sequence[WorkerPlacement]
    max_concurrency: int | None
    catch_failures: bool
    log_to_driver: bool


def launch_worker_group(cluster: Cluster, launch: Launch) -> tuple[StartedGroup, DirectoryEntry]:
    """Start the workers of a new group. Return them, constructed, and the group's directory entry. Wait for the
    constructors, and until each node has a broker for channels. `NameInUseError` if a running group has the name.
    Raises the exception of a constructor. After any error all started parts are removed."""
    directory = cluster.directory
    entry = register_name(
        directory,
        launch.name,
        {
            "class": launch.cls.__qualname__,
            WORLD_SIZE: len(launch.placements),
            "namespace": ray.get_runtime_context().namespace,
            "token": secrets.token_hex(4),  # see `actor_name`
        },
    )
    started = StartedGroup()
    started.before.callback(_end_entry, directory, entry)  # when the group ends
    with started.starting():
        # A worker entry under the group's own name marks a launch in progress, see `_is_launching`.
        launching = directory.register_worker(WorkerAddress(launch.name), endpoint="")
        _create_actors(started, cluster, launch, entry)
        names = [f"{launch.name}:{rank}" for rank in range(len(started.actors))]
        started.await_constructed(names)
        if launch.catch_failures:
            _log_lost_workers(started, directory, names)
        cluster.await_brokers()
        directory.end(Kind.WORKER, launching.name, launching.incarnation, why="the group is launched")
    return started, entry


def _end_entry(directory: DirectoryClient, entry: DirectoryEntry) -> None:
    """End the group's entry before its workers, so that callers that wait for a worker learn that the group ended."""
    with contextlib.suppress(DirectoryLostError):
        directory.end(Kind.WORKER_GROUP, entry.name, entry.incarnation, why="its group ended")


def _create_actors(started: StartedGroup, cluster: Cluster, launch: Launch, entry: DirectoryEntry) -> None:
    """Add an actor for each placement to `started.actors`, and hold their master port until the group ends. Does not
    wait for their constructors."""
    first_node = launch.placements[0].cluster_node_rank  # the node of rank 0, the master
    port = cluster.hold_port(first_node)
    started.after.callback(cluster.release_port, first_node, port)  # after the end of the actors
    # The actor's constructor sets these (see `serving_class`); Ray sets `variables` for the whole process.
    shared = {
        "GROUP_NAME": launch.name,
        "WORLD_SIZE": str(len(launch.placements)),
        "MASTER_ADDR": cluster.nodes[first_node].host,
        "MASTER_PORT": str(port),
        DIRECTORY_VARIABLE: cluster.directory.address,
        NODES_VARIABLE: str(cluster.num_nodes),
        "TQ_LOG": "driver" if launch.log_to_driver else "file",
    }
    cls = ray.remote(serving_class(launch.cls, catch_failures=launch.catch_failures))
    variables = cluster.environment()
    if cluster.num_accelerators:
        # Otherwise Ray hides all accelerators from actors that request none.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    options: dict[str, Any] = {"num_cpus": 0}
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    if launch.max_concurrency is not None:
        options["max_concurrency"] = launch.max_concurrency
    for placement in launch.placements:
        node = cluster.nodes[placement.cluster_node_rank]
        actor = cls.options(
            name=actor_name(entry, placement.rank),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False),
            **options,
        ).remote({**shared, **placement_environment(placement), "TQ_HOST": node.host}, *launch.args, **launch.kwargs)
        started.actors.append(actor)


def _log_lost_workers(started: StartedGroup, directory: DirectoryClient, names: Sequence[str]) -> None:
    """Log each worker whose process dies or whose connection breaks, until the group ends."""
    # Of the workers' directory entries. Each registration has a new number, so those of other groups never match.
    incarnations: set[int] = set()
    started_ref = weakref.ref(started)  # the subscription must not keep the group, which ends with its last reference

    def on_end(entry: DirectoryEntry) -> None:
        if entry.state is EntryState.LOST and entry.incarnation in incarnations and started_ref() is not None:
            logger.error("Worker %s was lost: %s", entry.name, entry.why)

    started.before.callback(directory.subscribe(on_end))  # `subscribe` returns the function that unsubscribes
    for name in names:  # `on_end` is called only for entries that this client has looked up
        incarnations.add(directory.lookup_worker(WorkerAddress.from_name(name)).incarnation)


def register_name(directory: DirectoryClient, name: str, facts: Facts) -> DirectoryEntry:
    """Register a group and return its entry. If all workers of a group with that name have died, end that group first.
    `NameInUseError` if one is running or being launched."""
    try:
        return directory.register_worker_group(name, facts)
    except NameInUseError:
        try:
            holder = directory.lookup_worker_group(name)
        except NameNotFoundError:  # it has ended meanwhile
            return directory.register_worker_group(name, facts)
        if _is_launching(directory, name) or _is_running(holder):
            raise
    directory.end(Kind.WORKER_GROUP, name, holder.incarnation, why="all its workers died")
    return directory.register_worker_group(name, facts)


def find_actors(entry: DirectoryEntry) -> list[ActorHandle]:
    """Return the workers of a running group, by rank. `WorkerLostError` for a worker that has ended."""
    actors = []
    for rank in range(_world_size_of(entry)):
        try:
            actors.append(ray.get_actor(actor_name(entry, rank), str(entry.facts["namespace"])))
        except ValueError as error:
            raise WorkerLostError(
                worker=f"worker {entry.name}:{rank}", why="its actor has ended; launch the group again"
            ) from error
    return actors


def actor_name(entry: DirectoryEntry, rank: int) -> str:
    """Return a name that is unique among all groups, including earlier groups with the same name."""
    return f"{entry.name}:{rank}-{entry.facts['token']}"


def placement_environment(placement: WorkerPlacement) -> dict[str, str]:
    """Return the environment variables of a worker's place. LOCAL_RANK is an index into the accelerators that it
    sees."""
    local_rank = placement.local_rank
    local_world_size = placement.local_world_size
    if placement.isolated:  # it sees only its own accelerators
        local_rank = 0
        local_world_size = 1
    elif placement.accelerators:  # it sees those of the whole node
        local_rank = placement.local_accelerator_rank
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(placement.placement_node_rank),
        "NODE_LOCAL_RANK": str(placement.local_rank),
        "NODE_LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "CLUSTER_NODE_RANK": str(placement.cluster_node_rank),
        NODE_RANK_VARIABLE: str(placement.cluster_node_rank),
        "LOCAL_ACCELERATOR_RANK": str(placement.local_accelerator_rank),
        **dict.fromkeys(VISIBLE_DEVICES.values(), ",".join(map(str, placement.visible))),
    }


def _is_launching(directory: DirectoryClient, name: str) -> bool:
    """Return whether the group has the entry that `launch_worker_group` registers while the workers start."""
    try:
        directory.lookup_worker(WorkerAddress(name))
    except Exception:
        return False
    return True


def _is_running(entry: DirectoryEntry) -> bool:
    """Return whether any worker of the group responds, or is alive but too busy to respond within `IN_USE_S`."""
    pings = []
    for rank in range(_world_size_of(entry)):
        with contextlib.suppress(ValueError, RayError):  # the actor does not exist
            actor = ray.get_actor(actor_name(entry, rank), str(entry.facts["namespace"]))
            pings.append(actor.__ray_ready__.remote())
    if not pings:
        return False
    done, busy = ray.wait(pings, num_returns=len(pings), timeout=IN_USE_S)
    return bool(busy) or any(_succeeded(ping) for ping in done)


def _world_size_of(entry: DirectoryEntry) -> int:
    """Return the number of workers of a group."""
    size = entry.facts[WORLD_SIZE]
    assert isinstance(size, int)
    return size


def _succeeded(reference: ObjectRef) -> bool:
    """Return whether a call that is done returned a result. Ray's error shows that the actor has died."""
    try:
        ray.get(reference)
    except RayError:
        return False
    return True
