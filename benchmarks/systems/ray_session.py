"""A private Ray cluster of this process, with CPUs for all actors on a small machine; removed on close."""

from __future__ import annotations

import logging
import tempfile

import ray

OBJECT_STORE_BYTES = 2 << 30
LOGICAL_CPUS = 32
"""Actors of the peers reserve one CPU each, independent of the machine's cores."""


class RaySession:
    """The first instance in a process starts Ray; later ones share it. `close` of the first ends it."""

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
