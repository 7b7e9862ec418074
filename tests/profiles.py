"""How long property tests search. `TQ_EXAMPLES` multiplies their examples: below 1 for `make test-fast` and
`make test`, 1 or more in `make soak`. Above 1 other examples are drawn on each run."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

FACTOR = float(os.environ.get("TQ_EXAMPLES", "1"))
LONG = pytest.mark.timeout(600 * max(1, FACTOR))
"""Marks a property test that takes minutes with all of its examples."""


def budget(examples: int, *, steps: int = 50) -> settings:
    """Settings for one test: `examples` of them, the same on every run unless there are more than that."""
    return settings(
        max_examples=max(1, round(examples * FACTOR)),
        stateful_step_count=steps,
        derandomize=FACTOR <= 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
