"""A sample id may be used again; a sample never."""

from __future__ import annotations

import pytest
import torch

from dataplane import DataPlaneClient, read_columns, write_columns
from dataplane.errors import StaleSampleError

pytestmark = pytest.mark.integration

NAMES = ["a", "b", "c"]


def test_three_steps_with_late_write_backs(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    earlier = None
    for step in range(3):
        meta = client.put_samples(NAMES, partition, {"x": torch.full((3,), step)})
        if earlier is not None:
            with pytest.raises(StaleSampleError, match="'a'"):
                write_columns(client, earlier, {"logprobs": torch.full((3,), -1.0)})
            with pytest.raises(KeyError):
                read_columns(client, earlier, ["x"])
            with pytest.raises(KeyError, match="logprobs"):
                client.get_samples(NAMES, partition, ["logprobs"])
        write_columns(client, meta, {"logprobs": torch.full((3,), float(step))})
        assert client.get_data(meta, ["x", "logprobs"])["logprobs"].tolist() == [float(step)] * 3
        client.clear_samples(meta, partition)
        with pytest.raises(KeyError):
            write_columns(client, meta, {"logprobs": torch.zeros(3)})
        assert client.list_samples(partition).size == 0
        earlier = meta


def test_a_stale_meta_clears_nothing(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    old = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(old, partition)
    client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(old, partition)
    assert client.list_samples(partition).sample_ids == NAMES


def test_handles_survive_transformations(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    meta = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    turned = meta.subset([2, 0])
    client.clear_samples(["a"], partition)
    client.put_samples(["a"], partition, {"x": torch.tensor([9])})
    with pytest.raises(StaleSampleError, match="'a'"):
        client.get_data(turned, ["x"])
    assert client.get_data(turned.subset([0]), ["x"])["x"].tolist() == [2]
    fresh = client.claim_meta(partition, "train", ["x"], 3)
    assert client.get_data(fresh, ["x"])["x"].tolist() == [1, 2, 9]


def test_a_dropped_partition_makes_its_metas_stale(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    old = client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    client.clear_samples(None, partition)
    client.register_partition(partition, ["x"], None, ["train"])
    client.put_samples(NAMES, partition, {"x": torch.arange(3)})
    with pytest.raises(StaleSampleError):
        client.get_data(old, ["x"])


def test_a_rewrite_is_seen_whole(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    meta = client.put_samples(NAMES, partition, {"x": [torch.zeros(4)] * 3})
    client.put_samples(["b"], partition, {"x": [torch.ones(7)]})
    rows = client.get_data(meta, ["x"])["x"].unbind()
    assert [row.tolist() for row in rows] == [[0.0] * 4, [1.0] * 7, [0.0] * 4]
