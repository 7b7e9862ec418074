"""Selection of the workers of a call, and of the part of its arguments for each. Arithmetic only; no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.placement.sharding import NamedSharding


@dataclass(frozen=True)
class DispatchTarget:
    """One worker of a sharded call: its index, its position on each sharded axis in the order of the call's axes,
    and whether it gets a dummy call without data."""

    worker: int
    shard: tuple[int, ...]
    dummy: bool


def check_axes(sharding: NamedSharding, **axes: Sequence[str]) -> None:
    """ValueError, naming the argument, for an unknown axis, an axis that an argument names twice, and a str instead
    of a list. axes: the axes that each argument of the call names."""
    for argument, names in axes.items():
        if isinstance(names, str):
            raise ValueError(f"{argument} must be a list of names of axes, got {names!r}")
        for name in names:
            if name not in sharding.names:
                raise ValueError(
                    f"{argument}: unknown axis {name!r}; the workers have the axes {', '.join(sharding.names)}"
                )
        if len(set(names)) != len(names):
            raise ValueError(f"{argument}: an axis is named twice in {list(names)}; name each axis once")


def workers_at_zero(sharding: NamedSharding, axes: Sequence[str]) -> list[int]:
    """Return the workers at 0 on each of `axes`, ascending. All workers if `axes` is empty."""
    check_axes(sharding, run_rank_0_only_axes=axes)
    return [
        worker for worker in worker_order(sharding) if sharding.is_axis_zero(sharding.get_worker_coords(worker), axes)
    ]


def worker_order(sharding: NamedSharding) -> list[int]:
    """Return all workers, ascending."""
    return sharding.get_ranks_by_coord()


def shard_targets(
    sharding: NamedSharding, sharded: Sequence[str], replicated: Sequence[str], *, dummies: bool
) -> list[DispatchTarget]:
    """Return the workers of a sharded call, ascending.

    Each position on the `sharded` axes has different data. All positions on the `replicated` axes have the same
    data. On the other (free) axes only position 0 has data; the other positions get a dummy call if `dummies`.
    ValueError for an unknown axis and for an axis in both roles.
    """
    check_axes(sharding, in_sharded_axes=sharded, replicate_on_axes=replicated)
    twice = set(sharded) & set(replicated)
    if twice:
        raise ValueError(
            f"axis {sorted(twice)[0]!r} is in in_sharded_axes and in replicate_on_axes; remove it from one of them"
        )
    free = [name for name in sharding.names if name not in sharded and name not in replicated]
    targets = []
    for worker in worker_order(sharding):
        coords = sharding.get_worker_coords(worker)
        has_data = sharding.is_axis_zero(coords, free)
        if has_data or dummies:
            targets.append(DispatchTarget(worker, tuple(coords[axis] for axis in sharded), dummy=not has_data))
    return targets


def result_workers(sharding: NamedSharding, targets: Sequence[DispatchTarget], replicated: Sequence[str]) -> list[int]:
    """Return the workers whose results a call returns: of `targets`, those at 0 on the `replicated` axes, without those
    of dummy calls."""
    check_axes(sharding, output_is_replicated=replicated)
    return [
        target.worker
        for target in targets
        if not target.dummy and sharding.is_axis_zero(sharding.get_worker_coords(target.worker), replicated)
    ]


def check_shards(name: str, shards: Any, sharding: NamedSharding, sharded: Sequence[str]) -> None:
    """ValueError unless `shards`, the value of argument `name`, is nested lists with one level per sharded axis, each
    as long as its axis. Any value is valid without a sharded axis."""
    if not sharded:
        return
    size = sharding.get_axis_size(sharded[0])
    if not isinstance(shards, Sequence) or isinstance(shards, str | bytes):
        raise ValueError(
            f"argument {name}: expected a list of {size} shards, one per position on axis {sharded[0]!r}, got "
            f"{type(shards).__name__}"
        )
    if len(shards) != size:
        raise ValueError(
            f"argument {name}: got {len(shards)} shards, expected {size}, one per position on axis {sharded[0]!r}"
        )
    for shard in shards:
        check_shards(name, shard, sharding, sharded[1:])


def shards_of(shards: Any, position: Sequence[int]) -> Any:
    """Return the element of nested lists at `position`, which has an index for each level."""
    for index in position:
        shards = shards[index]
    return shards


def check_counts(workers: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError unless each argument is a list with one value per called worker."""
    for name, values in named(args, kwargs):
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        if not is_list or len(values) != workers:
            got = len(values) if is_list else type(values).__name__
            raise ValueError(
                f"argument {name}: expected a list of {workers} values, one for each called worker; got {got}"
            )


def check_common(common: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError for a keyword argument that is both in `common` and in `kwargs`."""
    for name in kwargs:
        if name in common:
            raise ValueError(f"argument {name} is also in common_kwargs; pass it either for all workers or for each")


def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) of each argument. Positional arguments are named by their number."""
    return [*((str(index), value) for index, value in enumerate(args)), *kwargs.items()]
