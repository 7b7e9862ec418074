"""The options that operations between workers take, checked and compared; they change nothing else."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class CollectiveGroupOptions:
    """Settings of NCCL that programs written for RLinf pass. They change nothing here: no message uses NCCL, those
    of a GPU included.

    accel_cluster_size, accel_max_ctas, accel_min_ctas, is_high_priority_stream: what `ProcessGroupNCCL.Options` calls
    cluster size, most and fewest blocks, and a stream of high priority. use_ring_broadcast: RLinf's choice between
    two ways to broadcast; here the receivers of a large value pass it on to each other in any case. No options means
    these defaults. Only one thing is done with them: those that a pair of workers, or two of a broadcast, name at first
    contact are compared, and `GroupOptionsError` is raised where they differ; later ones are ignored.

    TypeError for a number that is no integer and for a flag that is no bool, ValueError for a number below 0.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            plain = _flag(each.name, value) if isinstance(each.default, bool) else _count(each.name, value)
            object.__setattr__(self, each.name, plain)


def checked(options: object) -> CollectiveGroupOptions | None:
    """`options` as an operation may be given them. TypeError for anything else."""
    if options is None or isinstance(options, CollectiveGroupOptions):
        return options
    raise TypeError(f"options={options!r}: expected a CollectiveGroupOptions or None, got {type(options).__name__}")


def _count(name: str, value: Any) -> int | None:
    """Of any type of integers."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int or None, got {type(value).__name__}")
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{name}={count}: must not be negative")
    return count


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r}: expected a bool, got {type(value).__name__}")
