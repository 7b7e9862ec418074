"""A short storm; `make faults` has a long one."""

from __future__ import annotations

import pytest

from tests.faults import storm


@pytest.mark.slow
def test_a_short_storm() -> None:
    told: list[str] = []
    storm.run(8, seed=11, say=told.append)
    assert "8 faults in" in told[-1]
    assert "consumed once each" in told[-2]
