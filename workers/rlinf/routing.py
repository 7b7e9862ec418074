"""`rlinf.scheduler.worker.routing`: batches from the ranks of one group to the ranks of another.

`rlinf.scheduler.channel` and `rlinf.scheduler.collective` have their names from here, too.

A batch of B rows is spread evenly over the ranks of the sender's group, in rank order, and is
redistributed evenly over the ranks of the receiver's group. Two ranks that have rows in common
exchange one slice, under a key that both compute.

A decoupled exchange has no fixed pairs. It consists of slices of equal size, and any rank of the
receivers takes the next one. Each slice carries a route, "RANK_INDEX_MODE_TAG", which addresses its
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.channels import DEFAULT_KEY as DEFAULT_KEY
from workers.channels import Channel as Channel
from workers.directory import DirectoryClient
from workers.directory.registry import WORLD_SIZE
from workers.groups.worker import Worker as PlainWorker
from workers.messages import AsyncWork as AsyncWork
from workers.messages import CollectiveGroupOptions as CollectiveGroupOptions
from workers.messages import all_of

PREFIX = "scheduler_route"
DEFAULT_TAG = "default"

RouteKey = tuple[str, str, str, str, str, int | None, int | None]
"""The prefix, the groups of sender and receiver, the tag, the route key, and the ranks of sender and receiver."""

SizeOf = Callable[[Any], int]

GROUP_WAIT_S = 60.0
"""How long to wait for a group that is being launched."""


@dataclass(frozen=True, kw_only=True)
class RouteEntry:
    """One slice. peer_rank: rank of the other side, None for any rank; batch_size: rows of the slice; batch_index: the
    route of the slice, None if it has none or if the receiver reads it from the slice."""

    peer_rank: int | None
    batch_size: int
    key: RouteKey
    batch_index: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """The slices that one rank sends or receives, in order."""

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
        """Return the number of rows of each slice that one rank of the group of `src_world_size` ranks sends or
        receives in one call.

        Each slice has the rows of one rank of the larger group. A rank of the smaller group
        therefore has one slice per peer, a rank of the larger group has one slice. queue_size: the
        number of slices to return; 0: all of them. ValueError for a `batch_size` that cannot be
        spread evenly, and for a `queue_size` above the number of peers."""
        larger_size = max(src_world_size, dst_world_size)
        if batch_size % larger_size:
            raise ValueError(
                f"batch_size={batch_size} cannot be spread evenly over {larger_size} ranks; pass a multiple of "
                f"{larger_size}"
            )
        peers_per_rank = max(dst_world_size // src_world_size, 1)  # 1 for a rank of the larger group
        if queue_size > peers_per_rank:
            raise ValueError(
                f"queue_size={queue_size}: expected at most {peers_per_rank}, the number of slices that one of "
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
    rows = batch_size // world_size
    peer_rows = batch_size // peer_world_size
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
    """Return the slices that `src_rank` sends of a batch of `batch_size` rows. ValueError as
    `CommMapper.get_dst_ranks`."""
    peers = CommMapper.get_dst_ranks(batch_size, src_world_size, dst_world_size, src_rank)
    transfers = [(src_rank, peer, peer, size) for peer, size in peers]
    return _rank_plan(src_group_name, dst_group_name, tag, route_key, transfers)


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
    """Return the slices that `dst_rank` receives of a batch of `batch_size` rows. ValueError as
    `CommMapper.get_dst_ranks`."""
    peers = CommMapper.get_src_ranks(batch_size, src_world_size, dst_world_size, dst_rank)
    transfers = [(peer, dst_rank, peer, size) for peer, size in peers]
    return _rank_plan(src_group_name, dst_group_name, tag, route_key, transfers)


def _rank_plan(
    src_group_name: str,
    dst_group_name: str,
    tag: str | None,
    route_key: Any,
    transfers: Sequence[tuple[int, int, int, int]],
) -> RoutePlan:
    """Return the plan of slices (sender's rank, receiver's rank, which of both is the peer, rows)."""
    entries = [
        RouteEntry(
            peer_rank=peer,
            batch_size=size,
            key=build_route_channel_key(src_group_name, dst_group_name, src, dst, tag, route_key),
        )
        for src, dst, peer, size in transfers
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
    """Return the slices that the rank `src_rank` puts for any rank of the receivers. `src_rank` and `mode` become part
    of their routes. send_queue_size: the number of slices; 0: one per peer.

    With `tag_batch_router`, the routes of received slices, return instead the answers to the ranks that sent those
    slices, under the routes of these. ValueError for fewer routes than slices."""
    sizes = CommMapper.decoupled_get_batch_size(batch_size, src_world_size, dst_world_size, send_queue_size)
    if tag_batch_router is not None and len(tag_batch_router) < len(sizes):
        raise ValueError(
            f"tag {tag!r}: cannot send {len(sizes)} slices as answers, because only {len(tag_batch_router)} slices "
            "were received"
        )
    entries = []
    for index, size in enumerate(sizes):
        answered_rank: int | None = None  # any rank of the receivers
        answered_tag = tag  # for an answer, the tag of the slice that it answers
        if tag_batch_router is None:
            route = f"{src_rank}_{index}_{mode}_{tag}"
        else:
            route = tag_batch_router[index]
            answered_rank, _, _, answered_tag = split_channel_message(route)
        key = build_route_channel_key(
            src_group_name, dst_group_name, src_rank=None, dst_rank=answered_rank, tag=answered_tag, route_key=route_key
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
    """Return the slices that a rank of the group of `src_world_size` ranks receives: the answers for `recv_rank`, or
    if that is None the next slices of any sender. All of them have the same channel key.

    The world sizes are those of `decoupled_build_send_plan` for the same rank: `src` is its own group. The group names
    are those of the sender and the receiver. recv_queue_size: the number of slices; 0: one per peer.
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
    """Return the channel key of a slice from one rank to another. A rank is None if any rank of the group may send or
    receive the slice. Both sides compute the same key, in which a `route_key` is its text."""
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
    words = channel_message.split("_", 3)  # only the tag may contain "_"
    if len(words) < 4:
        raise ValueError(f"{channel_message!r} is not a route; expected the form RANK_INDEX_MODE_TAG")
    return int(words[0]), int(words[1]), words[2], words[3]


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
    """Cut `data` into consecutive slices with the given row counts. Tensors, arrays and lists are cut. For a dict, each
    value is cut, and the slices are dicts with the same keys. None, numbers and strings are repeated in every slice.
    ValueError for other types, and for sizes whose sum differs from the rows."""
    if data is None or isinstance(data, bool | int | float | str):
        return [data for _ in split_sizes]
    if isinstance(data, Mapping):
        slices_by_name = {name: split_batch(value, split_sizes) for name, value in data.items()}
        return [{name: slices[index] for name, slices in slices_by_name.items()} for index in range(len(split_sizes))]
    if not isinstance(data, Tensor | np.ndarray | list):
        raise ValueError(f"cannot cut a {_kind(data)} into slices for the receivers; pass a split_fn that does it")
    rows = infer_batch_size(data)
    if rows != sum(split_sizes):
        raise ValueError(
            f"cannot cut {rows} rows into slices of {list(split_sizes)} rows: the sums differ; "
            "pass the right batch_size"
        )
    ends = np.cumsum(split_sizes).tolist()
    ranges = [slice(end - size, end) for size, end in zip(split_sizes, ends, strict=True)]
    if isinstance(data, Tensor):
        return [data[rows_range].contiguous() for rows_range in ranges]
    return [data[rows_range] for rows_range in ranges]


def merge_batches(batches: Sequence[Any]) -> Any:
    """Join slices that `split_batch` has cut. A value that `split_batch` repeated in every slice is returned once.
    ValueError for slices that cannot be joined, and for an empty list."""
    if not batches:
        raise ValueError("merge_batches got an empty list; pass at least one slice")
    first = batches[0]
    if len(batches) == 1 or all(each is None for each in batches):  # None was repeated in every slice
        return first
    if all(isinstance(each, Tensor) for each in batches):
        return torch.cat(list(batches))
    if all(isinstance(each, np.ndarray) for each in batches):
        return np.concatenate(list(batches))
    if all(isinstance(each, list) for each in batches):
        return [item for each in batches for item in each]
    if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in batches):
        return {name: merge_batches([each[name] for each in batches]) for name in first}
    if isinstance(first, bool | int | float | str) and all(each == first for each in batches):
        return first
    raise ValueError(
        f"cannot join slices of types {sorted({_kind(each) for each in batches})}; pass a merge_fn that does it"
    )


def _kind(value: Any) -> str:
    return type(value).__name__


# --- workers


class AsyncRouteWork(AsyncWork[Any]):
    """The handle of a batch whose slices are being sent or received.

    works: one per slice; finalize_fn: computes the result from the results of the slices, called once,
    by the first reader of the result. Errors: the first of a slice, in their order, once all have ended.
    """

    def __init__(self, works: Sequence[AsyncWork[Any]], finalize_fn: Callable[[list[Any]], Any]) -> None:
        handles = list(works)
        all_handles = all_of(handles, f"a batch of {len(handles)} slices", None)
        super().__init__(
            all_handles._future, all_handles._what, lambda _: finalize_fn([handle.wait() for handle in handles])
        )


def get_group_world_size(manager_proxy: DirectoryClient, group_name: str) -> int:
    """Return the number of workers of a group. manager_proxy: a worker's `manager_proxy`. Wait up to
    `GROUP_WAIT_S` for its launch, then `NameNotFoundError`."""
    size = manager_proxy.lookup_worker_group(group_name, GROUP_WAIT_S).facts[WORLD_SIZE]
    assert isinstance(size, int)
    return size


class RoutingWorker(PlainWorker):
    """`workers.Worker` with RLinf's `send_to` and `recv_from`.

    A worker of a decoupled exchange has a dict `batch_router`: by tag, the routes of received and not
    yet answered slices.
    """

    batch_router: dict[str, list[str]]

    def send_to(
        self,
        group_name: str,
        channel: Channel | None,
        data: Any,
        *,
        route_key: Any = None,
        mode: str | None = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        split_fn: Callable[[Any, list[int]], list[Any]] | None = None,
        enable_p2p: bool = False,
        options: CollectiveGroupOptions | None = None,
        decoupled_mode: bool = False,
        send_queue_size: int = 0,
    ) -> AsyncRouteWork | None:
        """Send this rank's rows of a batch to `group_name`. The rows are spread evenly over the
        ranks of this group, and are redistributed evenly over the ranks of `group_name`,
        which call `recv_from`. All ranks of both groups take part.

        data: a tensor or array `[rows, ...]`, a list, or a dict of these; or any object
        that `split_fn(data, rows)` cuts into slices with the given row counts. batch_size:
        rows of the whole batch; default: this rank's rows times the number of ranks. tag,
        route_key: must be the same in `recv_from`; with a `mode` (and without
        `decoupled_mode`) the tag there is "MODE_TAG". Parts go through `channel`, or with
        `enable_p2p` as messages with `options`. With `async_op` return a handle at once.

        decoupled_mode: any rank of the other group may take a slice, and its answer returns
        to the rank that sent the slice. The worker has a dict `batch_router`. If
        `batch_router[tag]` is a list, this call sends answers to the slices that `recv_from`
        received and empties the list. Otherwise it sends slices that are to be answered.
        send_queue_size: the number of slices, instead of one per peer. Cannot be combined
        with `enable_p2p`.

        ValueError for a batch that cannot be split, or not evenly; `NameNotFoundError` for
        a group that is not launched within a minute; errors of `Channel.put` or `send`.
        """
        self._check_route(group_name, channel, enable_p2p, decoupled_mode)
        if batch_size is None:
            batch_size = infer_batch_size(data) * self._world_size
        ends: dict[str, Any] = {
            "src_group_name": self.worker_address.root_group_name,
            "dst_group_name": group_name,
            "src_world_size": self._world_size,
            "dst_world_size": get_group_world_size(self._directory, group_name),
            "route_key": route_key,
            "batch_size": batch_size,
        }
        if not decoupled_mode:
            sent_tag = tag if mode is None else f"{mode}_{tag}"
            plan = build_send_plan(src_rank=self._rank, tag=sent_tag, **ends)
        else:
            # Without a list under the tag, this worker sends slices that are to be answered.
            routes_to_answer = self.batch_router.get(str(tag))
            plan = decoupled_build_send_plan(
                src_rank=self._rank,
                tag=tag,
                mode=mode,
                tag_batch_router=routes_to_answer,
                send_queue_size=send_queue_size,
                **ends,
            )
            # Only after the plan, which raises if there are fewer routes than slices.
            if routes_to_answer is not None:
                self.batch_router[str(tag)] = []
        sizes = [entry.batch_size for entry in plan.entries]
        slices = (split_fn or split_batch)(data, sizes)
        if len(slices) != len(sizes):
            raise ValueError(
                f"split_fn returned {len(slices)} slices for tag {tag!r}; expected {len(sizes)}, with {sizes} rows"
            )
        works = []
        for entry, sent in zip(plan.entries, slices, strict=True):
            if enable_p2p:
                assert entry.peer_rank is not None
                work = self.send(sent, group_name, entry.peer_rank, async_op=async_op, options=options)
            else:
                assert channel is not None
                item = sent
                if decoupled_mode:  # the slice carries its route, which addresses the answer
                    item = {"batch_index": entry.batch_index, "batch": sent}
                work = channel.put(item, key=entry.key, async_op=async_op)
            if work is not None:  # else the call has sent the slice
                works.append(work)
        return AsyncRouteWork(works, lambda _: None) if async_op else None

    def recv_from(
        self,
        group_name: str,
        channel: Channel | None,
        *,
        route_key: Any = None,
        tag: str | None = None,
        async_op: bool = False,
        batch_size: int | None = None,
        merge_fn: Callable[[list[Any]], Any] | None = None,
        infer_batch_size_fn: SizeOf | None = None,
        enable_p2p: bool = False,
        options: CollectiveGroupOptions | None = None,
        decoupled_mode: bool = False,
        recv_queue_size: int = 0,
    ) -> Any:
        """Return this rank's rows of a batch that the ranks of `group_name` send with `send_to`.
        `batch_size` is the number of rows of the whole batch, as in `send_to`, and
        required here. With `async_op` return a handle.

        `merge_fn(slices)` joins the slices; the default joins tensors and arrays along their
        first dimension, lists, and dicts value by value. `infer_batch_size_fn(slice)`
        returns the number of rows of a slice, for the check. decoupled_mode: see `send_to`.
        If `batch_router` has a list under the tag of the received slices, their routes are
        appended to it. Otherwise the slices are answers, returned in the order in which this
        rank sent the slices that they answer. recv_queue_size: the number of slices, instead
        of one per peer. ValueError for a slice whose row count differs from the plan; errors
        of `send_to`; errors of `Channel.get` or `recv`.
        """
        self._check_route(group_name, channel, enable_p2p, decoupled_mode)
        if batch_size is None:
            raise ValueError(f"recv_from({group_name!r}) needs batch_size, the number of rows of the whole batch")
        ends: dict[str, Any] = {
            "src_group_name": group_name,
            "dst_group_name": self.worker_address.root_group_name,
            "tag": tag,
            "route_key": route_key,
            "batch_size": batch_size,
        }
        peer_world_size = get_group_world_size(self._directory, group_name)
        if not decoupled_mode:
            plan = build_recv_plan(
                dst_rank=self._rank,
                src_world_size=peer_world_size,
                dst_world_size=self._world_size,
                **ends,
            )
        else:
            # A list of routes under the tag shows that this worker answers slices, so it takes those
            # of any sender. `src` of the world sizes is this worker's group.
            answers = str(tag) in self.batch_router
            plan = decoupled_build_recv_plan(
                recv_rank=None if answers else self._rank,
                src_world_size=self._world_size,
                dst_world_size=peer_world_size,
                recv_queue_size=recv_queue_size,
                **ends,
            )

        def finish(slices: list[Any]) -> Any:
            """Check the row counts of the received slices and join them."""
            if decoupled_mode:  # slices carry their routes, and all have equal sizes
                slices = self._unwrap_slices(slices)
            for received, entry in zip(slices, plan.entries, strict=True):
                rows = get_batch_size(received, infer_batch_size_fn)
                if rows != entry.batch_size:
                    raise ValueError(
                        f"a slice with tag {tag!r} from group {group_name!r} has {rows} rows; "
                        f"batch_size={batch_size} requires {entry.batch_size}"
                    )
            return (merge_fn or merge_batches)(slices)

        # All requests start at once, so that slices are received in any order.
        works: list[AsyncWork[Any]] = []
        for entry in plan.entries:
            if enable_p2p:
                assert entry.peer_rank is not None
                works.append(self.recv(group_name, entry.peer_rank, async_op=True, options=options))
            else:
                assert channel is not None
                works.append(channel.get(key=entry.key, async_op=True))
        if async_op:
            return AsyncRouteWork(works, finish)
        return finish([work.wait() for work in works])

    def _check_route(self, group_name: str, channel: Channel | None, enable_p2p: bool, decoupled: bool) -> None:
        """ValueError if the arguments name no connection, or one that cannot be decoupled."""
        if not enable_p2p and channel is None:
            raise ValueError(f"no connection to group {group_name!r} was chosen: pass a channel, or enable_p2p=True")
        if enable_p2p and decoupled:
            raise ValueError(
                "enable_p2p=True cannot be combined with decoupled_mode=True, whose slices have no "
                "fixed receiver; pass a channel instead"
            )
        if decoupled and getattr(self, "batch_router", None) is None:
            raise ValueError(
                "decoupled_mode=True: the worker has no `batch_router`; set it to a dict, which may be empty"
            )

    def _unwrap_slices(self, items: list[Any]) -> list[Any]:
        """Return the slices of a decoupled exchange without their routes.

        If `batch_router` has a list under the tag of the slices, they need answers: append their
        routes to the list. Otherwise they are answers: return them in the order of the slices that
        they answer.
        """
        routes = [split_channel_message(item["batch_index"]) for item in items]
        _, _, _, tag = routes[0]
        routes_to_answer = self.batch_router.get(tag)
        if routes_to_answer is not None:
            routes_to_answer.extend(item["batch_index"] for item in items)
            return [item["batch"] for item in items]
        # By the index within the route.
        order = sorted(range(len(items)), key=lambda number: routes[number][1])
        return [items[number]["batch"] for number in order]
