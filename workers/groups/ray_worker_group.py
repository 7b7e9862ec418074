"""`RayWorkerGroup`: Ray workers on reserved bundles that a driver calls together."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from dataplane.core.durations import as_timeout
from workers.groups.ray_worker_builder import RayWorkerBuilder
from workers.groups.start_workers import WorkerPlan, start_workers
from workers.groups.started_group import MultiWorkerFuture, StartedGroup, clean_up
from workers.groups.virtual_cluster import Endpoint, RayVirtualCluster
from workers.placement import dispatch
from workers.placement.bundles import TiedBundles, bundles_to_use, place_workers
from workers.placement.sharding import DATA_PARALLEL_AXIS, NamedSharding


class RayWorkerGroup:
    """Ray workers on the bundles of a cluster, called together. A context manager.

    cluster: provides the bundles. remote_worker_builder: creates each worker. workers_per_node: an int for every
    node or a list with one count per node; default: one worker per bundle. name_prefix: prefix of the workers'
    display names, which need not be unique. bundle_indices_list: (node, [bundles on it]) per tied group of workers
    that process the same data; replaces `workers_per_node`. sharding_annotations: names of the axes of the ranks.
    env_vars: set in every worker.

    Each worker sees RANK, LOCAL_RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT, and AVAILABLE_ADDR_LIST and
    AVAILABLE_PORT_LIST: JSON lists with one endpoint per rank, which `PortKeeper` holds for that rank. Blocks until
    every constructor has returned. If a constructor raises, raises its exception, with a note of the worker's name
    and rank, and leaves no worker behind.

    `_workers`, `_metadata` and `worker_to_tied_group_index` have one entry per worker, by rank; they are empty after
    the end. `_started` owns the actors and ends them.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[TiedBundles] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: dict[str, str] = {},  # noqa: B006 (public signature; the dict is never mutated)
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix
        self._started: StartedGroup | None = None
        self._workers: list[ActorHandle] = []
        self._metadata: list[dict[str, Any]] = []
        self.worker_to_tied_group_index: dict[int, int] = {}
        tied_groups = bundle_indices_list
        if tied_groups is None:
            tied_groups = bundles_to_use(cluster.bundle_counts, workers_per_node)
        # For the number of workers, and for its checks, which raise before a worker is started.
        locations = place_workers(cluster.bundle_counts, tied_groups, spanning=cluster.unified)
        self.sharding_annotations = _checked_sharding(len(locations), sharding_annotations)
        self._create_workers_from_bundle_indices(remote_worker_builder, tied_groups, env_vars)

    @property
    def workers(self) -> list[ActorHandle]:
        return self._workers

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """One dict per worker: rank, name, node_idx, local_rank, bundle_idx, dp_shard_idx (its data-parallel shard,
        below `dp_size`), tied_rank (its index in its tied group), and address and port of its endpoint."""
        return self._metadata

    @property
    def dp_size(self) -> int:
        """The number of data-parallel shards: the size of the axis "data_parallel", or else the number of tied
        groups; 0 after the end."""
        if not self._workers:
            return 0
        if self._dp_sharding is not None:
            return self._dp_sharding.get_axis_size(DATA_PARALLEL_AXIS)
        return len(set(self.worker_to_tied_group_index.values()))

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the first worker of a data-parallel shard: with an axis "data_parallel", the worker at 0 on all other
        axes; without it, a shard is a tied group, and this is the first worker of the group. IndexError for a shard
        that is not below `dp_size`."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(
                f"data-parallel shard {dp_shard_idx} does not exist; the group has {self.dp_size}, counted from 0"
            )
        if self._dp_sharding is not None:
            coords = {**dict.fromkeys(self._dp_sharding.names, 0), DATA_PARALLEL_AXIS: dp_shard_idx}
            return self._dp_sharding.get_ranks_by_coord(**coords)[0]
        return next(
            worker for worker, tied_group in self.worker_to_tied_group_index.items() if tied_group == dp_shard_idx
        )

    @property
    def _dp_sharding(self) -> NamedSharding | None:
        """`sharding_annotations`, if it has a data-parallel axis. Otherwise None: the tied groups are the data-parallel
        shards."""
        sharding = self.sharding_annotations
        return sharding if sharding is not None and DATA_PARALLEL_AXIS in sharding.names else None

    def _dp_shard_of(self, worker: int) -> int:
        """Return the data-parallel shard of a worker: its position on the axis, or else its tied group."""
        if self._dp_sharding is not None:
            return self._dp_sharding.get_worker_coords(worker)[DATA_PARALLEL_AXIS]
        return self.worker_to_tied_group_index[worker]

    # --- start and end ------------------------------------------------------------------------------------------

    def _create_workers_from_bundle_indices(
        self,
        remote_worker_builder: RayWorkerBuilder,
        bundle_indices_list: list[TiedBundles],
        env_vars: dict[str, str] = {},  # noqa: B006 (public signature; the dict is never mutated)
    ) -> None:
        """Start a worker on each of the given bundles and return once all are constructed."""
        self._started, plans, endpoints = start_workers(
            self.cluster, remote_worker_builder, bundle_indices_list, name_prefix=self.name_prefix, env_vars=env_vars
        )
        self._workers = list(self._started.actors)
        for plan, endpoint in zip(plans, endpoints, strict=True):
            self.worker_to_tied_group_index[plan.location.rank] = plan.location.tied_group
            self._metadata.append({**_metadata(plan, endpoint), "dp_shard_idx": self._dp_shard_of(plan.location.rank)})

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End every worker. Return whether no step failed; True also if the workers had ended before.

        cleanup_method: called on every worker first, unless `force`, and awaited for up to `timeout` seconds (None:
        no limit). The workers are killed after that, even if a cleanup failed.
        """
        timeout = as_timeout("timeout", timeout)
        names = [entry["name"] for entry in self._metadata]
        workers = dict(zip(names, self._workers, strict=True))
        # Before the cleanup: from now on calls of the group raise.
        self._workers = []
        self._metadata = []
        self.worker_to_tied_group_index = {}
        cleaned_up = True
        try:
            if cleanup_method is not None and not force:
                cleaned_up = clean_up(workers, cleanup_method, timeout_s=timeout)
        finally:
            all_killed = self._started is None or self._started.end()
        return cleaned_up and all_killed

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- calls --------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> ObjectRef:
        """Call a method on one worker and return its future. IndexError for an unknown worker."""
        self._check_callable()
        if not 0 <= worker_idx < len(self._workers):
            raise IndexError(f"worker {worker_idx} does not exist; the group has {len(self._workers)}, counted from 0")
        return self._send(method_name, [_Call(worker_idx, args, kwargs)])[0]

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[ObjectRef]:
        """Call a method with the same arguments on all workers, or on those at 0 of `run_rank_0_only_axes`. Return
        their futures in worker order.

        Each argument is put in the object store once for all workers; numbers and None are sent in the call.
        ValueError for an unknown axis.
        """
        self._check_callable()
        called = self._workers_to_call(run_rank_0_only_axes)
        stored = _StoredValues()
        shared_args = [stored.store_once(value) for value in args]
        shared_kwargs = {name: stored.store_once(value) for name, value in kwargs.items()}
        return self._send(method_name, [_Call(worker, shared_args, shared_kwargs) for worker in called])

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[ObjectRef]:
        """As `run_all_workers_single_data`, but each argument is a list with one value per called worker (ValueError
        for another length). `common_kwargs` are passed to all (ValueError for a name that is also in `kwargs`)."""
        self._check_callable()
        called = self._workers_to_call(run_rank_0_only_axes)
        dispatch.check_counts(len(called), args, kwargs)
        dispatch.check_common(common_kwargs or {}, kwargs)
        stored = _StoredValues()
        common = {name: stored.store_once(value) for name, value in (common_kwargs or {}).items()}
        calls = [
            _Call(
                worker,
                [values[index] for values in args],
                {**common, **{name: values[index] for name, values in kwargs.items()}},
            )
            for index, worker in enumerate(called)
        ]
        return self._send(method_name, calls)

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: list[str] | None = None,
        replicate_on_axes: list[str] | None = None,
        output_is_replicated: list[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call a method with arguments that are split along axes of the workers.

        Each argument is nested lists, one level per axis of `in_sharded_axes`, in that order. Workers that differ
        only on `replicate_on_axes` get the same value, which is stored once. On all other (free) axes only workers
        at 0 are called; with `make_dummy_calls_to_free_axes` the others are called with None for every argument.
        `common_kwargs` are passed to all. `output_is_replicated`: axes on which only the worker at 0 returns its
        result, as on free axes. ValueError, before any call, for a list whose length differs from its axis, for an
        unknown axis and for an axis in two roles.
        """
        self._check_callable()
        sharding = self._require_sharding()
        sharded = in_sharded_axes or []
        targets = dispatch.shard_targets(
            sharding, sharded, replicate_on_axes or [], dummies=make_dummy_calls_to_free_axes
        )
        # All checks come before the first value is stored and the first call is made.
        returned = dispatch.result_workers(sharding, targets, output_is_replicated or [])
        for name, shards in dispatch.named(args, kwargs):
            dispatch.check_shards(name, shards, sharding, sharded)
        dispatch.check_common(common_kwargs or {}, kwargs)
        stored = _StoredValues()
        common = {name: stored.store_once(value) for name, value in (common_kwargs or {}).items()}
        calls = [
            _Call(
                target.worker,
                [stored.shard_for(target, shards) for shards in args],
                {**common, **{name: stored.shard_for(target, shards) for name, shards in kwargs.items()}},
            )
            for target in targets
        ]
        return MultiWorkerFuture(
            self._send(method_name, calls),
            return_from_workers=returned,
            called_workers=[target.worker for target in targets],
        )

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """Return `future_bundle.get_results` of this group. TypeError for other types, such as the lists of futures
        that `run_all_workers_single_data` and `run_all_workers_multiple_data` return."""
        if not isinstance(future_bundle, MultiWorkerFuture):
            raise TypeError(
                f"expected the MultiWorkerFuture that run_all_workers_sharded_data returns, got "
                f"{type(future_bundle).__name__}; pass a list of futures to ray.get()"
            )
        return future_bundle.get_results(self, return_generators_as_proxies)

    def _send(self, method_name: str, calls: Sequence[_Call]) -> list[ObjectRef]:
        """Make the calls and return their futures. AttributeError, before any call, if the workers have no such
        method."""
        methods = [getattr(self._workers[call.worker], method_name) for call in calls]
        return [method.remote(*call.args, **call.kwargs) for method, call in zip(methods, calls, strict=True)]

    def _check_callable(self) -> None:
        """RuntimeError after the workers have ended. Ray itself would start a new cluster for the call."""
        if not self._workers:
            raise RuntimeError(f"worker group {self.name_prefix!r} has been shut down; start a new one")
        if not ray.is_initialized():
            raise RuntimeError(f"worker group {self.name_prefix!r} ended with its Ray cluster; start both again")

    def _workers_to_call(self, run_rank_0_only_axes: list[str] | None) -> list[int]:
        """Return the indices of the workers at 0 of these axes, or of all workers without axes."""
        if not run_rank_0_only_axes:
            return list(range(len(self._workers)))
        return dispatch.workers_at_zero(self._require_sharding(), run_rank_0_only_axes)

    def _require_sharding(self) -> NamedSharding:
        """Return the sharding. ValueError if the group has none."""
        if self.sharding_annotations is None:
            raise ValueError(
                "this call names axes, but the group has no sharding_annotations; pass them to RayWorkerGroup"
            )
        return self.sharding_annotations


class _Call(NamedTuple):
    """The arguments of a call on one worker. worker: its rank."""

    worker: int
    args: Sequence[Any]
    kwargs: dict[str, Any]


class _StoredValues:
    """Values that several calls share. Each is put in the object store once and passed by reference."""

    def __init__(self) -> None:
        self._references: dict[int, tuple[Any, ObjectRef]] = {}  # value and reference by the id of the value

    def store_once(self, value: Any) -> Any:
        """Return the argument to pass for `value`: its reference, or `value` itself if it is a reference or a small
        scalar."""
        if value is None or isinstance(value, bool | int | float | ObjectRef):
            return value
        if id(value) not in self._references:
            self._references[id(value)] = (value, ray.put(value))  # a reference to the value keeps its id unique
        return self._references[id(value)][1]

    def shard_for(self, target: dispatch.DispatchTarget, shards: Any) -> Any:
        """Return the argument to pass for the target's part of the nested lists `shards`, or None for a dummy call."""
        return None if target.dummy else self.store_once(dispatch.shards_of(shards, target.shard))


def _checked_sharding(workers: int, sharding: NamedSharding | None) -> NamedSharding | None:
    """Return `sharding`. ValueError unless it is None or names exactly the ranks of the group of `workers` workers."""
    if sharding is not None and sharding.get_ranks_by_coord() != list(range(workers)):
        raise ValueError(
            f"sharding_annotations has {sharding.size} ranks, which begin with {sharding.get_ranks_by_coord()[:4]}; it "
            f"must have the ranks 0 to {workers - 1} in ascending order, one per worker"
        )
    return sharding


def _metadata(plan: WorkerPlan, endpoint: Endpoint) -> dict[str, Any]:
    """Return the worker's entry of `worker_metadata`, without "dp_shard_idx"."""
    return {
        "rank": plan.location.rank,
        "name": plan.name,
        "node_idx": plan.location.node,
        "local_rank": plan.location.local_rank,
        "bundle_idx": plan.location.bundle,
        "tied_rank": plan.location.tied_rank,
        "address": endpoint[0],
        "port": endpoint[1],
    }
