"""Channels whose items have tensors on a GPU."""

from __future__ import annotations

import pytest
import torch

from workers.channels import Channel, ChannelBroker
from workers.channels.discovery import ChannelSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("size", [3, 3 << 20])
@pytest.mark.parametrize("async_op", [False, True])
def test_what_was_on_a_gpu_comes_back_on_one(size: int, async_op: bool) -> None:
    with ChannelBroker(capacity_bytes=256 << 20) as broker:
        settings = ChannelSettings(
            name="c", ident="c", maxsize=0, distributed=False, nodes=(0,), endpoints=(broker.endpoint,)
        )
        channel = Channel(settings)
        channel._create()
        alone = torch.arange(size, device="cuda")
        mixed = {"cuda": torch.arange(2 * size, device="cuda")[::2], "cpu": torch.arange(size)}
        works = [channel.put(item, async_op=async_op) for item in (alone, mixed)]
        alone.zero_()
        for work in works:
            if work is not None:
                work.wait()
        got, both = channel.get(), channel.get()
        channel.disconnect()
    assert got.is_cuda
    assert torch.equal(got.cpu(), torch.arange(size))
    assert both["cuda"].is_cuda
    assert not both["cpu"].is_cuda
    assert torch.equal(both["cuda"].cpu(), torch.arange(0, 2 * size, 2))
