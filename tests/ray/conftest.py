"""One Ray cluster for all tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private import services, worker

START_S = 180.0


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Ends with this directory's tests: what comes after them runs as where there is no cluster."""
    directory = tempfile.mkdtemp(prefix="tqr", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "get_node", patiently(services.get_node))
        ray.init(
            num_cpus=16,
            num_gpus=0,
            include_dashboard=False,
            _temp_dir=directory,
            log_to_driver=False,
            namespace="tests",
        )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Ray logs of errors that nobody asked for."""
    logged: list[str] = []
    monkeypatch.setattr(worker, "_unhandled_error_handler", lambda error: logged.append(str(error)))
    return logged


def patiently(get_node: Any) -> Any:
    """Ray gives its processes 30 s to start, however busy the machine is."""

    def get(*arguments: Any) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return get
