"""A device type "npu" and a backend "hccl" that exist in one process: the names of Ascend, without its hardware.

torch's device for backends written in Python. A tensor on it has its values in a CPU tensor, its attribute `raw`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration

_kept: list[Any] = []


class Event:
    """synchronized: how many events were waited for."""

    synchronized = 0

    def record(self, stream: Any) -> None:
        assert stream.device.type == "npu"

    def synchronize(self) -> None:
        Event.synchronized += 1


class Stream:
    def __init__(self, device: torch.device) -> None:
        assert device.type == "npu"

    def wait_event(self, event: Event) -> None: ...

    def query(self) -> bool:
        return True


class Group(dist.ProcessGroupGloo):
    """broadcasts: how many members have taken part in one, all groups together."""

    broadcasts = 0

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        Group.broadcasts += 1
        return super().broadcast([tensor.raw for tensor in tensors], options)  # type: ignore[attr-defined]


class Platform:
    """What torch_npu has as `torch.npu`, as far as it is used."""

    initialized = False
    available = True
    Event = Event
    Stream = Stream
    stream = contextlib.nullcontext

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        return self.available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, number: int = 0) -> str:
        return "Ascend"

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)


def install() -> Platform:
    """Add the device and the backend to torch. They cannot be removed, so call it in a process of its own."""
    platform = Platform()
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=platform)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "empty.memory_format": lambda size, dtype=None, **_: _wrap(torch.empty(size, dtype=dtype)),
        "empty_strided": lambda size, strides, dtype=None, **_: _wrap(torch.empty_strided(size, strides, dtype=dtype)),
        "_copy_from": _copy_from,
        "as_strided": lambda source, *args: _wrap(source.raw.as_strided(*args)),
        "view": lambda source, size: _wrap(source.raw.view(size)),
        "view.dtype": lambda source, dtype: _wrap(source.raw.view(dtype)),
        "detach": lambda source: _wrap(source.raw),
    }.items():
        library.impl(name, kernel, "PrivateUse1")
        library.impl(name, kernel, "AutogradPrivateUse1")  # torch's own would make views without `raw`
    _kept.append(library)  # its kernels go with it
    dist.Backend.register_backend("hccl", _make_group, devices=["npu"])
    return platform


def _wrap(raw: Tensor) -> Tensor:
    tensor: Tensor = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
    tensor.raw = raw  # type: ignore[attr-defined]
    return tensor


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    getattr(target, "raw", target).copy_(getattr(source, "raw", source))
    return target


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return Group(store, rank, size, timeout)
