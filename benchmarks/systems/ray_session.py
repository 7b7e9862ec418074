"""A Ray cluster of this process alone, with space for actors on a small machine and nothing left behind."""

from __future__ import annotations

import logging
import tempfile

import ray

OBJECT_STORE_BYTES = 2 << 30
LOGICAL_CPUS = 32
"""Peers' actors reserve one each, whatever the machine has."""


class RaySession:
    """Started by the first constructor of a process, which later ones share; `close` of the first ends it."""

    def __init__(self) -> None:
        self._owner = not ray.is_initialized()
        if not self._owner:
            return
        self._directory = tempfile.TemporaryDirectory(prefix="rb", ignore_cleanup_errors=True)
        ray.init(
            address="local",
            num_cpus=LOGICAL_CPUS,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self._directory.name,
        )

    def close(self) -> None:
        if not self._owner:
            return
        ray.shutdown()
        self._directory.cleanup()
