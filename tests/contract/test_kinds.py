"""The name of a field says what its kind is by default; what is put, or a `FieldSpec`, decides."""

from __future__ import annotations

import pytest
import torch

from dataplane import DataPlaneClient, FieldSpec, KVBatchMeta, kv_first_write, write_columns
from dataplane.errors import SchemaError

from .values import same, same_rows

pytestmark = pytest.mark.integration

IDS = ["a", "b", "c"]
LENGTHS = [3, 1, 4]
PADDED = torch.arange(12.0).view(3, 4)
CUT = [PADDED[row, :length] for row, length in enumerate(LENGTHS)]


def rows(client: DataPlaneClient, partition: str, name: str) -> list[torch.Tensor]:
    return list(client.get_samples(IDS, partition, [name])[name].unbind())


@pytest.mark.parametrize("fields", [["advantages", "loss_mask"], {"advantages": FieldSpec(dtype="float32")}, []])
def test_one_number_per_sample_is_stored_as_given(client: DataPlaneClient, partition: str, fields: object) -> None:
    client.register_partition(partition, fields, None, ["train"])  # type: ignore[arg-type]
    client.put_samples(IDS, partition, {"advantages": torch.tensor([1.0, -1.0, 0.5])})
    assert same(client.get_samples(IDS, partition, ["advantages"])["advantages"], torch.tensor([1.0, -1.0, 0.5]))


@pytest.mark.parametrize("fields", [["advantages"], {"advantages": FieldSpec("jagged")}])
def test_a_padded_put_of_a_declared_per_token_name_is_jagged(
    client: DataPlaneClient, partition: str, fields: object
) -> None:
    client.register_partition(partition, fields, None, ["train"])  # type: ignore[arg-type]
    client.put_samples(IDS[:2], partition, {"advantages": PADDED[:2]})
    client.put_samples(IDS[2:], partition, {"advantages": [torch.ones(9)]})
    assert list(map(len, rows(client, partition, "advantages"))) == [4, 4, 9]
    if isinstance(fields, dict):  # declared: the kind does not widen
        with pytest.raises(SchemaError, match="advantages"):
            client.put_samples(IDS, partition, {"advantages": torch.ones(3)})


def test_a_name_without_a_kind_takes_another_once_its_rows_are_gone(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["values"], None, ["train"])
    for value in (PADDED, torch.ones(3), PADDED):
        client.put_samples(IDS, partition, {"values": value})
        stored = client.get_samples(IDS, partition, ["values"])["values"]
        assert stored.is_nested == (value.dim() > 1)
        client.clear_samples(IDS, partition)


def test_a_per_token_name_need_not_be_declared(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, [], None, ["train"])
    for _ in range(2):
        client.put_samples(IDS, partition, {"values": PADDED, "scores": torch.ones(3, 4, 2)})
        stored = client.get_samples(IDS, partition, ["values", "scores"])
        assert same_rows(stored["values"], list(PADDED))
        assert stored["values"].is_nested
        assert same(stored["scores"], torch.ones(3, 4, 2))
        client.clear_samples(IDS, partition)


def test_a_field_spec_decides(client: DataPlaneClient, partition: str) -> None:
    """What a per-token name would be cut to, or refused for."""
    fields = {"values": FieldSpec("dense"), "returns": FieldSpec("dense"), "entropy": FieldSpec("jagged")}
    client.register_partition(partition, fields, None, ["train"])
    batch = {"input_ids": PADDED, "values": PADDED, "returns": PADDED[:, :2], "input_lengths": torch.tensor(LENGTHS)}
    meta = kv_first_write(batch, sample_ids=IDS, dp_client=client, partition_id=partition)
    write_columns(client, meta, {"returns": PADDED[:, :2] + 1, "entropy": PADDED})
    stored = client.get_samples(IDS, partition, ["values", "returns"])
    assert same(stored["values"], PADDED)
    assert same(stored["returns"], PADDED[:, :2] + 1)
    for name in ("input_ids", "entropy"):
        assert all(map(torch.equal, rows(client, partition, name), CUT)), name


def test_a_column_of_an_unknown_name_is_stored_as_given(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["input_ids", "hidden"], None, ["train"])
    hidden = torch.randn(3, 4, 5)
    meta = KVBatchMeta(partition, "train", IDS, sequence_lengths=LENGTHS)
    client.put_samples(IDS, partition, {"input_ids": CUT, "hidden": hidden})
    assert same(client.get_samples(IDS, partition, ["hidden"])["hidden"], hidden)
    write_columns(client, meta, {"hidden": hidden + 1})
    assert same(client.get_samples(IDS, partition, ["hidden"])["hidden"], hidden + 1)
