"""The CPU in the place of a GPU: registrations are recorded, and kernels copy with `memmove`."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client import unit_connections
from dataplane.core import cuda_copy, cuda_memory, devices
from dataplane.data.columns import device_decode

CPU = torch.device("cpu")


class FakeGpu:
    """What the code asked of CUDA. registered: (start, bytes) of each registration; refuse: whether they fail. copied:
    bytes that kernels copied."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.refuse = False
        self.copied = 0

    def register(self, start: int, nbytes: int) -> bool:
        self.registered.append((start, nbytes))
        return not self.refuse

    def launch(self, word_bytes: int, table: torch.Tensor, pieces: int) -> None:
        for source, target, words, _ in table.T.tolist():
            assert not (source | target) % word_bytes
            ctypes.memmove(target, source, words * word_bytes)
            self.copied += words * word_bytes
        assert pieces


@contextlib.contextmanager
def _copying(device: torch.device, **_: Any) -> Iterator[None]:
    assert device == CPU
    with cuda_memory.lock, cuda_memory._counted():
        yield


def _pinned(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8).view(cuda_memory.DeviceBuffer)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let "cuda" mean the CPU."""
    gpu = FakeGpu()
    monkeypatch.setattr(cuda_memory, "_register", gpu.register)
    monkeypatch.setattr(cuda_memory, "_unregister", lambda start: None)
    monkeypatch.setattr(cuda_copy, "copy_kernel", lambda: object())
    monkeypatch.setattr(cuda_copy, "launch", gpu.launch)
    monkeypatch.setattr(cuda_copy, "_upload", lambda table, device: torch.from_numpy(table))
    monkeypatch.setattr(device_decode, "copying", _copying)
    monkeypatch.setattr(unit_connections, "copying", _copying)
    monkeypatch.setattr(device_decode, "pinned", _pinned)
    monkeypatch.setattr(devices, "gpu", lambda device: CPU if device == "cuda" else None)
    return gpu
