"""Runs a driver in a process of its own, as a driver is in one cluster only, with a temporary directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def found_by(module: str, timeout_s: float = 560) -> dict[str, Any]:
    """What `module`, started as a program with a directory for Ray's files, printed as JSON on its last line."""
    directory = tempfile.mkdtemp(prefix="tqn", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    Path(directory, "ray").mkdir()  # ray.cluster_utils notes its newest cluster there and expects the folder
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, directory],
            env={**environment, "RAY_TMPDIR": directory, "PYTHONPATH": str(ROOT)},  # other packages bring a `tests` too
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
