"""Starting and ending the Ray actors of a worker group, of whatever kind the group is.

The seam: a group says which bundles of its cluster to use and hands over a `WorkerMaker`; `start_workers` places,
names, connects and starts a worker on each, and returns a `StartedGroup`: the workers with all that is known of them,
and `end()`, which leaves nothing of them behind. If it raises, there is nothing to end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ray import ObjectRef
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from dataplane.core.durations import seconds
from workers.groups.actors import await_constructed, kill, results_of
from workers.groups.virtual_cluster import Bundle, Endpoint, RayVirtualCluster
from workers.placement.bundles import TiedBundles, WorkerPlace, counted_by_host, place_workers, rank_environment
from workers.placement.environment import Layer, driver_environment, layered

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 1800.0


class WorkerMaker(Protocol):
    """What makes a group's workers. `RayWorkerBuilder` is one."""

    def for_group(self) -> WorkerMaker:
        """A maker whose initializers no other group shares, as they are killed with the group."""
        ...

    def initializer(self, placement_group: PlacementGroup, bundle: int, options: Mapping[str, Any]) -> ActorHandle:
        """The actor that `begin` with such options will use on this placement group; starts it if there is none."""
        ...

    def begin(
        self,
        placement_group: PlacementGroup,
        bundle: int,
        num_gpus: float,
        bundle_indices: TiedBundles | None = None,
        **extra_options: Any,
    ) -> tuple[ObjectRef, ActorHandle]:
        """Begin to make a worker: a future of (its actor, sentences to log), and the initializer that owns it."""
        ...


@dataclass(frozen=True, kw_only=True)
class StartedWorker:
    """A worker whose constructor has returned. bundle: where it is in the cluster; endpoint: held for it there."""

    actor: ActorHandle
    name: str
    place: WorkerPlace
    bundle: Bundle
    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is settled of a worker before it is made."""

    name: str
    place: WorkerPlace
    bundle: Bundle

    @property
    def label(self) -> str:
        return f"{self.name} (rank {self.place.rank})"


class StartedGroup:
    """Workers that were started together, in rank order, and what keeps them alive."""

    def __init__(self, cluster: RayVirtualCluster) -> None:
        self.workers: list[StartedWorker] = []
        self._cluster = cluster
        self._actors: list[ActorHandle] = []
        self._initializers: list[ActorHandle] = []
        self._endpoints: list[Endpoint] = []

    def end(self) -> bool:
        """Kill workers and initializers, let go of their ports. Whether all went well; a no-op once done."""
        return self._end(keep=True)

    def _end(self, *, keep: bool) -> bool:
        actors, self._actors = [*self._actors, *self._initializers], []
        endpoints, self._endpoints = self._endpoints, []
        self._initializers, self.workers = [], []
        well = kill(actors)
        self._cluster.release_endpoints(endpoints)
        self._cluster.leave(self, keep=keep)
        return well

    def start(
        self,
        maker: WorkerMaker,
        groups: Sequence[TiedBundles],
        name_prefix: str,
        env_vars: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Fill it, once; if that raises, end it, and the cluster's reservation if that was made here."""
        reserved = self._cluster.join(self)
        try:
            plans = _planned(self._cluster, groups, name_prefix)
            self._cluster.occupy(self, [plan.bundle for plan in plans])
            self._make(maker.for_group(), plans, env_vars, timeout_s)
        except BaseException:
            self._end(keep=reserved)
            raise

    def _make(self, maker: WorkerMaker, plans: Sequence[_Plan], env_vars: Mapping[str, str], timeout_s: float) -> None:
        placement_groups = self._cluster.get_placement_groups()
        settings = [
            Layer("the driver's environment", _variables(driver_environment()), ""),
            Layer("the argument env_vars", _variables(env_vars), "it is for this group"),
        ]
        shared, overrides = layered(settings)
        for plan in plans:  # initializers boot while endpoints are asked for
            group, bundle = plan.bundle
            initializer = maker.initializer(placement_groups[group], bundle, shared)
            if initializer not in self._initializers:
                self._initializers.append(initializer)
        self._endpoints = self._cluster.hold_endpoints([plans[0].bundle, *(plan.bundle for plan in plans)])
        master, *endpoints = self._endpoints
        making: dict[str, ObjectRef] = {}
        for plan in plans:
            ranks = Layer("the group", _variables(rank_environment(plan.place, endpoints, master)), "ranks are its own")
            options, more = layered([*settings, ranks])
            overrides += more
            group, bundle = plan.bundle
            making[plan.label], _ = maker.begin(
                placement_groups[group],
                bundle,
                self._cluster.num_gpus_per_worker,
                plan.place.bundle_indices,
                num_gpus_per_node=self._cluster.num_gpus_per_node,
                **options,
            )
        made = results_of(making, "being made", timeout_s=timeout_s)
        self._actors = [made[plan.label][0] for plan in plans]
        _log_once([*overrides, *(sentence for plan in plans for sentence in made[plan.label][1])])
        await_constructed({plan.label: made[plan.label][0] for plan in plans}, timeout_s=timeout_s)
        self.workers = [
            StartedWorker(actor=actor, name=plan.name, place=plan.place, bundle=plan.bundle, endpoint=endpoint)
            for plan, actor, endpoint in zip(plans, self._actors, endpoints, strict=True)
        ]


def start_workers(
    cluster: RayVirtualCluster,
    maker: WorkerMaker,
    groups: Sequence[TiedBundles],
    *,
    name_prefix: str = "",
    env_vars: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> StartedGroup:
    """A worker on every bundle that `groups` name, ranks in their order.

    Workers are made and constructed all at the same time. Their environment, lowest first: this process's, `env_vars`,
    what the class asks for, the rank variables; what overrides what is logged. Blocks until every constructor has
    returned, up to `timeout_s` (`WorkerStartError`). What a constructor raises is raised here, at once, with a note of
    the worker's name and rank. ValueError where `groups` do not fit the cluster
    or as many workers as it allows are on a bundle already. After any error no worker, initializer
    or port is left, nor a placement group that was not there before.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    crew = StartedGroup(cluster)
    crew.start(maker, groups, name_prefix, env_vars or {}, timeout_s)
    return crew


def _planned(cluster: RayVirtualCluster, groups: Sequence[TiedBundles], name_prefix: str) -> list[_Plan]:
    places = place_workers(cluster.bundle_counts, groups, spanning=cluster.unified)
    bundles = [cluster.locate(place.node, place.bundle) for place in places]
    if cluster.unified:
        places = counted_by_host(places, [cluster.host_of(bundle) for bundle in bundles])
    return [
        _Plan(
            name="-".join(part for part in (name_prefix, str(place.node), str(place.rank)) if part),
            place=place,
            bundle=bundle,
        )
        for place, bundle in zip(places, bundles, strict=True)
    ]


def _variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": variables}}


def _log_once(sentences: Sequence[str]) -> None:
    for sentence in dict.fromkeys(sentences):
        logger.warning("%s", sentence)
