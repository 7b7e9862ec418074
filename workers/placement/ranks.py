"""Axes along which ranks hold different or equal samples, and the leader of a replica group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DATA_PARALLEL_AXIS = "data_parallel"
"""The axis along which ranks hold different samples."""

REPLICATED_AXES: tuple[str, ...] = ("tensor_parallel", "context_parallel", "pipeline_parallel")
"""The axes along which ranks hold the same samples. Ranks that differ only on these form a replica group."""


def is_axis_zero(coords: Mapping[str, int], axes: Sequence[str]) -> bool:
    """Return whether `coords` (axis -> position) is 0 on each of `axes`. A missing axis counts as 0."""
    return all(coords.get(axis, 0) == 0 for axis in axes)


def is_replica_leader(coords: Mapping[str, int]) -> bool:
    """Return whether the rank at `coords` is the one of its replica group that fetches, writes back and returns
    results."""
    return is_axis_zero(coords, REPLICATED_AXES)
