"""Placement strategies: which worker is where."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workers.placement.strategies import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)


@dataclass
class Counts:
    accelerators_per_node: list[int]


TWO_NODES = Counts([4, 4])
NO_ACCELERATORS = Counts([0, 0])


def own(strategy: PlacementStrategy, cluster: Counts = TWO_NODES) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.cluster_node_rank, place.accelerators) for place in strategy.get_placement(cluster)]


def test_packed_fills_node_after_node() -> None:
    places = PackedPlacementStrategy(2, 5).get_placement(TWO_NODES)
    assert [(p.rank, p.cluster_node_rank, p.local_rank, p.local_world_size, p.visible) for p in places] == [
        (0, 0, 0, 2, (2,)),
        (1, 0, 1, 2, (3,)),
        (2, 1, 0, 2, (0,)),
        (3, 1, 1, 2, (1,)),
    ]
    assert all(place.isolated for place in places)
    assert [place.local_accelerator_rank for place in places] == [2, 3, 0, 1]


def test_packed_in_chunks_and_strides() -> None:
    assert own(PackedPlacementStrategy(0, 3, 2)) == [(0, (0, 1)), (0, (2, 3))]
    assert own(PackedPlacementStrategy(0, 7, 2, 2)) == [(0, (0, 2)), (0, (1, 3)), (1, (0, 2)), (1, (1, 3))]


def test_nodes_of_a_group_are_counted_from_its_first() -> None:
    (place,) = PackedPlacementStrategy(6, 6).get_placement(TWO_NODES)
    assert (place.cluster_node_rank, place.placement_node_rank, place.accelerators) == (1, 0, (2,))


def test_without_isolation_all_of_a_node_is_seen() -> None:
    (place,) = PackedPlacementStrategy(5, 5).get_placement(TWO_NODES, isolate_accelerator=False)
    assert (place.accelerators, place.visible, place.isolated, place.local_accelerator_rank) == (
        (1,),
        (0, 1, 2, 3),
        False,
        1,
    )


def test_flexible_sorts_within_and_across_workers() -> None:
    strategy = FlexiblePlacementStrategy([[6], [1, 0], [3]])
    assert own(strategy) == [(0, (0, 1)), (0, (3,)), (1, (2,))]
    assert [place.rank for place in strategy.get_placement(TWO_NODES)] == [0, 1, 2]


def test_node_placement_sorts_and_isolates_nothing() -> None:
    places = NodePlacementStrategy([1, 0, 1]).get_placement(TWO_NODES)
    assert [(p.cluster_node_rank, p.local_rank, p.local_world_size) for p in places] == [
        (0, 0, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert [(p.visible, p.local_accelerator_rank, p.isolated) for p in places[:1]] == [((0, 1, 2, 3), 0, False)]
    (place,) = NodePlacementStrategy([1]).get_placement(NO_ACCELERATORS)
    assert (place.local_accelerator_rank, place.visible, place.placement_node_rank) == (-1, (), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedPlacementStrategy(0, 2, 2), "3 accelerators are not a multiple of 2"),
        (lambda: PackedPlacementStrategy(3, 1), "expected 0 <= start <= end"),
        (lambda: PackedPlacementStrategy(0, 0, 0), "at least 1"),
        (lambda: FlexiblePlacementStrategy([]), "at least one list"),
        (lambda: FlexiblePlacementStrategy([[0], []]), "at least one list"),
        (lambda: FlexiblePlacementStrategy([[1, 1]]), "twice for one worker"),
        (lambda: NodePlacementStrategy([]), "at least one worker"),
        (lambda: PackedPlacementStrategy(4, 8).get_placement(TWO_NODES), r"\[8\] do not exist; the cluster has 8"),
        (lambda: PackedPlacementStrategy(2, 5, 4).get_placement(TWO_NODES), "must all be on one node"),
        (lambda: PackedPlacementStrategy(0, 0).get_placement(NO_ACCELERATORS), "NodePlacementStrategy"),
        (lambda: FlexiblePlacementStrategy([[-1]]).get_placement(TWO_NODES), r"\[-1\] do not exist"),
        (lambda: NodePlacementStrategy([2]).get_placement(TWO_NODES), "node 2 does not exist; the cluster has 2"),
    ],
)
def test_what_cannot_be(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
