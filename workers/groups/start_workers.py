"""Start of the actors of a `RayWorkerGroup`, one per bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef

from dataplane.core.durations import as_timeout
from workers.groups.ray_worker_builder import RayWorkerBuilder, log_overrides
from workers.groups.started_group import START_TIMEOUT_S, StartedGroup, results_of
from workers.groups.virtual_cluster import Bundle, Endpoint, RayVirtualCluster
from workers.placement.bundles import TiedBundles, WorkerLocation, counted_by_host, place_workers, rank_environment
from workers.placement.environment import Layer, driver_environment, layered


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Name and place of a worker before its creation. bundle: the place's bundle in the cluster."""

    name: str
    location: WorkerLocation
    bundle: Bundle

    @property
    def label(self) -> str:
        return f"{self.name} (rank {self.location.rank})"


def start_workers(
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    tied_groups: Sequence[TiedBundles],
    *,
    name_prefix: str = "",
    env_vars: Mapping[str, str] | None = None,
    timeout_s: float | None = START_TIMEOUT_S,
) -> tuple[StartedGroup, list[WorkerPlan], list[Endpoint]]:
    """Start a worker on every bundle of `tied_groups`, with ranks in their order. Return the actors, and plan and
    endpoint of each.

    Workers are created and constructed concurrently. Their environment in ascending precedence: this process's;
    `env_vars`; that of the class; the rank variables. Overrides are logged. Blocks until every constructor has
    returned, up to `timeout_s` for the creation of the actors and again up to `timeout_s` for their constructors
    (then `WorkerStartError`). Raises the first exception of a constructor at once, with a note of the worker's name
    and rank. Endpoints are held until the group ends. ValueError if `tied_groups` do not fit the cluster or a bundle
    has the allowed number of workers already. After any error no worker, initializer or port of the
    group remains, nor a placement group that did not exist before.
    """
    timeout_s = as_timeout("timeout_s", timeout_s)
    started = StartedGroup()
    were_reserved = cluster.join(started)
    # Bundles that were reserved only for a group that failed to start are released.
    started.after.callback(lambda: cluster.leave(started, keep=were_reserved or started.constructed))
    with started.starting():
        plans = _plan_workers(cluster, tied_groups, name_prefix)
        cluster.occupy(started, [plan.bundle for plan in plans])
        endpoints = _create_actors(started, cluster, builder.for_worker_group(), plans, env_vars or {}, timeout_s)
        started.await_constructed([plan.label for plan in plans], timeout_s=timeout_s)
    return started, plans, endpoints


def _plan_workers(cluster: RayVirtualCluster, tied_groups: Sequence[TiedBundles], name_prefix: str) -> list[WorkerPlan]:
    """Return a plan for each worker, by rank, with the name "PREFIX-NODE-RANK". In a unified placement group, ranks of
    nodes and local ranks follow the Ray nodes of the bundles (see `counted_by_host`)."""
    locations = place_workers(cluster.bundle_counts, tied_groups, spanning=cluster.unified)
    bundles = [cluster.locate(location.node, location.bundle) for location in locations]  # reserves the bundles
    if cluster.unified:
        locations = counted_by_host(locations, [cluster.host_of(bundle) for bundle in bundles])
    return [
        WorkerPlan(
            name="-".join(word for word in (name_prefix, str(location.node), str(location.rank)) if word),
            location=location,
            bundle=bundle,
        )
        for location, bundle in zip(locations, bundles, strict=True)
    ]


def _create_actors(
    started: StartedGroup,
    cluster: RayVirtualCluster,
    builder: RayWorkerBuilder,
    plans: Sequence[WorkerPlan],
    env_vars: Mapping[str, str],
    timeout_s: float,
) -> list[Endpoint]:
    """Create the actors and add them to `started`, but do not wait for their constructors. Return the endpoint of each.

    builder: used by this group only. env_vars: see `start_workers`. Waits up to `timeout_s` for the creation, then
    `WorkerStartError`. Overrides of environment variables and options are logged once, at the end.
    """
    placement_groups = cluster.get_placement_groups()
    shared_layers = [  # of all workers; the lowest one overrides nothing, so it has no reason
        Layer("the driver's environment", _variables(driver_environment()), ""),
        Layer("the argument env_vars", _variables(env_vars), "it applies to this group"),
    ]
    shared_options, overrides = layered(shared_layers)
    for plan in plans:  # initializers start while endpoints are requested
        placement_index, bundle = plan.bundle
        initializer = builder.initializer(placement_groups[placement_index], bundle, shared_options)
        if initializer not in started.owners:
            started.owners.append(initializer)
    # One endpoint per worker, and one more on the first worker's node: the master's.
    held_endpoints = cluster.hold_endpoints([plans[0].bundle, *(plan.bundle for plan in plans)])
    started.after.callback(cluster.release_endpoints, held_endpoints)
    master, *endpoints = held_endpoints
    creations: dict[str, ObjectRef] = {}
    for plan in plans:
        ranks = Layer(
            "the group", _variables(rank_environment(plan.location, endpoints, master)), "ranks are fixed by the group"
        )
        options, more_overrides = layered([*shared_layers, ranks])
        overrides += more_overrides
        placement_index, bundle = plan.bundle
        creations[plan.label], _ = builder.begin(  # the second value is the initializer, in `owners` already
            placement_groups[placement_index],
            bundle,
            cluster.num_gpus_per_worker,
            plan.location.bundle_indices,
            num_gpus_per_node=cluster.num_gpus_per_node,
            **options,
        )
    for actor, more_overrides in results_of(creations, "being made", timeout_s=timeout_s).values():
        started.actors.append(actor)
        overrides += more_overrides
    log_overrides(overrides)
    return endpoints


def _variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the actor options that set these environment variables."""
    return {"runtime_env": {"env_vars": variables}}
