"""Where samples are: `locate` gives their rows and hosts."""

from __future__ import annotations

import pytest
import torch

from dataplane import DataPlaneClient, KVBatchMeta, SampleNotFoundError, StaleSampleError
from dataplane.core.addresses import boot_id
from dataplane.errors import FieldNotProducedError

pytestmark = pytest.mark.integration


@pytest.fixture
def meta(client: DataPlaneClient) -> KVBatchMeta:
    client.register_partition("p", ["x", "empty"], None, ["train"])
    fields = {"x": [torch.arange(n) for n in (3, 1)], "empty": [torch.zeros(0), torch.ones(2)]}
    return client.put_samples(["a", "b"], "p", fields)


def test_samples_have_the_host_that_stores_their_bytes(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    found, hosts = client.locate(KVBatchMeta("p", None, ["b", "a"], ["x"]))
    assert hosts == [boot_id()] * 2
    assert client.locate(meta, ["empty"]).hosts == [None, boot_id()], "a sample without bytes is nowhere"
    assert found.sample_ids == ["b", "a"]
    client.clear_samples(["a"], "p")
    client.put_samples(["a"], "p", {"x": [torch.arange(2)]})
    with pytest.raises(StaleSampleError):
        client.get_data(found)


def test_nothing_stays_pinned(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    client.locate(meta)
    client.clear_samples(meta.sample_ids, "p")
    assert [unit.retired_bytes for unit in client.stats().units] == [0]


def test_what_is_missing_cannot_be_located(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    client.put_samples(["half"], "p", {"x": [torch.arange(1)]})
    with pytest.raises(FieldNotProducedError):
        client.locate(client.list_samples("p"), ["empty"])
    with pytest.raises(SampleNotFoundError):
        client.locate(KVBatchMeta("p", None, ["nobody"]), ["x"])
