"""A replica group over NCCL: its leader reads to the GPU, and every rank pads there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dataplane import DataPlaneClient, connect, materialize, serve
from dataplane.core import cuda_copy
from workers.training.replica_group import (
    NO_DIGEST,
    RankFetch,
    ReplicaGroup,
    pack_columns,
    unpack_columns,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
FIELDS: dict[str, Any] = {
    "tokens": [torch.arange(n) for n in (5, 1000, 0, 3)],
    "logprobs": [torch.randn(n, dtype=torch.bfloat16) for n in (5, 1000, 0, 3)],
    "experts": [torch.randint(0, 99, (n, 3, 2), dtype=torch.uint8) for n in (5, 1000, 0, 3)],
    "reward": torch.randn(4),
    "text": ["a", "b", "c", "d"],
}


@pytest.fixture
def client() -> Iterator[DataPlaneClient]:
    with serve({"capacity_bytes": 64 * MIB}) as server, connect(server.address) as client:
        client.register_partition("train", list(FIELDS), num_samples=4, consumer_tasks=["policy"])
        client.put_samples(list("abcd"), "train", FIELDS)
        yield client


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ReplicaGroup]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield ReplicaGroup(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fetch_over_nccl_equals_a_read(
    client: DataPlaneClient, group: ReplicaGroup, layout: Any, stream: bool
) -> None:
    meta = client.claim_meta("train", "policy", list(FIELDS), batch_size=4)
    form: dict[str, Any] = {
        "layout": layout,
        "pad_value_dict": {"tokens": 7, "experts": 255},
        "pad_to_seqlen": 1024 if layout == "padded" else 0,
    }
    part = RankFetch(
        leads=lambda: True,
        digest=lambda: NO_DIGEST,
        read=lambda: client.get_batch(meta, layout="jagged", device=group.gpu),
    )
    lengths = meta.sequence_lengths
    assert group.gpu == torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.current_stream()):
        got = group.fetch(
            part,
            "leader_broadcast",
            lambda columns: materialize(columns, sequence_lengths=lengths, **form),
        )
        expected = client.get_batch(meta, **form)
        assert list(got["text"]) == list(expected["text"])
        for name in ("tokens", "logprobs", "experts", "reward"):
            assert got[name].is_cuda
            one, other = got[name], expected[name]
            if one.is_nested:
                one, other = one.values(), other.values()
            assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.uint8, torch.bool, torch.complex128])
def test_padding_on_the_gpu_equals_padding_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: bool
) -> None:
    if not kernel:
        monkeypatch.setattr(cuda_copy, "copy_kernel", lambda: None)
    rows = [torch.randint(0, 2, (n, 3)).to(dtype) for n in (4, 0, 900, 17)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    for width in (0, 1001):
        here = materialize({"x": nested}, pad_value_dict={"x": 1}, pad_to_seqlen=width)["x"]
        there = materialize({"x": nested.cuda()}, pad_value_dict={"x": 1}, pad_to_seqlen=width)["x"]
        assert there.is_cuda
        assert torch.equal(here, there.cpu())


def test_a_batch_on_the_gpu_is_packed_there() -> None:
    columns = {"x": torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged).cuda()}
    flat, layout_bytes = pack_columns(columns, torch.device("cuda"))
    assert flat.is_cuda
    there = unpack_columns(flat, layout_bytes)["x"]
    assert there.is_cuda
    assert torch.equal(there.values(), columns["x"].values())
    assert torch.equal(unpack_columns(flat.cpu(), layout_bytes)["x"].values(), there.values().cpu())
