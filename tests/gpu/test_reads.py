"""Samples read to a GPU: equal to the CPU's, while arenas are reused, and in CUDA graphs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from dataplane import connect, serve
from dataplane.core import cuda_copy, cuda_memory
from dataplane.core.row_copy import address
from tests.data.columns_helpers import random_tensor, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 1 << 20
DTYPES = [torch.int64, torch.int32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn]


def _random_fields(rng: np.random.Generator, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        inner = [(), (3,), (2, 5)][int(rng.integers(3))]
        lengths = rng.choice([0, 1, 7, 300, 9_000], count)
        seed = int(rng.integers(1 << 30))
        fields[f"jagged{number}"] = [
            random_tensor((int(n), *inner), dtype, seed + row) for row, n in enumerate(lengths)
        ]
        fields[f"dense{number}"] = random_tensor((count, *inner), dtype, seed)
    fields["text"] = [f"row {row}" for row in range(count)]
    return fields


def _assert_same(here: Any, there: Any) -> None:
    assert list(here) == list(there)
    for name, column in here.items():
        other = there[name]
        if not isinstance(column, torch.Tensor):
            assert list(column) == list(other), name
            continue
        assert other.is_cuda, name
        if column.is_nested:
            assert torch.equal(column.offsets(), other.offsets().cpu()), name
            column, other = column.values(), other.values()
        assert same_bits(column, other), name


@pytest.mark.parametrize("remote", [False, True])
def test_random_batches_equal_those_of_the_cpu(remote: bool) -> None:
    rng = np.random.default_rng(int(remote))
    with (
        serve({"capacity_bytes": 512 * MIB}) as server,
        connect(server.address, force_remote=remote) as client,
    ):
        for turn in range(6):
            count, partition = int(rng.integers(1, 40)), f"train{turn}"
            fields = _random_fields(rng, count)
            client.register_partition(partition, list(fields), num_samples=count, consumer_tasks=["policy"])
            ids = [f"{row}" for row in range(count)]
            on_gpu = {name: value for name, value in fields.items() if turn % 2 and name != "text"}
            for name, value in on_gpu.items():
                fields[name] = value.cuda() if isinstance(value, torch.Tensor) else [row.cuda() for row in value]
            client.put_samples(ids, partition, fields)
            meta = client.claim_meta(partition, "policy", list(fields), batch_size=count)
            meta = meta.subset(rng.permutation(count).tolist())
            pads = {name: 1 for name in fields if name.startswith("jagged")}
            for options in ({"layout": "jagged"}, {"pad_value_dict": pads}, {"pad_to_seqlen": 10_000}):
                _assert_same(client.get_batch(meta, **options), client.get_batch(meta, **options, device="cuda"))
            names = [name for name in fields if name.startswith("jagged")]
            part: Any = {"tokens": (3, 100)}
            here = client.get_samples(meta, partition, names, **part)
            _assert_same(
                dict(here.items()), dict(client.get_samples(meta, partition, names, **part, device="cuda").items())
            )
            client.clear_samples(None, partition)


def test_the_gpu_reads_whole_rows_while_the_arena_is_reused() -> None:
    """Each row has one value: a torn or stale row has others."""
    stop = threading.Event()
    failures: list[str] = []
    with serve({"capacity_bytes": 256 * MIB}) as server:

        def churn() -> None:
            with connect(server.address) as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    partition = f"other{number % 3}"
                    rows = [
                        torch.full((int(n),), number) for n in np.random.default_rng(number).integers(1, 300_000, 16)
                    ]
                    client.register_partition(partition, ["x"], num_samples=16, consumer_tasks=[])
                    client.put_samples([f"{n}" for n in range(16)], partition, {"x": rows})
                    client.clear_samples(None, partition)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            with connect(server.address) as client:
                for turn in range(60):
                    rows = [
                        torch.full((int(n),), turn, device="cuda" if turn % 2 else "cpu")
                        for n in np.random.default_rng(turn).integers(1, 200_000, 8)
                    ]
                    client.register_partition("mine", ["x"], num_samples=8, consumer_tasks=["policy"])
                    client.put_samples([f"{n}" for n in range(8)], "mine", {"x": rows})
                    meta = client.claim_meta("mine", "policy", ["x"], batch_size=8)
                    got = client.get_batch(meta, device="cuda", pad_value_dict={"x": -1})["x"]
                    for row, sample in zip(got, meta.sample_ids, strict=True):
                        count = len(rows[int(sample)])
                        if not ((row[:count] == turn).all() and (row[count:] == -1).all()):
                            failures.append(f"turn {turn}, sample {sample}")
                    client.clear_samples(None, "mine")
        finally:
            stop.set()
            thread.join()
    assert not failures


def test_copies_in_a_cuda_graph() -> None:
    source = cuda_memory.pinned(1 << 16)
    source[:] = np.random.default_rng(0).integers(0, 256, len(source))
    out = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    sizes = np.array([1000, 3000, 8])
    starts = np.array([0, 8192, 16384])
    ((word, table),) = cuda_copy.plan([(starts + address(source), starts + out.data_ptr(), sizes)]).items()
    on_device, pieces = torch.from_numpy(table).cuda(), int(table[3, -1])
    cuda_copy.launch(word, on_device, pieces)  # compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_copy.launch(word, on_device, pieces)
    for fill in (1, 2):
        source[:] = fill
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert int(out.sum()) == fill * int(sizes.sum())


def test_a_refused_registration_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    with cuda_memory.lock:
        first, second = (cuda_memory.RegisteredMemory(memory, lambda: memory.nbytes) for _ in range(2))
        assert first.cover(4096)
        assert not second.cover(4096), "registered already"
        assert "ulimit -l" in caplog.text
        torch.zeros(8, device="cuda").add_(1)
        torch.cuda.synchronize()
        first.release()
        assert first.cover(1 << 20)
        first.release()
