"""Implementation of `Worker.send_to` and `Worker.recv_from`: batches from all ranks of one group to all of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.core.durations import as_timeout
from workers.directory import DirectoryClient
from workers.directory.address import WorkerAddress
from workers.directory.registry import WORLD_SIZE
from workers.groups.batch_routing import (
    RoutePlan,
    SizeOf,
    build_recv_plan,
    build_send_plan,
    decoupled_build_recv_plan,
    decoupled_build_send_plan,
    get_batch_size,
    infer_batch_size,
    merge_batches,
    split_batch,
    split_channel_message,
)
from workers.messages import AsyncWork, CollectiveGroupOptions

GROUP_WAIT_S = 60.0
"""How long to wait for a group that is being launched."""

Router = dict[str, list[str]]
"""The routes of received and not yet answered parts, by tag."""


class Peers(Protocol):
    """The channel methods that this module uses."""

    def put(self, item: Any, weight: float = ..., key: Any = ..., async_op: bool = ...) -> AsyncWork[None] | None: ...

    def get(self, key: Any = ..., async_op: bool = ...) -> Any: ...


class Sender(Protocol):
    """The worker attributes that this module uses, to send and to receive."""

    _rank: int
    _world_size: int
    _directory: DirectoryClient

    @property
    def worker_address(self) -> WorkerAddress: ...

    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = ...,
        options: CollectiveGroupOptions | None = ...,
    ) -> AsyncWork[None] | None: ...

    def recv(
        self,
        src_group_name: str,
        src_rank: int | Sequence[int],
        async_op: bool = ...,
        options: CollectiveGroupOptions | None = ...,
    ) -> Any: ...


class AsyncRouteWork:
    """The handle of a batch whose parts are being sent or received. Thread-safe.

    works: one per part; finalize_fn: computes the result from the results of the parts, in the first `wait`; called
    once.
    """

    def __init__(self, works: Sequence[AsyncWork[Any]], finalize_fn: Callable[[list[Any]], Any]) -> None:
        self._works = list(works)
        self._finalize = finalize_fn
        self._guard = threading.Lock()
        self._result: list[Any] = []  # empty until the result is computed, then that one item

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return bool(self._result) or all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the first error of a part. `MessageTimeoutError` after `timeout` seconds,
        while the parts continue."""
        until = time.monotonic() + as_timeout("timeout", timeout)
        return self._finalize_once([work.wait(_remaining_s(until)) for work in self._works])

    async def async_wait(self, timeout: float | None = None) -> Any:
        """`wait` for async code. The event loop is woken when each part is done."""
        until = time.monotonic() + as_timeout("timeout", timeout)
        return self._finalize_once([await work.async_wait(_remaining_s(until)) for work in self._works])

    def _finalize_once(self, results: list[Any]) -> Any:
        """Return the result. The first call computes it from the results of the parts."""
        with self._guard:
            if not self._result:
                self._result = [self._finalize(results)]
            return self._result[0]


def _remaining_s(until: float) -> float:
    return max(until - time.monotonic(), 0.0)


def group_world_size(directory: DirectoryClient, group_name: str) -> int:
    """Return the number of workers of a group. Wait up to `GROUP_WAIT_S` for its launch, then `NameNotFoundError`."""
    size = directory.lookup_group(group_name, GROUP_WAIT_S).facts[WORLD_SIZE]
    assert isinstance(size, int)
    return size


@dataclass(frozen=True, kw_only=True)
class BatchRoute:
    """The path of batches between this worker's group and the group `group_name`.

    The fields are the arguments of `Worker.send_to` and `Worker.recv_from` with these names. router: the worker's
    `batch_router` for a decoupled exchange, else None. queue_size: `send_queue_size` or `recv_queue_size`.
    """

    group_name: str
    channel: Peers | None
    route_key: Any
    tag: str | None
    enable_p2p: bool
    options: CollectiveGroupOptions | None
    router: Router | None
    queue_size: int

    def __post_init__(self) -> None:
        if not self.enable_p2p and self.channel is None:
            raise ValueError(
                f"no connection to group {self.group_name!r} was chosen: pass a channel, or enable_p2p=True"
            )
        if self.enable_p2p and self.router is not None:
            raise ValueError(
                "enable_p2p=True cannot be combined with decoupled_mode=True, whose parts have no fixed receiver; "
                "pass a channel instead"
            )


def send_batch(
    worker: Sender,
    route: BatchRoute,
    data: Any,
    *,
    mode: str | None,
    batch_size: int | None,
    split_fn: Callable[[Any, list[int]], list[Any]] | None,
    async_op: bool,
) -> AsyncRouteWork | None:
    """Send the rows of this rank, and return a handle with `async_op`, else None. ValueError if `split_fn` returns
    another number of parts than requested. See `Worker.send_to`."""
    if batch_size is None:
        batch_size = infer_batch_size(data) * worker._world_size
    plan = _send_plan(worker, route, mode, batch_size)
    sizes = [entry.batch_size for entry in plan.entries]
    parts = (split_fn or split_batch)(data, sizes)
    if len(parts) != len(sizes):
        raise ValueError(
            f"split_fn returned {len(parts)} parts for tag {route.tag!r}; expected {len(sizes)}, with {sizes} rows"
        )
    works = []
    for entry, part in zip(plan.entries, parts, strict=True):
        if route.enable_p2p:
            assert entry.peer_rank is not None
            work = worker.send(part, route.group_name, entry.peer_rank, async_op=async_op, options=route.options)
        else:
            assert route.channel is not None
            # In a decoupled exchange, the part carries its route, which addresses the answer.
            item = part if route.router is None else {"batch_index": entry.batch_index, "batch": part}
            work = route.channel.put(item, key=entry.key, async_op=async_op)
        works.append(work)  # None unless `async_op`: the call has sent the part
    return AsyncRouteWork([work for work in works if work is not None], lambda _: None) if async_op else None


def _send_plan(worker: Sender, route: BatchRoute, mode: str | None, batch_size: int) -> RoutePlan:
    """Return the plan of a `send_to` call. `mode` becomes part of the tag. In a decoupled exchange it becomes part of
    the routes instead, and the list of routes that the call answers is emptied."""
    own_group = worker.worker_address.root_group_name
    peer_world_size = group_world_size(worker._directory, route.group_name)
    if route.router is None:
        return build_send_plan(
            src_group_name=own_group,
            dst_group_name=route.group_name,
            src_rank=worker._rank,
            src_world_size=worker._world_size,
            dst_world_size=peer_world_size,
            tag=route.tag if mode is None else f"{mode}_{route.tag}",
            route_key=route.route_key,
            batch_size=batch_size,
        )
    # None, without a list under the tag: this worker sends parts that are to be answered.
    routes_to_answer = route.router.get(str(route.tag))
    plan = decoupled_build_send_plan(
        src_group_name=own_group,
        dst_group_name=route.group_name,
        src_rank=worker._rank if routes_to_answer is None else None,  # answers have the routes of the others
        src_world_size=worker._world_size,
        dst_world_size=peer_world_size,
        tag=route.tag,
        route_key=route.route_key,
        batch_size=batch_size,
        mode=mode,
        tag_batch_router=routes_to_answer,
        send_queue_size=route.queue_size,
    )
    # Only after the plan, which raises if there are fewer routes than parts.
    if routes_to_answer is not None:
        route.router[str(route.tag)] = []
    return plan


def recv_batch(
    worker: Sender,
    route: BatchRoute,
    *,
    batch_size: int | None,
    merge_fn: Callable[[list[Any]], Any] | None,
    infer_batch_size_fn: SizeOf | None,
    async_op: bool,
) -> Any:
    """Receive the rows of this rank. Return them, or a handle with `async_op`. See `Worker.recv_from`."""
    if batch_size is None:
        raise ValueError(f"recv_from({route.group_name!r}) needs batch_size, the number of rows of the whole batch")
    plan = _recv_plan(worker, route, batch_size)

    def finish(parts: list[Any]) -> Any:
        """Check the row counts of the received parts and join them."""
        if route.router is not None:  # a decoupled exchange: parts carry their routes, and all have equal sizes
            parts = _unwrap_parts(parts, route.router)
        for part, entry in zip(parts, plan.entries, strict=True):
            rows = get_batch_size(part, infer_batch_size_fn)
            if rows != entry.batch_size:
                raise ValueError(
                    f"a part with tag {route.tag!r} from group {route.group_name!r} has {rows} rows; "
                    f"batch_size={batch_size} requires {entry.batch_size}"
                )
        return (merge_fn or merge_batches)(parts)

    # All requests start at once, so that parts are received in any order.
    works = [_receive_part(worker, route, entry.peer_rank, entry.key) for entry in plan.entries]
    work = AsyncRouteWork(works, finish)
    return work if async_op else work.wait()


def _receive_part(worker: Sender, route: BatchRoute, rank: int | None, key: Any) -> AsyncWork[Any]:
    """Start to receive a part: through the channel, under `key`, or as a message of the peer `rank`. Return its
    handle."""
    work: AsyncWork[Any]
    if route.enable_p2p:
        assert rank is not None
        work = worker.recv(route.group_name, rank, async_op=True, options=route.options)
    else:
        assert route.channel is not None
        work = route.channel.get(key=key, async_op=True)
    return work


def _recv_plan(worker: Sender, route: BatchRoute, batch_size: int) -> RoutePlan:
    """Return the plan of a `recv_from` call."""
    own_group = worker.worker_address.root_group_name
    peer_world_size = group_world_size(worker._directory, route.group_name)
    if route.router is None:
        return build_recv_plan(
            src_group_name=route.group_name,
            dst_group_name=own_group,
            dst_rank=worker._rank,
            src_world_size=peer_world_size,
            dst_world_size=worker._world_size,
            tag=route.tag,
            route_key=route.route_key,
            batch_size=batch_size,
        )
    # A list of routes under the tag shows that this worker answers parts, so it takes the parts of any sender. The
    # world sizes are as in `_send_plan`: `src` is this worker's group.
    return decoupled_build_recv_plan(
        src_group_name=route.group_name,
        dst_group_name=own_group,
        recv_rank=None if str(route.tag) in route.router else worker._rank,
        src_world_size=worker._world_size,
        dst_world_size=peer_world_size,
        tag=route.tag,
        route_key=route.route_key,
        batch_size=batch_size,
        recv_queue_size=route.queue_size,
    )


def _unwrap_parts(items: list[Any], router: Router) -> list[Any]:
    """Return the parts of a decoupled exchange without their routes.

    If `router` has a list under the tag of the parts, they need answers: append their routes to the list. Otherwise
    they are answers: return them in the order of the parts that they answer.
    """
    routes = [split_channel_message(item["batch_index"]) for item in items]
    _, _, _, tag = routes[0]
    routes_to_answer = router.get(tag)
    if routes_to_answer is not None:
        routes_to_answer.extend(item["batch_index"] for item in items)
        return [item["batch"] for item in items]
    order = sorted(range(len(items)), key=lambda number: routes[number][1])  # by the index within the route
    return [items[number]["batch"] for number in order]
