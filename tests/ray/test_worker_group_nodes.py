"""Worker groups on several logical nodes."""

from __future__ import annotations

import pytest

from tests.ray.jobs import found_by

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)]


def test_two_nodes_of_two_accelerators() -> None:
    found = found_by("tests.ray.group_nodes_job")
    assert found == {
        "counts": [2, 4],
        "places": ["0 0 1 0 0", "1 0 1 0 1", "2 0 1 1 0", "3 0 1 1 1"],
        "attributes": [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]],
        "swapped": ["a", "b"],
        "got": ["here"],
        "logs": ["not for the driver\n"],
    }
