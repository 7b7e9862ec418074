"""`RayVirtualCluster`: Ray placement groups of equal bundles, one per node or one over all nodes, for worker groups."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from threading import RLock
from types import TracebackType
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dataplane.core.durations import seconds
from workers.groups.started_group import kill, wait_for_all
from workers.placement.bundles import bundles_by_node
from workers.placement.ports import PortKeeper

logger = logging.getLogger(__name__)
READY_TIMEOUT_S = 120.0
FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 30.0
"""Wait for all bundles before a line in the log: at first and, doubled each time, at most."""
RELEASE_TIMEOUT_S = 5.0
_RESOURCES_SHOWN_NODES = 8
Bundle = tuple[int, int]
"""(placement group, bundle within it)."""
Endpoint = tuple[str, int]
"""(address, port)."""


class ResourcesNotReadyError(TimeoutError):
    """The Ray cluster did not provide the requested resources in time. The message has both the request and the
    resources."""


class RayVirtualCluster:
    """Bundles of CPUs and GPUs in a Ray cluster, reserved for worker groups on first use.

    bundle_ct_per_node_list: number of bundles on each node; a worker uses one bundle. use_gpus: one GPU in each
    bundle. max_colocated_worker_groups: how many groups share the bundles; each bundle has that many CPUs.
    num_gpus_per_node: limit of bundles with GPUs on a node. name: shown in Ray's listings; need not be unique.
    placement_group_strategy: Ray's strategy for one placement group over all nodes. Placement groups of one node are
    always packed, each on a different Ray node while enough of them have space (resources that an earlier group has
    released become available after a moment).

    ready_timeout_s (a settable attribute): limit of the wait for the bundles, and of the wait for ports of a node.

    A node of this cluster is an entry of the list. Two of them may be on one Ray node if Ray has fewer nodes.
    Thread-safe. A context manager.

    `_placement_groups` is None while nothing is reserved. `_unified`: whether it is one placement group over all
    nodes; otherwise placement group n is that of node n. Keepers run in bundles and end with them.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
    ) -> None:
        counts = [int(count) for count in bundle_ct_per_node_list]
        if not counts or min(counts) < 1:
            raise ValueError(
                f"bundle_ct_per_node_list={counts}: expected one number of bundles per node, each at least 1"
            )
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups={max_colocated_worker_groups} must be at least 1")
        if use_gpus and max(counts) > num_gpus_per_node:
            raise ValueError(
                f"bundle_ct_per_node_list={counts} has {max(counts)} bundles with a GPU each on one node, but "
                f"num_gpus_per_node={num_gpus_per_node}; use fewer bundles, or use_gpus=False"
            )
        self.name = name
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.placement_group_strategy = placement_group_strategy
        self.ready_timeout_s = READY_TIMEOUT_S
        self._bundle_counts = counts
        self._lock = RLock()  # guards all of the following; methods that hold it call each other
        self._placement_groups: list[PlacementGroup] | None = None
        self._unified = False
        self._host_of: dict[Bundle, str] = {}  # the id of the Ray node of each bundle
        self._nodes: list[list[Bundle]] = []  # the bundles of each node of this cluster
        self._keepers: dict[str, ActorHandle] = {}  # a `PortKeeper` actor by Ray node id
        self._held: dict[Endpoint, ActorHandle] = {}  # the keeper that holds each endpoint's port
        self._used_by: dict[Hashable, list[Bundle]] = {}  # one entry per worker group; a bundle per worker

    # --- sizes ----------------------------------------------------------------------------------------------------

    @property
    def bundle_counts(self) -> list[int]:
        """The number of bundles of each node."""
        return list(self._bundle_counts)

    @property
    def unified(self) -> bool:
        """Whether one placement group holds the bundles of all nodes."""
        return self._unified

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs per worker, so that every colocated group gets an equal share. A multiple of 0.0001, Ray's
        resolution."""
        if not self.use_gpus:
            return 0.0
        return 10_000 // self.max_colocated_worker_groups / 10_000

    def world_size(self) -> int:
        """The number of bundles."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        return len(self._bundle_counts)

    # --- placement groups -----------------------------------------------------------------------------------------

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups: one per node, or one if a unified placement group was requested. Reserve them
        first if needed.

        Blocks until Ray has created them, up to `ready_timeout_s`. After that `ResourcesNotReadyError`, with nothing
        reserved.
        """
        with self._lock:
            self._init_placement_groups()
            assert self._placement_groups is not None
            return list(self._placement_groups)

    def _init_placement_groups(self, strategy: str | None = None, use_unified_pg: bool = False) -> None:
        """Reserve the bundles: a packed placement group per node, or one unified group over all nodes, with
        `strategy` or else the cluster's strategy. A no-op if they are reserved. After an error nothing is reserved."""
        with self._lock:
            if self._placement_groups is not None:
                return
            self._unified = use_unified_pg
            try:
                self._reserve(strategy or self.placement_group_strategy)
                self._locate_bundles()
            except BaseException:
                self.shutdown()
                raise

    def _reserve(self, strategy: str) -> None:
        """Request the bundles and wait until Ray has created them all."""
        end = time.monotonic() + seconds("ready_timeout_s", self.ready_timeout_s)
        wait_s = FIRST_WAIT_S
        self._placement_groups = placement_groups = []
        targets = [None] if self._unified else self._choose_target_nodes()
        for number, target in enumerate(targets):
            placement_groups.append(self._request_placement_group(number, target, strategy))
        creations = [each.ready() for each in placement_groups]  # a future for each group
        while True:
            timeout_s = min(wait_s, end - time.monotonic())
            if len(wait_for_all(creations, timeout_s=timeout_s)) == len(creations):
                return
            request_text = self._describe_request()
            left_s = end - time.monotonic()
            if left_s <= 0:
                self._remove_placement_groups()
                raise ResourcesNotReadyError(
                    f"{request_text}. Not reserved within {self.ready_timeout_s:g} s; free some resources or request "
                    "fewer"
                )
            logger.warning("Bundles not reserved yet, waiting for another %.0f s at most: %s", left_s, request_text)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _bundle_resources(self) -> dict[str, float]:
        """Return the resources of one bundle."""
        return {"CPU": float(self.max_colocated_worker_groups), **({"GPU": 1.0} if self.use_gpus else {})}

    def _request_placement_group(self, number: int, target: str | None, strategy: str) -> PlacementGroup:
        """Request the placement group of node `number`, or the unified one, from Ray. target: the id of the preferred
        Ray node; None for no preference. Returns before the placement group is created."""
        name = f"{self.name or 'cluster'}-{uuid.uuid4().hex[:8]}-{number}"
        if self._unified:
            return placement_group(
                [self._bundle_resources() for _ in range(self.world_size())], strategy=strategy, name=name
            )
        bundles = [self._bundle_resources() for _ in range(self._bundle_counts[number])]
        return placement_group(bundles, strategy="STRICT_PACK", name=name, _soft_target_node_id=target)

    def _choose_target_nodes(self) -> list[str | None]:
        """Return for each node the id of a distinct Ray node whose total resources can hold it, or None if there is
        none. Without a target, Ray fills one node before it uses the next."""
        if self.node_count() == 1:
            return [None]  # there are no other nodes to keep apart from
        unchosen = alive_nodes()
        targets: list[str | None] = []
        for count in self._bundle_counts:
            needed = {name: count * amount for name, amount in self._bundle_resources().items()}
            fitting = [
                node for node in unchosen if all(node["Resources"].get(name, 0) >= needed[name] for name in needed)
            ]
            if fitting:
                unchosen.remove(fitting[0])
                targets.append(fitting[0]["NodeID"])
            else:
                targets.append(None)
        return targets

    def _describe_request(self) -> str:
        """Describe the requested bundles and the resources of the Ray cluster, for messages."""
        kind = "in one placement group" if self._unified else "one placement group per node"
        return (
            f"requested {self.world_size()} bundles of {_resources_text(self._bundle_resources())} on "
            f"{self.node_count()} nodes ({self._bundle_counts}, {kind}); the Ray cluster has "
            f"{_resources_text(ray.cluster_resources())} (free: "
            f"{_resources_text(ray.available_resources())}), on nodes of {_nodes_text()}"
        )

    def _locate_bundles(self) -> None:
        """Fill `_host_of` with the Ray node of each bundle, and `_nodes` with the bundles of each node."""
        assert self._placement_groups is not None
        for number, each in enumerate(self._placement_groups):
            for bundle in range(each.bundle_count):
                self._host_of[number, bundle] = node_of_bundle(each, bundle)
        if self._unified:
            hosts = [self._host_of[0, bundle] for bundle in range(self.world_size())]
            by_node = bundles_by_node(self._bundle_counts, hosts)
            self._nodes = [[(0, bundle) for bundle in bundles] for bundles in by_node]
        else:
            self._nodes = [
                [(node, bundle) for bundle in range(count)] for node, count in enumerate(self._bundle_counts)
            ]

    def locate(self, node: int, bundle: int) -> Bundle:
        """Return (placement group, bundle within it) of bundle `bundle` of node `node`. Reserve the bundles first if
        needed."""
        self.get_placement_groups()
        return self._nodes[node][bundle]

    def host_of(self, bundle: Bundle) -> str:
        """Return the id of the Ray node of a bundle. Reserve the bundles first if needed."""
        self.get_placement_groups()
        return self._host_of[bundle]

    # --- endpoints ------------------------------------------------------------------------------------------------

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> Endpoint:
        """Return the address of the node of bundle `bundle_idx` of placement group `pg_idx`, and a free port on that
        node.

        The port is held until `shutdown`: no other caller on that node gets it. See `PortKeeper` for how its worker
        binds it. Blocks up to `ready_timeout_s` for that node. IndexError for an unknown bundle.
        """
        return self.hold_endpoints([(pg_idx, bundle_idx)])[0]

    def get_master_address_and_port(self) -> Endpoint:
        """Return `get_available_address_and_port` of the first bundle."""
        return self.get_available_address_and_port(pg_idx=0, bundle_idx=0)

    def hold_endpoints(self, bundles: Sequence[Bundle]) -> list[Endpoint]:
        """Return `get_available_address_and_port` of each bundle, with one concurrent request per node. Wait up to
        `ready_timeout_s` for each node, then `ResourcesNotReadyError`. After an error no new port is held."""
        with self._lock:
            self.get_placement_groups()
            for bundle in bundles:
                if bundle not in self._host_of:
                    raise IndexError(
                        f"(placement group, bundle) {bundle} does not exist; this cluster has {sorted(self._host_of)}"
                    )
            hosts = [self._host_of[bundle] for bundle in bundles]  # ids of Ray nodes
            keepers = {host: self._keeper_on(host) for host in dict.fromkeys(hosts)}  # each host once
            # One request asks for the ports of all bundles of a host.
            requests = {host: keeper.hold.remote(hosts.count(host)) for host, keeper in keepers.items()}
            address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}
            new: dict[str, list[Endpoint]] = {}  # the new endpoints by host
            try:
                for host, ports in requests.items():
                    new[host] = [(address_of[host], port) for port in self._held_ports(ports, host)]
                    self._held.update(dict.fromkeys(new[host], keepers[host]))
            except BaseException:
                for host in requests.keys() - new.keys():
                    keepers[host].release.remote(requests[host])  # executed after the request, with its result
                self.release_endpoints([endpoint for endpoints in new.values() for endpoint in endpoints])
                raise
            # `hosts` has one entry per bundle: each bundle takes the next endpoint of its host.
            return [new[host].pop(0) for host in hosts]

    def release_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Release these endpoints, and end keepers that hold no other ports. Errors are only logged: a dead node holds
        no ports. Wait up to `RELEASE_TIMEOUT_S` for the nodes."""
        with self._lock:
            ports_of: dict[ActorHandle, list[int]] = {}  # the ports to release, by keeper
            for endpoint in endpoints:
                keeper = self._held.pop(endpoint, None)
                if keeper is not None:
                    ports_of.setdefault(keeper, []).append(endpoint[1])
            if not ray.is_initialized():
                return
            try:
                if requests := [keeper.release.remote(ports) for keeper, ports in ports_of.items()]:
                    ray.wait(requests, num_returns=len(requests), timeout=RELEASE_TIMEOUT_S)
            except Exception as error:
                logger.warning("Cannot release ports: %s", error)
            needed = set(self._held.values())
            kill([keeper for keeper in self._keepers.values() if keeper not in needed])
            self._keepers = {host: keeper for host, keeper in self._keepers.items() if keeper in needed}

    def _keeper_on(self, host: str) -> ActorHandle:
        """Return the actor that holds this cluster's ports on the Ray node `host`. If there is none, create it in a
        bundle of the node, so that it ends with the bundles."""
        if host not in self._keepers:
            placement_index, bundle = next(key for key, node in self._host_of.items() if node == host)
            on_bundle = PlacementGroupSchedulingStrategy(self.get_placement_groups()[placement_index], bundle)
            self._keepers[host] = ray.remote(PortKeeper).options(num_cpus=0, scheduling_strategy=on_bundle).remote()
        return self._keepers[host]

    def _held_ports(self, ports: ObjectRef, host: str) -> list[int]:
        """Wait for the ports that the keeper on `host` holds, and return them. `ResourcesNotReadyError` after a failure
        or `ready_timeout_s`; then forget the keeper: the next request creates a new one."""
        try:
            held: list[int] = ray.get(ports, timeout=self.ready_timeout_s)
        except RayError as error:
            del self._keepers[host]
            silent = isinstance(error, GetTimeoutError)
            why = f"no response within {self.ready_timeout_s:g} s" if silent else str(error)
            raise ResourcesNotReadyError(f"cannot hold ports on node {host}: {why}") from error
        return held

    # --- users and shutdown -----------------------------------------------------------------------------------------

    def join(self, user: Hashable) -> bool:
        """Register `user`, a group of workers, as a user of the bundles. Return whether the bundles were already
        reserved."""
        with self._lock:
            self._used_by[user] = []
            return self._placement_groups is not None

    def occupy(self, user: Hashable, bundles: Sequence[Bundle]) -> None:
        """Record a worker of `user`, which has joined, on each of `bundles`. ValueError, with nothing recorded, if a
        bundle would have more workers than allowed."""
        with self._lock:
            worker_counts = Counter(bundle for used in self._used_by.values() for bundle in used)
            worker_counts.update(bundles)
            for bundle in bundles:
                if worker_counts[bundle] > self.max_colocated_worker_groups:
                    raise ValueError(
                        f"{worker_counts[bundle]} workers on bundle {bundle[1]} of placement group {bundle[0]}; the "
                        f"limit is max_colocated_worker_groups={self.max_colocated_worker_groups}; shut a group down "
                        "first"
                    )
            self._used_by[user] = list(bundles)

    def leave(self, user: Hashable, *, keep: bool = True) -> None:
        """Unregister `user`; a no-op if it is not registered. keep: whether the bundles stay reserved after the last
        user has left."""
        with self._lock:
            was_registered = self._used_by.pop(user, None) is not None
            if was_registered and not keep and not self._used_by:
                self.shutdown()

    def shutdown(self) -> bool:
        """Release the bundles and ports. Ray ends the workers that run on them. Return whether no step failed.

        Idempotent, also after Ray has shut down. A later use of the cluster reserves the bundles again.
        """
        with self._lock:
            self._host_of = {}
            self._nodes = []
            self._keepers = {}
            self._held = {}
            self._used_by = {}
            self._unified = False
            return self._remove_placement_groups()

    def _remove_placement_groups(self) -> bool:
        """Remove the placement groups. Return whether no step failed; True also if Ray has shut down, which removed
        them."""
        placement_groups = self._placement_groups or []
        self._placement_groups = None
        succeeded = True
        for each in placement_groups:
            try:
                if ray.is_initialized():
                    remove_placement_group(each)
            except Exception as error:
                logger.warning("Cannot remove placement group %s: %s", each.id.hex(), error)
                succeeded = False
        return succeeded

    def __enter__(self) -> RayVirtualCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def _nodes_text() -> str:
    """Describe the resources of the first nodes, and the number of the others."""
    nodes = alive_nodes()
    more = len(nodes) - _RESOURCES_SHOWN_NODES
    shown = " + ".join(f"({_resources_text(node['Resources'])})" for node in nodes[:_RESOURCES_SHOWN_NODES])
    return f"{shown} and {more} more" if more > 0 else shown


def _resources_text(resources: dict[str, Any]) -> str:
    amounts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources]
    return ", ".join(amounts) or "no CPU and no GPU"


def node_of_bundle(placement_group: PlacementGroup, bundle: int) -> str:
    """Return the id of the Ray node of a bundle of a ready placement group."""
    return str(placement_group_table(placement_group)["bundles_to_node_id"][bundle])
