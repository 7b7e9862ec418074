"""Memory of an accelerator that two processes on it share, through CUDA IPC, for workers with the same device."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from dataplane.core import devices
from workers.messages.collectives import DeviceValues
from workers.messages.wire import SharedMemory


def share(values: DeviceValues) -> SharedMemory:
    """Share the memory of the values with one other process, which must open it. Until then, or until this process
    ends, torch keeps the memory. RuntimeError if the device or its allocator does not support that."""
    storage = values.flat.untyped_storage()
    device = values.flat.device
    if device.type != "cuda":
        raise RuntimeError(f"{device.type} devices cannot share memory between processes")
    with torch.cuda.device(device):
        if values.ready is not None:
            devices.current_stream(device).wait_event(values.ready)  # torch's event follows the current stream
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what other processes have closed
        _, *facts = storage._share_cuda_()  # type: ignore[no-untyped-call]
    return SharedMemory(*facts)


def copy_of(memory: SharedMemory, nbytes: int, device: torch.device) -> Tensor:
    """Open the memory, on `device` of this process, and return a copy of the values, uint8 `[nbytes]`. Blocks until
    the copy is complete. RuntimeError if this process cannot open it, for example because it is the owner."""
    with torch.cuda.device(device):
        storage: Any = torch.UntypedStorage._new_shared_cuda(device.index, *msgspec.structs.astuple(memory))
        values = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
        copy = values.clone()
        torch.cuda.current_stream(device).synchronize()
    return copy
