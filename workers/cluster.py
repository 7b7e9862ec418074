"""The resources that worker groups share: placement groups of equal bundles, one per node or one over all of them."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

READY_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 60.0


class ResourcesNotReadyError(TimeoutError):
    """The Ray cluster did not free the bundles that were asked for in time; says what was asked and what there is."""


def _free_endpoints(count: int) -> tuple[str, list[int]]:
    """This node's address and `count` distinct ports that nothing is bound to."""
    sockets = []
    try:
        for _ in range(count):
            sockets.append(socket.socket())
            sockets[-1].bind(("", 0))
        return ray.util.get_node_ip_address(), [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


class RayVirtualCluster:
    """Bundles of CPUs and GPUs reserved in a Ray cluster for worker groups. Nothing is reserved before use.

    bundle_ct_per_node_list: bundles on each node, one list entry per node; a worker takes a bundle.
    use_gpus: a GPU in each bundle. max_colocated_worker_groups: how many groups share the bundles; each bundle has that
    many CPUs. num_gpus_per_node: the most bundles with GPUs a node can have. name: shown in Ray's listings; need not be
    unique. placement_group_strategy: Ray's name of how bundle groups spread over nodes where one group holds them all;
    groups of one node are always packed.
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
            raise ValueError(f"bundle_ct_per_node_list={counts}: one positive count per node")
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups={max_colocated_worker_groups}: at least 1")
        if use_gpus and max(counts) > num_gpus_per_node:
            raise ValueError(f"{max(counts)} bundles with a GPU each do not fit on {num_gpus_per_node} GPUs per node")
        self.name = name
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.placement_group_strategy = placement_group_strategy
        self.ready_timeout_s = READY_TIMEOUT_S
        self._bundle_counts = counts
        self._placement_groups: list[PlacementGroup] | None = None
        self._unified = False
        self._handed_out: set[tuple[str, int]] = set()

    @property
    def bundle_counts(self) -> list[int]:
        """Bundles of each node."""
        return list(self._bundle_counts)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs a worker may take so that every colocated group gets its share."""
        return 1.0 / self.max_colocated_worker_groups if self.use_gpus else 0.0

    def world_size(self) -> int:
        """The number of bundles."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        return len(self._bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement groups, reserved on first use: one per node, or one where a unified one was asked for.

        Blocks until Ray has them ready, up to `ready_timeout_s`; then `ResourcesNotReadyError`, holding nothing.
        """
        if self._placement_groups is None:
            self._init_placement_groups()
        assert self._placement_groups is not None
        return list(self._placement_groups)

    def _init_placement_groups(self, strategy: str | None = None, use_unified_pg: bool = False) -> None:
        """Reserve the bundles: one group for each node (packed), or one unified over all of them (`strategy`, else the
        cluster's). A no-op when they are reserved."""
        if self._placement_groups is not None:
            return
        bundle = {"CPU": float(self.max_colocated_worker_groups)}
        if self.use_gpus:
            bundle["GPU"] = 1.0
        shapes = [[dict(bundle) for _ in range(count)] for count in self._bundle_counts]
        if use_unified_pg:
            shapes = [[one for shape in shapes for one in shape]]
        kind = (strategy or self.placement_group_strategy) if use_unified_pg else "STRICT_PACK"
        unique = f"{self.name or 'cluster'}-{uuid.uuid4().hex[:8]}"
        self._placement_groups, self._unified = [], use_unified_pg
        try:
            for number, shape in enumerate(shapes):
                self._placement_groups.append(placement_group(shape, strategy=kind, name=f"{unique}-{number}"))
            self._await_ready(bundle)
        except BaseException:
            self.shutdown()
            raise

    def _await_ready(self, bundle: dict[str, float]) -> None:
        """Wait for every placement group, in growing steps so that a slow cluster is asked less and less often."""
        waited_s, step_s = 0.0, 1.0
        waiting = self.get_placement_groups()
        while waiting:
            step_s = min(step_s * 2, 30.0, self.ready_timeout_s - waited_s)
            if step_s <= 0:
                asked, has, free = self.world_size(), ray.cluster_resources(), ray.available_resources()
                raise ResourcesNotReadyError(
                    f"asked for {asked} bundles of {bundle} on {self.node_count()} nodes ({self._bundle_counts}); not "
                    f"reserved within {self.ready_timeout_s:.0f} s. The Ray cluster has {_brief(has)}, of which free "
                    f"{_brief(free)}. Free some, or ask for fewer."
                )
            if waiting[-1].wait(timeout_seconds=max(step_s, 0.05)):
                waiting.pop()
            else:
                waited_s += step_s

    def get_available_address_and_port(self, pg_idx: int, bundle_idx: int) -> tuple[str, int]:
        """An address of the node that bundle `bundle_idx` of placement group `pg_idx` is on, and a port free there.

        No two calls on this cluster return the same. Blocks up to `PROBE_TIMEOUT_S` for an answer from that node.
        """
        return self.free_endpoints(pg_idx, bundle_idx, 1)[0]

    def free_endpoints(self, pg_idx: int, bundle_idx: int, count: int) -> list[tuple[str, int]]:
        """`count` times `get_available_address_and_port`, in one visit to the node."""
        group = self.get_placement_groups()[pg_idx]
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_idx)
        probe = ray.remote(num_cpus=0)(_free_endpoints).options(scheduling_strategy=place)
        found: list[tuple[str, int]] = []
        while len(found) < count:
            address, ports = ray.get(probe.remote(count - len(found)), timeout=PROBE_TIMEOUT_S)
            new = [(address, port) for port in ports if (address, port) not in self._handed_out]
            self._handed_out.update(new)
            found += new
        return found

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Address and free port of the node of the first bundle."""
        return self.get_available_address_and_port(0, 0)

    def locate(self, node: int, bundle: int) -> tuple[int, int]:
        """(placement group, bundle within it) of bundle `bundle` of node `node`."""
        if not self._unified:
            return node, bundle
        return 0, sum(self._bundle_counts[:node]) + bundle

    def shutdown(self) -> bool:
        """Give the bundles back; whoever still runs on them is ended by Ray. Idempotent, also after Ray is gone."""
        groups, self._placement_groups = self._placement_groups, None
        if groups and ray.is_initialized():
            for group in groups:
                remove_placement_group(group)
        return True

    def __enter__(self) -> RayVirtualCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _brief(resources: dict[str, Any]) -> str:
    counted = {name: resources[name] for name in ("CPU", "GPU") if name in resources}
    return ", ".join(f"{amount:g} {name}" for name, amount in counted.items()) or "no CPU and no GPU"


def node_of_bundle(group: PlacementGroup, bundle: int) -> str:
    """The id of the Ray node that a ready placement group's bundle is on."""
    return str(placement_group_table(group)["bundles_to_node_id"][bundle])
