"""`Worker`, the base class of workers that exchange messages with the workers of other groups."""

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

from dataplane.core import devices
from workers.channels import Channel
from workers.directory import DIRECTORY_VARIABLE, DirectoryClient
from workers.directory.address import WorkerAddress
from workers.groups.actor_class import SERVING_FILE, add_duration
from workers.groups.device_lock import DeviceLock
from workers.groups.worker_group import WorkerGroup
from workers.messages import AsyncWork, CollectiveGroupOptions, Messenger, participants
from workers.messages.collectives import COLLECTIVES_VARIABLE
from workers.messages.messenger import Ranks
from workers.placement.ports import HIGHEST, PortKeeper
from workers.transport.waiting import DEFAULT_TIMEOUT, Timeout

LOG_LEVEL_VARIABLE = "RLINF_LOG_LEVEL"
_HOST_VARIABLE = "TQ_HOST"
_WRAPPERS = (SERVING_FILE, f"{Path(ray.__file__).parent}{os.sep}")
"""Beginnings of the names of source files whose functions call the methods of a worker, but are not the user's code."""
_LOG_FORMAT = "[%(levelname)s %(asctime)s {name}] %(message)s"

Self = TypeVar("Self", bound="Worker")


class _OnAccess:
    """A class attribute that is computed on access: in the class body, a query could initialize the accelerator."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> Any:
        return self._value()


class Worker:
    """Base class of workers. `MyWorker.create_group(...).launch(...)` constructs one worker in each process of the
    group.

    A subclass calls `super().__init__()` first. It may use `_rank`, `_world_size`, `_group_name`,
    `_cluster_node_rank`, `_node_local_rank`, `_local_accelerator_rank` (-1 without an accelerator), `logger` (also
    `_logger`), and the environment variables of torch.distributed: MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE. LOCAL_RANK is the index of the worker's accelerator among the accelerators that the
    worker sees. Without one it is the worker's index among the workers of its group on the node.

    A process that a worker spawns (with multiprocessing, not by a fork of the worker itself) constructs
    `MyWorker(parent_address, world_size, rank)`. Its address is `parent_address` followed by `rank`. It needs no
    Ray.

    `Worker.current_worker` is the worker of this process and `Worker.logger` its logger. `torch_platform`
    (such as torch.cuda or torch.npu) and `torch_device_type` ("cuda", "npu", "xpu") are None without an accelerator.
    Message methods raise the errors of `workers.messages.Messenger`. With `timeout_s=None` they
    have no timeout.

    `_messenger` sends and receives the messages. `_directory` finds groups, workers and channels of the job by name.
    `_ports` holds the ports of `acquire_free_port`. All three belong to this worker until `_close`.
    """

    current_worker: ClassVar[Worker | None] = None
    logger: logging.Logger = logging.getLogger("workers")
    torch_platform: Any = _OnAccess(devices.platform)
    torch_device_type: Any = _OnAccess(devices.device_type)

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        """Join the job that the environment variables name. RuntimeError if they name no job; `NameInUseError` if
        another process has this worker's address."""
        if DIRECTORY_VARIABLE not in os.environ or _HOST_VARIABLE not in os.environ:
            raise RuntimeError(
                f"{type(self).__name__}() was constructed outside of a job; create workers with "
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
        self.logger = self._logger = Worker.logger = _worker_logger(self._worker_address)
        self._timers: dict[str, float] = {}  # total seconds by tag, see `worker_timer`
        self._ports = PortKeeper()
        self._device_lock = DeviceLock(
            self._worker_address.get_name(),
            devices.visible_devices(),
            os.environ[DIRECTORY_VARIABLE],
        )
        self._directory = DirectoryClient.from_environment()
        try:
            self._messenger = Messenger(
                self._worker_address,
                self._directory,
                host=os.environ[_HOST_VARIABLE],
                facts={"rank": self._rank, "world_size": self._world_size, "node": self._cluster_node_rank},
                collectives=os.environ.get(COLLECTIVES_VARIABLE, "auto"),
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
        """Create a group of this class, not launched yet. The arguments are passed to the constructor of each
        worker."""
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Send any Python object to the worker of that rank or rank path, which receives it with `recv`. The values
        sent are those at the time of the call. With a `piggyback_payload` other than None the receiver gets a pair.
        With `async_op` return a handle at once. See `Messenger.send`."""
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Return the next object that the worker of that rank or rank path sends with `send`. If it was sent with a
        payload, return a pair `(object, payload)` of type `WithPayload`. With `async_op` return a handle, whose
        result is the object. See `Messenger.recv`."""
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Send one tensor, which the worker of that rank receives with `recv_tensor`. See `Messenger.send_tensor`."""
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> AsyncWork[None] | None:
        """Write the tensor that the worker of that rank sends with `send_tensor` into `tensor`, of the same shape
        and dtype. See `Messenger.recv_tensor`."""
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
        timeout_s: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Return the `object` of `src` on every worker of `groups`. All of these workers call this with the same
        `groups` and `src`. See `Messenger.broadcast`.

        groups: (group name, ranks) pairs, where ranks is a rank, a tuple for the rank path of one worker, or a list
        of either. None for this worker's whole group. src: (group name, rank or rank path), None for the first
        worker of `groups`.
        """
        if groups is None:
            # The launched group. In a child process the rank paths are those of its siblings.
            parent_path = self._worker_address.rank_path[:-1]
            paths: Ranks = [(*parent_path, rank) for rank in range(self._world_size)]
            groups = [(self._worker_address.root_group_name, paths)]
        return self._messenger.broadcast(
            object,
            participants(groups),
            None if src is None else WorkerAddress(*src),
            async_op=async_op,
            options=options,
            timeout_s=timeout_s,
        )

    # --- channels -------------------------------------------------------------------------------------------------

    def create_channel(
        self, channel_name: str, maxsize: int = 0, distributed: bool = False, node_rank: int = 0, local: bool = False
    ) -> Channel:
        """Create a channel, or return the existing one of that name if its settings are equal. See `Channel.create`."""
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
        """Return the channel of that name. Wait up to `wait_s` for its creation. See `Channel.connect`."""
        return Channel.connect(channel_name, directory=self._directory, here=self._cluster_node_rank, wait_s=wait_s)

    # --- the node --------------------------------------------------------------------------------------------------

    @property
    def device_lock(self) -> DeviceLock:
        """The lock of the accelerators that this worker sees. While a worker holds its lock, other workers of the job
        that see one of its accelerators block in `with self.device_lock:`. See `DeviceLock`."""
        return self._device_lock

    def acquire_free_port(self, max_port_num: int | None = None) -> int:
        """Return a TCP port, at most `max_port_num`, that is free on this node. No other worker gets it until this
        worker ends. The user of the port sets SO_REUSEADDR (or SO_REUSEPORT), as torch, gRPC, ZMQ, asyncio and
        http.server do. ValueError for a `max_port_num` below 1024; OSError if all ports are in use."""
        return self._ports.hold(1, HIGHEST if max_port_num is None else max_port_num)[0]

    # --- the log ---------------------------------------------------------------------------------------------------

    def log_debug(self, msg: object) -> None:
        """Log `msg` under the worker's name and the caller's source line. The log level is `RLINF_LOG_LEVEL`,
        default INFO."""
        self._logger.debug(msg, stacklevel=_caller_stacklevel())

    def log_info(self, msg: object) -> None:
        """As `log_debug`, at level INFO."""
        self._logger.info(msg, stacklevel=_caller_stacklevel())

    def log_warning(self, msg: object) -> None:
        """As `log_debug`, at level WARNING."""
        self._logger.warning(msg, stacklevel=_caller_stacklevel())

    def log_error(self, msg: object) -> None:
        """As `log_debug`, at level ERROR."""
        self._logger.error(msg, stacklevel=_caller_stacklevel())

    def log_on_first_rank(self, msg: object) -> None:
        """`log_info` in the worker of rank 0; a no-op in others."""
        if self._rank == 0:
            self._logger.info(msg, stacklevel=_caller_stacklevel())

    def log_on_last_rank(self, msg: object) -> None:
        """`log_info` in the worker of the last rank; a no-op in others."""
        if self._rank == self._world_size - 1:
            self._logger.info(msg, stacklevel=_caller_stacklevel())

    # --- durations ------------------------------------------------------------------------------------------------

    @contextmanager
    def worker_timer(self, tag: str | None = None) -> Iterator[None]:
        """Add the seconds of this context to the total under `tag` (default: the name of the calling function). The
        total is reported by `consume_durations` of the current call and by `pop_execution_times`."""
        # Frame 0 is this function, frame 1 the `__enter__` of `contextmanager`, frame 2 the caller.
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
        """Return a decorator that runs a method, also an asynchronous one, within `worker_timer(tag)`; under the
        method's name if `tag` is None."""

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
        """Return the seconds by tag of all `worker_timer`s since the last call of this method."""
        times, self._timers = self._timers, {}
        return times

    # --- close ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Leave the job: close the messenger, which removes the directory entry, and release the ports. Idempotent. For
        child processes; the workers of a group end with the group."""
        self._messenger.close()
        self._directory.close()
        self._ports.close()
        if Worker.current_worker is self:
            Worker.current_worker = None

    def _tq_check(self) -> None:
        """RuntimeError if the subclass did not call the constructor of `Worker`. Called after its own constructor."""
        if not hasattr(self, "_messenger"):
            raise RuntimeError(f"{type(self).__name__}.__init__ must call super().__init__()")


def _caller_stacklevel() -> int:
    """Return the `stacklevel` for `logging` of the code that called a log method. Frames of wrappers around actor
    methods are skipped."""
    level, frame = 2, sys._getframe(2)  # frame 0 is this function, frame 1 the log method, frame 2 its caller
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        level = level + 1
        frame = frame.f_back
    return level


def _worker_logger(address: WorkerAddress) -> logging.Logger:
    """Return the logger of one worker. It writes to stderr, which Ray forwards to the driver, or with TQ_LOG=file to
    a file beside Ray's own logs (if Ray redirects this process's output there)."""
    logger = logging.getLogger(f"workers.{address.get_name().replace('.', '_')}")
    logger.setLevel(os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper())
    logger.propagate = False
    for old in list(logger.handlers):  # of an earlier worker with this address in this process
        logger.removeHandler(old)
    handler: logging.Handler = logging.StreamHandler()
    # Ray redirects the stdout of its workers to a file in its directory "logs".
    ray_logs = Path("/proc/self/fd/1").resolve().parent
    if os.environ.get("TQ_LOG") == "file" and ray_logs.name == "logs":
        name = re.sub(r"[^\w.-]", "_", address.get_name())
        handler = logging.FileHandler(ray_logs / f"group-{name}-{os.getpid()}.log")
    # The name becomes part of a %-format.
    handler.setFormatter(logging.Formatter(_LOG_FORMAT.format(name=address.get_name().replace("%", "%%"))))
    logger.addHandler(handler)
    return logger
