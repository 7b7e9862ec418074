"""Starting the actors of a `WorkerGroup`, and ending them.

Not on the engine of `RayWorkerGroup`, which starts workers on bundles that a cluster has reserved: these groups share
nodes and accelerators, so their workers are put on a node by name and take nothing. What both need is below: waiting
for constructors, raising what they raised, held ports, the driver's environment.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.channels.settings import NODE_RANK_VARIABLE, NODES_VARIABLE
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient, DirectoryEntry, Facts, Kind
from workers.directory.address import WorkerAddress
from workers.directory.registry import WORLD_SIZE
from workers.directory.wire import EntryState
from workers.errors import DirectoryLostError, NameInUseError, NameNotFoundError, WorkerLostError
from workers.groups.actor_class import hosted
from workers.groups.actors import await_constructed, kill
from workers.groups.cluster import Cluster
from workers.placement.strategies import WorkerPlacement

START_TIMEOUT_S = 1800.0
IN_USE_S = 2.0
"""A worker of a group whose name is wanted that does not answer for so long is busy, not gone."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is asked for."""

    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str
    placements: Sequence[WorkerPlacement]
    max_concurrency: int | None
    catch_failures: bool
    log_to_driver: bool


class LaunchedGroup:
    """The workers of a launched group, in rank order. entry: the group's in the directory."""

    def __init__(self, cluster: Cluster, entry: DirectoryEntry) -> None:
        self.entry = entry
        self.actors: list[ActorHandle] = []
        self._cluster = cluster
        self._port: tuple[int, int] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def end(self) -> bool:
        """Say in the directory that the group has ended, kill the workers, let go of the port. Whether all went well;
        a no-op once done."""
        self._unsubscribe()
        with contextlib.suppress(DirectoryLostError):
            self._cluster.directory.end(Kind.GROUP, self.entry.name, self.entry.incarnation, why="its group ended")
        actors, self.actors = self.actors, []
        well = kill(actors)
        if self._port is not None and ray.is_initialized():
            self._cluster.release_port(*self._port)
        self._port = None
        return well

    def start(self, launch: Launch) -> None:
        """Fill it; blocks until every constructor has returned, or raises what one raised (then `end` it)."""
        first = launch.placements[0].cluster_node_rank
        self._port = (first, self._cluster.hold_port(first))
        shared = self._shared(launch)
        cls = ray.remote(hosted(launch.cls, catch_failures=launch.catch_failures))
        variables = self._cluster.environment()
        if self._cluster.num_accelerators:
            variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        options: dict[str, Any] = {"num_cpus": 0}
        if variables:
            options["runtime_env"] = {"env_vars": variables}
        if launch.max_concurrency is not None:
            options["max_concurrency"] = launch.max_concurrency
        for placement in launch.placements:
            node = self._cluster.nodes[placement.cluster_node_rank]
            environment = {**shared, **place_environment(placement), "TQ_HOST": node.host}
            made = cls.options(
                name=actor_name(self.entry, placement.rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.ident, soft=False),
                **options,
            ).remote(environment, *launch.args, **launch.kwargs)
            self.actors.append(made)
        await_constructed(
            {f"{launch.name}:{rank}": actor for rank, actor in enumerate(self.actors)}, timeout_s=START_TIMEOUT_S
        )
        if launch.catch_failures:
            self._watch()

    def _shared(self, launch: Launch) -> dict[str, str]:
        assert self._port is not None
        node, port = self._port
        return {
            "GROUP_NAME": launch.name,
            "WORLD_SIZE": str(len(launch.placements)),
            "MASTER_ADDR": self._cluster.nodes[node].host,
            "MASTER_PORT": str(port),
            DIRECTORY_VARIABLE: self._cluster.directory.address,
            NODES_VARIABLE: str(self._cluster.num_nodes),
            "TQ_LOG": "driver" if launch.log_to_driver else "file",
        }

    def _watch(self) -> None:
        """Have the log tell, by name, of workers whose process dies."""
        names = [f"{self.entry.name}:{rank}" for rank in range(len(self.actors))]
        found: set[int] = set()
        crew = weakref.ref(self)

        def gone(entry: DirectoryEntry) -> None:
            if entry.state is EntryState.LOST and entry.incarnation in found and crew() is not None:
                logger.error("worker %s is gone: %s", entry.name, entry.why)

        self._unsubscribe = self._cluster.directory.subscribe(gone)
        for name in names:
            found.add(self._cluster.directory.lookup_worker(WorkerAddress.from_name(name)).incarnation)


def launch_group(cluster: Cluster, launch: Launch) -> LaunchedGroup:
    """The workers of a new group. `NameInUseError` if a group that has not ended has the name; whatever is raised,
    nothing is left behind."""
    root = WorkerAddress(launch.name)
    entry = take_name(
        cluster.directory,
        launch.name,
        {
            "class": launch.cls.__qualname__,
            WORLD_SIZE: len(launch.placements),
            "namespace": ray.get_runtime_context().namespace,
            "token": secrets.token_hex(4),
        },
    )
    crew = LaunchedGroup(cluster, entry)
    try:
        launching = cluster.directory.register_worker(root, "")
        crew.start(launch)
        cluster.await_brokers()
        cluster.directory.end(Kind.WORKER, root.get_name(), launching.incarnation, why="the group is launched")
    except BaseException:
        crew.end()
        raise
    return crew


def take_name(directory: DirectoryClient, name: str, facts: Facts) -> DirectoryEntry:
    """Register a group. One of that name whose workers are all gone is ended first."""
    try:
        return directory.register_group(name, facts)
    except NameInUseError:
        try:
            held = directory.lookup_group(name)
        except NameNotFoundError:
            return directory.register_group(name, facts)
        if _is_launching(directory, name) or _lives(held):
            raise
    directory.end(Kind.GROUP, name, held.incarnation, why="its workers are gone")
    return directory.register_group(name, facts)


def find_actors(entry: DirectoryEntry) -> list[ActorHandle]:
    """The workers of a live group, by rank. `WorkerLostError` for one that is gone."""
    actors = []
    for rank in range(int(str(entry.facts[WORLD_SIZE]))):
        try:
            actors.append(ray.get_actor(actor_name(entry, rank), str(entry.facts["namespace"])))
        except ValueError as error:
            raise WorkerLostError(worker=f"worker {entry.name}:{rank}", why="its actor has ended") from error
    return actors


def actor_name(entry: DirectoryEntry, rank: int) -> str:
    """Unique among all groups, also those of the same name before."""
    return f"{entry.name}:{rank}-{entry.facts['token']}"


def place_environment(placement: WorkerPlacement) -> dict[str, str]:
    """What a worker's environment says of its place. LOCAL_RANK is an index into what the worker sees."""
    local_rank, local_world_size = placement.local_rank, placement.local_world_size
    if placement.isolated:
        local_rank, local_world_size = 0, 1
    elif placement.accelerators:
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
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, placement.visible)),
    }


def _is_launching(directory: DirectoryClient, name: str) -> bool:
    try:
        directory.lookup_worker(WorkerAddress(name))
    except Exception:
        return False
    return True


def _lives(entry: DirectoryEntry) -> bool:
    """Whether any of the group's workers answers, or is too busy to."""
    size = int(str(entry.facts[WORLD_SIZE]))
    asked = []
    for rank in range(size):
        with contextlib.suppress(ValueError, RayError):
            actor = ray.get_actor(actor_name(entry, rank), str(entry.facts["namespace"]))
            asked.append(actor.__ray_ready__.remote())
    if not asked:
        return False
    answered, busy = ray.wait(asked, num_returns=len(asked), timeout=IN_USE_S)
    return bool(busy) or any(_is_well(one) for one in answered)


def _is_well(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError:
        return False
    return True
