"""A host with 32 ranks that need parts of the routed experts: no byte is read or sent twice, and the memory is that of
the parts. The full size: `python -m benchmarks.host`."""

from __future__ import annotations

import pytest

from benchmarks.host import STEPS, measure

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MEGABYTES = 64
REQUESTS_BYTES = 16 << 20
"""What a client may hold besides its results: replies of a remote unit."""
MALLOC_BYTES = 48 << 20
"""Memory of received parts that malloc may keep for the next ones."""


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_the_ranks_of_a_host_hold_their_parts_and_nothing_else(remote: bool) -> None:
    measured = measure(MEGABYTES, remote=remote)
    whole, part, fetched, written, _ = (measured[step] for step in STEPS)
    rows = whole.asked
    assert fetched.asked == 4 * rows, "each part has four tensor-parallel copies"
    for step in (part, fetched):
        assert (step.unit, step.arena) == ((min(step.asked, rows), 0) if remote else (0, min(step.asked, rows)))
        assert step.peak <= 1.2 * step.asked + REQUESTS_BYTES * (step is part)
    assert 0.1 * rows < part.asked < 0.14 * rows
    arena = 0 if remote else rows  # the put writes into the arena's memory, which this process maps
    assert written.unit == written.arena == 0
    assert written.peak <= rows + arena + part.asked + MALLOC_BYTES
