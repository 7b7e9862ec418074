"""One Ray cluster for all tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ray
from ray._private import services, worker

from tests.children import START_S
from tests.ray import slow_start
from tests.restarts import WAIT_S
from workers.groups import virtual_cluster


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Ends with this directory's tests: what comes after them runs as where there is no cluster."""
    directory = tempfile.mkdtemp(prefix="tqr", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", slow_start.get_node)
        patch.setattr(virtual_cluster, "READY_TIMEOUT_S", START_S)
        ray.init(
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            _temp_dir=directory,
            log_to_driver=False,
            namespace="tests",
        )
    processes = [each.process for several in worker._global_node.all_processes.values() for each in several]
    try:
        yield
    finally:
        ray.shutdown()
        for process in processes:  # Ray waits for those that it kills for a second only
            process.wait(WAIT_S)
        shutil.rmtree(directory, ignore_errors=True)
