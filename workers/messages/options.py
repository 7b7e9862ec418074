"""Options of the process groups between workers, validated and compared between peers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class CollectiveGroupOptions:
    """Settings of the process groups that carry tensors on an accelerator. They have no effect on other messages.

    accel_cluster_size, accel_max_ctas, accel_min_ctas: cluster size (`cga_cluster_size`), maximum and minimum number of
    blocks of `ProcessGroupNCCL.Options.config`; is_high_priority_stream: the same of `ProcessGroupNCCL.Options`. None
    means the backend's default. A backend that does not have a setting ignores it. use_ring_broadcast: RLinf's choice
    between two broadcast algorithms; here the backend chooses, so this has no effect. The options that two workers of a
    pair or of a broadcast pass at first contact are compared; `GroupOptionsError` is raised if they differ. Later
    options are ignored.

    TypeError for a number that is not an integer and for a flag that is not a bool, ValueError for a negative number.
    """

    accel_cluster_size: int | None = None
    accel_max_ctas: int | None = None
    accel_min_ctas: int | None = None
    is_high_priority_stream: bool = False
    use_ring_broadcast: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):  # those whose default is a bool are flags, the others numbers
            value = getattr(self, each.name)
            plain = _flag(each.name, value) if isinstance(each.default, bool) else _count(each.name, value)
            object.__setattr__(self, each.name, plain)  # plain assignment fails, because this class is frozen


def checked(options: object) -> CollectiveGroupOptions | None:
    """Return `options` if they are a `CollectiveGroupOptions` or None. TypeError for anything else."""
    if options is None or isinstance(options, CollectiveGroupOptions):
        return options
    raise TypeError(f"options={options!r}: expected a CollectiveGroupOptions or None, got {type(options).__name__}")


def _count(name: str, value: Any) -> int | None:
    """Return an integer of any type as an int, and None as None. TypeError for other values and bools, ValueError for
    negative integers."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: expected an int or None, got {type(value).__name__}")
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{name}={count}: expected 0 or more, or None")
    return count


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r}: expected a bool, got {type(value).__name__}")
