"""Which workers a group has, on which nodes and accelerators: arithmetic on a cluster's counts. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Accelerators(Protocol):
    """What a strategy needs to know of a cluster."""

    @property
    def accelerators_per_node(self) -> Sequence[int]:
        """How many accelerators each node has, by node rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerPlacement:
    """Where one worker of a group is.

    cluster_node_rank: its node among all of the cluster; placement_node_rank: among those that the group is on;
    local_rank, local_world_size: among the group's workers of its node; accelerators: those of its node that are its
    own, none for a CPU worker; visible: those that it shall see.
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
        """Whether it sees its own accelerators only."""
        return bool(self.accelerators) and self.visible == self.accelerators

    @property
    def local_accelerator_rank(self) -> int:
        """The first accelerator that it may use, counted on its node; -1 if there is none."""
        return next(iter(self.accelerators or self.visible), -1)


class PlacementStrategy(Protocol):
    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        """The workers, in rank order. isolate_accelerator: whether a worker sees its own accelerators only. ValueError
        where the cluster has not what the strategy names."""
        ...


class PackedPlacementStrategy:
    """A worker for every `num_hardware_per_process` accelerators from `start_hardware_rank` to `end_hardware_rank`
    (included), node after node.

    Accelerators are numbered over the whole cluster. With `stride` s a worker has every s-th one: of 0 to 3, two per
    worker, (0, 1) and (2, 3) with stride 1, (0, 2) and (1, 3) with stride 2. ValueError for a range that is not a
    multiple of `num_hardware_per_process * stride`.
    """

    def __init__(
        self, start_hardware_rank: int, end_hardware_rank: int, num_hardware_per_process: int = 1, stride: int = 1
    ) -> None:
        if num_hardware_per_process < 1 or stride < 1:
            raise ValueError(f"num_hardware_per_process={num_hardware_per_process}, stride={stride}: at least 1 each")
        if not 0 <= start_hardware_rank <= end_hardware_rank:
            raise ValueError(f"accelerators {start_hardware_rank} to {end_hardware_rank} are no range from 0 on")
        count, block = end_hardware_rank - start_hardware_rank + 1, num_hardware_per_process * stride
        if count % block:
            raise ValueError(f"{count} accelerators are not a multiple of {block}: so many are taken at a time")
        self._groups = [
            tuple(range(first + offset, first + offset + block, stride))
            for first in range(start_hardware_rank, end_hardware_rank + 1, block)
            for offset in range(stride)
        ]

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        return _on_accelerators(self._groups, cluster, isolate_accelerator)


class FlexiblePlacementStrategy:
    """A worker for each list of accelerators, which are numbered over the whole cluster.

    Those of one worker are on one node and differ. They are sorted, and so are the workers, by their first.
    """

    def __init__(self, hardware_ranks_list: Sequence[Sequence[int]]) -> None:
        groups = [tuple(sorted(ranks)) for ranks in hardware_ranks_list]
        if not groups or not all(groups):
            raise ValueError(
                f"hardware_ranks_list={hardware_ranks_list!r}: at least one worker, each with accelerators"
            )
        for ranks in groups:
            if len(set(ranks)) < len(ranks):
                raise ValueError(f"a worker names an accelerator more than once: {list(ranks)}")
        self._groups = sorted(groups, key=lambda ranks: ranks[0])

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        return _on_accelerators(self._groups, cluster, isolate_accelerator)


class NodePlacementStrategy:
    """A worker for each node rank named, sorted; a node may be named often. They see all accelerators of their node."""

    def __init__(self, node_ranks: Sequence[int]) -> None:
        if not node_ranks:
            raise ValueError("node_ranks is empty: a worker group has at least one worker")
        self._nodes = sorted(node_ranks)

    def get_placement(self, cluster: Accelerators, isolate_accelerator: bool = True) -> list[WorkerPlacement]:
        nodes = len(cluster.accelerators_per_node)
        for node in self._nodes:
            if not 0 <= node < nodes:
                raise ValueError(f"node {node} was named; the cluster has {nodes} nodes, counted from 0")
        return _placed([(node, ()) for node in self._nodes], cluster, False)


def _on_accelerators(groups: Sequence[tuple[int, ...]], cluster: Accelerators, isolate: bool) -> list[WorkerPlacement]:
    places = [(node, index) for node, count in enumerate(cluster.accelerators_per_node) for index in range(count)]
    if not places:
        raise ValueError("the cluster has no accelerators; NodePlacementStrategy places workers by nodes alone")
    found = []
    for ranks in groups:
        if not 0 <= ranks[0] <= ranks[-1] < len(places):
            raise ValueError(f"accelerators {list(ranks)} were named; the cluster has {len(places)}, counted from 0")
        nodes = {places[rank][0] for rank in ranks}
        if len(nodes) > 1:
            raise ValueError(f"accelerators {list(ranks)} of one worker are on several nodes: {sorted(nodes)}")
        found.append((nodes.pop(), tuple(places[rank][1] for rank in ranks)))
    return _placed(found, cluster, isolate)


def _placed(
    workers: Sequence[tuple[int, tuple[int, ...]]], cluster: Accelerators, isolate: bool
) -> list[WorkerPlacement]:
    """workers: (node, accelerators of its own there) of each, in order of their nodes."""
    nodes = [node for node, _ in workers]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [
        WorkerPlacement(
            rank=rank,
            cluster_node_rank=node,
            placement_node_rank=numbers[node],
            local_rank=nodes[:rank].count(node),
            local_world_size=nodes.count(node),
            accelerators=own,
            visible=own if isolate else tuple(range(cluster.accelerators_per_node[node])),
        )
        for rank, (node, own) in enumerate(workers)
    ]
