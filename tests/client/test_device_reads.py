# ruff: noqa: F401
"""Reads to a GPU and their registrations of arenas, with the CPU in the GPU's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from dataplane import DataPlaneClient, connect, serve
from dataplane.client.unit_connections import _device_buffer
from dataplane.core import cuda_memory, devices
from dataplane.data.columns import values
from dataplane.storage.arena import PAGE_BYTES, Arena
from dataplane.storage.mapped_arena import MappedArena
from tests.fake_gpu import CPU, FakeGpu, fake_gpu

pytestmark = pytest.mark.integration

MIB = 1 << 20


def _put(client: DataPlaneClient) -> Any:
    client.register_partition("train", ["tokens", "reward", "text"], num_samples=4, consumer_tasks=["policy"])
    fields = {
        "tokens": [torch.arange(n) for n in (5, 70_000, 0, 3)],
        "reward": torch.randn(4, dtype=torch.bfloat16),
        "text": ["a", "b", "c", "d"],
    }
    client.put_samples(list("abcd"), "train", fields)
    return client.claim_meta("train", "policy", ["tokens", "reward", "text"], batch_size=4)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("refuse", [False, True])
def test_reads_to_a_gpu_equal_reads_to_the_cpu(fake_gpu: FakeGpu, remote: bool, refuse: bool) -> None:
    fake_gpu.refuse = refuse
    with serve({"capacity_bytes": 64 * MIB}) as server, connect(server.address, force_remote=remote) as client:
        meta = _put(client)
        for layout in ("padded", "jagged"):
            here = client.get_batch(meta, layout=layout, pad_value_dict={"tokens": 9})
            there = client.get_batch(meta, layout=layout, pad_value_dict={"tokens": 9}, device="cuda")
            assert torch.equal(here["reward"], there["reward"])
            assert list(here["text"]) == list(there["text"])
            for one, other in zip(here["tokens"].unbind(), there["tokens"].unbind(), strict=True):
                assert torch.equal(one, other)
        assert fake_gpu.copied
        options: Any = {"tokens": (1, 4), "inner": {}}
        cut = client.get_samples(meta.sample_ids, "train", ["tokens"], device="cuda", **options)
        expected = client.get_samples(meta.sample_ids, "train", ["tokens"], **options)
        assert torch.equal(cut["tokens"].values(), expected["tokens"].values())
    assert bool(fake_gpu.registered) is not remote


def test_memory_is_registered_once_and_again_only_when_more_is_needed(
    fake_gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(cuda_memory, "_unregister", ended.append)
    arena = Arena.create(tmp_path, 64 * PAGE_BYTES, epoch=1)
    arena.grow(32 * PAGE_BYTES)
    mapped = MappedArena.open(arena.path)
    buffer: Any = _device_buffer(mapped)
    assert buffer.cover(10)
    assert buffer.cover(32 * PAGE_BYTES)
    assert len(fake_gpu.registered) == 1
    assert not buffer.cover(33 * PAGE_BYTES), "no memory there"
    arena.grow(64 * PAGE_BYTES)
    assert buffer.cover(64 * PAGE_BYTES), "grown"
    assert (len(fake_gpu.registered), len(ended)) == (2, 1)
    arena.close()
    mapped.close()
    assert len(ended) == 2
    assert not buffer.cover(10), "closed"


def test_a_refused_registration_is_not_repeated(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    fake_gpu.refuse = True
    with Arena.create(tmp_path, 64 * PAGE_BYTES, epoch=1) as arena:
        arena.grow(PAGE_BYTES)
        with MappedArena.open(arena.path) as mapped:
            buffer: Any = _device_buffer(mapped)
            assert not buffer.cover(10)
            tried = len(fake_gpu.registered)
            assert not buffer.cover(10)
    assert len(fake_gpu.registered) == tried


def test_values_on_a_gpu_are_put_after_the_arena_was_registered(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values.FlatValues, "device", torch.device("meta"))  # in the place of "cuda"
    monkeypatch.setattr(devices, "gpu", lambda device: CPU if torch.device(device).type == "meta" else None)
    for name in ("record_event", "current_stream"):
        monkeypatch.setattr(f"dataplane.client.operations.put.{name}", lambda _: MagicMock())
    with serve({"capacity_bytes": 64 * MIB}) as server, connect(server.address) as client:
        meta = _put(client)
        assert len(fake_gpu.registered) == 1
        assert client.get_batch(meta)["tokens"].sum() == sum(n * (n - 1) // 2 for n in (5, 70_000, 3))


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with serve({"capacity_bytes": 64 * MIB}) as server, connect(server.address) as client:
        meta = _put(client)
        with pytest.raises(ValueError, match="device='cuda': this process sees 0 CUDA devices"):
            client.get_batch(meta, device="cuda")
        for device, words in [(0, "device=0: "), ("npu", "device='npu': "), ("hpu", "'hpu': .* no accelerator")]:
            with pytest.raises(ValueError, match=words):
                client.get_batch(meta, device=device)  # type: ignore[arg-type]
        assert client.get_batch(meta, device="cpu")["tokens"].shape == (4, 70_000)
        assert client.get_samples(meta.sample_ids, "train", ["reward"], device="cpu")["reward"].shape == (4,)
