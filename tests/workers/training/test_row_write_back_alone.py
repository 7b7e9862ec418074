"""The write-back of a rank without siblings, and what it refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from dataplane import ContextParallel, DataPlaneClient, KVBatchMeta
from dataplane.errors import InvalidRequestError
from tests.service import client, server  # noqa: F401
from tests.workers.training.mixin_service import alone, partition  # noqa: F401
from tests.workers.training.mixin_worker import LENGTHS, Worker, fingerprints, put

pytestmark = pytest.mark.integration


def test_a_rank_without_siblings_must_have_whole_rows(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    whole = ContextParallel(rank=0, size=1)
    batch = alone._fetch(meta.with_fields(["generation_logprobs", "routed_experts"]), tokens=whole)
    columns = {"logprobs": batch["generation_logprobs"], "experts": batch["routed_experts"]}
    alone._write_back(meta, columns, tokens=whole, inner={"experts": slice(0, 2)})
    stored = client.get_batch(meta, ["logprobs", "experts", "generation_logprobs", "routed_experts"], layout="jagged")
    prints = list(fingerprints(stored).values())
    assert prints[:2] == prints[2:]
    with pytest.raises(ValueError, match="'logprobs': no rank has token 3 of sample 's0'"):
        alone._write_back(meta, {"logprobs": batch["generation_logprobs"][:, :3]}, tokens=(0, 3))
    alone.coords = {"tensor_parallel": 1}
    alone._write_back(meta, {"logprobs": batch["generation_logprobs"][:, :3]}, tokens=(0, 3))  # does not write


def test_tokens_need_lengths(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    unknown = KVBatchMeta(partition, "train", meta.sample_ids, fields=meta.fields)
    with pytest.raises(InvalidRequestError, match=r"'kl': tokens= needs .*sequence_lengths.*tag 'input_lengths'"):
        alone._write_back(unknown, {"kl": torch.zeros(8, 40)}, tokens=(0, 40))


def test_slices_of_dense_fields(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    hidden = torch.randn(8, 5)
    alone._write_back(meta, {"hidden": hidden}, inner={"hidden": slice(None)})
    assert client.get_batch(meta, ["hidden"])["hidden"].equal(hidden)
    with pytest.raises(ValueError, match=r"'hidden': no rank has inner index \[0\] of sample 's0'"):
        alone._write_back(meta, {"hidden": hidden}, inner={"hidden": slice(1, None)})


def test_no_samples(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition).slice(0, 0)
    alone._write_back(meta, {"kl": torch.zeros(0, 0), "score": torch.zeros(0)}, tokens=(0, 3))


def test_rows_are_cut_as_in_a_fetch_that_is_not_aligned(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition, pad_to=40)  # as long as the longest row, so that both cuts have the same width
    whole = ContextParallel(rank=0, size=1, zigzag=False)
    names = ["generation_logprobs", "routed_experts"]
    for aligned in (True, False):
        for tokens in (None, whole):
            batch = alone._fetch(meta.with_fields(names), dp_aligned_seq_len=aligned, tokens=tokens)
            fields = dict(zip(["logprobs", "experts"], batch.values(), strict=True))
            alone._write_back(meta, fields, dp_aligned_seq_len=aligned, tokens=tokens)
            stored = client.get_batch(meta, [*names, *fields], layout="jagged")
            prints = list(fingerprints(stored).values())
            assert prints[:2] == prints[2:]


def test_per_token_columns_of_a_fetch_that_is_not_aligned(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    meta = put(client, partition, pad_to=64)
    kl = alone._fetch(meta.with_fields(["generation_logprobs"]), dp_aligned_seq_len=False)["generation_logprobs"]
    assert kl.shape[1] == 40
    alone._write_back(meta, {"kl": kl}, dp_aligned_seq_len=False)
    result = {"logprobs": kl}
    alone._write_back_result_field(meta, result, result_key="logprobs", tq_field="other", dp_aligned_seq_len=False)
    stored = client.get_batch(meta, ["kl", "other"], layout="jagged")
    assert all(column.offsets().diff().tolist() == LENGTHS for column in stored.values())


def test_a_width_of_another_cut_is_refused(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition, pad_to=64)
    half = ContextParallel(rank=0, size=2)
    kl = alone._fetch(meta.with_fields(["generation_logprobs"]), dp_aligned_seq_len=False, tokens=half)
    with pytest.raises(
        InvalidRequestError, match=r"padded to 32 tokens, got shape \[8, 20\]; pass .*dp_aligned_seq_len"
    ):
        alone._write_back(meta, {"kl": kl["generation_logprobs"]}, tokens=half)


@pytest.mark.parametrize(("pad_to", "why"), [(66, "multiple of the 4 chunks"), (36, "sample 2 has 40 tokens")])
def test_a_pad_length_of_the_driver_that_does_not_fit_is_named(
    alone: Worker, client: DataPlaneClient, partition: str, pad_to: int, why: str
) -> None:
    meta = put(client, partition, pad_to=pad_to).with_fields(["input_ids"])
    cp = ContextParallel(rank=0, size=2)
    message = f"global_forward_pad_seqlen={pad_to}, which the driver has set .*{why}.*pad_to_multiple"
    with pytest.raises(InvalidRequestError, match=message):
        alone._fetch(meta, tokens=cp)
    with pytest.raises(InvalidRequestError, match=message):
        alone._write_back(meta, {"kl": torch.zeros(8, 20)}, tokens=cp)
    assert alone._fetch(meta, tokens=cp, dp_aligned_seq_len=False)["input_ids"].shape == (8, 20)
    assert alone._fetch(meta, tokens=ContextParallel(rank=0, size=2, pad_to=48))["input_ids"].shape == (8, 24)


NESTED = torch.nested.nested_tensor([torch.zeros(length) for length in LENGTHS], layout=torch.jagged)


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ([torch.zeros(8, 40)], TypeError, "list is not supported here. Pass a TensorDict or a mapping of field names"),
        (None, TypeError, "NoneType is not supported here. Pass a TensorDict or a mapping of field names"),
        ({0: torch.zeros(8, 40)}, InvalidRequestError, "field names must be non-empty strings, got 0"),
        ({"": torch.zeros(8, 40)}, InvalidRequestError, "field names must be non-empty strings, got ''"),
        ({"kl": torch.zeros(8, 40, device="meta")}, TypeError, r"'kl': a torch.Tensor \(float32, on meta\) cannot be"),
        ({"kl": NESTED.to("meta")}, TypeError, "'kl': .* on meta.* cannot be stored"),
        ({"kl": torch.zeros(8, 40).to_sparse()}, TypeError, "'kl': .*layout sparse_coo.* cannot be stored"),
    ],
)
@pytest.mark.parametrize("parts", [{}, {"tokens": (0, 40)}, {"inner": {}}])
def test_fields_that_cannot_be_stored(
    alone: Worker,
    client: DataPlaneClient,
    partition: str,
    fields: Any,
    kind: type[Exception],
    why: str,
    parts: dict[str, Any],
) -> None:
    with pytest.raises(kind, match=why):
        alone._write_back(put(client, partition), fields, **parts)


def test_nested_rows_of_other_shapes_are_no_parts(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    rows = torch.nested.nested_tensor([torch.zeros(length, 2) for length in LENGTHS], layout=torch.jagged)
    for parts in ({"tokens": (0, 40)}, {"inner": {}}):
        with pytest.raises(InvalidRequestError, match="'x': nested rows of parts may differ in their first dimension"):
            alone._write_back(meta, {"x": rows.transpose(1, 2)}, **parts)  # type: ignore[arg-type]
        alone._write_back(meta, {"x": rows}, **parts)  # type: ignore[arg-type]


def test_fields_of_a_tensordict(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    fields = TensorDict({"a": torch.ones(8, 40)}, [8])
    alone._write_back(meta, fields, tokens=(0, 40))
    alone._write_back_result_field(meta, fields, result_key="a", tq_field="b", tokens=(0, 40))
    assert client.get_batch(meta, ["a", "b"], layout="jagged")["b"].values().equal(torch.ones(sum(LENGTHS)))


def test_slices_are_cut_like_those_of_python(alone: Worker, client: DataPlaneClient, partition: str) -> None:
    meta = put(client, partition)
    for slices in (slice(0, 10**30), slice(0, None, 1), slice(0, 10**12)):
        inner = {"routed_experts": slices}
        experts = alone._fetch(meta.with_fields(["routed_experts"]), inner=inner)["routed_experts"]
        alone._write_back(meta, {"routed_experts": experts}, inner=inner)
    none = alone._fetch(meta.with_fields(["routed_experts"]), inner={"routed_experts": slice(10**30, None)})
    assert none["routed_experts"].shape == (8, 64, 0, 3)


def test_a_sliced_dimension_as_wide_as_the_longest_sample(
    alone: Worker, client: DataPlaneClient, partition: str
) -> None:
    """The column is dense: its only dimension is sliced, so it has none of tokens."""
    meta = put(client, partition)
    width = max(LENGTHS)
    column = torch.arange(len(LENGTHS) * width).reshape(len(LENGTHS), width)
    alone._write_back(meta, {"square": column}, inner={"square": slice(0, width)})
    assert torch.equal(client.get_batch(meta, ["square"])["square"], column)
