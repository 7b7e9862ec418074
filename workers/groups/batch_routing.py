"""Plans for the redistribution of a batch from the ranks of one group to the ranks of another.

A batch of B rows is spread evenly over the ranks of the sender's group, in rank order, and is redistributed evenly
over the ranks of the receiver's group. Two ranks that have rows in common exchange one part, under a key that both
compute.

A decoupled exchange has no fixed pairs. It consists of parts of equal size, and any rank of the receivers takes the
next one. Each part carries a route, "RANK_INDEX_MODE_TAG", which addresses its answer.
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
"""The prefix, the groups of sender and receiver, the tag, the route key, and the ranks of sender and receiver."""

SizeOf = Callable[[Any], int]


@dataclass(frozen=True, kw_only=True)
class RouteEntry:
    """One part. peer_rank: rank of the other side, None for any rank; batch_size: rows of the part; batch_index: the
    route of the part, None if it has none or if the receiver reads it from the part."""

    peer_rank: int | None
    batch_size: int
    key: RouteKey
    batch_index: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """The parts that one rank sends or receives, in order."""

    src_group_name: str
    dst_group_name: str
    tag: str
    entries: list[RouteEntry]


class CommMapper:
    """Arithmetic for the plans."""

    @staticmethod
    def get_dst_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, src_rank: int
    ) -> list[tuple[int, int]]:
        """Return (rank, rows) of each receiver of rows of the sender `src_rank`. ValueError for a batch that cannot
        be spread evenly over both groups, and for a rank outside of the group."""
        return _common_rows(batch_size, src_world_size, dst_world_size, src_rank)

    @staticmethod
    def get_src_ranks(
        batch_size: int, src_world_size: int, dst_world_size: int, dst_rank: int
    ) -> list[tuple[int, int]]:
        """Return (rank, rows) of each sender of rows to the receiver `dst_rank`. Raises as `get_dst_ranks`."""
        return _common_rows(batch_size, dst_world_size, src_world_size, dst_rank)

    @staticmethod
    def decoupled_get_batch_size(
        batch_size: int, src_world_size: int, dst_world_size: int, queue_size: int = 0
    ) -> list[int]:
        """Return the number of rows of each part that one rank of the group of `src_world_size` ranks sends or
        receives in one call.

        Each part has the rows of one rank of the larger group. A rank of the smaller group therefore has one part per
        peer, a rank of the larger group has one part. queue_size: only so many parts, unless it is 0. ValueError for
        a `batch_size` that cannot be spread evenly, and for a `queue_size` above the number of peers."""
        larger_size = max(src_world_size, dst_world_size)
        if batch_size % larger_size:
            raise ValueError(
                f"batch_size={batch_size} cannot be spread evenly over {larger_size} ranks; pass a multiple of "
                f"{larger_size}"
            )
        peers_per_rank = max(dst_world_size // src_world_size, 1)  # 1 for a rank of the larger group
        if queue_size > peers_per_rank:
            raise ValueError(
                f"queue_size={queue_size}: expected at most {peers_per_rank}, the number of parts that one of "
                f"{src_world_size} ranks exchanges with {dst_world_size} ranks"
            )
        return [batch_size // larger_size] * (queue_size if queue_size > 0 else peers_per_rank)

    @staticmethod
    def build_channel_key(src_rank: int, dst_rank: int, extra: str) -> str:
        """Return the key for items that one rank puts for another."""
        return f"{src_rank}_{dst_rank}_{extra}"


def _common_rows(batch_size: int, world_size: int, peer_world_size: int, rank: int) -> list[tuple[int, int]]:
    """Return (rank, rows) of each rank of the peers that has rows in common with `rank`. ValueError as
    `CommMapper.get_dst_ranks`."""
    for size in (world_size, peer_world_size):
        if size < 1 or batch_size < 1 or batch_size % size:
            raise ValueError(
                f"batch_size={batch_size} cannot be spread evenly over a group of {size} ranks; pass a positive "
                "multiple"
            )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a group of {world_size} ranks, counted from 0")
    rows, peer_rows = batch_size // world_size, batch_size // peer_world_size
    begin, end = rank * rows, (rank + 1) * rows  # the rows of `rank` within the batch
    # The peers from the one with the row `begin` to the one with the row `end - 1`.
    return [
        (peer, min(end, (peer + 1) * peer_rows) - max(begin, peer * peer_rows))
        for peer in range(begin // peer_rows, (end - 1) // peer_rows + 1)
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
    """Return the parts that `src_rank` sends of a batch of `batch_size` rows. ValueError as
    `CommMapper.get_dst_ranks`."""
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
    """Return the parts that `dst_rank` receives of a batch of `batch_size` rows. ValueError as
    `CommMapper.get_dst_ranks`."""
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
    """Return the parts that the rank `src_rank` puts for any rank of the receivers. `src_rank` and `mode` become part
    of their routes. send_queue_size: the number of parts; 0: one per peer.

    With `tag_batch_router`, the routes of received parts, return instead the answers to the ranks that sent those
    parts, under the routes of these. ValueError for fewer routes than parts."""
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, send_queue_size)
    if tag_batch_router is not None and len(tag_batch_router) < len(sizes):
        raise ValueError(
            f"tag {tag!r}: cannot send {len(sizes)} parts as answers, because only {len(tag_batch_router)} parts were "
            "received"
        )
    entries = []
    for index, size in enumerate(sizes):
        answered_rank: int | None = None  # any rank of the receivers
        part_tag = tag  # for an answer, the tag of the part that it answers
        if tag_batch_router is None:
            route = f"{src_rank}_{index}_{mode}_{tag}"
        else:
            route = tag_batch_router[index]
            answered_rank, _, _, part_tag = split_channel_message(route)
        key = build_route_channel_key(
            src_group_name, dst_group_name, src_rank=None, dst_rank=answered_rank, tag=part_tag, route_key=route_key
        )
        entries.append(RouteEntry(peer_rank=answered_rank, batch_size=size, key=key, batch_index=route))
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
    """Return the parts that a rank of the group of `src_world_size` ranks receives: the answers for `recv_rank`, or
    if that is None the next parts of any sender. All of them have the same channel key.

    The world sizes are those of `decoupled_build_send_plan` for the same rank: `src` is its own group. The group names
    are those of the sender and the receiver. recv_queue_size: the number of parts; 0: one per peer.
    """
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, recv_queue_size)
    key = build_route_channel_key(
        src_group_name, dst_group_name, src_rank=None, dst_rank=recv_rank, tag=tag, route_key=route_key
    )
    entries = [RouteEntry(peer_rank=None, batch_size=size, key=key) for size in sizes]
    return _plan(src_group_name, dst_group_name, tag, entries)


def _plan(src_group_name: str, dst_group_name: str, tag: str | None, entries: list[RouteEntry]) -> RoutePlan:
    """Return the plan of these entries, with the default tag for None."""
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
    """Return the channel key of a part from one rank to another. A rank is None if any rank of the group may send or
    receive the part. Both sides compute the same key, in which a `route_key` is its text."""
    if route_key is None:
        key_text = ""
    else:
        key_text = route_key if isinstance(route_key, str) else repr(route_key)
    return (PREFIX, src_group_name, dst_group_name, tag or DEFAULT_TAG, key_text, src_rank, dst_rank)


def build_send_key(
    *,
    src_group_name: str,
    dst_group_name: str,
    src_rank: int | None,
    dst_rank: int | None,
    tag: str | None,
    route_key: Any = None,
) -> RouteKey:
    """`build_route_channel_key` with keyword arguments."""
    return build_route_channel_key(src_group_name, dst_group_name, src_rank, dst_rank, tag, route_key)


def split_channel_message(channel_message: str) -> tuple[int, int, str, str]:
    """Return rank, index, mode and tag of a route. ValueError for a string that is not a route."""
    parts = channel_message.split("_", 3)  # only the tag may contain "_"
    if len(parts) < 4:
        raise ValueError(f"{channel_message!r} is not a route; expected the form RANK_INDEX_MODE_TAG")
    return int(parts[0]), int(parts[1]), parts[2], parts[3]


# --- batches


def infer_batch_size(data: Any) -> int:
    """Return the rows of a tensor or array, the length of a list, or the rows of the first value of a dict that is
    not None. ValueError for other types, and for a dict without such a value."""
    if isinstance(data, Tensor | np.ndarray):
        return int(data.shape[0])
    if isinstance(data, list):
        return len(data)
    if isinstance(data, Mapping):
        for value in data.values():
            if value is not None:
                return infer_batch_size(value)
    raise ValueError(f"cannot infer the number of rows of a {_kind(data)}; pass batch_size or infer_batch_size_fn")


def get_batch_size(data: Any, infer_batch_size_fn: SizeOf | None = None) -> int:
    """Return the rows of `data`, computed by `infer_batch_size_fn` or else by `infer_batch_size`."""
    return (infer_batch_size_fn or infer_batch_size)(data)


def split_batch(data: Any, split_sizes: Sequence[int]) -> list[Any]:
    """Cut `data` into consecutive parts with the given row counts. Tensors, arrays and lists are cut. For a dict, each
    value is cut, and the parts are dicts with the same keys. None, numbers and strings are repeated in every part.
    ValueError for other types, and for sizes whose sum differs from the rows."""
    if data is None or isinstance(data, bool | int | float | str):
        return [data for _ in split_sizes]
    if isinstance(data, Mapping):
        parts_of = {name: split_batch(value, split_sizes) for name, value in data.items()}
        return [{name: parts[index] for name, parts in parts_of.items()} for index in range(len(split_sizes))]
    if not isinstance(data, Tensor | np.ndarray | list):
        raise ValueError(f"cannot cut a {_kind(data)} into parts for the receivers; pass a split_fn that does it")
    rows = infer_batch_size(data)
    if rows != sum(split_sizes):
        raise ValueError(
            f"cannot cut {rows} rows into parts of {list(split_sizes)} rows: the sums differ; pass the right batch_size"
        )
    ends = np.cumsum(split_sizes).tolist()
    ranges = [slice(end - size, end) for size, end in zip(split_sizes, ends, strict=True)]
    if isinstance(data, Tensor):
        return [data[rows_range].contiguous() for rows_range in ranges]
    return [data[rows_range] for rows_range in ranges]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Join parts that `split_batch` has cut. A value that `split_batch` repeated in every part is returned once.
    ValueError for parts that cannot be joined, and for an empty list."""
    if not batches:
        raise ValueError("merge_batches got an empty list; pass at least one part")
    first = batches[0]
    if len(batches) == 1 or all(part is None for part in batches):  # None was repeated in every part
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
    raise ValueError(
        f"cannot join parts of types {sorted({_kind(part) for part in batches})}; pass a merge_fn that does it"
    )


def _kind(value: Any) -> str:
    return type(value).__name__
