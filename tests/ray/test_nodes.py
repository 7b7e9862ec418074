"""Several logical nodes: placement and storage units. In a process of its own, as a driver is in one cluster only."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_two_nodes() -> None:
    directory = tempfile.mkdtemp(prefix="tqn", dir="/tmp")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.nodes_job", directory], capture_output=True, text=True, timeout=150
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"per node": [1, 1], "unified": [2], "read": [1.0], "units": 2}
