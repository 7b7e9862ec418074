"""Which worker goes where."""

from __future__ import annotations

import json

import pytest

from workers.placement.bundles import (
    RANK_VARIABLES,
    bundles_by_node,
    bundles_to_use,
    counted_by_host,
    place_workers,
    rank_environment,
)


def test_one_worker_per_bundle_by_default() -> None:
    assert bundles_to_use([2, 1], None) == [(0, [0]), (0, [1]), (1, [0])]
    assert bundles_to_use([2, 2], 1) == [(0, [0]), (1, [0])]
    assert bundles_to_use([2, 2], [2, 0]) == [(0, [0]), (0, [1])]


@pytest.mark.parametrize("count", [3, -1, [2], [0, 3]])
def test_counts_that_do_not_fit(count: int | list[int]) -> None:
    with pytest.raises(ValueError, match="workers_per_node"):
        bundles_to_use([2, 2], count)


def test_tied_groups() -> None:
    places = place_workers([2, 2], [(1, [1, 0]), (0, [0])])
    assert [(p.rank, p.node, p.bundle, p.local_rank, p.tied_group, p.tied_rank) for p in places] == [
        (0, 1, 1, 0, 0, 0),
        (1, 1, 0, 1, 0, 1),
        (2, 0, 0, 0, 1, 0),
    ]
    assert [p.bundle_indices for p in places] == [(1, [1, 0]), None, (0, [0])]


def test_tied_groups_over_several_nodes() -> None:
    places = place_workers([2, 2, 1], [(0, [1, 2]), (1, [1, 2])], spanning=True)
    assert [(p.node, p.bundle, p.local_rank) for p in places] == [(0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 0, 0)]
    assert [p.bundle_indices for p in places] == [(0, [1, 2]), None, (1, [1, 2]), None]
    with pytest.raises(
        ValueError, match="bundle 3 of node 1 does not exist; this node and the next ones together have 3, counted"
    ):
        place_workers([2, 2, 1], [(1, [3])], spanning=True)
    with pytest.raises(ValueError, match="bundle 2 of node 0 does not exist; the node has 2, counted from 0"):
        place_workers([2, 2, 1], [(0, [1, 2])])
    with pytest.raises(ValueError, match="bundle -1 of node 1"):
        place_workers([2, 2, 1], [(1, [-1])], spanning=True)


@pytest.mark.parametrize(
    ("counts", "hosts", "found"),
    [
        ([2, 2], "aabb", [[0, 1], [2, 3]]),
        ([2, 2], "abab", [[0, 2], [1, 3]]),
        ([1, 2], "aab", [[2], [0, 1]]),
        ([1, 2], "aaa", [[2], [0, 1]]),
        ([2, 1, 1], "aabb", [[0, 1], [2], [3]]),
        ([3, 1], "abab", [[0, 1, 2], [3]]),
        ([2, 2], "aaab", [[0, 1], [2, 3]]),
    ],
)
def test_the_bundles_of_a_node_are_on_one_host_where_that_works_out(
    counts: list[int], hosts: str, found: list[list[int]]
) -> None:
    assert bundles_by_node(counts, hosts) == found


def test_workers_count_themselves_to_their_node_if_it_is_on_one_host() -> None:
    places = place_workers([2, 2], [(1, [0]), (0, [0, 1])])
    assert counted_by_host(places, "abb") == places
    assert counted_by_host(places, "aaa") == places
    assert [(p.node_rank, p.local_rank) for p in places] == [(1, 0), (0, 0), (0, 1)]


def test_workers_count_themselves_to_their_host_if_a_node_is_on_several() -> None:
    places = place_workers([3, 1], bundles_to_use([3, 1], None))
    counted = counted_by_host(places, "abab")
    assert [(p.node_rank, p.local_rank) for p in counted] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(p.node, p.bundle, p.rank) for p in counted] == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3)]
    assert rank_environment(counted[3], [("h", 1)] * 4, ("h", 2))["NODE_RANK"] == "1"


def test_rank_environment() -> None:
    places = place_workers([1, 1], [(0, [0]), (1, [0])])
    endpoints = [("10.0.0.1", 1000), ("10.0.0.2", 1001)]
    variables = rank_environment(places[1], endpoints, ("10.0.0.1", 999))
    assert tuple(variables) == RANK_VARIABLES
    assert variables["RANK"] == "1"
    assert variables["LOCAL_RANK"] == "0"
    assert variables["WORLD_SIZE"] == "2"
    assert variables["NODE_RANK"] == "1"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "999")
    assert json.loads(variables["AVAILABLE_ADDR_LIST"]) == ["10.0.0.1", "10.0.0.2"]
    assert json.loads(variables["AVAILABLE_PORT_LIST"]) == [1000, 1001]
