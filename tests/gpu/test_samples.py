"""Samples whose tensors are on a GPU: a client's, and those that a replica's leader broadcasts over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dataplane import BatchedDataDict, connect, serve
from workers.training.replica_group import _broadcast_batched_data_dict, pack_columns, unpack_columns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_client_puts_from_a_gpu_and_gets_onto_one() -> None:
    ids = ["a", "b", "c"]
    rows = [torch.arange(n, device="cuda") for n in (5, 1 << 20, 0)]
    reward = torch.randn(3, dtype=torch.bfloat16, device="cuda")
    with serve({"capacity_bytes": 64 << 20}) as server, connect(server.address) as client:
        client.register_partition("train", ["tokens", "reward"], num_samples=3, consumer_tasks=["policy"])
        client.put_samples(ids, "train", {"tokens": rows, "reward": reward})
        meta = client.claim_meta("train", "policy", ["tokens", "reward"], batch_size=3)
        padded = client.get_batch(meta, device="cuda")
        jagged = client.get_batch(meta, layout="jagged", device="cuda")
    order = [ids.index(sample) for sample in meta.sample_ids]
    assert padded["tokens"].is_cuda
    assert jagged["tokens"].is_cuda
    for place, row in enumerate(order):
        assert torch.equal(padded["tokens"][place, : len(rows[row])], rows[row])
        assert torch.equal(jagged["tokens"][place], rows[row])
    assert torch.equal(padded["reward"], reward[order])


def test_a_packed_batch_is_unpacked_on_the_gpu() -> None:
    tokens = torch.nested.nested_tensor_from_jagged(torch.arange(10).cuda(), torch.tensor([0, 3, 3, 10]).cuda())
    columns = {"tokens": tokens, "reward": torch.randn(3).cuda(), "text": ["x", "y", "z"]}
    flat, layout_bytes = pack_columns(columns, torch.device("cpu"))
    got = unpack_columns(flat.cuda(), layout_bytes)
    assert got["tokens"].is_cuda
    assert torch.equal(got["tokens"].values(), tokens.values())
    assert list(got["text"]) == ["x", "y", "z"]


def test_the_leader_of_an_nccl_group_broadcasts_on_its_gpu(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data: BatchedDataDict[torch.Tensor] = BatchedDataDict({"reward": torch.randn(3), "text": ["x", "y", "z"]})
        got = _broadcast_batched_data_dict(data, is_leader=True, src=0, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert torch.equal(got["reward"].cpu(), data["reward"])
    assert list(got["text"]) == ["x", "y", "z"]
