"""Worker groups on several logical nodes. In a process of its own, as a driver is in one cluster only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_two_nodes_of_two_accelerators() -> None:
    directory = tempfile.mkdtemp(prefix="tqg", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ray.group_nodes_job", directory],
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "counts": [2, 4],
        "places": ["0 0 1 0 0", "1 0 1 0 1", "2 0 1 1 0", "3 0 1 1 1"],
        "attributes": [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]],
        "swapped": ["a", "b"],
        "got": ["here"],
        "logs": ["not for the driver\n"],
    }
