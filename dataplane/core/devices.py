"""This process's accelerator (CUDA, Ascend NPU, Intel XPU, ...), found in torch's own tables.

A package such as torch_npu enters its device and its backend of torch.distributed there when it is imported. torch
imports such packages itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The environment variable that limits the devices of a process, by device type. torch has no table of these."""


def accelerator() -> torch.device | None:
    """Return the accelerator that this process can use, without an index; None if it has none. Creates no context."""
    return torch.accelerator.current_accelerator(check_available=True)


def platform() -> Any:
    """Return torch's module of the accelerator, such as torch.cuda or torch.npu; None without an accelerator."""
    device = accelerator()
    return None if device is None else torch.get_device_module(device)


def device_type() -> str | None:
    """Return the type of the accelerator, such as "cuda" or "npu"; None without one."""
    device = accelerator()
    return None if device is None else device.type


def current_device() -> torch.device | None:
    """Return this thread's current device if this process has initialized its accelerator, otherwise None."""
    device = torch.accelerator.current_accelerator()
    if device is None or not (module := torch.get_device_module(device)).is_initialized():
        return None
    return torch.device(device.type, module.current_device())


def gpu(device: torch.device | str) -> torch.device | None:
    """Return the device with its index, by default that of this thread's current device, if it is one of CUDA, else
    None. Raises ValueError if this process sees no such device."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: {str(error).splitlines()[0]}") from error
    known = torch.accelerator.current_accelerator()
    if target.type not in ("cpu", "meta", "cuda") and (known is None or known.type != target.type):
        accelerator = "no accelerator" if known is None else f"accelerators of type {known.type!r}"
        raise ValueError(f"device={str(device)!r}: this process sees {accelerator}")
    if target.type != "cuda" or (torch.version.cuda is None and torch.cuda.is_available()):
        return None  # also for ROCm, which torch calls "cuda"
    if (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: this process sees {torch.cuda.device_count()} CUDA devices")
    return target if target.index is not None else torch.device("cuda", torch.cuda.current_device())


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on the CPU or the accelerator, where it has values; not on "meta" and the like."""
    device = torch.accelerator.current_accelerator()
    return tensor.is_cpu or (device is not None and device.type == tensor.device.type)


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream of an accelerator."""
    return torch.get_device_module(device).current_stream(device)


def record_event(device: torch.device) -> Any:
    """Record and return an event on this thread's current stream of an accelerator."""
    event = torch.get_device_module(device).Event()
    event.record(current_stream(device))
    return event


def process_group_device(process_group: Any) -> torch.device:
    """Return the device for the buffers of a process group: this thread's current accelerator if the group has a
    backend for it that is not also its backend for the CPU (NCCL, HCCL, XCCL), otherwise the CPU."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(process_group).split(","))
    device = torch.accelerator.current_accelerator()
    if device is None or backends.get(device.type) in (None, backends.get("cpu")):
        return CPU
    return torch.device(device.type, torch.get_device_module(device).current_device())


def visible_devices() -> list[str]:
    """Return the devices to which the environment limits this process, as the variable of its accelerator names them.
    Without an accelerator, CUDA's variable counts."""
    device = torch.accelerator.current_accelerator()
    variable = VISIBLE_DEVICES.get(device.type if device else "cuda", VISIBLE_DEVICES["cuda"])
    return [name for name in os.environ.get(variable, "").split(",") if name]
