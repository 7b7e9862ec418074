"""TransferQueue from PyPI: SimpleStorage, two storage units, polling mode; its key-value interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.payload import Batch
from benchmarks.systems.ray_session import RaySession

PARTITION = "bench"


class TransferQueue:
    """Its controller and two storage units as Ray actors, its client in this process."""

    def __init__(self) -> None:
        self._ray: RaySession | None = None

    def open(self) -> None:
        self._ray = RaySession()
        transfer_queue.init(
            OmegaConf.create(
                {
                    "controller": {"polling_mode": True},
                    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}},
                }
            )
        )

    def put(self, batch: Batch, held: list[str] | None = None) -> list[str]:
        keys = batch.ids if held is None else held
        transfer_queue.kv_batch_put(keys, PARTITION, TensorDict(dict(batch.columns), batch_size=len(keys)))
        return keys

    def part(self, held: list[str], first: int, last: int) -> list[str]:
        return held[first:last]

    def read(self, held: list[str], names: list[str]) -> Mapping[str, Any]:
        columns: Mapping[str, Any] = transfer_queue.kv_batch_get(held, PARTITION, names)
        return columns

    def read_padded(self, held: list[str], names: list[str]) -> Mapping[str, Any]:
        return {name: _dense(column) for name, column in self.read(held, names).items()}

    def drop(self, held: list[str]) -> None:
        transfer_queue.kv_clear(held, PARTITION)

    def close(self) -> None:
        transfer_queue.close()
        if self._ray is not None:
            self._ray.close()


def _dense(column: Any) -> Any:
    if isinstance(column, torch.Tensor) and column.is_nested:
        return torch.nested.to_padded_tensor(column, 0)
    return column
