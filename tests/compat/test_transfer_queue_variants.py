"""Rows of one field that differ in dtype, kind or dimensions: they are in two columns, and count as one field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import dataplane.compat.transfer_queue as tq
from dataplane import DataPlaneClient, FieldSpec, connect
from dataplane.client.operations.partitions import ask
from dataplane.core.schema import VARIANTS
from dataplane.errors import FieldNotProducedError, SchemaError
from dataplane.ledger import commands as c

pytestmark = pytest.mark.integration


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlaneClient]:
    """A client of the service that `tq` uses."""
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tq.init({"controller": {"polling_mode": True}, "dataplane": {"capacity_bytes": 32 << 20, "http_port": 0}})
    with connect(tq.get_client().config.address or "") as client:
        yield client
    tq.close()


def rows_of(key: str, partition: str = "p") -> torch.Tensor:
    [row] = tq.kv_batch_get(key, partition, "x")["x"].unbind()
    return row


def test_a_row_is_of_the_dtype_it_was_put_with(native: DataPlaneClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.tensor([1, 2], dtype=torch.int64)})
    tq.kv_put("c", "p", {"x": torch.ones(1, dtype=torch.bfloat16)})
    assert [rows_of(key).dtype for key in "abc"] == [torch.float32, torch.int64, torch.bfloat16]
    tq.kv_put("b", "p", {"x": torch.zeros(3)})
    together = tq.kv_batch_get(["b", "a"], "p", "x")["x"]
    assert together.dtype == torch.float32
    assert [row.tolist() for row in together.unbind()] == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_fit_a_field_that_a_native_client_declared_go_there(native: DataPlaneClient, count: int) -> None:
    dense = FieldSpec("dense", "float32", (3,))  # type: ignore[arg-type]
    native.register_partition("p", {"x": dense}, None, [])
    keys = ["a", "b"][:count]
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.ones(count, 3)}, batch_size=count))
    assert native.get_samples(keys, "p", ["x"])["x"].tolist() == [[1, 1, 1]] * count
    tq.kv_batch_put(keys, "p", TensorDict({"x": torch.ones(count, 4)}, batch_size=count))
    assert [rows_of(key).tolist() for key in keys] == [[1, 1, 1, 1]] * count


def test_two_columns_count_as_one_field(native: DataPlaneClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3), "y": torch.ones(2)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.ones(2, 2, dtype=torch.int64)})
    assert native.list_samples("p").fields == ["x", "y"]
    [found] = [each for each in native.stats().partitions if each.partition == "p"]
    assert found.produced == {"x": 2, "y": 2}
    assert native.matrix("p").produced.keys() == {"x", "y"}
    shown: c.Shown = native.show_sample("b", "p")
    assert {cell.field for cell in shown.cells} == {"x", "y"}
    assert shown.missing == ()
    with pytest.raises(FieldNotProducedError, match="'x'"):
        native.get_samples(["b"], "p", ["x"])
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").size == 2


def test_what_takes_the_place_of_a_row_frees_its_memory(native: DataPlaneClient) -> None:
    def live_bytes() -> int:
        return next(each.live_bytes for each in native.stats().partitions if each.partition == "p")

    tq.kv_put("a", "p", {"x": torch.ones(1000)})
    tq.kv_put("b", "p", {"x": torch.ones(100_000)})
    before = live_bytes()
    tq.kv_put("b", "p", {"x": torch.tensor(1)})
    assert live_bytes() < before - 300_000
    tq.kv_put("b", "p", {"x": torch.ones(500, 500)})
    assert live_bytes() > before
    tq.kv_put("b", "p", {"x": torch.ones(1)})
    assert live_bytes() < before - 300_000
    tq.kv_clear(["a", "b"], "p")
    assert live_bytes() == 0


def test_a_field_is_of_one_column_again_when_the_rows_before_are_gone(native: DataPlaneClient) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(3)})
    tq.kv_put("b", "p", {"x": torch.ones(2, 2)})
    tq.kv_clear("a", "p")
    tq.kv_batch_put(["b", "c"], "p", TensorDict({"x": torch.zeros(2, 2, 2)}, batch_size=2))
    assert [tuple(row.shape) for row in native.get_samples(["b", "c"], "p", ["x"])["x"]] == [(2, 2), (2, 2)]
    located: c.Located = native.perform(
        ask, c.Locate(partition="p", samples=c.Samples(ids=("b", "c")), fields=("x",), missing_ok=True)
    )
    assert [found.name for found in located.fields] == ["x"]


def test_a_checkpoint_has_both_columns(native: DataPlaneClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.tensor([[5]])})
    tq.save_checkpoint(tmp_path / "c")
    tq.kv_clear(["a", "b"], "p")
    tq.load_checkpoint(tmp_path / "c")
    assert [rows_of(key).tolist() for key in "ab"] == [[1, 1, 1], [[5]]]
    tq.kv_put("b", "p", {"x": torch.zeros(1)})
    assert rows_of("b").tolist() == [0]


def test_a_strict_schema_has_no_other_column(native: DataPlaneClient) -> None:
    native.register_partition("s", ["x"], None, [], strict=True)
    tq.kv_put("a", "s", {"x": torch.ones(2)})
    for fields in ({"x": torch.ones(2).bool()}, {"y": torch.ones(2)}):
        with pytest.raises(SchemaError, match="strict"):
            tq.kv_put("a", "s", fields)


def test_the_meta_of_such_rows_says_what_is_known(native: DataPlaneClient) -> None:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    tq.kv_put("b", "p", {"x": torch.ones(2, 2)})
    meta = client.kv_retrieve_meta(["a", "b"], "p")
    assert meta.is_ready
    assert meta.field_schema["x"]["is_nested"] is True
    assert meta.get_shapes("x") == [(3,), None]
    assert client.kv_retrieve_meta("b", "p").field_names == ["x"]
    assert VARIANTS not in str(meta)
