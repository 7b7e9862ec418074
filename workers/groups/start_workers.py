"""Start of the actors of a `RayWorkerGroup`, one per bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef

from dataplane.core.durations import seconds
from workers.groups.ray_worker_builder import RayWorkerBuilder, log_overrides
from workers.groups.started_group import START_TIMEOUT_S, StartedGroup, results_of
from workers.groups.virtual_cluster import Bundle, Endpoint, RayVirtualCluster
from workers.placement.bundles import TiedBundles, WorkerPlace, counted_by_host, place_workers, rank_environment
from workers.placement.environment import Layer, driver_environment, layered


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Name and place of a worker before its creation. bundle: the place's bundle in the cluster."""

    name: str
    place: WorkerPlace
    bundle: Bundle

    @property
    def label(self) -> str:
        return f"{self.name} (rank {self.place.rank})"


def start_workers(
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    groups: Sequence[TiedBundles],
    *,
    name_prefix: str = "",
    env_vars: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[StartedGroup, list[WorkerPlan], list[Endpoint]]:
    """Start a worker on every bundle of `groups`, with ranks in their order. Return the actors, and plan and
    endpoint of each.

    Workers are created and constructed concurrently. Their environment in ascending precedence: this process's;
    `env_vars`; that of the class; the rank variables. Overrides are logged. Blocks until every constructor has
    returned, up to `timeout_s` for the creation of the actors and again up to `timeout_s` for their constructors
    (then `WorkerStartError`). Raises the first exception of a constructor at once, with a note of the worker's name
    and rank. Endpoints are held until the group ends. ValueError if `groups` do not fit the cluster or a bundle has
    the allowed number of workers already. After any error no worker, initializer or port of the group remains, nor a
    placement group that did not exist before.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    started = StartedGroup()
    reserved = cluster.join(started)
    started.after.callback(lambda: cluster.leave(started, keep=reserved or started.constructed))
    with started.starting():
        plans = _planned(cluster, groups, name_prefix)
        cluster.occupy(started, [plan.bundle for plan in plans])
        endpoints = _make(started, cluster, builder.for_group(), plans, env_vars or {}, timeout_s)
        started.await_constructed([plan.label for plan in plans], timeout_s=timeout_s)
    return started, plans, endpoints


def _planned(cluster: RayVirtualCluster, groups: Sequence[TiedBundles], name_prefix: str) -> list[WorkerPlan]:
    """Return a name and a place for each worker. If the bundles are in one placement group, ranks of nodes follow
    the hosts."""
    places = place_workers(cluster.bundle_counts, groups, spanning=cluster.unified)
    bundles = [cluster.locate(place.node, place.bundle) for place in places]
    if cluster.unified:
        places = counted_by_host(places, [cluster.host_of(bundle) for bundle in bundles])
    return [
        WorkerPlan(
            name="-".join(part for part in (name_prefix, str(place.node), str(place.rank)) if part),
            place=place,
            bundle=bundle,
        )
        for place, bundle in zip(places, bundles, strict=True)
    ]


def _make(
    started: StartedGroup,
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    plans: Sequence[WorkerPlan],
    env_vars: Mapping[str, str],
    timeout_s: float,
) -> list[Endpoint]:
    """Create the actors. Return the endpoint of each."""
    placement_groups = cluster.get_placement_groups()
    settings = [
        Layer("the driver's environment", _variables(driver_environment()), ""),
        Layer("the argument env_vars", _variables(env_vars), "it applies to this group"),
    ]
    shared, overrides = layered(settings)
    for plan in plans:  # initializers start while endpoints are requested
        group, bundle = plan.bundle
        initializer = builder.initializer(placement_groups[group], bundle, shared)
        if initializer not in started.owners:
            started.owners.append(initializer)
    held = cluster.hold_endpoints([plans[0].bundle, *(plan.bundle for plan in plans)])
    started.after.callback(cluster.release_endpoints, held)
    master, *endpoints = held
    making: dict[str, ObjectRef] = {}
    for plan in plans:
        ranks = Layer(
            "the group", _variables(rank_environment(plan.place, endpoints, master)), "ranks are fixed by the group"
        )
        options, more = layered([*settings, ranks])
        overrides += more
        group, bundle = plan.bundle
        making[plan.label], _ = builder.begin(
            placement_groups[group],
            bundle,
            cluster.num_gpus_per_worker,
            plan.place.bundle_indices,
            num_gpus_per_node=cluster.num_gpus_per_node,
            **options,
        )
    for actor, more in results_of(making, "being made", timeout_s=timeout_s).values():
        started.actors.append(actor)
        overrides += more
    log_overrides(overrides)
    return endpoints


def _variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": variables}}
