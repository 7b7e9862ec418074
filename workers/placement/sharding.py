"""`NamedSharding`: an array of ranks with named axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DATA_PARALLEL_AXIS = "data_parallel"
"""The axis along which ranks hold different samples."""

REPLICATED_AXES: tuple[str, ...] = ("tensor_parallel", "context_parallel", "pipeline_parallel")
"""The axes along which ranks hold the same samples. Ranks that differ only on these form a replica group."""

Ranks = npt.NDArray[np.int64]


def _as_ranks(layout: Any) -> Ranks:
    """Return `layout` (nested sequences or an array) as an int64 array. ValueError if it is ragged, empty, not of
    integers, or names a rank twice."""
    try:
        ranks = np.asarray(layout)
    except ValueError as error:
        raise ValueError("layout is ragged: all of its lists at the same depth must have equal length") from error
    if ranks.dtype == object:
        raise ValueError("layout is ragged or has elements that are not integers; pass an array of integer ranks")
    if ranks.size == 0:
        raise ValueError(f"layout is empty (shape {ranks.shape}): it must name at least one rank")
    if not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"layout has dtype {ranks.dtype}, but ranks must be integers")
    unique_ranks, counts = np.unique(ranks, return_counts=True)
    if len(unique_ranks) != ranks.size:
        raise ValueError(f"layout names rank {int(unique_ranks[counts > 1][0])} more than once")
    return ranks.astype(np.int64)


class NamedSharding:
    """An N-dimensional layout of integer ranks with named axes. Immutable.

    layout: nested sequences or an array of distinct integers, e.g. `[[0, 1], [2, 3]]`.
    names: one name per axis, outermost first, e.g. `["data_parallel", "tensor_parallel"]`.
    ValueError for a layout that is ragged, empty, not of integers or names a rank twice, and for names that are not
    unique or not one per axis.
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        self._layout = _as_ranks(layout)
        self._layout.setflags(write=False)
        self._names = [str(name) for name in names]
        if self._layout.ndim != len(self._names):
            raise ValueError(
                f"layout has {self._layout.ndim} axes, but names has {len(self._names)}: {self._names}; pass one name "
                "per axis"
            )
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"axis names are not unique: {self._names}")
        # The index of each axis by name, and the position of each rank on all axes.
        self._axes = {name: axis for axis, name in enumerate(self._names)}
        positions = itertools.product(*map(range, self._layout.shape))
        self._coords = dict(zip(self._layout.ravel().tolist(), positions, strict=True))

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size, outermost first."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self._layout.size)

    @property
    def layout(self) -> Ranks:
        """A copy of the array of ranks."""
        return self._layout.copy()

    def get_axis_index(self, name: str) -> int:
        """Return the index of axis `name`, counted from the outermost. ValueError for an unknown axis."""
        try:
            return self._axes[name]
        except KeyError:
            raise ValueError(f"unknown axis {name!r}; this sharding has the axes {', '.join(self._names)}") from None

    def get_axis_size(self, name: str) -> int:
        """Return the size of axis `name`. ValueError for an unknown axis."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the coordinates (axis name -> position) of rank `worker_id`, in constant time. ValueError for an
        unknown rank."""
        try:
            positions = self._coords[worker_id]
        except KeyError:
            raise ValueError(
                f"unknown rank {worker_id}; this sharding has {self.size} ranks, {self.get_ranks_by_coord()[:8]}"
            ) from None
        return dict(zip(self._names, positions, strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return the ranks at `coords`, ascending. An axis that is not given matches all positions. Empty for a
        position beyond its axis. ValueError for an unknown axis."""
        if any(not 0 <= position < self.get_axis_size(name) for name, position in coords.items()):
            return []
        return sorted(int(rank) for rank in self._ranks_at(coords).ravel())

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Fix the given axes. Return a sharding over the remaining axes, or the rank if no axis remains.

        ValueError for an unknown axis, IndexError for a position beyond its axis.
        """
        for name, position in coords.items():
            if not 0 <= position < self.get_axis_size(name):
                raise IndexError(
                    f"{name}={position}: expected a position from 0 to {self.get_axis_size(name) - 1} on this axis"
                )
        remaining = self._ranks_at(coords)
        if remaining.ndim == 0:
            return int(remaining)
        return NamedSharding(remaining, [name for name in self._names if name not in coords])

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Sequence[str]) -> bool:
        """Return whether `coords` is 0 on each of `axes`. A missing axis counts as 0.

        `TQWorkerMixin._is_replica_leader` calls it with `_local_coords()`, a driver with `get_worker_coords(rank)`.
        """
        return all(coords.get(axis, 0) == 0 for axis in axes)

    def _ranks_at(self, coords: Mapping[str, int]) -> Ranks:
        """Return the array of ranks at `coords`, over the axes that are not given; 0-d if all are given."""
        index = tuple(coords.get(name, slice(None)) for name in self._names)
        return np.asarray(self._layout[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        return hash((tuple(self._names), self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding(layout={self._layout.tolist()}, names={self._names})"
