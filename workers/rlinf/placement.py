"""`rlinf.scheduler.placement`: placement strategies, and the strategies that a configuration assigns to components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.groups.cluster import Cluster
from workers.placement.strategies import FlexiblePlacementStrategy as FlexiblePlacementStrategy
from workers.placement.strategies import NodePlacementStrategy as NodePlacementStrategy
from workers.placement.strategies import PackedPlacementStrategy as PlainPackedPlacementStrategy
from workers.placement.strategies import PlacementStrategy as PlacementStrategy
from workers.placement.strategies import WorkerPlacement as WorkerPlacement
from workers.rlinf.cluster import parse_rank_config

NODE_GROUPS = ("cluster", "node")
"""RLinf's predefined node groups: all nodes, with ranks of accelerators ("cluster") or of nodes ("node")."""

RankMap = dict[tuple[int, ...], list[int]]
"""Maps ranks of accelerators (or nodes) to the ranks of the processes on them."""


class PackedPlacementStrategy(PlainPackedPlacementStrategy):
    """`workers.PackedPlacementStrategy` with RLinf's attributes for its arguments."""

    def __init__(
        self, start_hardware_rank: int, end_hardware_rank: int, num_hardware_per_process: int = 1, stride: int = 1
    ) -> None:
        super().__init__(start_hardware_rank, end_hardware_rank, num_hardware_per_process, stride)
        self._start_hw_rank = start_hardware_rank
        self._end_hw_rank = end_hardware_rank
        self._num_hardware_per_process = num_hardware_per_process
        self._stride = stride


class ComponentPlacement:
    """The placement of components by `config.cluster.component_placement`.

    config: each key names components ("actor,rollout"). Each value is a comma-separated list of "RESOURCES" or
    "RESOURCES:PROCESSES". RESOURCES are ranks of accelerators (of nodes, in a cluster without accelerators), as
    FIRST-LAST or "all". PROCESSES are ranks of the processes that share them evenly; the default is one process per
    resource. A value can also be a block with `placement` and `node_group`, "cluster" or "node" (ranks of nodes).

    ValueError for duplicate components, resources or processes, processes that are not numbered consecutively from 0, a
    number of processes that cannot share the resources evenly, and other node groups.

    The dicts have the names of the components as keys. Subclasses may set `_placement_mode` and add `_placements`.
    """

    def __init__(self, config: Any, cluster: Cluster) -> None:
        self._config = config
        self._placement_config = config.cluster.component_placement
        self._placement_mode: Any = None
        self._placements: dict[str, PlacementStrategy] = {}
        self._components: list[str] = []
        self._component_world_size: dict[str, int] = {}
        self._component_rank_map: dict[str, RankMap] = {}
        for names, value in self._placement_config.items():
            by_nodes, text = _parse_value(value)
            rank_map, strategy = _place_processes(text, cluster, by_nodes=by_nodes or not cluster.num_accelerators)
            for name in map(str.strip, str(names).split(",")):
                if name in self._placements:
                    raise ValueError(f"component_placement names component {name!r} twice; name each component once")
                self._components.append(name)
                self._placements[name] = strategy
                self._component_rank_map[name] = rank_map
                self._component_world_size[name] = sum(map(len, rank_map.values()))

    @property
    def placement_mode(self) -> Any:
        """The mode that a subclass sets, by default None."""
        return self._placement_mode

    @property
    def components(self) -> list[str]:
        """The names of the components, in the order of the configuration."""
        return self._components

    def get_hardware_ranks(self, component_name: str) -> list[int]:
        """Return the ranks of a component's accelerators (or nodes). ValueError for an unknown component."""
        return [rank for ranks in self._component_rank_map[self._checked_name(component_name)] for rank in ranks]

    def get_world_size(self, component_name: str) -> int:
        """Return a component's number of processes. ValueError for an unknown component."""
        return self._component_world_size[self._checked_name(component_name)]

    def get_strategy(self, component_name: str) -> PlacementStrategy:
        """Return the placement strategy of a component's group. ValueError for an unknown component."""
        # `_checked_name` reads the rank maps, so it is not called for placements that subclasses add without one.
        if component_name not in self._placements:
            self._checked_name(component_name)  # raises
        return self._placements[component_name]

    def _checked_name(self, name: str) -> str:
        """Return `name`. ValueError if there is no such component."""
        if name not in self._component_rank_map:
            raise ValueError(f"component_placement has no component {name!r}; it has {', '.join(self._components)}")
        return name


def _parse_value(value: Any) -> tuple[bool, str]:
    """Return whether a component's value names ranks of nodes, and its placement text. value: the text, or a block with
    `placement` and `node_group`."""
    if not isinstance(value, Mapping):
        return False, str(value)
    node_group = str(value.get("node_group") or NODE_GROUPS[0])
    if node_group not in NODE_GROUPS:
        raise ValueError(f"node_group={node_group!r} is not supported; expected {' or '.join(NODE_GROUPS)}")
    return node_group == "node", str(value["placement"])


def _place_processes(text: str, cluster: Cluster, by_nodes: bool) -> tuple[RankMap, PlacementStrategy]:
    """Return the rank map and the strategy of a placement text. by_nodes: its resources are nodes, not accelerators.
    ValueError as `_parse_rank_map`, and for a process on several nodes."""
    count = cluster.num_nodes if by_nodes else cluster.num_accelerators
    rank_map = _parse_rank_map(text, list(range(count)), "node" if by_nodes else "accelerator")
    resources_of_process: dict[int, list[int]] = {}
    for resources, processes in rank_map.items():
        # Either processes use several resources each, or resources have several processes each: one number is 1.
        per_process = max(len(resources) // len(processes), 1)
        processes_per_resource = max(len(processes) // len(resources), 1)
        for index, process in enumerate(processes):
            first = index // processes_per_resource * per_process
            resources_of_process[process] = list(resources[first : first + per_process])
    resources_by_rank = [resources_of_process[process] for process in sorted(resources_of_process)]
    if not by_nodes:
        return rank_map, FlexiblePlacementStrategy(resources_by_rank)
    if any(len(nodes) > 1 for nodes in resources_by_rank):
        raise ValueError(
            f"component_placement {text!r}: a process has several nodes, but must have one; name at least as many "
            "processes as nodes"
        )
    return rank_map, NodePlacementStrategy([nodes[0] for nodes in resources_by_rank])


def _parse_rank_map(text: str, available: list[int], kind: str) -> RankMap:
    """Parse a placement text of "RESOURCES" or "RESOURCES:PROCESSES" parts (see `ComponentPlacement`). available: the
    existing resources; kind: what they are, for errors. ValueError as `ComponentPlacement`."""
    rank_map: RankMap = {}
    used_resources: list[int] = []
    process_count = 0
    for entry in filter(None, map(str.strip, text.split(","))):
        resource_text, _, process_text = entry.partition(":")
        resources = parse_rank_config(resource_text, available, kind)
        if used_resources and resources[0] <= used_resources[-1]:
            raise ValueError(f"component_placement {text!r}: name each {kind} once, in ascending order")
        if process_text:
            process_ranks = parse_rank_config(process_text, rank_type="process")
        else:  # one process per resource, numbered after the processes of the previous parts
            process_ranks = list(range(process_count, process_count + len(resources)))
        if process_ranks != list(range(process_count, process_count + len(process_ranks))):
            raise ValueError(f"component_placement {text!r}: processes must be numbered from 0 without gaps")
        if len(process_ranks) % len(resources) and len(resources) % len(process_ranks):
            raise ValueError(
                f"component_placement {entry!r}: {len(process_ranks)} processes cannot share {len(resources)} {kind}s "
                "evenly; one number must be a multiple of the other"
            )
        process_count += len(process_ranks)
        used_resources += resources
        rank_map[tuple(resources)] = process_ranks
    if not rank_map:
        raise ValueError(f"component_placement {text!r} names no {kind}")
    return rank_map
