"""Which workers a call runs on and which part of its arguments each gets. Arithmetic only; no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.placement.ranks import is_axis_zero
from workers.placement.sharding import NamedSharding


@dataclass(frozen=True)
class DispatchTarget:
    """One worker of a sharded call: its index, its place along each sharded axis in the order the axes were given, and
    whether it is sent a dummy call instead of data."""

    worker: int
    shard: tuple[int, ...]
    dummy: bool


def known_axes(sharding: NamedSharding, **axes: Sequence[str]) -> None:
    """ValueError naming the argument for an axis the sharding does not have, one given twice in it, or a bare name."""
    for argument, names in axes.items():
        if isinstance(names, str):
            raise ValueError(f"{argument}: a list of axes is needed, got {names!r}")
        for name in names:
            if name not in sharding.names:
                raise ValueError(f"{argument}: unknown axis {name!r}; the workers have {', '.join(sharding.names)}")
        if len(set(names)) != len(names):
            raise ValueError(f"{argument}: an axis is named twice in {list(names)}")


def workers_at_zero(sharding: NamedSharding, axes: Sequence[str]) -> list[int]:
    """The workers whose place is 0 on each of `axes`, ascending; all of them when none is named."""
    known_axes(sharding, run_rank_0_only_axes=axes)
    return [worker for worker in worker_order(sharding) if is_axis_zero(sharding.get_worker_coords(worker), axes)]


def worker_order(sharding: NamedSharding) -> list[int]:
    """Every worker, ascending."""
    return sharding.get_ranks_by_coord()


def shard_targets(
    sharding: NamedSharding, sharded: Sequence[str], replicated: Sequence[str], *, dummies: bool
) -> list[DispatchTarget]:
    """The workers that a sharded call reaches, ascending.

    Along `sharded` axes each place has its own data, along `replicated` ones all places have the same, and along the
    others (free axes) place 0 alone has it; the rest get a dummy call if `dummies`. ValueError for an unknown axis or
    one in both roles.
    """
    known_axes(sharding, in_sharded_axes=sharded, replicate_on_axes=replicated)
    both = set(sharded) & set(replicated)
    if both:
        raise ValueError(f"axis {sorted(both)[0]!r} is in in_sharded_axes and in replicate_on_axes; it has one role")
    free = [name for name in sharding.names if name not in sharded and name not in replicated]
    targets = []
    for worker in worker_order(sharding):
        coords = sharding.get_worker_coords(worker)
        reached = is_axis_zero(coords, free)
        if reached or dummies:
            targets.append(DispatchTarget(worker, tuple(coords[axis] for axis in sharded), not reached))
    return targets


def result_workers(sharding: NamedSharding, targets: Sequence[DispatchTarget], replicated: Sequence[str]) -> list[int]:
    """Of `targets`, those whose results are returned: not dummies, and place 0 on the `replicated` output axes."""
    known_axes(sharding, output_is_replicated=replicated)
    return [
        target.worker
        for target in targets
        if not target.dummy and is_axis_zero(sharding.get_worker_coords(target.worker), replicated)
    ]


def check_shards(name: str, shards: Any, sharding: NamedSharding, sharded: Sequence[str]) -> None:
    """ValueError unless `shards` is nested lists, one level per sharded axis, each as long as its axis."""
    if not sharded:
        return
    size = sharding.get_axis_size(sharded[0])
    if not isinstance(shards, Sequence) or isinstance(shards, str | bytes):
        raise ValueError(f"argument {name}: axis {sharded[0]!r} needs a list of {size}, got {type(shards).__name__}")
    if len(shards) != size:
        raise ValueError(f"argument {name}: axis {sharded[0]!r} has {size} places, got {len(shards)} shards")
    for shard in shards:
        check_shards(name, shard, sharding, sharded[1:])


def shards_of(shards: Any, places: Sequence[int]) -> Any:
    """The part of nested lists that belongs to `places`."""
    for place in places:
        shards = shards[place]
    return shards


def check_counts(workers: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError unless each argument is a list with one value per worker that runs."""
    for name, values in named(args, kwargs):
        is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
        if not is_list or len(values) != workers:
            got = len(values) if is_list else type(values).__name__
            raise ValueError(f"argument {name}: {workers} workers run, so it needs a list of {workers}; got {got}")


def check_common(common: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError where a keyword argument is given both for all workers and for each."""
    for name in kwargs:
        if name in common:
            raise ValueError(f"argument {name}: it is in common_kwargs too; give it for all workers or for each")


def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Arguments with their names, positional ones by their number."""
    return [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
