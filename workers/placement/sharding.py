"""Names for the axes of an array of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.placement.ranks import is_axis_zero

Ranks = npt.NDArray[np.int64]


def _as_ranks(layout: Any) -> Ranks:
    """`layout` (nested sequences or an array) as int64 ranks; ValueError for ragged, empty, non-integer, repeated."""
    try:
        ranks = np.asarray(layout)
    except ValueError as error:
        raise ValueError("layout is ragged: every axis needs rows of equal length") from error
    if ranks.dtype == object:
        raise ValueError("layout is ragged or holds something that is not a rank: it must be an array of integers")
    if ranks.size == 0:
        raise ValueError(f"layout is empty (shape {ranks.shape}): it must name at least one rank")
    if not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"layout holds {ranks.dtype}: ranks are integers")
    found, counts = np.unique(ranks, return_counts=True)
    if len(found) != ranks.size:
        raise ValueError(f"layout names rank {int(found[counts > 1][0])} more than once")
    return ranks.astype(np.int64)


class NamedSharding:
    """An N-dimensional layout of integer ranks whose axes have names. Immutable.

    layout: nested sequences or an array of distinct integers, e.g. `[[0, 1], [2, 3]]`.
    names: one name per axis, outermost first, e.g. `["data_parallel", "tensor_parallel"]`.
    ValueError for a ragged, empty or non-integer layout, a rank named twice, and names that repeat or are not one
    per axis.
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        self._layout = _as_ranks(layout)
        self._layout.setflags(write=False)
        self._names = [str(name) for name in names]
        if self._layout.ndim != len(self._names):
            raise ValueError(
                f"layout has {self._layout.ndim} axes, got {len(self._names)} names for them: {self._names}"
            )
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"axis names repeat: {self._names}")
        self._axes = {name: axis for axis, name in enumerate(self._names)}
        places = itertools.product(*map(range, self._layout.shape))
        self._coords = dict(zip(self._layout.ravel().tolist(), places, strict=True))

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
        """Which axis `name` is, counted from the outermost. ValueError for a name that is not an axis."""
        try:
            return self._axes[name]
        except KeyError:
            raise ValueError(f"unknown axis {name!r}; this sharding has {', '.join(self._names)}") from None

    def get_axis_size(self, name: str) -> int:
        """How many places axis `name` has. ValueError for a name that is not an axis."""
        return int(self._layout.shape[self.get_axis_index(name)])

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Where rank `worker_id` is: axis name -> place. One look-up. ValueError for a rank it does not name."""
        try:
            places = self._coords[worker_id]
        except KeyError:
            raise ValueError(f"unknown rank {worker_id}; the layout names {self.size} others") from None
        return dict(zip(self._names, places, strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """The ranks at `coords`, ascending; an axis not given matches every place. Empty where a place is beyond its
        axis. ValueError for a name that is not an axis."""
        if any(not 0 <= place < self.get_axis_size(name) for name, place in coords.items()):
            return []
        return sorted(int(rank) for rank in self._at(coords).ravel())

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """What is left when the given axes are fixed: a sharding over the others, or the one rank when none is left.

        ValueError for a name that is not an axis, IndexError for a place beyond its axis.
        """
        for name, place in coords.items():
            if not 0 <= place < self.get_axis_size(name):
                raise IndexError(f"axis {name!r} has {self.get_axis_size(name)} places, got {place}")
        left = self._at(coords)
        if left.ndim == 0:
            return int(left)
        return NamedSharding(left, [name for name in self._names if name not in coords])

    @staticmethod
    def is_axis_zero(coords: Mapping[str, int], axes: Sequence[str]) -> bool:
        """Whether `coords` is 0 on each of `axes`, one that it does not name counting as 0.

        The predicate behind `TQWorkerMixin._is_replica_leader`, which feeds it `_local_coords()`; a driver feeds it
        `get_worker_coords(rank)`.
        """
        return is_axis_zero(coords, axes)

    def _at(self, coords: Mapping[str, int]) -> Ranks:
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
