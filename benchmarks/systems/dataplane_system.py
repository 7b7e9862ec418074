"""This project: the local connection (shared memory) and the remote connection (ZMQ over TCP)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.payload import Batch
from benchmarks.systems.service import Service
from dataplane import DataPlaneClient, KVBatchMeta, connect
from dataplane.storage.arena_record import discard

PARTITION = "bench"
CAPACITY_BYTES = 2 << 30


class DataPlane:
    """One service process and one client in this process.

    remote: never use shared memory. views: read whole batches with `copy=False`. journal: the service has a
    state directory from which a restart restores it.
    """

    def __init__(self, *, remote: bool = False, views: bool = False, journal: bool = False) -> None:
        self._remote = remote
        self._views = views
        self._journal = journal
        self._state: tempfile.TemporaryDirectory[str] | None = None
        self._service: Service | None = None
        self._client: DataPlaneClient | None = None

    def open(self) -> None:
        self._service = Service(self._settings(), tcp_only=self._remote)
        self._client = connect(self._service.address, force_remote=self._remote)
        self._client.register_partition(PARTITION, [], None, ["train"])

    def _settings(self) -> dict[str, Any]:
        if not self._journal:
            return {"capacity_bytes": CAPACITY_BYTES}
        self._state = tempfile.TemporaryDirectory(prefix="tq-bench-")
        return {"capacity_bytes": CAPACITY_BYTES, "state_dir": self._state.name}

    @property
    def address(self) -> str:
        assert self._service is not None
        return self._service.address

    @property
    def client(self) -> DataPlaneClient:
        assert self._client is not None
        return self._client

    def put(self, batch: Batch, held: KVBatchMeta | None = None) -> KVBatchMeta:
        return self.client.put_samples(batch.ids if held is None else held, PARTITION, batch.columns)

    def part(self, held: KVBatchMeta, first: int, last: int) -> KVBatchMeta:
        return held.slice(first, last)

    def read(self, held: KVBatchMeta, names: list[str]) -> Mapping[str, Any]:
        columns: Mapping[str, Any] = self.client.get_samples(held, PARTITION, names, copy=not self._views)
        return columns

    def read_padded(self, held: KVBatchMeta, names: list[str]) -> Mapping[str, Any]:
        return self.client.get_batch(held, names)

    def drop(self, held: KVBatchMeta) -> None:
        self.client.clear_samples(held, PARTITION)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._service is not None:
            self._service.close()
        if self._state is not None:
            discard(self._state.name, [self._state.name, "/dev/shm"])
            self._state.cleanup()
