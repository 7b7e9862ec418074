"""A worker that reads a field that its stage did not fetch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane import BatchedDataDict, DataPlaneClient, KVBatchMeta, Server
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_worker import LAYOUTS, Worker
from workers.training.policy import FORWARD_FIELDS, forward_fields

pytestmark = pytest.mark.integration


class ImageWorker(Worker):
    """Its model reads images."""

    def get_logprobs(
        self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        images = data["pixel_values"].sum((1, 2))  # [N, patches, 6] to [N]
        return {"logprobs": -data["input_ids"] * images[:, None]}

    def get_reference_policy_logprobs(
        self, *, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> dict[str, torch.Tensor]:
        return {"reference_logprobs": self.get_logprobs(data=data)["logprobs"]}

    def train(self, data: BatchedDataDict[Any], **_: Any) -> dict[str, float]:
        return {"loss": float(data["pixel_values"].sum())}


@pytest.fixture
def meta(client: DataPlaneClient) -> KVBatchMeta:
    """Two samples of 3 and 5 tokens with images of 8 and 4 patches."""
    client.register_partition("images", ["input_ids", "pixel_values"], 2, ["train"])
    fields = {
        "input_ids": [torch.ones(3, dtype=torch.int64), torch.ones(5, dtype=torch.int64)],
        "pixel_values": [torch.ones(8, 6), torch.ones(4, 6)],
    }
    tags = [{"input_lengths": 3}, {"input_lengths": 5}]
    client.put_samples(["a", "b"], "images", fields, tags=tags)
    return client.list_samples("images").with_fields(list(fields))


def test_a_field_that_a_stage_did_not_fetch_is_named_with_the_argument(
    server: Server,
    client: DataPlaneClient,
    meta: KVBatchMeta,
) -> None:
    worker = ImageWorker(LAYOUTS["dp2"], 0)
    worker.setup_data_plane({"address": server.address})
    default = meta.with_fields(forward_fields(meta, None, FORWARD_FIELDS))
    stages = [
        lambda part: worker.get_logprobs_presharded(part),
        lambda part: worker.get_reference_policy_logprobs_presharded(part),
        lambda part: worker.train_presharded(part, "loss"),
    ]
    for stage in stages:
        with pytest.raises(KeyError, match=r"no column 'pixel_values'; it has input_ids.*`fields=`"):
            stage(default)
        stage(meta)
    got = client.get_samples(["a", "b"], "images", ["prev_logprobs"])["prev_logprobs"]
    assert [row.tolist() for row in got.unbind()] == [[-48.0] * 3, [-24.0] * 5]
    worker.close_data_plane()
    client.clear_samples(None, "images")
