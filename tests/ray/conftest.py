"""One Ray cluster for all tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Ends with this directory's tests: what comes after them runs as where there is no cluster."""
    directory = tempfile.mkdtemp(prefix="tqr", dir="/tmp")
    ray.init(
        num_cpus=16, num_gpus=0, include_dashboard=False, _temp_dir=directory, log_to_driver=False, namespace="tests"
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
