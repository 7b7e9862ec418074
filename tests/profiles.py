"""How long property tests search. `TQ_SOAK=N` multiplies their examples by N and draws fresh ones each run."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SOAK = int(os.environ.get("TQ_SOAK", "0"))


def budget(examples: int, *, steps: int = 50) -> settings:
    """Settings for one test: fixed examples (the same on every run) unless soaking."""
    return settings(
        max_examples=examples * max(SOAK, 1),
        stateful_step_count=steps,
        derandomize=not SOAK,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
