"""Starting the actors of a `RayWorkerGroup`, one on each bundle that it names."""

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
    """What is settled of a worker before it is made. bundle: where its place is in the cluster."""

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
    """A worker on every bundle that `groups` name, ranks in their order: the actors, and of each its plan and endpoint.

    Workers are made and constructed all at the same time. Their environment, lowest first: this process's, `env_vars`,
    what the class asks for, the rank variables; what overrides what is logged. Blocks until every constructor has
    returned, up to `timeout_s` for making the actors and as long again for their constructors (`WorkerStartError`).
    What a constructor raises is raised here, at once, with a note of the worker's name and rank. Endpoints are held
    until the group ends. ValueError where `groups` do not fit the cluster or as many workers as it allows are on a
    bundle already. After any error no worker, initializer or port is left, nor a placement group that was not there
    before.
    """
    timeout_s = seconds("timeout_s", timeout_s)
    crew = StartedGroup()
    reserved = cluster.join(crew)
    crew.after.callback(lambda: cluster.leave(crew, keep=reserved or crew.constructed))
    with crew.starting():
        plans = _planned(cluster, groups, name_prefix)
        cluster.occupy(crew, [plan.bundle for plan in plans])
        endpoints = _make(crew, cluster, builder.for_group(), plans, env_vars or {}, timeout_s)
        crew.await_constructed([plan.label for plan in plans], timeout_s=timeout_s)
    return crew, plans, endpoints


def _planned(cluster: RayVirtualCluster, groups: Sequence[TiedBundles], name_prefix: str) -> list[WorkerPlan]:
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
    crew: StartedGroup,
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    plans: Sequence[WorkerPlan],
    env_vars: Mapping[str, str],
    timeout_s: float,
) -> list[Endpoint]:
    """Make the actors; the endpoint of each."""
    placement_groups = cluster.get_placement_groups()
    settings = [
        Layer("the driver's environment", _variables(driver_environment()), ""),
        Layer("the argument env_vars", _variables(env_vars), "it is for this group"),
    ]
    shared, overrides = layered(settings)
    for plan in plans:  # initializers boot while endpoints are asked for
        group, bundle = plan.bundle
        initializer = builder.initializer(placement_groups[group], bundle, shared)
        if initializer not in crew.owners:
            crew.owners.append(initializer)
    held = cluster.hold_endpoints([plans[0].bundle, *(plan.bundle for plan in plans)])
    crew.after.callback(cluster.release_endpoints, held)
    master, *endpoints = held
    making: dict[str, ObjectRef] = {}
    for plan in plans:
        ranks = Layer("the group", _variables(rank_environment(plan.place, endpoints, master)), "ranks are its own")
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
        crew.actors.append(actor)
        overrides += more
    log_overrides(overrides)
    return endpoints


def _variables(variables: Mapping[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": variables}}
