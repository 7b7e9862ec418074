from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client.columns import kv_first_write, read_columns, write_columns
from dataplane.core.schema import Layout
from dataplane.data.batch import BatchedDataDict
from dataplane.data.columns import decode, encode_fields
from dataplane.data.columns.encode import declared_specs
from dataplane.data.jagged import is_jagged
from dataplane.data.meta import KVBatchMeta
from tests.data.columns_helpers import same_rows, store


class FakeClient:
    """Notes what it is asked, encodes puts as a client would."""

    def __init__(self) -> None:
        self.puts: list[tuple[Any, str, dict[str, Any], Any, str]] = []
        self.gets: list[tuple[Any, ...]] = []

    def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: Mapping[str, Any] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        mode: str = "upsert",
    ) -> KVBatchMeta:
        rows = len(sample_ids)
        columns = encode_fields(fields or {}, rows=rows, specs=declared_specs(list(fields or {})))
        self.puts.append((sample_ids, partition_id, {c.name: decode(store(c)) for c in columns}, tags, mode))
        ids = sample_ids.sample_ids if isinstance(sample_ids, KVBatchMeta) else list(sample_ids)
        return KVBatchMeta(partition_id, None, ids).with_handles(np.arange(rows), np.arange(rows) + 7)

    def get_batch(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "padded",
        pad_value_dict: Mapping[str, Any] | None = None,
        pad_to_seqlen: int = 0,
        device: torch.device | str | None = None,
    ) -> BatchedDataDict[Any]:
        self.gets.append((meta, select_fields, layout, pad_value_dict, pad_to_seqlen, device))
        return BatchedDataDict({"x": torch.zeros(meta.size)})


LENGTHS = [3, 0, 2]
PADDED = torch.arange(12).reshape(3, 4)
CUT = [PADDED[i, :length] for i, length in enumerate(LENGTHS)]


def meta_of(**more: Any) -> KVBatchMeta:
    return KVBatchMeta("train", "policy", ["a", "b", "c"], **more).with_handles(np.arange(3), np.arange(3))


def test_read_columns_passes_everything_on() -> None:
    client, meta = FakeClient(), meta_of()
    batch = read_columns(client, meta, ["x"], layout="jagged", pad_value_dict={"x": 1}, pad_to_seqlen=8, device="cpu")
    assert client.gets == [(meta, ["x"], "jagged", {"x": 1}, 8, "cpu")]
    assert batch.size == 3


def test_write_columns_updates_by_handles_and_cuts_per_token_fields() -> None:
    client, meta = FakeClient(), meta_of(sequence_lengths=LENGTHS)
    write_columns(client, meta, {"prev_logprobs": PADDED.float(), "kl": torch.ones(3), "mine": PADDED})
    ((names, partition, columns, tags, mode),) = client.puts
    assert names is meta
    assert (partition, tags, mode) == ("train", None, "update")
    assert is_jagged(columns["prev_logprobs"])
    assert same_rows(columns["prev_logprobs"], [row.float() for row in CUT])
    assert same_rows(columns["kl"], list(torch.ones(3)))
    assert same_rows(columns["mine"], list(PADDED))
    write_columns(client, meta, {"mine": PADDED}, token_aligned_fields={"mine"})
    assert same_rows(client.puts[-1][2]["mine"], CUT)


def test_write_columns_without_lengths_puts_fields_as_they_are() -> None:
    client = FakeClient()
    write_columns(client, meta_of(), {"prev_logprobs": PADDED})
    assert same_rows(client.puts[0][2]["prev_logprobs"], list(PADDED))


def test_write_columns_narrower_than_the_longest_row() -> None:
    client = FakeClient()
    with pytest.raises(ValueError, match="'prev_logprobs': rows have width 4, but the longest sample has 5"):
        write_columns(client, meta_of(sequence_lengths=[5, 1, 1]), {"prev_logprobs": PADDED})
    assert client.puts == []


def test_what_is_no_meta_is_not_written() -> None:
    client = FakeClient()
    for wrong in (None, {}, ["s0"]):
        with pytest.raises(TypeError, match=r"argument meta: .* Pass a KVBatchMeta"):
            write_columns(client, wrong, {"prev_logprobs": PADDED})  # type: ignore[arg-type]
    assert client.puts == []


def test_kv_first_write() -> None:
    client = FakeClient()
    batch = BatchedDataDict(
        {"input_ids": PADDED, "input_lengths": torch.tensor(LENGTHS), "text": ["x", "y", "z"], "reward": torch.ones(3)}
    )
    given = {"step": 4}
    meta = kv_first_write(
        batch,
        sample_ids=["a", "b", "c"],
        dp_client=client,
        partition_id="train",
        extra_info=given,
        tags=[{"group": 1}, {"group": 1}, {"group": 2}],
        pad_to_multiple=8,
    )
    ((names, partition, columns, tags, mode),) = client.puts
    assert (names.sample_ids, names.handles) == (["a", "b", "c"], None)
    assert names.sequence_lengths == LENGTHS
    assert (partition, mode) == ("train", "create")
    assert same_rows(columns["input_ids"], CUT)
    assert columns["input_lengths"].tolist() == LENGTHS
    assert columns["text"].tolist() == ["x", "y", "z"]
    expected = [{"group": 1, "input_lengths": 3}, {"group": 1, "input_lengths": 0}, {"group": 2, "input_lengths": 2}]
    assert tags == expected
    assert (meta.partition_id, meta.task_name, meta.sample_ids) == ("train", "train", ["a", "b", "c"])
    assert meta.fields == ["input_ids", "input_lengths", "text", "reward"]
    assert meta.sequence_lengths == LENGTHS
    assert meta.tags == expected
    assert meta.extra_info == {"step": 4, "pad_to_multiple": 8}
    assert given == {"step": 4}
    assert meta.handles is not None
    assert meta.handles[1].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("batch", "more", "told"),
    [
        ({"input_ids": PADDED}, {}, "no column 'input_lengths'"),
        ({"input_ids": PADDED, "input_lengths": [1, 2]}, {}, "2 lengths for 3 rows"),
        ({"input_ids": PADDED, "input_lengths": [1, 2, 5]}, {}, "but the longest sample has 5"),
        ({"input_ids": PADDED, "input_lengths": [1, 2, 3]}, {"pad_to_multiple": 0}, "pad_to_multiple=0"),
        ({"input_ids": PADDED, "input_lengths": [1, 2, 3]}, {"tags": [{}]}, "tags: got 1 values for 3"),
    ],
)
def test_kv_first_write_refuses_before_anything_is_put(batch: Any, more: Any, told: str) -> None:
    client = FakeClient()
    with pytest.raises(ValueError, match=told):
        kv_first_write(batch, sample_ids=["a", "b", "c"], dp_client=client, partition_id="train", **more)
    assert client.puts == []
