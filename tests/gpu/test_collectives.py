"""Tensors that travel by the collectives of accelerators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.messages.messengers import Here, address, elsewhere
from workers.messages import CollectiveGroupOptions, Messenger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]

A, B = address(0), address(1)
BIG = 3 << 20
OPTIONS = CollectiveGroupOptions(accel_max_ctas=8, accel_min_ctas=1, is_high_priority_stream=True)


def _device(index: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, index)


def _on(index: int) -> Any:
    return {"x": torch.arange(BIG, device=_device(index)), "n": 1}


def _answer_on_one(messenger: Messenger, pipe: Any) -> None:
    for number in range(5):
        got = messenger.recv(A)
        assert got["x"].device == _device(0)
        assert torch.equal(got["x"].cpu(), torch.arange(BIG))
        messenger.send({"x": got["x"] + number}, A)
    messenger.broadcast(None, [A, B])
    pipe.send("done")
    pipe.poll(120)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_processes_on_one_gpu_copy_from_its_memory() -> None:
    workers = Here(True)
    a = workers.worker(A)
    with elsewhere(workers.directory, B, _answer_on_one) as peer:
        for number in range(5):
            value = _on(0)
            a.send(value, B, async_op=True)
            value["x"].zero_()
            assert torch.equal(a.recv(B)["x"].cpu(), torch.arange(BIG) + number)
        a.broadcast(_on(0), [A, B])
        assert peer.hear() == "done"
        assert not a._io_thread._collectives._collectives
    workers.close()


def test_workers_of_one_process_use_host_memory() -> None:
    workers = Here(True)
    a, b = workers.workers(2)
    for _ in range(2):
        a.send(_on(0), B)
        got = b.recv(A)
        assert got["x"].device.type == _device(0).type
        assert torch.equal(got["x"].cpu(), torch.arange(BIG))
    assert not a._io_thread._collectives._collectives
    workers.close()


def _answer(messenger: Messenger, pipe: Any) -> None:
    torch.accelerator.set_device_index(1)
    for _ in range(3):
        messenger.send(_on(1), A, options=OPTIONS, async_op=True)
        got = messenger.recv(A, options=OPTIONS)
        assert got["x"].device == _device(1)
        assert torch.equal(got["x"].cpu(), torch.arange(BIG))
    target = torch.zeros(BIG, device=_device(1))
    messenger.recv_tensor(target, A)
    pipe.send(target.sum().item())
    for _ in range(2):
        messenger.broadcast(None, [A, B])
    pipe.poll(120)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_two_accelerators_exchange_tensors_by_collectives() -> None:
    workers = Here(True)
    a = workers.worker(A)
    with elsewhere(workers.directory, B, _answer) as peer:
        torch.accelerator.set_device_index(0)
        for _ in range(3):  # both ends send first
            a.send(_on(0), B, options=OPTIONS, async_op=True)
            assert torch.equal(a.recv(B, options=OPTIONS)["x"].cpu(), torch.arange(BIG))
        a.send_tensor(torch.ones(BIG, device=_device(0)), B)
        assert peer.hear() == BIG
        for _ in range(2):
            a.broadcast(_on(0), [A, B])
        assert len(a._io_thread._collectives._collectives) >= 2
    workers.close()
