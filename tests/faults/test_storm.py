"""A short storm; `make faults` has a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane.core import failpoints
from tests.faults import storm, weather

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_short_storm() -> None:
    told: list[str] = []
    storm.Course(8, seed=11, say=told.append).run()
    assert "8 faults in" in told[-1]
    assert "consumed once each" in told[-2]


def test_a_storm_comes_by_every_failpoint_or_another_test_does() -> None:
    assert weather.known_points() | weather.ELSEWHERE.keys() == failpoints.NAMES
    for test in weather.ELSEWHERE.values():
        assert (ROOT / test).exists()


def test_every_kind_of_fault_comes_once() -> None:
    every = list(weather.every_fault())
    assert len(every) == len(set(every)) >= 200
