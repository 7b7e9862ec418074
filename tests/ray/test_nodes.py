"""Several logical nodes: placement and storage units."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ray.jobs import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each scene of nodes_job.py found."""
    return found_by("tests.ray.nodes_job")


def test_a_placement_group_on_each_node(found: dict[str, Any]) -> None:
    assert found["one_group_per_node"]["places"] == [[0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]]
    assert found["small_groups_per_node"]["nodes"] == 2


def test_a_unified_placement_group(found: dict[str, Any]) -> None:
    assert found["unified"] == {
        "groups": 1,
        "places": [[0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1]],
        "told": [[1, [0, 1]], None, [0, [0, 1]], None],
        "ports": 4,
    }


def test_a_unified_placement_group_with_a_node_over_two_of_rays(found: dict[str, Any]) -> None:
    assert found["unified_with_a_node_over_both"] == {
        "places": [[0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]],
        "dp_size": 1,
    }


def test_colocated_workers_share_a_gpu(found: dict[str, Any]) -> None:
    assert found["shared_gpus"] == {"bundles": [{"CPU": 2.0, "GPU": 1.0}], "shares": [[1.0, 0.5], [1.0, 0.5]]}


def test_gpus_that_never_come(found: dict[str, Any]) -> None:
    said = found["too_many_gpus"]["error"]
    assert "requested 3 bundles of 1 CPU, 1 GPU on 3 nodes ([1, 1, 1], one placement group per node)" in said
    assert "the Ray cluster has 4 CPU, 2 GPU (free: " in said
    assert "on nodes of (2 CPU, 1 GPU) + (2 CPU, 1 GPU)" in said


def test_a_service_has_a_unit_on_each_node(found: dict[str, Any]) -> None:
    assert found["service"] == {"read": [1.0], "units": 2}


def test_an_end_after_ray_is_gone(found: dict[str, Any]) -> None:
    assert found["after ray"] == {"ended": [True, True, True], "ray": False}
