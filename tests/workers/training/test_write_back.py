"""The write-back of a rank, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dataplane import DataPlaneClient
from dataplane.errors import InvalidRequestError
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import LENGTHS, Worker, put

pytestmark = pytest.mark.integration


def test_per_token_columns_of_a_fetch_that_is_not_aligned(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition, pad_to=64)
    fetched = alone._fetch(meta.with_fields(["generation_logprobs"]), dp_aligned_seq_len=False)
    kl = fetched["generation_logprobs"]
    assert kl.shape[1] == 40
    alone._write_back(meta, {"kl": kl}, dp_aligned_seq_len=False)
    result = {"logprobs": kl}
    alone._write_back_result_field(meta, result, result_key="logprobs", tq_field="other", dp_aligned_seq_len=False)
    stored = client.get_batch(meta, ["kl", "other"], layout="jagged")
    assert all(column.offsets().diff().tolist() == LENGTHS for column in stored.values())


def test_only_a_leader_writes(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    alone.coords = {"tensor_parallel": 1}
    alone._write_back(meta, {"score": torch.zeros(8)})
    alone._write_back_result_field(meta, None, result_key="scores", tq_field="score")
    with pytest.raises(KeyError, match="score"):
        client.get_batch(meta, ["score"])


NESTED = torch.nested.nested_tensor([torch.zeros(length) for length in LENGTHS], layout=torch.jagged)
NOT_A_MAPPING = "is not supported here. Pass a TensorDict or a mapping of field names"


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ([torch.zeros(8, 40)], TypeError, f"list {NOT_A_MAPPING}"),
        (None, TypeError, f"NoneType {NOT_A_MAPPING}"),
        ({0: torch.zeros(8, 40)}, InvalidRequestError, "must be non-empty strings, got 0"),
        ({"": torch.zeros(8, 40)}, InvalidRequestError, "must be non-empty strings, got ''"),
        (
            {"kl": torch.zeros(8, 40, device="meta")},
            TypeError,
            r"'kl': a torch.Tensor \(float32, on meta\) cannot be",
        ),
        ({"kl": NESTED.to("meta")}, TypeError, "'kl': .* on meta.* cannot be stored"),
        ({"kl": torch.zeros(8, 40).to_sparse()}, TypeError, "'kl': .*layout sparse_coo.* cannot"),
    ],
)
def test_fields_that_cannot_be_stored(
    alone: Worker,
    client: DataPlaneClient,
    partition: str,
    fields: Any,
    kind: type[Exception],
    why: str,
) -> None:
    with pytest.raises(kind, match=why):
        alone._write_back(put(client, partition), fields)


def test_fields_of_a_tensordict(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition, pad_to=40)
    fields = TensorDict({"a": torch.ones(8, 40)}, [8])
    alone._write_back(meta, fields)
    alone._write_back_result_field(meta, fields, result_key="a", tq_field="b")
    stored = client.get_batch(meta, ["a", "b"], layout="jagged")
    assert stored["b"].values().equal(torch.ones(sum(LENGTHS)))
