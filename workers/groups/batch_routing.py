"""Which rows of a batch go from which rank of one group to which rank of another, and how batches are cut and joined.

A batch of B rows lies evenly over the ranks of its sender's group, in rank order, and shall lie evenly over those of
its receiver's. Each pair of ranks that have rows in common exchanges one part, under a key that both compute.

A decoupled exchange fixes no pairs: parts of one size are put where any rank of the receivers takes the next one. Each
carries a route, "RANK_INDEX_MODE_TAG", by which the answer finds the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PREFIX = "scheduler_route"
DEFAULT_TAG = "default"

RouteKey = tuple[str, str, str, str, str, int | None, int | None]
"""The prefix, the groups of sender and receiver, tag, route key, and the ranks of sender and receiver."""

SizeOf = Callable[[Any], int]


@dataclass(frozen=True, kw_only=True)
class RouteEntry:
    """One part. peer_rank: of the other side, None where any rank may be; batch_size: its rows; batch_index: the route
    that it carries, None where it carries none or the receiver learns it from the part."""

    peer_rank: int | None
    batch_size: int
    key: RouteKey
    batch_index: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """What one rank sends, or receives, in this order."""

    src_group_name: str
    dst_group_name: str
    tag: str
    entries: list[RouteEntry]


class CommMapper:
    """The arithmetic of the plans."""

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """(rank, rows) of each receiver of rows of the sender `src_rank`. ValueError for a batch that does not lie
        evenly over both groups, or a rank that the group does not have."""
        return _common_rows(batch_size, src_world_size, dst_world_size, src_rank)

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """(rank, rows) of each sender of rows to the receiver `dst_rank`. Raises as `get_dst_ranks`."""
        return _common_rows(batch_size, dst_world_size, src_world_size, dst_rank)

    @staticmethod
    def decoupled_get_batch_size(
        batch_size: int, src_world_size: int, dst_world_size: int, queue_size: int = 0
    ) -> list[int]:
        """Rows of each part of one rank of `src_world_size`: as many parts as it has peers (or `queue_size`, if that is
        positive), each of the rows of one rank of the larger group. ValueError where that does not come out even."""
        parts = max(src_world_size, dst_world_size)
        if batch_size % parts:
            raise ValueError(f"batch_size={batch_size} does not lie evenly over {parts} ranks")
        count = max(dst_world_size // src_world_size, 1)
        if queue_size > count:
            raise ValueError(f"a queue of {queue_size} parts: one rank of {src_world_size} has {count} at most")
        return [batch_size // parts] * (queue_size if count > 1 and queue_size > 0 else count)

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        """A key for what one rank puts for another."""
        return f"{src_rank}_{dst_rank}_{extra}"


def _common_rows(batch_size: int, world_size: int, peer_world_size: int, rank: int) -> list[tuple[int, int]]:
    """(rank, rows) of each rank of the peers with which `rank` has rows in common."""
    for size in (world_size, peer_world_size):
        if size < 1 or batch_size < 1 or batch_size % size:
            raise ValueError(f"batch_size={batch_size} does not lie evenly over a group of {size} ranks")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of a group of {world_size} ranks, counted from 0")
    mine, theirs = batch_size // world_size, batch_size // peer_world_size
    begin, end = rank * mine, (rank + 1) * mine
    return [
        (peer, min(end, (peer + 1) * theirs) - max(begin, peer * theirs))
        for peer in range(begin // theirs, (end - 1) // theirs + 1)
    ]


# --- plans


def build_send_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
) -> RoutePlan:
    """What `src_rank` sends of a batch of `batch_size` rows. ValueError as `CommMapper.get_dst_ranks`."""
    peers = CommMapper.get_dst_ranks(batch_size, src_world_size, dst_world_size, src_rank)
    entries = [
        RouteEntry(
            peer_rank=peer,
            batch_size=size,
            key=build_route_channel_key(src_group_name, dst_group_name, src_rank, peer, tag, route_key),
        )
        for peer, size in peers
    ]
    return _plan(src_group_name, dst_group_name, tag, entries)


def build_recv_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    dst_rank: int,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
) -> RoutePlan:
    """What `dst_rank` receives of a batch of `batch_size` rows. ValueError as `CommMapper.get_dst_ranks`."""
    peers = CommMapper.get_src_ranks(batch_size, src_world_size, dst_world_size, dst_rank)
    entries = [
        RouteEntry(
            peer_rank=peer,
            batch_size=size,
            key=build_route_channel_key(src_group_name, dst_group_name, peer, dst_rank, tag, route_key),
        )
        for peer, size in peers
    ]
    return _plan(src_group_name, dst_group_name, tag, entries)


def decoupled_build_send_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
    mode: str | None = None,
    tag_batch_router: Sequence[str] | None = None,
    send_queue_size: int = 0,
) -> RoutePlan:
    """What a rank puts for any rank of the receivers; or, where it names the routes of parts that it got
    (`tag_batch_router`), for the ranks that those came from. ValueError for fewer routes than parts."""
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, send_queue_size)
    if tag_batch_router is not None and len(tag_batch_router) < len(sizes):
        raise ValueError(f"{len(sizes)} parts of tag {tag!r} to answer; only {len(tag_batch_router)} came")
    entries = []
    for index, size in enumerate(sizes):
        back: int | None = None
        kept_tag = tag
        if tag_batch_router is None:
            route = f"{src_rank}_{index}_{mode}_{tag}"
        else:
            route = tag_batch_router[index]
            back, _, _, kept_tag = split_channel_message(route)
        key = build_route_channel_key(src_group_name, dst_group_name, None, back, kept_tag, route_key)
        entries.append(RouteEntry(peer_rank=back, batch_size=size, key=key, batch_index=route))
    return _plan(src_group_name, dst_group_name, tag, entries)


def decoupled_build_recv_plan(
    *,
    src_group_name: str,
    dst_group_name: str,
    recv_rank: int | None,
    src_world_size: int,
    dst_world_size: int,
    tag: str | None,
    route_key: Any = None,
    batch_size: int,
    recv_queue_size: int = 0,
) -> RoutePlan:
    """What a rank of `src_world_size` gets: answers for `recv_rank`, or, if that is None, the next parts of any
    sender."""
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, recv_queue_size)
    key = build_route_channel_key(src_group_name, dst_group_name, None, recv_rank, tag, route_key)
    entries = [RouteEntry(peer_rank=None, batch_size=size, key=key) for size in sizes]
    return _plan(src_group_name, dst_group_name, tag, entries)


def _plan(src_group_name: str, dst_group_name: str, tag: str | None, entries: list[RouteEntry]) -> RoutePlan:
    return RoutePlan(
        src_group_name=src_group_name, dst_group_name=dst_group_name, tag=tag or DEFAULT_TAG, entries=entries
    )


def build_route_channel_key(
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteKey:
    """The key of a channel under which a part goes from one rank to another."""
    told = "" if route_key is None else route_key if isinstance(route_key, str) else repr(route_key)
    return (PREFIX, src_group_name, dst_group_name, tag or DEFAULT_TAG, told, src_rank, dst_rank)


def build_send_key(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteKey:
    """The same with keywords."""
    return build_route_channel_key(src_group_name, dst_group_name, src_rank, dst_rank, tag, route_key)


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Rank, index, mode and tag of a route. ValueError for a string that is none."""
    parts = channel_message.split("_", 3)
    if len(parts) < 4:
        raise ValueError(f"{channel_message!r} is not a route of the form RANK_INDEX_MODE_TAG")
    return int(parts[0]), int(parts[1]), parts[2], parts[3]


# --- batches


def infer_batch_size(data: Any) -> int:
    """Rows of a tensor or array, items of a list, rows of a dict's first value that is not None. ValueError for
    anything else."""
    if isinstance(data, Tensor | np.ndarray):
        return int(data.shape[0])
    if isinstance(data, list):
        return len(data)
    if isinstance(data, Mapping):
        for value in data.values():
            if value is not None:
                return infer_batch_size(value)
    raise ValueError(f"the number of rows of a {_kind(data)} cannot be inferred; pass batch_size or a function for it")


def get_batch_size(data: Any, infer_batch_size_fn: SizeOf | None = None) -> int:
    """Rows of `data`, as the function says, or `infer_batch_size`."""
    return (infer_batch_size_fn or infer_batch_size)(data)


def split_batch(data: Any, split_sizes: Sequence[int]) -> list[Any]:
    """`data` in consecutive parts of so many rows. Tensors, arrays and lists are cut; a dict's values each on their
    own; None, numbers and strings are the same in all parts. ValueError for other types, and for sizes that do not add
    up to the rows."""
    if data is None or isinstance(data, bool | int | float | str):
        return [data for _ in split_sizes]
    if isinstance(data, Mapping):
        cut = {name: split_batch(value, split_sizes) for name, value in data.items()}
        return [{name: values[place] for name, values in cut.items()} for place in range(len(split_sizes))]
    if not isinstance(data, Tensor | np.ndarray | list):
        raise ValueError(f"a {_kind(data)} cannot be cut into parts; pass split_fn")
    rows = infer_batch_size(data)
    if rows != sum(split_sizes):
        raise ValueError(f"{rows} rows cannot be cut into parts of {list(split_sizes)} rows")
    ends = np.cumsum(split_sizes).tolist()
    cuts = [slice(end - size, end) for size, end in zip(split_sizes, ends, strict=True)]
    if isinstance(data, Tensor):
        return [data[cut].contiguous() for cut in cuts]
    return [data[cut] for cut in cuts]


def merge_batches(batches: Sequence[Any]) -> Any:
    """What `split_batch` cut, joined. ValueError for parts that cannot be joined, or none at all."""
    if not batches:
        raise ValueError("no parts to join")
    first = batches[0]
    if len(batches) == 1 or all(part is None for part in batches):
        return first
    if all(isinstance(part, Tensor) for part in batches):
        return torch.cat(list(batches))
    if all(isinstance(part, np.ndarray) for part in batches):
        return np.concatenate(list(batches))
    if all(isinstance(part, list) for part in batches):
        return [item for part in batches for item in part]
    if all(isinstance(part, Mapping) and part.keys() == first.keys() for part in batches):
        return {name: merge_batches([part[name] for part in batches]) for name in first}
    if isinstance(first, bool | int | float | str) and all(part == first for part in batches):
        return first
    raise ValueError(f"parts of types {sorted({_kind(part) for part in batches})} cannot be joined; pass merge_fn")


def _kind(value: Any) -> str:
    return type(value).__name__
