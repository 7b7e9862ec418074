"""Nodes that join, leave, die and come back, under a running service."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ray.jobs import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each scene of many_nodes_job.py found."""
    return found_by("tests.ray.many_nodes_job")


def test_each_node_has_a_unit_and_clients_put_on_their_own_hosts(found: dict[str, Any]) -> None:
    assert found["each"] == {"units": [1, 1], "rows": [2, 0]}


def test_a_node_that_joins_gets_a_unit_and_is_used(found: dict[str, Any]) -> None:
    assert found["joins"] == {"rows": 3, "read": [[3.0, 1.0, 3.0], [1.0, 3.0]]}


def test_the_units_outlive_the_process_of_their_supervisor(found: dict[str, Any]) -> None:
    assert found["supervisor"] == {"units": True, "rows": True}


def test_a_node_is_drained_and_nothing_is_lost(found: dict[str, Any]) -> None:
    drained = found["drained"]
    assert (drained["state"], drained["units"], drained["read"]) == ("drained", [], [1.0, 1.0, 3.0, 3.0, 3.0])
    assert drained["added"]
    assert drained["live"] == 3


def test_a_node_that_dies_takes_its_rows_along_and_nothing_else(found: dict[str, Any]) -> None:
    dies = found["dies"]
    assert dies["units"] == 2
    assert dies["ids"] == ["a", "b", "c", "d", "e", "f", "more"]
    assert dies["meta"].startswith("StaleSampleError: sample 'lost' of partition 'p' was cleared")
    assert dies["id"].startswith("SampleNotFoundError: partition 'p' has no live sample 'lost'")
    for error in (dies["meta"], dies["id"]):
        assert re.search(r"\(1 of them were lost with storage unit \d+ \(unit-", error)


def test_a_node_that_ray_says_will_leave_is_drained(found: dict[str, Any]) -> None:
    assert found["leaves"]["told"]
    assert found["leaves"]["read"] == [1.0, 1.0, 3.0, 3.0, 3.0, 5.0, 1.0]


def test_a_node_comes_back_with_its_state_unless_it_is_given_up(found: dict[str, Any]) -> None:
    expected = {"same name": True, "units": 1, "read": [6.0, 6.0], "waited for": True, "dropped": True}
    assert found["back"] == expected


def test_a_detached_service_outlasts_its_driver(found: dict[str, Any]) -> None:
    error = found["stays"].pop("error")
    assert found["stays"] == {"read": [7.0], "units": ["serving"]}
    assert "no data plane service at actor:stays@many: no service of that name runs in that namespace" in error
