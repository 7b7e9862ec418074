"""A group of Ray workers that a driver calls together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayError

from workers import dispatch
from workers.builder import RayWorkerBuilder
from workers.cluster import RayVirtualCluster
from workers.engine import await_started, driver_environment, end_actors, merged, results_in_order
from workers.placement import TiedBundles, WorkerPlace, bundles_to_use, place_workers, rank_environment
from workers.ranks import DATA_PARALLEL_AXIS
from workers.sharding import NamedSharding

logger = logging.getLogger(__name__)


@dataclass
class MultiWorkerFuture:
    """The futures of one call on many workers.

    futures: one per worker called, in worker order. called_workers: their indices. return_from_workers: those of them
    whose results `get_results` returns; None for all.
    """

    futures: list[ObjectRef]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def get_results(self, worker_group: RayWorkerGroup, return_generators_as_proxies: bool = False) -> list[Any]:
        """The results, in worker order: of `return_from_workers`, or else of the first worker of each tied group.

        Blocks until every worker called has answered (also those whose results are dropped), or one raises: then that
        exception, at once, with a note naming the worker. A generator's items come in its place, one after another;
        with `return_generators_as_proxies` the `ObjectRefGenerator` itself does.
        """
        called = self.called_workers if self.called_workers is not None else list(range(len(self.futures)))
        names = [worker_group.worker_metadata[worker]["name"] for worker in called]
        plain = [place for place, future in enumerate(self.futures) if not isinstance(future, ObjectRefGenerator)]
        values = results_in_order([self.futures[place] for place in plain], [names[place] for place in plain])
        ready = dict(zip(plain, values, strict=True))
        results: list[Any] = []
        for place in self._returned(called, worker_group.worker_to_tied_group_index):
            future = self.futures[place]
            if place in ready:
                results.append(ready[place])
            elif return_generators_as_proxies:
                results.append(future)
            else:
                results.extend(ray.get(item) for item in future)
        return results

    def _returned(self, called: Sequence[int], tied_group_of: dict[int, int]) -> list[int]:
        """Places in `futures` whose results are returned."""
        if self.return_from_workers is not None:
            wanted = set(self.return_from_workers)
            return [place for place, worker in enumerate(called) if worker in wanted]
        first: dict[int, int] = {}
        for place, worker in enumerate(called):
            first.setdefault(tied_group_of[worker], place)
        return list(first.values())


class RayWorkerGroup:
    """Ray workers on the bundles of a cluster, called together.

    cluster: whose bundles they take. remote_worker_builder: makes each worker. workers_per_node: one per bundle unless
    an int (for every node) or a list says otherwise. name_prefix: of the workers' names, which are shown and need not
    be unique. bundle_indices_list: (node, [bundles on it]) per tied group of workers that process the same data;
    `workers_per_node` is ignored then. sharding_annotations: names the axes of the ranks. env_vars: for every worker.

    Each worker sees RANK, LOCAL_RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT, and AVAILABLE_ADDR_LIST and
    AVAILABLE_PORT_LIST (JSON lists, one endpoint per rank). Blocks until every constructor has returned;
    `WorkerStartError` where one raises, leaving no worker behind. A context manager.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[TiedBundles] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: dict[str, str] = {},  # noqa: B006 (the document's signature; never changed)
    ) -> None:
        self.cluster = cluster
        self.name_prefix = name_prefix
        self._workers: list[ActorHandle] = []
        self._metadata: list[dict[str, Any]] = []
        self.worker_to_tied_group_index: dict[int, int] = {}
        groups = bundle_indices_list
        if groups is None:
            groups = bundles_to_use(cluster.bundle_counts, workers_per_node)
        places = place_workers(cluster.bundle_counts, groups)
        self.sharding_annotations = _sharding_for(len(places), sharding_annotations)
        try:
            self._create_workers_from_bundle_indices(remote_worker_builder, groups, env_vars)
            await_started({entry["name"]: worker for entry, worker in zip(self._metadata, self._workers, strict=True)})
        except BaseException:
            self.shutdown(force=True)
            raise

    @property
    def workers(self) -> list[ActorHandle]:
        return self._workers

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """Of each worker: rank, name, node_idx, local_rank, bundle_idx, dp_shard_idx (its tied group), tied_rank,
        address and port of its endpoint."""
        return self._metadata

    @property
    def dp_size(self) -> int:
        """The number of data-parallel shards: places on the axis "data_parallel", else tied groups."""
        if not self._workers:
            return 0
        if self.sharding_annotations is not None and DATA_PARALLEL_AXIS in self.sharding_annotations.names:
            return self.sharding_annotations.get_axis_size(DATA_PARALLEL_AXIS)
        return len(set(self.worker_to_tied_group_index.values()))

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """The first worker of a data-parallel shard. IndexError beyond `dp_size`."""
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(f"data-parallel shard {dp_shard_idx} of {self.dp_size}")
        sharding = self.sharding_annotations
        if sharding is not None and DATA_PARALLEL_AXIS in sharding.names:
            return sharding.get_ranks_by_coord(
                **{**dict.fromkeys(sharding.names, 0), DATA_PARALLEL_AXIS: dp_shard_idx}
            )[0]
        return next(worker for worker, group in self.worker_to_tied_group_index.items() if group == dp_shard_idx)

    # --- start and end ------------------------------------------------------------------------------------------

    def _create_workers_from_bundle_indices(
        self,
        remote_worker_builder: RayWorkerBuilder,
        bundle_indices_list: list[TiedBundles],
        env_vars: dict[str, str] = {},  # noqa: B006 (the document's signature; never changed)
    ) -> None:
        """Start a worker on each bundle named; returns before their constructors have run."""
        places = place_workers(self.cluster.bundle_counts, bundle_indices_list)
        placement_groups = self.cluster.get_placement_groups()
        endpoints = self._endpoints(places)
        first = self.cluster.locate(places[0].node, places[0].bundle)
        master = self.cluster.get_available_address_and_port(*first)
        for place, endpoint in zip(places, endpoints, strict=True):
            group, bundle = self.cluster.locate(place.node, place.bundle)
            name = self._name(place)
            variables = {**driver_environment(), **env_vars}
            options = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
            ranked = {"runtime_env": {"env_vars": rank_environment(place, endpoints, master)}}
            worker = remote_worker_builder(
                placement_groups[group],
                bundle,
                self.cluster.num_gpus_per_worker,
                place.bundle_indices,
                **merged(options, ranked),
            )
            self._workers.append(worker)
            self.worker_to_tied_group_index[place.rank] = place.tied_group
            self._metadata.append(_metadata(place, name, endpoint))

    def _endpoints(self, places: Sequence[WorkerPlace]) -> list[tuple[str, int]]:
        """A free address and port per rank, asked of each node once."""
        free: dict[int, list[tuple[str, int]]] = {}
        for node in {place.node for place in places}:
            here = [place for place in places if place.node == node]
            group, bundle = self.cluster.locate(node, here[0].bundle)
            free[node] = self.cluster.free_endpoints(group, bundle, len(here))
        return [free[place.node][place.local_rank] for place in places]

    def _name(self, place: WorkerPlace) -> str:
        return "-".join(part for part in (self.name_prefix, str(place.node), str(place.rank)) if part)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = 30.0, force: bool = False) -> bool:
        """End every worker. Returns whether all went well: True also when there is nothing left to end.

        cleanup_method: called on every worker first, unless `force`; waited for up to `timeout` seconds (None: as long
        as it takes). Workers are killed after that, whatever one of them did.
        """
        workers, self._workers = self._workers, []
        names = [entry["name"] for entry in self._metadata]
        self._metadata, self.worker_to_tied_group_index = [], {}
        well = True
        try:
            if workers and cleanup_method is not None and not force:
                well = _cleaned_up(workers, names, cleanup_method, timeout)
        finally:
            end_actors(workers)
        return well

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- calls --------------------------------------------------------------------------------------------------

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any) -> ObjectRef:
        """Call a method on one worker; its future. IndexError for a worker that is not there."""
        if not 0 <= worker_idx < len(self._workers):
            raise IndexError(f"worker {worker_idx} of {len(self._workers)}")
        return self._call(worker_idx, method_name, args, kwargs)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: list[str] | None = None, **kwargs: Any
    ) -> list[ObjectRef]:
        """Call a method on all workers, or on those at 0 of `run_rank_0_only_axes`, with the same arguments, each
        stored once; their futures in worker order."""
        shared_args = [_shared(value) for value in args]
        shared_kwargs = {name: _shared(value) for name, value in kwargs.items()}
        return [
            self._call(worker, method_name, shared_args, shared_kwargs)
            for worker in self._running(run_rank_0_only_axes)
        ]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: list[str] | None = None,
        common_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[ObjectRef]:
        """As `run_all_workers_single_data`, each argument a list with one value per worker that runs (ValueError where
        its length differs); `common_kwargs` go to all."""
        running = self._running(run_rank_0_only_axes)
        dispatch.check_counts(len(running), args, kwargs)
        shared = {name: _shared(value) for name, value in (common_kwargs or {}).items()}
        return [
            self._call(
                worker,
                method_name,
                [values[place] for values in args],
                {**shared, **{name: values[place] for name, values in kwargs.items()}},
            )
            for place, worker in enumerate(running)
        ]

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

        Each argument is nested lists, one level per axis of `in_sharded_axes`, in that order. Workers that differ on
        `replicate_on_axes` only get the same (stored once). On all other axes workers beyond 0 are not called, or with
        `make_dummy_calls_to_free_axes` are called with None for every argument. `common_kwargs` go to all.
        `output_is_replicated`: axes on which only place 0 returns its result. ValueError for lists of another length
        than their axis, an unknown axis or one in two roles.
        """
        sharding, sharded = self._sharding(), in_sharded_axes or []
        targets = dispatch.shard_targets(
            sharding, sharded, replicate_on_axes or [], dummies=make_dummy_calls_to_free_axes
        )
        returned = dispatch.result_workers(sharding, targets, output_is_replicated or [])
        named = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
        for name, shards in named:
            dispatch.check_shards(name, shards, sharding, sharded)
        split_args = [_Shards(value, len(sharded)) for value in args]
        split_kwargs = {name: _Shards(value, len(sharded)) for name, value in kwargs.items()}
        common = {name: _shared(value) for name, value in (common_kwargs or {}).items()}
        futures = [
            self._call(
                target.worker,
                method_name,
                [shards.of(target) for shards in split_args],
                {**common, **{name: shards.of(target) for name, shards in split_kwargs.items()}},
            )
            for target in targets
        ]
        return MultiWorkerFuture(futures, returned, [target.worker for target in targets])

    def get_all_worker_results(
        self, future_bundle: MultiWorkerFuture, return_generators_as_proxies: bool = False
    ) -> list[Any]:
        """`future_bundle.get_results` on this group."""
        return future_bundle.get_results(self, return_generators_as_proxies)

    def _call(self, worker: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ObjectRef:
        return getattr(self._workers[worker], method_name).remote(*args, **kwargs)

    def _running(self, run_rank_0_only_axes: list[str] | None) -> list[int]:
        if not run_rank_0_only_axes:
            return list(range(len(self._workers)))
        return dispatch.workers_at_zero(self._sharding(), run_rank_0_only_axes)

    def _sharding(self) -> NamedSharding:
        if self.sharding_annotations is None:
            raise ValueError("this call names axes, but the group was made without sharding_annotations")
        return self.sharding_annotations


class _Shards:
    """One argument of a sharded call: what each worker is sent, every distinct part stored once."""

    def __init__(self, shards: Any, depth: int) -> None:
        self._shards = shards
        self._shared: dict[tuple[int, ...], Any] = {}
        self._depth = depth

    def of(self, target: dispatch.Target) -> Any:
        if target.dummy:
            return None
        if target.shard not in self._shared:
            self._shared[target.shard] = _shared(dispatch.shards_of(self._shards, target.shard))
        return self._shared[target.shard]


def _shared(value: Any) -> Any:
    """`value` for several calls: stored once in the object store; references and nothing are passed as they are."""
    return value if value is None or isinstance(value, bool | int | float | ObjectRef) else ray.put(value)


def _sharding_for(workers: int, sharding: NamedSharding | None) -> NamedSharding | None:
    """`sharding`, which must name exactly the ranks of the group."""
    if sharding is not None and sharding.get_ranks_by_coord() != list(range(workers)):
        raise ValueError(
            f"sharding_annotations names {sharding.size} ranks from {sharding.get_ranks_by_coord()[0]} on; it has to "
            f"name 0 to {workers - 1}, one per worker"
        )
    return sharding


def _metadata(place: WorkerPlace, name: str, endpoint: tuple[str, int]) -> dict[str, Any]:
    return {
        "rank": place.rank,
        "name": name,
        "node_idx": place.node,
        "local_rank": place.local_rank,
        "bundle_idx": place.bundle,
        "dp_shard_idx": place.tied_group,
        "tied_rank": place.tied_rank,
        "address": endpoint[0],
        "port": endpoint[1],
    }


def _cleaned_up(workers: Sequence[ActorHandle], names: Sequence[str], method: str, timeout: float | None) -> bool:
    """Whether `method` returned on every worker in time; what went wrong is logged."""
    futures = {getattr(worker, method).remote(): name for worker, name in zip(workers, names, strict=True)}
    done, late = ray.wait(list(futures), num_returns=len(futures), timeout=timeout)
    for future in late:
        logger.warning("worker %s: %s did not return within %s s", futures[future], method, timeout)
    well = not late
    for future in done:
        try:
            ray.get(future)
        except RayError as error:
            logger.warning("worker %s: %s failed: %s", futures[future], method, error)
            well = False
    return well
