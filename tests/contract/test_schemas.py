"""A put is stored under the schema that holds when it commits, never under one that a client remembers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec

from .values import same

pytestmark = pytest.mark.integration

IDS = ["a", "b"]
TOKENS = [torch.arange(3), torch.arange(2)]


@pytest.mark.parametrize("width", [8, 1 << 17])
@pytest.mark.parametrize("mode", ["upsert", "append"])
def test_a_schema_that_another_client_replaced_is_not_used(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], partition: str, width: int, mode: str
) -> None:
    client.register_partition(partition, {"input_ids": None, "emb": FieldSpec("jagged")}, None, ["train"])
    client.put_samples(IDS, partition, {"input_ids": TOKENS, "emb": torch.zeros(2, width)})
    other = open_client()
    other.clear_samples(None, partition)
    other.register_partition(partition, ["input_ids"], None, ["train"])
    meta = other.put_samples(IDS, partition, {"input_ids": TOKENS})
    emb = torch.arange(2 * width).view(2, width)
    client.put_samples(meta, partition, {"emb": emb}, mode=mode)
    assert same(other.get_samples(IDS, partition, ["emb"])["emb"], emb)


def test_a_kind_that_went_with_the_last_row_is_not_used(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], partition: str
) -> None:
    other = open_client()
    other.register_partition(partition, [], None, ["train"])
    other.put_samples(IDS, partition, {"x": torch.zeros(2, 8)})
    client.put_samples(IDS, partition, {"x": torch.ones(2, 8)})
    other.clear_samples(IDS, partition)
    client.put_samples(IDS, partition, {"x": [torch.ones(8), torch.ones(8)]})
    assert other.get_samples(IDS, partition, ["x"])["x"].is_nested
