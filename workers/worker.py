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

import torch

from workers.address import WorkerAddress
from workers.channel import Channel
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient
from workers.hosted import add_duration
from workers.messages import AsyncWork, CollectiveGroupOptions, Messenger, participants
from workers.messages.groups import Ranks
from workers.worker_group import WorkerGroup

LOG_LEVEL_VARIABLE = "RLINF_LOG_LEVEL"
_HOST_VARIABLE = "TQ_HOST"
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
    `_node_local_rank` and `_local_accelerator_rank` (-1 without one), `logger`, and what torch.distributed reads in the
    environment: MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE. LOCAL_RANK is the index of
    the worker's accelerator among those it sees, or without one its place among its group's workers on the node.

    A process that a worker starts (by multiprocessing, not by a fork of the worker itself) constructs
    `MyWorker(parent_address, world_size, rank)`: its address is the parent's and `rank`. It needs no Ray.

    `Worker.current_worker` is the one of this process; `torch_platform` (torch.cuda) and `torch_device_type` ("cuda")
    are None without an accelerator. Errors of messages are those of `workers.messages.Messenger`.
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
        self.logger = _logger(self._worker_address)
        self._timers: dict[str, float] = {}
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
        if Worker.current_worker is self:
            Worker.current_worker = None

    def _tq_check(self) -> None:
        if not hasattr(self, "_messenger"):
            raise RuntimeError(f"{type(self).__name__}.__init__ has to call super().__init__()")


def _logger(address: WorkerAddress) -> logging.Logger:
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
