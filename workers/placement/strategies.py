"""Placement strategies: the workers of a group, their nodes and their accelerators. Arithmetic only; no Ray, no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Accelerators(Protocol):
    """The cluster attributes that a strategy reads."""

    @property
    def accelerators_per_node(self) -> Sequence[int]:
        """The number of accelerators of each node, by node rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerPlacement:
    """The place of one worker of a group.

    cluster_node_rank: rank of its node in the cluster; placement_node_rank: rank of its node among the nodes of the
    group; local_rank, local_world_size: among the group's workers on its node; accelerators: indices on its node of
    its own accelerators, empty for a CPU worker; visible: indices of the accelerators that it can see.
    """

    rank: int
    cluster_node_rank: int
    placement_node_rank: int
    local_rank: int
    local_world_size: int
    accelerators: tuple[int, ...]
    visible: tuple[int, ...]

    @property
    def isolated(self) -> bool:
        """Whether the worker has accelerators and sees only its own."""
        return bool(self.accelerators) and self.visible == self.accelerators

    @property
    def local_accelerator_rank(self) -> int:
        """Index on the node of the first accelerator that the worker may use; -1 without one."""
        return next(iter(self.accelerators or self.visible), -1)


class PlacementStrategy(Protocol):
    """Decides how many workers a group has, and where each of them runs."""

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        """Return the workers in rank order. isolate_accelerator: each worker sees only its own accelerators.
        ValueError for a node or accelerator that the cluster does not have."""
        ...


class PackedPlacementStrategy:
    """One worker per `num_hardware_per_process` accelerators, from `start_hardware_rank` to `end_hardware_rank`
    (inclusive).

    Accelerators are numbered over the whole cluster. With `stride` s a worker gets every s-th accelerator: of 0 to 3
    with two per worker, (0, 1) and (2, 3) for stride 1, (0, 2) and (1, 3) for stride 2. ValueError if the size of
    the range is not a multiple of `num_hardware_per_process * stride`.
    """

    def __init__(
        self, start_hardware_rank: int, end_hardware_rank: int, num_hardware_per_process: int = 1, stride: int = 1
    ) -> None:
        if num_hardware_per_process < 1 or stride < 1:
            raise ValueError(
                f"num_hardware_per_process={num_hardware_per_process}, stride={stride}: must be at least 1"
            )
        if not 0 <= start_hardware_rank <= end_hardware_rank:
            raise ValueError(
                f"start_hardware_rank={start_hardware_rank}, end_hardware_rank={end_hardware_rank}: expected 0 <= "
                "start <= end"
            )
        count = end_hardware_rank - start_hardware_rank + 1
        block = num_hardware_per_process * stride
        if count % block:
            raise ValueError(
                f"{count} accelerators are not a multiple of {block} (num_hardware_per_process * stride); change the "
                "range"
            )
        # The accelerators of each worker. `stride` workers share a block of consecutive accelerators.
        self._hardware_ranks = [
            tuple(range(first + offset, first + offset + block, stride))
            for first in range(start_hardware_rank, end_hardware_rank + 1, block)
            for offset in range(stride)
        ]

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        return _on_accelerators(self._hardware_ranks, cluster, isolate_accelerator)


class FlexiblePlacementStrategy:
    """One worker per list of accelerators, which are numbered over the whole cluster.

    The accelerators of a worker must be distinct and on one node. They are sorted. Workers are sorted by their first
    one.
    """

    def __init__(self, hardware_ranks_list: Sequence[Sequence[int]]) -> None:
        hardware_ranks = [tuple(sorted(ranks)) for ranks in hardware_ranks_list]
        if not hardware_ranks or not all(hardware_ranks):
            raise ValueError(
                f"hardware_ranks_list={hardware_ranks_list!r}: expected at least one list, each with at least one "
                "accelerator"
            )
        for ranks in hardware_ranks:
            if len(set(ranks)) < len(ranks):
                raise ValueError(f"hardware_ranks_list names an accelerator twice for one worker: {list(ranks)}")
        self._hardware_ranks = sorted(hardware_ranks, key=lambda ranks: ranks[0])

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        return _on_accelerators(self._hardware_ranks, cluster, isolate_accelerator)


class NodePlacementStrategy:
    """One worker per entry of `node_ranks`, sorted; a node may occur repeatedly. Workers see all accelerators of
    their node."""

    def __init__(self, node_ranks: Sequence[int]) -> None:
        if not node_ranks:
            raise ValueError("node_ranks is empty: a worker group needs at least one worker")
        self._nodes = sorted(node_ranks)

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        """See `PlacementStrategy`. isolate_accelerator: ignored, these workers have no accelerators of their own."""
        node_count = len(cluster.accelerators_per_node)
        for node in self._nodes:
            if not 0 <= node < node_count:
                raise ValueError(f"node {node} does not exist; the cluster has {node_count} nodes, counted from 0")
        return _placements([(node, ()) for node in self._nodes], cluster, isolate=False)


def _on_accelerators(
    hardware_ranks: Sequence[tuple[int, ...]], cluster: Accelerators, isolate: bool
) -> list[WorkerPlacement]:
    """Return the placements. hardware_ranks: the accelerators of each worker, ascending, in the whole cluster.
    ValueError if an accelerator does not exist, or if those of one worker are on several nodes."""
    per_node = cluster.accelerators_per_node
    # (node, index on it) of each accelerator, by its number in the cluster.
    all_accelerators = [(node, index) for node, count in enumerate(per_node) for index in range(count)]
    if not all_accelerators:
        raise ValueError("the cluster has no accelerators; use NodePlacementStrategy to place workers by node")
    assigned = []
    for owned in hardware_ranks:  # ascending, so that the first and the last one bound the others
        if not 0 <= owned[0] <= owned[-1] < len(all_accelerators):
            raise ValueError(
                f"some of the accelerators {list(owned)} do not exist; the cluster has {len(all_accelerators)}, "
                "counted from 0"
            )
        nodes = {all_accelerators[number][0] for number in owned}
        if len(nodes) > 1:
            raise ValueError(
                f"accelerators {list(owned)} of one worker are on the nodes {sorted(nodes)}, but must all be on one "
                "node"
            )
        assigned.append((nodes.pop(), tuple(all_accelerators[number][1] for number in owned)))
    return _placements(assigned, cluster, isolate)


def _placements(
    workers: Sequence[tuple[int, tuple[int, ...]]], cluster: Accelerators, isolate: bool
) -> list[WorkerPlacement]:
    """Return the placements. workers: (node, its own accelerators there) of each, sorted by node. isolate: each worker
    sees only its own accelerators, else all of its node."""
    nodes = [node for node, _ in workers]
    group_node_ranks = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [
        WorkerPlacement(
            rank=rank,
            cluster_node_rank=node,
            placement_node_rank=group_node_ranks[node],
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            accelerators=accelerators,
            visible=accelerators if isolate else tuple(range(cluster.accelerators_per_node[node])),
        )
        for rank, (node, accelerators) in enumerate(workers)
    ]
