# ruff: noqa: F401, F811
"""Messages whose tensors are on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.workers.messages.messengers import Here, address, here
from workers.errors import MessageMismatchError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

A, B = address(0), address(1)
BIG = 3 << 20


@pytest.mark.parametrize("size", [3, BIG])
def test_what_was_on_a_gpu_arrives_on_one(here: Here, size: int) -> None:
    a, b = here.workers(2)
    mixed = {"cuda": torch.arange(size, device="cuda"), "cpu": [torch.arange(size)]}
    a.send(mixed, B, async_op=True)
    mixed["cuda"].zero_()  # type: ignore[attr-defined]
    got = b.recv(A)
    assert got["cuda"].is_cuda
    assert not got["cpu"][0].is_cuda
    assert torch.equal(got["cuda"].cpu(), torch.arange(size))
    assert torch.equal(got["cpu"][0], torch.arange(size))


@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("async_op", [False, True])
def test_in_place_between_devices(here: Here, source: str, target: str, async_op: bool) -> None:
    a, b = here.workers(2)
    values = torch.randn(1500, 1400, device=source).t()
    place = torch.zeros(1400, 1500, device=target)
    work = b.recv_tensor(place, A, async_op=True) if async_op else None
    a.send_tensor(values, B)
    if work is None:
        b.recv_tensor(place, A)
    else:
        work.wait()
    assert torch.equal(place.cpu(), values.cpu())


def test_a_broadcast_from_a_gpu(here: Here) -> None:
    a, b = here.workers(2)
    work = b.broadcast(None, [A, B], async_op=True)
    a.broadcast([torch.ones(BIG, device="cuda")], [A, B])
    (got,) = work.wait()
    assert got.is_cuda
    assert got.sum().item() == BIG


def test_another_shape_on_a_gpu(here: Here) -> None:
    a, b = here.workers(2)
    place = torch.zeros(3, device="cuda")
    work = b.recv_tensor(place, A, async_op=True)
    assert work is not None
    with pytest.raises(MessageMismatchError):
        a.send_tensor(torch.ones(4, device="cuda"), B)
    with pytest.raises(MessageMismatchError):
        work.wait()
    assert place.sum().item() == 0
