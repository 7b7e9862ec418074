"""Ray's object store: the whole batch as one object, of numpy arrays (which Ray reads in place) or of torch
tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from benchmarks.payload import Batch
from benchmarks.systems.ray_session import RaySession


class Held(NamedTuple):
    """Rows of one stored object."""

    stored: Any
    first: int
    last: int


class RayStore:
    """`ray.put` and `ray.get` in this process. Jagged columns are stored as values and offsets, strings as a
    list."""

    def __init__(self, *, tensors: bool) -> None:
        self._tensors = tensors
        self._ray: RaySession | None = None

    def open(self) -> None:
        self._ray = RaySession()

    def put(self, batch: Batch, held: Held | None = None) -> Held:
        assert held is None, "an object in Ray's store is immutable"
        stored = ray.put({name: self._plain(column) for name, column in batch.columns.items()})
        return Held(stored, 0, len(batch.ids))

    def part(self, held: Held, first: int, last: int) -> Held:
        return Held(held.stored, held.first + first, held.first + last)

    def read(self, held: Held, names: list[str]) -> Mapping[str, Any]:
        stored = ray.get(held.stored)
        return {name: _column(stored[name]) for name in names}

    def read_padded(self, held: Held, names: list[str]) -> Mapping[str, Any]:
        """Get the whole object, as every data-parallel rank would, and cut the rows out of it."""
        return {name: _cut(column, held.first, held.last) for name, column in self.read(held, names).items()}

    def drop(self, held: Held) -> None:
        """Do nothing: Ray removes the object with the last reference to it."""

    def close(self) -> None:
        if self._ray is not None:
            self._ray.close()

    def _plain(self, column: Any) -> Any:
        if not isinstance(column, torch.Tensor):
            return column
        jagged: Any = column
        parts = (jagged.values(), jagged.offsets()) if column.is_nested else (column,)
        return parts if self._tensors else tuple(part.numpy() for part in parts)


def _column(stored: Any) -> Any:
    if not isinstance(stored, tuple):
        return stored
    parts = [part if isinstance(part, torch.Tensor) else _tensor(part) for part in stored]
    return parts[0] if len(parts) == 1 else torch.nested.nested_tensor_from_jagged(parts[0], parts[1])


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a view. Torch warns for each read-only array, which it cannot represent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def _cut(column: Any, first: int, last: int) -> Any:
    if not isinstance(column, torch.Tensor) or not column.is_nested:
        return column[first:last]
    jagged: Any = column
    offsets = jagged.offsets()[first : last + 1]
    values = jagged.values()[int(offsets[0]) : int(offsets[-1])]
    longest = int(offsets.diff().max())  # without max_seqlen torch may pad to a larger length
    rows = torch.nested.nested_tensor_from_jagged(values, offsets - offsets[0], max_seqlen=longest)
    return torch.nested.to_padded_tensor(rows, 0)
