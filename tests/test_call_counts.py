"""Small operations stay short: the Python calls that each of them makes in the project's own functions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MARGIN = 1.1
"""Operations may ask for space, or find other work, a little more often on another machine."""
CALLS = {
    "put": {"client": 60, "ledger": 50},
    "get": {"client": 56, "ledger": 44},
    "claim": {"client": 54, "ledger": 60},
    "set_tags": {"client": 46, "ledger": 41},
    "clear": {"client": 40, "ledger": 56},
}
"""Calls of a lone operation on one sample, in the calling thread and in the ledger thread, without ticks."""


@pytest.mark.integration
def test_small_operations_make_no_more_calls() -> None:
    run = subprocess.run([sys.executable, "-m", "tests.call_counts"], capture_output=True, text=True, check=True)
    counts = json.loads(run.stdout)
    for operation, expected in CALLS.items():
        for thread, most in expected.items():
            count = counts[operation][thread]
            assert count <= MARGIN * most, f"{operation}, {thread} thread: {count} calls, {most} are known"
            assert count >= most / MARGIN, f"{operation}, {thread} thread: only {count} calls; lower the number here"
