"""Which worker goes where."""

from __future__ import annotations

import json

import pytest

from workers.placement import RANK_VARIABLES, bundles_to_use, place_workers, rank_environment


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
