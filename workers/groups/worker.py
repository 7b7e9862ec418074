"""What workers are: a class to inherit from, that knows its place and talks to the workers of other groups."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import ray
import torch

from workers.channels import Channel
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.groups.actor_class import SERVING_FILE, add_duration
from workers.groups.batch_routing import SizeOf
from workers.groups.device_lock import DeviceLock
from workers.groups.routed import AsyncRouteWork, BatchRoute, Router, recv_batch, send_batch
from workers.groups.worker_group import WorkerGroup
from workers.messages import AsyncWork, CollectiveGroupOptions, Messenger, participants
from workers.messages.broadcast_members import Ranks
from workers.placement.ports import HIGHEST, PortKeeper

LOG_LEVEL_VARIABLE = "RLINF_LOG_LEVEL"
_HOST_VARIABLE = "TQ_HOST"
_WRAPPERS = (SERVING_FILE, f"{Path(ray.__file__).parent}{os.sep}")
_LOG_FORMAT = "[%(levelname)s %(asctime)s {name}] %(message)s"

Self = TypeVar("Self", bound="Worker")


class _OnAccelerator:
    """A class attribute that is looked up when asked for: asking CUDA when the class is made would start it."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> Any:
        return self._value() if torch.cuda.is_available() else None


class Worker:
    """A worker of a group: `MyWorker.create_group(...).launch(...)` constructs one in each of the group's processes.

    A subclass calls `super().__init__()` first and may use `_rank`, `_world_size`, `_group_name`, `_cluster_node_rank`,
    `_node_local_rank` and `_local_accelerator_rank` (-1 without one), `logger` (also `_logger`), and what
    torch.distributed reads in the environment: MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE. LOCAL_RANK is the index of the worker's accelerator among those it sees, or without one its place
    among its group's workers on the node.

    A process that a worker starts (by multiprocessing, not by a fork of the worker itself) constructs
    `MyWorker(parent_address, world_size, rank)`: its address is the parent's and `rank`. It needs no Ray.

    `Worker.current_worker` is the one of this process, and `Worker.logger` its log; `torch_platform` (torch.cuda) and
    `torch_device_type` ("cuda") are None without an accelerator. Errors of messages are those of
    `workers.messages.Messenger`.
    """

    current_worker: ClassVar[Worker | None] = None
    logger: logging.Logger = logging.getLogger("workers")
    torch_platform: Any = _OnAccelerator(lambda: torch.cuda)
    torch_device_type: Any = _OnAccelerator(lambda: "cuda")

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        """Joins the job that the environment tells of. RuntimeError where it tells of none; `NameInUseError` if another
        process is this worker."""
        if DIRECTORY_VARIABLE not in os.environ or _HOST_VARIABLE not in os.environ:
            raise RuntimeError(
                f"{type(self).__name__}() belongs to no job: workers are made by "
                f"{type(self).__name__}.create_group(...).launch(...)"
            )
        self._rank = int(os.environ["RANK"]) if rank is None else rank
        self._world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
        if parent_address is None:
            self._worker_address = WorkerAddress(os.environ["GROUP_NAME"], self._rank)
        else:
            self._worker_address = parent_address.get_child_address(self._rank)
        self._group_name = self._worker_address.get_parent_address().get_name()
        self._cluster_node_rank = int(os.environ["CLUSTER_NODE_RANK"])
        self._node_local_rank = int(os.environ["NODE_LOCAL_RANK"])
        self._node_local_world_size = int(os.environ["NODE_LOCAL_WORLD_SIZE"])
        self._local_accelerator_rank = int(os.environ["LOCAL_ACCELERATOR_RANK"])
        self.logger = self._logger = Worker.logger = _log_of(self._worker_address)
        self._timers: dict[str, float] = {}
        self._ports = PortKeeper()
        self._device_lock = DeviceLock(
            self._worker_address.get_name(),
            [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name],
            os.environ[DIRECTORY_VARIABLE],
        )
        self._directory = DirectoryClient.from_environment()
        try:
            self._messenger = Messenger(
                self._worker_address,
                self._directory,
                host=os.environ[_HOST_VARIABLE],
                facts={"rank": self._rank, "world_size": self._world_size, "node": self._cluster_node_rank},
            )
        except BaseException:
            self._directory.close()
            raise
        Worker.current_worker = self

    def __repr__(self) -> str:
        address = getattr(self, "_worker_address", None)
        return f"{type(self).__name__}({address})"

    @property
    def worker_address(self) -> WorkerAddress:
        return self._worker_address

    @classmethod
    def create_group(cls: type[Self], *args: Any, **kwargs: Any) -> WorkerGroup[Self]:
        """A group of this class, still to be launched; the arguments are for the constructor of each worker."""
        return WorkerGroup(cls, args, kwargs)

    # --- messages -------------------------------------------------------------------------------------------------

    def send(
        self,
        object: Any,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        piggyback_payload: Any = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncWork[None] | None:
        """Send any Python object, whose values are those of the call, to the worker of that rank or rank path, which
        takes it with `recv`, alone or, with a `piggyback_payload` other than None, as a pair. With `async_op` returns
        work at once. See `Messenger.send`."""
        dst = WorkerAddress(dst_group_name, dst_rank)
        return self._messenger.send(
            object, dst, async_op=async_op, options=options, piggyback_payload=piggyback_payload, timeout_s=timeout_s
        )

    def recv(
        self,
        src_group_name: str,
        src_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """The next object that the worker of that rank or rank path sends with `send`; a pair `(object, payload)`, of
        the type `WithPayload`, if a payload came along. With `async_op` the work's result. See `Messenger.recv`."""
        src = WorkerAddress(src_group_name, src_rank)
        return self._messenger.recv(src, async_op=async_op, options=options, timeout_s=timeout_s)

    def send_tensor(
        self,
        tensor: torch.Tensor,
        dst_group_name: str,
        dst_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncWork[None] | None:
        """Send one tensor for the `recv_tensor` of that worker. See `Messenger.send_tensor`."""
        dst = WorkerAddress(dst_group_name, dst_rank)
        return self._messenger.send_tensor(tensor, dst, async_op=async_op, options=options, timeout_s=timeout_s)

    def recv_tensor(
        self,
        tensor: torch.Tensor,
        src_group_name: str,
        src_rank: int | Sequence[int],
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout_s: float | None = None,
    ) -> AsyncWork[None] | None:
        """Write what that worker sends with `send_tensor` into `tensor`, of the same shape and dtype. See
        `Messenger.recv_tensor`."""
        src = WorkerAddress(src_group_name, src_rank)
        return self._messenger.recv_tensor(tensor, src, async_op=async_op, options=options, timeout_s=timeout_s)

    def broadcast(
        self,
        object: Any = None,
        groups: Sequence[tuple[str, Ranks]] | None = None,
        src: tuple[str, int | tuple[int, ...]] | None = None,
        async_op: bool = False,
        options: CollectiveGroupOptions | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """The `object` of `src`, on every worker that `groups` names; all of them call this with the same `groups` and
        `src`. See `Messenger.broadcast`.

        groups: (group name, ranks) pairs: a rank, a tuple for the path of one worker, or a list of either; None for
        this worker's whole group. src: (group name, rank or path), None for the first worker named.
        """
        whole: list[tuple[str, Ranks]] = [(self._worker_address.root_group_name, list(self._siblings()))]
        return self._messenger.broadcast(
            object,
            participants(whole if groups is None else groups),
            None if src is None else WorkerAddress(*src),
            async_op=async_op,
            options=options,
            timeout_s=timeout_s,
        )

    # --- batches between groups -----------------------------------------------------------------------------------

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
        """Send this rank's rows of a batch, which lies evenly over the ranks of this group, to the ranks of
        `group_name` over which it shall lie evenly; these call `recv_from`. All ranks of both groups take part.

        data: a tensor or array `[rows, ...]`, a list, or a dict of these; or anything that `split_fn(data, rows)` cuts
        into parts of so many rows. batch_size: rows of the whole batch; by default this rank's times the ranks.
        tag, route_key: batches under other ones do not meet; `mode` comes before the tag, joined with "_". Parts go by
        `channel`, or with `enable_p2p` by `send` with these options. With `async_op` returns work at once.

        decoupled_mode: parts go to any ranks of the other group, and their answers back to the ranks that they are of.
        The worker has a dict `batch_router`: where it has a list under `tag`, this sends answers to what `recv_from`
        got (and empties the list), else parts to be answered. send_queue_size: how many parts, instead of one for each
        peer. Not with `enable_p2p`.

        ValueError for batches that do not lie evenly, or cannot be cut; `NameNotFoundError` for a group that is not
        launched within a minute; errors of `Channel.put` or `send`.
        """
        route = BatchRoute(
            group_name=group_name,
            channel=channel,
            route_key=route_key,
            tag=tag,
            enable_p2p=enable_p2p,
            options=options,
            router=self._router(decoupled_mode),
            queue_size=send_queue_size,
        )
        return send_batch(self, route, data, mode=mode, batch_size=batch_size, split_fn=split_fn, async_op=async_op)

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
        """This rank's rows of a batch that the ranks of `group_name` send with `send_to` and the same `batch_size`, the
        rows of the whole batch. With `async_op` the work's result.

        `merge_fn(parts)` joins the parts, by default tensors and arrays along their first dimension, lists, and dicts
        value by value. `infer_batch_size_fn(part)`: the rows of a part, which are checked. decoupled_mode: see
        `send_to`; where `batch_router` has a list under the tag of the parts, their routes are added to it, else they
        are answers to what this rank sent, in that order. ValueError for a part of other rows than planned; other
        errors as `send_to`, and those of `Channel.get` or `recv`.
        """
        route = BatchRoute(
            group_name=group_name,
            channel=channel,
            route_key=route_key,
            tag=tag,
            enable_p2p=enable_p2p,
            options=options,
            router=self._router(decoupled_mode),
            queue_size=recv_queue_size,
        )
        return recv_batch(
            self,
            route,
            batch_size=batch_size,
            merge_fn=merge_fn,
            infer_batch_size_fn=infer_batch_size_fn,
            async_op=async_op,
        )

    def _router(self, decoupled: bool) -> Router | None:
        if not decoupled:
            return None
        router: Router | None = getattr(self, "batch_router", None)
        if router is None:
            raise ValueError("decoupled_mode=True: the worker has no dict `batch_router`; set it, if only to {}")
        return router

    def _siblings(self) -> Iterator[tuple[int, ...]]:
        above = self._worker_address.rank_path[:-1]
        return ((*above, rank) for rank in range(self._world_size))

    # --- channels -------------------------------------------------------------------------------------------------

    def create_channel(
        self, channel_name: str, maxsize: int = 0, distributed: bool = False, node_rank: int = 0, local: bool = False
    ) -> Channel:
        """A new channel, or that of the name if it has the same settings. See `Channel.create`."""
        return Channel.create(
            channel_name,
            maxsize=maxsize,
            distributed=distributed,
            node_rank=node_rank,
            local=local,
            directory=self._directory,
            here=self._cluster_node_rank,
        )

    def connect_channel(self, channel_name: str, *, wait_s: float = 60.0) -> Channel:
        """The channel of that name, once there is one: waits for it for up to `wait_s`. See `Channel.connect`."""
        return Channel.connect(channel_name, directory=self._directory, here=self._cluster_node_rank, wait_s=wait_s)

    # --- the node --------------------------------------------------------------------------------------------------

    @property
    def device_lock(self) -> DeviceLock:
        """The lock of the accelerators that this worker sees: `with self.device_lock:` keeps every other worker of the
        job that sees one of them out of theirs. See `DeviceLock`."""
        return self._device_lock

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """A TCP port that is free on this node, up to `max_port_num`, and that no other worker gets until this one
        ends. Whatever binds it sets SO_REUSEADDR (or SO_REUSEPORT), as torch, gRPC, ZMQ, asyncio and http.server do.
        ValueError for a `max_port_num` below 1024; OSError where all ports are in use."""
        return self._ports.hold(1, HIGHEST if max_port_num is None else max_port_num)[0]

    # --- the log ---------------------------------------------------------------------------------------------------

    def log_debug(self, msg: object) -> None:
        """Log it under the worker's name, from the line of the caller. The level is `RLINF_LOG_LEVEL`, by default
        INFO."""
        self._logger.debug(msg, stacklevel=_above())

    def log_info(self, msg: object) -> None:
        """As `log_debug`."""
        self._logger.info(msg, stacklevel=_above())

    def log_warning(self, msg: object) -> None:
        """As `log_debug`."""
        self._logger.warning(msg, stacklevel=_above())

    def log_error(self, msg: object) -> None:
        """As `log_debug`."""
        self._logger.error(msg, stacklevel=_above())

    def log_on_first_rank(self, msg: object) -> None:
        """`log_info` in the worker of rank 0, nothing in others."""
        if self._rank == 0:
            self._logger.info(msg, stacklevel=_above())

    def log_on_last_rank(self, msg: object) -> None:
        """`log_info` in the worker of the last rank, nothing in others."""
        if self._rank == self._world_size - 1:
            self._logger.info(msg, stacklevel=_above())

    # --- durations ------------------------------------------------------------------------------------------------

    @contextmanager
    def worker_timer(self, tag: str | None = None) -> Iterator[None]:
        """Count the seconds of this context under `tag` (the calling function's name, if None), for
        `consume_durations` of the call that is being served and for `pop_execution_times`."""
        name = tag or sys._getframe(2).f_code.co_name
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self._timers[name] = self._timers.get(name, 0.0) + seconds
            add_duration(name, seconds)

    @staticmethod
    def timer(tag: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates a method: `worker_timer` around it, under its own name if `tag` is None."""

        def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
            name = tag or method.__name__

            @functools.wraps(method)
            def timed(self: Worker, *args: Any, **kwargs: Any) -> Any:
                with self.worker_timer(name):
                    return method(self, *args, **kwargs)

            @functools.wraps(method)
            async def timed_async(self: Worker, *args: Any, **kwargs: Any) -> Any:
                with self.worker_timer(name):
                    return await method(self, *args, **kwargs)

            return timed_async if inspect.iscoroutinefunction(method) else timed

        return decorate

    def pop_execution_times(self) -> dict[str, float]:
        """Seconds by tag of all `worker_timer`s since this was last asked."""
        times, self._timers = self._timers, {}
        return times

    # --- the end --------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Leave the job: end messages and the entry in the directory. Idempotent; for child processes, as the workers
        of a group end with it."""
        self._messenger.close()
        self._directory.close()
        self._ports.close()
        if Worker.current_worker is self:
            Worker.current_worker = None

    def _tq_check(self) -> None:
        if not hasattr(self, "_messenger"):
            raise RuntimeError(f"{type(self).__name__}.__init__ has to call super().__init__()")


def _above() -> int:
    """For a method that logs: how far above the call of the log its caller is, as methods of actors are wrapped."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        level, frame = level + 1, frame.f_back
    return level


def _log_of(address: WorkerAddress) -> logging.Logger:
    """The log of one worker: its lines go to the driver, or with TQ_LOG=file to a file beside Ray's own logs only."""
    logger = logging.getLogger(f"workers.{address.get_name().replace('.', '_')}")
    logger.setLevel(os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper())
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler: logging.Handler = logging.StreamHandler()
    logs = Path("/proc/self/fd/1").resolve().parent
    if os.environ.get("TQ_LOG") == "file" and logs.name == "logs":
        name = re.sub(r"[^\w.-]", "_", address.get_name())
        handler = logging.FileHandler(logs / f"group-{name}-{os.getpid()}.log")
    handler.setFormatter(logging.Formatter(_LOG_FORMAT.format(name=address.get_name().replace("%", "%%"))))
    logger.addHandler(handler)
    return logger
