# ruff: noqa: F401
"""Tensors of workers on one device, which share its memory: the CPU here, in the place of a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.workers.messages.messengers import Here, address, fails_at_both_ends, switched
from tests.workers.messages.test_collectives import _collectives
from workers.errors import DeviceTransferError
from workers.messages import collectives, transfers
from workers.messages.collectives import DeviceValues
from workers.messages.wire import DeviceId, SharedMemory

pytestmark = pytest.mark.integration

A, B, C = address(0), address(1), address(2)
NAMES = [A, B, C]
BIG = 3 << 20


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be one device on which workers share memory."""
    shared: dict[bytes, torch.Tensor] = {}

    def share(values: DeviceValues) -> SharedMemory:
        handle = f"{len(shared)}".encode()
        shared[handle] = values.flat
        return SharedMemory(handle, values.flat.numel(), 0, b"", 0, b"", False)

    def copy_of(memory: SharedMemory, nbytes: int, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cpu")
        return shared[memory.handle][:nbytes].clone()

    monkeypatch.setattr(transfers, "share", share)
    monkeypatch.setattr(transfers, "copy_of", copy_of)
    for module in (transfers, collectives):
        monkeypatch.setattr(module, "device_id_of", lambda _: DeviceId("cpu", "the only one"))


@pytest.mark.usefixtures("one_device")
def test_workers_on_one_device_copy_from_its_memory(switched: Here) -> None:
    """Collectives do not connect them."""
    a, b = switched.workers(2)
    for number in range(3):
        value = {"x": torch.full((BIG,), number), "y": torch.ones(2)}
        a.send(value, B, async_op=True)
        value["x"].zero_()
        assert torch.equal(b.recv(A)["x"], torch.full((BIG,), number))
        target = torch.zeros(7)
        b.send_tensor(torch.ones(7), A, async_op=True)
        a.recv_tensor(target, B)
        assert target.sum() == 7
    assert not _collectives(a)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("failing", ["share", "copy_of"])
def test_memory_of_a_device_that_cannot_be_shared(
    switched: Here, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("not supported")

    a, b = switched.workers(2)
    with monkeypatch.context() as without:
        without.setattr(transfers, failing, fail)
        fails_at_both_ends(a, b, DeviceTransferError, "not supported")


@pytest.mark.usefixtures("one_device")
def test_a_broadcast_to_the_source_s_device_and_another(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    device_ids = {"tq-messages-g:2": DeviceId("cpu", "another")}
    usual = DeviceId("cpu", "the only one")
    monkeypatch.setattr(transfers, "device_id_of", lambda _: device_ids.get(threading.current_thread().name, usual))
    a, b, c = switched.workers(3)
    assert any(name in device_ids for name in (thread.name for thread in threading.enumerate()))
    for _ in range(2):
        works = [each.broadcast(None, NAMES, async_op=True) for each in (b, c)]
        a.broadcast(torch.arange(BIG), NAMES)
        for work in works:
            assert work is not None
            assert torch.equal(work.wait(), torch.arange(BIG))
    assert [group.membership.peers for group in _collectives(a)] == [frozenset(["g:2"])]


def test_workers_of_one_process_on_one_device_use_host_memory(switched: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transfers, collectives):
        monkeypatch.setattr(module, "device_id_of", lambda _: DeviceId("cpu", "the only one", "this process"))
    a, b = switched.workers(2)
    a.send(torch.arange(BIG), B)
    assert torch.equal(b.recv(A), torch.arange(BIG))
    assert not _collectives(a)
