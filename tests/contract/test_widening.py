"""Fields that nobody declared: batches of any shapes can follow each other, and readers get the kind that fits all."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane import DataPlaneClient, FieldSpec
from dataplane.errors import InvalidRequestError, SchemaError

from .values import rows_of, same, same_rows

pytestmark = pytest.mark.integration


@pytest.fixture
def bare(client: DataPlaneClient, partition: str) -> str:
    """A partition that declares no field."""
    client.register_partition(partition, [], None, ["train"])
    return partition


def filled(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, value)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


BATCHES: dict[str, list[Any]] = {
    "images of one size, then of others": [
        [filled(3, 8, 8), filled(3, 8, 8)],
        [filled(3, 5, 9), filled(3, 9, 5)],
        [filled(3, 8, 8), filled(1, 2, 2)],
    ],
    "one tensor, then lists": [filled(2, 4), [filled(3), filled(5)], filled(2, 7)],
    "lists, then a tensor of another inner shape": [[filled(2, 4), filled(1, 4)], filled(2, 3, 5)],
    "nested with another inner shape": [nested([filled(2, 4), filled(3, 4)]), nested([filled(2, 5), filled(1, 5)])],
    "nested in the last dimension": [
        torch.nested.nested_tensor([filled(4, 7), filled(4, 7)], layout=torch.jagged),
        torch.nested.nested_tensor([filled(4, 9), filled(4, 2)], layout=torch.jagged),
    ],
    "scalars, then rows": [filled(2), [filled(3), filled(2)], filled(2)],
    "rows, then scalars": [[filled(3), filled(2)], filled(2)],
    "rows, then numbers": [[filled(3), filled(2)], [1.0, 1], filled(2)],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("declared", [[], ["x"], {"x": FieldSpec(dtype="float32")}], ids=["no", "name", "dtype"])
def test_no_put_fails_because_of_the_batch_that_came_first(
    client: DataPlaneClient, partition: str, batches: list[Any], declared: Any
) -> None:
    client.register_partition(partition, declared, None, ["train"])
    expected: list[torch.Tensor] = []
    for number, batch in enumerate(batches):
        ids = [f"{number}-0", f"{number}-1"]
        client.put_samples(ids, partition, {"x": batch, "y": torch.tensor([number, number])})
        expected += [torch.as_tensor(row, dtype=torch.float32) for row in rows_of(batch)]
    names = [f"{number}-{row}" for number in range(len(batches)) for row in range(2)]
    meta = client.list_samples(partition)
    for order in (names, names[::-1], names[:2], names[-2:]):
        rows = [expected[names.index(name)] for name in order]
        columns = client.get_samples(order, partition, ["y", "x"])
        assert list(columns.keys()) == ["y", "x"]
        assert columns["y"].tolist() == [int(name[0]) for name in order]
        assert same_rows(columns["x"].tolist() if hasattr(columns["x"], "tolist") else columns["x"], rows)
        views = client.get_samples(order, partition, ["x"], copy=False)["x"]
        assert same_rows(views.tolist() if hasattr(views, "tolist") else views, rows)
    batch = client.get_batch(meta, ["x", "y"])
    assert same_rows(list(batch["x"]), expected)
    # The claims of a task count rows of both kinds.
    claimed = client.claim_meta(partition, "train", ["x"], len(names), timeout_s=30)
    assert claimed.sample_ids == names


def test_rows_can_be_overwritten_by_rows_of_the_other_kind(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a", "b"], bare, {"x": filled(2, 4)})
    client.put_samples(["b"], bare, {"x": [filled(2, 2)]})
    client.put_samples(["a"], bare, {"x": [filled(9, value=3.0)]})
    client.put_samples(["b"], bare, {"x": filled(1, 4, value=2.0)})
    stored = list(client.get_samples(["a", "b"], bare, ["x"])["x"].tolist())
    assert same_rows(stored, [filled(9, value=3.0), filled(4, value=2.0)])


def test_the_first_kind_returns_when_the_wider_rows_are_gone(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a", "b"], bare, {"x": filled(2, 4)})
    client.put_samples(["c"], bare, {"x": [filled(2, 2)]})
    client.clear_samples(["c"], bare)
    assert same(client.get_samples(["a", "b"], bare, ["x"])["x"], filled(2, 4))
    client.put_samples(["d"], bare, {"x": [filled(7)]})
    assert same_rows(list(client.get_samples(["d", "b"], bare, ["x"])["x"].tolist()), [filled(7), filled(4)])
    client.clear_samples(["a", "b"], bare)
    assert same_rows(list(client.get_samples(["d"], bare, ["x"])["x"].tolist()), [filled(7)])


@pytest.mark.parametrize("spec", [FieldSpec("jagged"), FieldSpec("dense", "float32", (4,))])
def test_a_declared_field_stays_fixed_and_names_the_remedy(
    client: DataPlaneClient, partition: str, spec: FieldSpec
) -> None:
    client.register_partition(partition, {"x": spec}, None, ["train"])
    first = [filled(2, 4), filled(3, 4)] if spec.kind == "jagged" else filled(2, 4)
    client.put_samples(["a", "b"], partition, {"x": first})
    with pytest.raises(SchemaError, match=r"'x'.*FieldSpec\(\"ragged\"\)"):
        client.put_samples(["c"], partition, {"x": [filled(2, 5)]})
    assert client.list_samples(partition).sample_ids == ["a", "b"]


def test_another_dtype_is_refused(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"x": [filled(2, 4)]})
    with pytest.raises(SchemaError, match="float64"):
        client.put_samples(["b"], bare, {"x": [filled(2, 5).double()]})


def test_a_client_that_knows_the_earlier_kind_puts_and_reads(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], bare: str
) -> None:
    other = open_client()
    client.put_samples(["a"], bare, {"x": [filled(2, 4)]})
    other.put_samples(["b"], bare, {"x": [filled(3, 4)]})
    client.put_samples(["c"], bare, {"x": [filled(2, 5)]})
    other.put_samples(["d"], bare, {"x": [filled(1, 4)]})
    stored = list(other.get_samples(["a", "b", "c", "d"], bare, ["x"])["x"].tolist())
    assert same_rows(stored, [filled(2, 4), filled(3, 4), filled(2, 5), filled(1, 4)])


def test_the_first_read_of_a_wider_kind_is_logged_once(
    client: DataPlaneClient, bare: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.put_samples(["a"], bare, {"x": [filled(2, 4)], "y": filled(1)})
    client.get_samples(["a"], bare, ["x", "y"])
    assert not [record for record in caplog.records if "widened" in record.message]
    client.put_samples(["b"], bare, {"x": [filled(2, 5)]})
    for _ in range(2):
        client.get_samples(["b"], bare, ["x"])
    (record,) = [record for record in caplog.records if "widened" in record.message]
    assert record.levelno == logging.WARNING
    assert "'x'" in record.message


def test_values_cannot_be_appended_to_rows_of_different_shapes(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"x": [filled(2, 4)]})
    with pytest.raises(SchemaError, match="'x'"):  # an append does not widen
        client.put_samples(["a"], bare, {"x": [filled(2, 5)]}, mode="append")
    client.put_samples(["b"], bare, {"x": [filled(2, 5)]})
    with pytest.raises(InvalidRequestError, match=r"append.*'x'"):
        client.put_samples(["a"], bare, {"x": [filled(2, 4)]}, mode="append")
    assert same_rows(list(client.get_samples(["a"], bare, ["x"])["x"].tolist()), [filled(2, 4)])


def test_parts_of_a_field_whose_kind_widened_are_refused(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"x": [filled(2, 4)]})
    client.put_samples(["b"], bare, {"x": [filled(2, 5)]})
    for names in (["a", "b"], ["a"], ["b"]):
        with pytest.raises(InvalidRequestError, match="'x'"):
            client.get_samples(names, bare, ["x"], inner={"x": slice(0, 2)})


def test_a_stale_kind_changes_no_put(
    client: DataPlaneClient, open_client: Callable[[], DataPlaneClient], partition: str
) -> None:
    other = open_client()
    client.register_partition(partition, {"scores": FieldSpec("jagged"), "input_ids": FieldSpec("jagged")}, None, [])
    client.put_samples(["a"], partition, {"scores": [filled(3)]})
    other.clear_samples(None, partition)
    other.register_partition(partition, {"scores": FieldSpec("dense"), "input_ids": FieldSpec("jagged")}, None, [])
    meta = client.put_samples(["a", "b"], partition, {"input_ids": [torch.arange(3), torch.arange(3)]})
    client.put_samples(meta, partition, {"scores": filled(2, 2)})
    assert same(client.get_samples(meta, partition, ["scores"])["scores"], filled(2, 2))


def test_rows_narrower_than_their_samples_are_not_per_token(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"scores": [filled(3)], "input_ids": [torch.arange(3)]})
    meta = client.put_samples(["b", "c"], bare, {"input_ids": [torch.arange(3), torch.arange(4)]})
    client.put_samples(meta, bare, {"scores": filled(2, 2)})
    assert same_rows(client.get_samples(meta, bare, ["scores"])["scores"], [filled(2), filled(2)])


@pytest.mark.parametrize("declared", [[], ["images", "patches", "routed_experts", "input_ids"]])
def test_standard_names_have_their_kind_from_the_first_batch(
    client: DataPlaneClient, partition: str, declared: Any
) -> None:
    client.register_partition(partition, declared, None, ["train"])
    fields = {
        "images": filled(2, 3, 8, 8),
        "patches": filled(2, 5, 3, 14, 14),
        "routed_experts": torch.ones(2, 6, 4, 2, dtype=torch.int64),
        "input_ids": torch.ones(2, 6, dtype=torch.int64),
    }
    meta = client.put_samples(["a", "b"], partition, fields)
    columns = client.get_samples(meta, partition, list(fields))
    assert same_rows(columns["images"].tolist(), list(filled(2, 3, 8, 8)))
    assert all(columns[name].is_nested for name in ("patches", "routed_experts", "input_ids"))
    client.put_samples(meta, partition, {"patches": filled(2, 5, 3, 14, 14)})  # not cut to the samples' tokens
    assert same_rows(client.get_samples(meta, partition, ["patches"])["patches"], list(filled(2, 5, 3, 14, 14)))


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((2, 3, 2), (2, 5))])
def test_no_put_fails_while_others_put_other_shapes_and_clear(
    client: DataPlaneClient, bare: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """The field is empty in between, so its kind is another one at each moment."""

    def work(number: int) -> None:
        names = [f"{number}-a", f"{number}-b"]
        for _ in range(25):
            client.put_samples(names, bare, {"x": [*filled(*shapes[number])]})
            client.clear_samples(names, bare)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


# --- plain numbers


@pytest.mark.parametrize("declare", [True, False])
def test_plain_numbers_become_a_tensor_where_the_field_is_dense(
    client: DataPlaneClient, partition: str, declare: bool
) -> None:
    fields = {"reward": FieldSpec("dense", "float32", ())} if declare else {}
    client.register_partition(partition, fields, None, ["train"])
    if not declare:
        client.put_samples(["z"], partition, {"reward": filled(1)})
    client.put_samples(["a", "b", "c"], partition, {"reward": [0.5, 1, True]})
    assert same(client.get_samples(["a", "b", "c"], partition, ["reward"])["reward"], torch.tensor([0.5, 1.0, 1.0]))
    client.put_samples(["a"], partition, {"reward": [np.float32(0.5)]})
    for number in (1e39, (1 << 24) + 1):
        with pytest.raises(SchemaError, match=rf"'reward'.*the number {re.escape(repr(number))} \(row 1\).*float32"):
            client.put_samples(["d", "e"], partition, {"reward": [0.0, number]})
    with pytest.raises(SchemaError, match="str"):
        client.put_samples(["d", "e"], partition, {"reward": [0.0, "1.0"]})


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([0.5, 1.0], torch.float32), ([1, 2], torch.int64), ([1, 0], torch.float32), ([True, False], torch.bool)],
)
def test_numbers_that_came_first_are_read_with_a_later_tensor(
    client: DataPlaneClient, bare: str, numbers: list[Any], dtype: torch.dtype
) -> None:
    client.put_samples(["a", "b"], bare, {"x": numbers})
    assert list(client.get_samples(["b", "a"], bare, ["x"])["x"].tolist()) == numbers[::-1]
    client.put_samples(["c"], bare, {"x": torch.ones(1, dtype=dtype)})
    expected = torch.tensor([numbers[1], 1, numbers[0]], dtype=dtype)
    assert same(client.get_samples(["b", "c", "a"], bare, ["x"])["x"], expected)
    assert same(client.get_samples(["b", "a"], bare, ["x"])["x"], expected[[0, 2]])
    client.put_samples(["d"], bare, {"x": numbers[:1]})
    assert same(client.get_samples(["d"], bare, ["x"])["x"], expected[2:])


def test_numbers_then_tensors_then_rows(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"x": [0.5]})
    client.put_samples(["b"], bare, {"x": filled(1)})
    client.put_samples(["c"], bare, {"x": [filled(3)]})
    client.put_samples(["d"], bare, {"x": [2]})
    stored = client.get_samples(["c", "a", "b", "d"], bare, ["x"])["x"].tolist()
    assert same_rows(stored, [filled(3), torch.tensor(0.5), torch.tensor(1.0), torch.tensor(2.0)])


def test_objects_that_are_not_all_numbers_stay_objects(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a", "b"], bare, {"x": [0.5, None], "y": [1, 2]})
    client.put_samples(["c"], bare, {"y": ["three"]})
    for name in ("x", "y"):
        with pytest.raises(SchemaError, match="object"):
            client.put_samples(["d"], bare, {name: torch.ones(1, dtype=torch.int64)})


def test_a_tensor_that_cannot_hold_the_numbers_is_refused(client: DataPlaneClient, bare: str) -> None:
    client.put_samples(["a"], bare, {"x": [0.5]})
    with pytest.raises(SchemaError, match=r"'x'.*int64.*plain numbers"):
        client.put_samples(["b"], bare, {"x": torch.ones(1, dtype=torch.int64)})


def test_a_checkpoint_keeps_both_kinds(client: DataPlaneClient, partition: str, tmp_path: Any) -> None:
    client.register_partition(partition, ["x", "y"], None, ["train"], strict=True)
    client.put_samples(["a", "b"], partition, {"x": filled(2, 4), "y": [1, 2.5]})
    client.put_samples(["c"], partition, {"x": [filled(2, 2)], "y": filled(1)})
    client.checkpoint(tmp_path / "saved", [partition])
    client.restore(tmp_path / "saved", replace=True)
    columns: TensorDict = client.get_samples(["c", "a", "b"], partition, ["x", "y"])
    assert same_rows(columns["x"].tolist(), [filled(2, 2), filled(4), filled(4)])
    assert columns["y"].tolist() == [1.0, 1.0, 2.5]
    client.clear_samples(["c"], partition)
    assert same(client.get_samples(["a", "b"], partition, ["x"])["x"], filled(2, 4))


def test_arrays_of_strings_are_objects_and_lists_of_arrays_are_tensors(client: DataPlaneClient, bare: str) -> None:
    fields = {
        "text": np.array(["x", "yy"]),
        "raw": np.array([b"x", b"yy"]),
        "words": np.array([["a", "b"], ["c", "d"]]),
        "arrays": [np.ones(3, np.float32), np.ones(2, np.float32)],
    }
    client.put_samples(["a", "b"], bare, fields)
    columns = client.get_samples(["a", "b"], bare, list(fields))
    assert columns["text"].tolist() == ["x", "yy"]
    assert columns["raw"].tolist() == [b"x", b"yy"]
    assert [row.tolist() for row in columns["words"].tolist()] == [["a", "b"], ["c", "d"]]
    assert same_rows(columns["arrays"], [filled(3), filled(2)])
