"""Partitions of the service in `tests.service`, and streams of them. Fixtures are imported by the files that use
them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta, StreamingDataLoader

NEVER_S = 600.0
TASKS = ["train", "other"]
_numbers = itertools.count()


@pytest.fixture
def partition(client: DataPlaneClient) -> Iterator[str]:
    name = f"p{next(_numbers)}"
    client.register_partition(name, ["input_ids", "reward"], None, TASKS)
    yield name
    client.clear_samples(None, name)


def put(client: DataPlaneClient, partition: str, numbers: Sequence[int]) -> KVBatchMeta:
    """Sample n has n + 1 tokens, all n."""
    ids = [torch.full((n + 1,), n, dtype=torch.int64) for n in numbers]
    fields = {"input_ids": ids, "reward": torch.tensor([float(n) for n in numbers])}
    tags = [{"input_lengths": n + 1} for n in numbers]
    return client.put_samples([f"s{n}" for n in numbers], partition, fields, tags=tags)


def loader(client: DataPlaneClient, partition: str, batch_size: int = 2, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(
        client, partition, "train", ["input_ids", "reward"], batch_size=batch_size, timeout_s=NEVER_S, **options
    )


def rewards(stream: StreamingDataLoader) -> list[list[float]]:
    return [data["reward"].tolist() for data, _ in stream]


prefetches = pytest.mark.parametrize("prefetch", [0, 2])
