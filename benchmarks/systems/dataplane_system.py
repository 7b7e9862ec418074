"""This project: the local road (shared memory) and the remote road (ZMQ over tcp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.payload import Batch
from benchmarks.systems.service import Service
from dataplane import DataPlaneClient, KVBatchMeta, connect

PARTITION = "bench"
CAPACITY_BYTES = 2 << 30


class DataPlane:
    """One service process and one client in this process.

    remote: never by shared memory. views: whole-batch reads with `copy=False`.
    """

    def __init__(self, *, remote: bool = False, views: bool = False) -> None:
        self._remote = remote
        self._views = views
        self._service: Service | None = None
        self._client: DataPlaneClient | None = None

    def open(self) -> None:
        self._service = Service(capacity_bytes=CAPACITY_BYTES, tcp_only=self._remote)
        self._client = connect(self._service.address, force_remote=self._remote)
        self._client.register_partition(PARTITION, [], None, ["train"])

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
