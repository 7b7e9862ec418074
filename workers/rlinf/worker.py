"""`rlinf.scheduler.worker`, and the types that it shares with `hardware` and `manager`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dataplane.core import devices
from workers.directory import DirectoryClient
from workers.directory.address import WorkerAddress as WorkerAddress
from workers.groups.calls import GroupCall
from workers.groups.worker_group import WorkerGroup as WorkerGroup
from workers.rlinf.cluster import load_user_extension_module
from workers.rlinf.routing import RoutingWorker

WorkerGroupFuncResult = GroupCall


class AcceleratorType(StrEnum):
    """A worker has the type of torch's accelerator. AMD's GPUs count as `NV_GPU`, because torch calls them "cuda"."""

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    INTEL_GPU = "INTEL_GPU"
    NPU = "NPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    NO_ACCEL = "NO_ACCEL"


BY_DEVICE_TYPE = {
    "cuda": AcceleratorType.NV_GPU,
    "xpu": AcceleratorType.INTEL_GPU,
    "npu": AcceleratorType.NPU,
    "musa": AcceleratorType.MUSA_GPU,
}
"""Types of accelerators by torch's device type."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """A worker's rank, node and accelerators. accelerator_rank: -1 without an accelerator. node_port: MASTER_PORT of
    its group. available_accelerators: those visible to it. hardware_infos: always empty, because descriptions of robots
    are not supported."""

    address: WorkerAddress
    rank: int
    group_world_size: int
    cluster_node_rank: int
    accelerator_type: AcceleratorType
    accelerator_model: str
    accelerator_rank: int
    node_ip: str
    node_port: int
    available_accelerators: list[int]
    hardware_infos: list[Any] = field(default_factory=list)


class Tracer:
    """A tracer whose calls have no effect, like RLinf's tracer in a job without tracing."""

    @classmethod
    def trace_begin(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> None:
        """Do nothing."""

    @classmethod
    def trace_end(cls, name: str, cat: str = "default") -> None:
        """Do nothing."""

    @classmethod
    @contextlib.contextmanager
    def trace_span(cls, name: str, cat: str = "default", args: dict[str, Any] | None = None) -> Iterator[None]:
        """Return a context manager that has no effect."""
        yield

    @classmethod
    def trace_func(cls, func_or_cat: Any = None, cat: str = "default") -> Any:
        """Decorate a function without changing it, with or without arguments of the decorator."""
        if callable(func_or_cat):
            return func_or_cat

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        return decorate


class _AcceleratorTypeAttribute:
    """`Worker.accelerator_type`, a class attribute that is computed on access: at class creation it could initialize
    the accelerator."""

    def __get__(self, instance: object, owner: type) -> AcceleratorType:
        return BY_DEVICE_TYPE.get(devices.device_type() or "", AcceleratorType.NO_ACCEL)


class Worker(RoutingWorker):
    """`workers.Worker` with additional members that RLinf's code uses. Each worker process imports the module that
    RLINF_EXT_MODULE names, and calls its `register()`."""

    accelerator_type: Any = _AcceleratorTypeAttribute()

    def __init__(
        self, parent_address: WorkerAddress | None = None, world_size: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(parent_address, world_size, rank)
        load_user_extension_module(self.logger)

    @property
    def has_accelerator(self) -> bool:
        """Whether the worker's process sees an accelerator."""
        kind: AcceleratorType = self.accelerator_type
        return kind is not AcceleratorType.NO_ACCEL

    @property
    def hardware_infos(self) -> list[Any]:
        """Always empty, because descriptions of robots are not supported."""
        return []

    @property
    def worker_info(self) -> WorkerInfo:
        """The worker's rank, node and accelerators."""
        # The variable can name a device by its UUID instead of its index; such a device is left out.
        visible = [name for name in devices.visible_devices() if name.isdigit()]
        return WorkerInfo(
            address=self.worker_address,
            rank=self._rank,
            group_world_size=self._world_size,
            cluster_node_rank=self._cluster_node_rank,
            accelerator_type=self.accelerator_type,
            accelerator_model=devices.platform().get_device_name() if self.has_accelerator else "",
            accelerator_rank=self._local_accelerator_rank,
            node_ip=os.environ["TQ_HOST"],
            node_port=int(os.environ["MASTER_PORT"]),
            available_accelerators=[int(name) for name in visible],
        )

    @property
    def manager_proxy(self) -> DirectoryClient:
        """The job's directory, for `get_group_world_size`."""
        return self._directory

    _manager_proxy = manager_proxy

    @property
    def _timer_metrics(self) -> dict[str, float]:
        """The accumulated seconds of all `worker_timer`s, by tag. Callers may modify the dict."""
        return self._timers

    def get_name(self) -> str:
        """Return the worker's address as text."""
        return self.worker_address.get_name()

    def get_parent_rank(self) -> int:
        """Return the rank of the worker that started this one, or 0 if a group's launch started it."""
        path = self.worker_address.rank_path
        return path[-2] if len(path) > 1 else 0

    def pop_execution_time(self, tag: str) -> float:
        """Return the seconds of `worker_timer`s with that tag since the last call. ValueError if none ended since."""
        if tag not in self._timers:
            raise ValueError(f"no timer {tag!r} has ended in worker {self.get_name()} since the last call")
        return self._timers.pop(tag)

    def start_profile(self, step_idx: int) -> None:
        """Log that profiling is not supported."""
        self._logger.warning("step %d is not profiled: profiling of RLinf's scheduler is not supported", step_idx)

    def stop_profile(self) -> None:
        """Do nothing."""
