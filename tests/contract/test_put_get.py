"""What is put comes back, bit for bit, or the call says why not and nothing is stored."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane import DataPlaneClient, FieldSpec, KVBatchMeta, Shared
from dataplane.errors import (
    FieldNotFoundError,
    FieldNotProducedError,
    InvalidRequestError,
    PartitionNotFoundError,
    SampleExistsError,
    SampleNotFoundError,
    SchemaError,
    UnsupportedValueError,
)
from tests.restarts import wait_until

from .values import DTYPES, random_tensor, same, same_rows

pytestmark = pytest.mark.integration


def ids(count: int, prefix: str = "s") -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


@pytest.fixture(autouse=True)
def _registered(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["input_ids"], None, ["train"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fields": [torch.zeros(2)]}, "fields.*list"),
        ({"fields": torch.zeros(2)}, "fields.*Tensor"),
        ({"fields": "x"}, "fields.*str"),
        ({"tags": ["a", "b"]}, "tags.*str"),
        ({"tags": [{"n": 1}, None]}, "tags.*row 1.*NoneType"),
        ({"tags": [{1: 1}, {}]}, "tags.*names"),
        ({"tags": 5}, "tags.*int"),
        ({"fields": [torch.zeros(2)], "mode": "append"}, "fields.*list"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(
    client: DataPlaneClient, partition: str, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(TypeError, match=named):
        client.put_samples(["a", "b"], partition, **arguments)
    assert client.list_samples(partition).size == 0


def test_a_put_of_neither_fields_nor_tags_makes_samples(client: DataPlaneClient, partition: str) -> None:
    assert client.put_samples(["a"], partition).fields is None
    assert client.put_samples(["a"], partition, {}, mode="update").size == 1
    client.put_samples(["b"], partition, TensorDict({}, batch_size=[]))
    assert client.list_samples(partition).sample_ids == ["a", "b"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_dense_and_jagged(client: DataPlaneClient, partition: str, dtype: torch.dtype) -> None:
    dense = random_tensor((4, 3), dtype)
    strided = random_tensor((4, 6), dtype, seed=1)[:, ::2]
    jagged = [random_tensor((length, 2), dtype, seed=length) for length in (3, 0, 5, 1)]
    client.put_samples(ids(4), partition, {"dense": dense, "strided": strided, "rows": jagged})
    back = client.get_samples(ids(4), partition, ["dense", "strided", "rows"])
    assert same(back["dense"], dense)
    assert same(back["strided"], strided)
    assert back["rows"].is_nested
    assert same_rows(back["rows"], jagged)


def test_jagged_stays_nested_for_one_row_and_equal_and_empty_rows(client: DataPlaneClient, partition: str) -> None:
    equal = [torch.arange(4) + n for n in range(3)]
    client.put_samples(ids(3), partition, {"input_ids": equal, "empty": [torch.zeros(0)] * 3})
    whole = client.get_samples(ids(3), partition, ["input_ids", "empty"])
    one = client.get_samples(["s1"], partition, ["input_ids", "empty"])
    for td in (whole, one):
        assert td["input_ids"].is_nested
        assert td["empty"].is_nested
    assert same_rows(one["input_ids"], equal[1:2])
    assert whole["empty"].offsets().tolist() == [0, 0, 0, 0]


def test_columns_of_equal_lengths_combine(client: DataPlaneClient, partition: str) -> None:
    rows = [torch.ones(2), torch.ones(5)]
    client.put_samples(ids(2), partition, {"a": rows, "b": [2 * row for row in rows]})
    td = client.get_samples(ids(2), partition, ["a", "b"])
    assert same_rows(td["a"] + td["b"], [3 * row for row in rows])


def test_a_subset_in_another_order(client: DataPlaneClient, partition: str) -> None:
    rows = [torch.full((n + 1,), n) for n in range(10)]
    client.put_samples(ids(10), partition, {"input_ids": rows, "x": torch.arange(10)})
    chosen = [7, 1, 9, 0]
    td = client.get_samples([f"s{n}" for n in chosen], partition, ["input_ids", "x"])
    assert td["x"].tolist() == chosen
    assert same_rows(td["input_ids"], [rows[n] for n in chosen])


def test_objects_and_ragged(client: DataPlaneClient, partition: str) -> None:
    values: list[Any] = [{"a": [1, 2.5, None]}, ("x", b"y"), "text", 10**30]
    images = [torch.rand(2, 3), torch.rand(4, 1), torch.rand(0, 7), torch.rand(1, 1)]
    fields = {"notes": np.array(values, dtype=object), "images": images}
    client.put_samples(ids(4), partition, fields)
    td = client.get_samples(ids(4), partition, ["notes", "images"])
    assert list(td["notes"]) == values
    assert same_rows(td["images"], images)


def test_tensordict_with_non_tensor_stack(client: DataPlaneClient, partition: str) -> None:
    td = TensorDict({"x": torch.arange(3), "names": NonTensorStack("a", "b", "c")}, batch_size=[3])
    client.put_samples(ids(3), partition, td)
    back = client.get_samples(ids(3), partition, ["names", "x"])
    assert list(back["names"]) == ["a", "b", "c"]
    assert same(back["x"], torch.arange(3))


def test_a_bare_non_tensor_leaf_is_refused(client: DataPlaneClient, partition: str) -> None:
    td = TensorDict({"x": torch.arange(3), "name": NonTensorData("a", batch_size=[3])}, batch_size=[3])
    with pytest.raises(TypeError, match="non-tensor"):
        client.put_samples(ids(3), partition, td)
    assert client.list_samples(partition).size == 0


def test_shared_values_are_stored_once(client: DataPlaneClient, partition: str) -> None:
    prompt = [torch.arange(100_000), torch.arange(50_000)]
    index = [0, 0, 1, 0, 1, 1, 0, 0]
    client.put_samples(ids(8), partition, {"prompt": Shared(prompt, index), "x": torch.arange(8)})
    td = client.get_samples(ids(8), partition, ["prompt", "x"])
    assert same_rows(td["prompt"], [prompt[n] for n in index])
    (stats,) = [part for part in client.stats().partitions if part.partition == partition]
    assert stats.live_bytes < 1.1 * sum(row.nbytes for row in prompt)


def test_gradients_do_not_matter(client: DataPlaneClient, partition: str) -> None:
    value = torch.rand(3, 2, requires_grad=True)
    client.put_samples(ids(3), partition, {"value": value})
    back = client.get_samples(ids(3), partition, ["value"])["value"]
    assert same(back, value)
    assert not back.requires_grad


def test_dense_into_a_jagged_field_is_rows_of_one_length(client: DataPlaneClient, partition: str) -> None:
    value = torch.arange(12).reshape(3, 4)
    client.put_samples(ids(3), partition, {"input_ids": value})
    assert same_rows(client.get_samples(ids(3), partition, ["input_ids"])["input_ids"], list(value))


def test_nested_rows_of_one_length_fit_a_dense_field(client: DataPlaneClient, partition: str) -> None:
    value = torch.arange(12).reshape(3, 4)
    client.put_samples(ids(3), partition, {"vectors": value})
    client.put_samples(
        ids(2), partition, {"vectors": torch.nested.as_nested_tensor([value[1], value[2]], layout=torch.jagged)}
    )
    nested = torch.nested.nested_tensor([value[0], value[0]], layout=torch.jagged)
    client.put_samples(ids(3)[1:], partition, {"vectors": nested})
    assert same(client.get_samples(ids(3), partition, ["vectors"])["vectors"], value[[1, 0, 0]])
    client.register_partition(partition, {"vectors": FieldSpec("dense")}, None, [])
    rows = torch.nested.nested_tensor([value[0], value[0][:3]], layout=torch.jagged)
    with pytest.raises(SchemaError, match=r"shapes \[4\] \(row 0\) and \[3\] \(row 1\)"):
        client.put_samples(ids(2), partition, {"vectors": rows})


def test_views_without_copying(client: DataPlaneClient, partition: str) -> None:
    value = torch.rand(16, 8)
    rows = [torch.arange(n) for n in range(16)]
    meta = client.put_samples(ids(16), partition, {"value": value, "input_ids": rows})
    td = client.get_samples(meta, partition, ["value", "input_ids"], copy=False)
    client.clear_samples(meta, partition)
    client.put_samples(ids(16), partition, {"value": torch.zeros(16, 8), "input_ids": rows})
    assert same(td["value"], value)
    assert same_rows(td["input_ids"], rows)


def test_the_meta_of_a_put_of_no_samples_names_its_fields(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, ["known"], None, [])
    values = {"known": [], "unknown": [], "dense": torch.zeros(0, 3), "text": np.array([], object)}
    meta = client.put_samples([], partition, values)
    assert meta.fields == list(values)
    assert client.put_samples([], partition, {"unknown": []}).fields == ["unknown"]
    assert client.put_samples([], partition, {}).fields is None
    assert client.put_samples([], partition, tags=[]).fields is None


# --- what is missing ------------------------------------------------------------------------------------------


def test_missing_things_are_named(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(ids(2), partition, {"x": torch.arange(2)})
    client.put_samples(["s1"], partition, {"y": torch.arange(1)})
    with pytest.raises(PartitionNotFoundError, match="nowhere"):
        client.get_samples(ids(2), "nowhere", ["x"])
    with pytest.raises(SampleNotFoundError, match="s7"):
        client.get_samples(["s0", "s7"], partition, ["x"])
    with pytest.raises(FieldNotFoundError, match="zzz"):
        client.get_samples(["s0"], partition, ["zzz"])
    with pytest.raises(FieldNotProducedError, match=r"'y'.*'s0'"):
        client.get_samples(ids(2), partition, ["x", "y"])
    with pytest.raises(KeyError):
        client.get_samples(["s7"], partition, ["x"])


def test_get_data_needs_fields(client: DataPlaneClient, partition: str) -> None:
    meta = client.put_samples(ids(2), partition, {"x": torch.arange(2)})
    assert client.get_data(meta)["x"].tolist() == [0, 1]
    tagged = client.put_samples(ids(2), partition, tags=[{"a": 1}] * 2)
    with pytest.raises(ValueError, match="select_fields"):
        client.get_data(tagged)


# --- modes, tags, refusals ------------------------------------------------------------------------------------


def test_modes(client: DataPlaneClient, partition: str) -> None:
    with pytest.raises(SampleNotFoundError, match="s0"):
        client.put_samples(ids(2), partition, {"x": torch.arange(2)}, mode="update")
    client.put_samples(ids(2), partition, {"x": torch.arange(2)}, mode="create")
    with pytest.raises(SampleExistsError, match="s1"):
        client.put_samples(["s1", "s2"], partition, {"x": torch.arange(2)}, mode="create")
    with pytest.raises(ValueError, match="mode"):
        client.put_samples(ids(2), partition, {"x": torch.arange(2)}, mode="replace")
    client.put_samples(["s1", "s2"], partition, {"x": torch.tensor([10, 20])})
    assert client.get_samples(ids(3), partition, ["x"])["x"].tolist() == [0, 10, 20]


def test_refused_puts_leave_nothing(client: DataPlaneClient, partition: str) -> None:
    x = torch.arange(4, dtype=torch.float32)
    client.register_partition(partition, {"x": FieldSpec("dense", "float32", ())}, None, [])
    client.put_samples(ids(4), partition, {"x": x})
    before = client.stats().units[0].live_bytes
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"sample_ids": ["a", "a"], "fields": {"x": x[:2]}}, ValueError),
        ({"sample_ids": ["a", "b", "c"], "fields": {"x": x[:2]}}, ValueError),
        ({"sample_ids": ["a", "b"], "fields": {"x": x[:2]}, "tags": [{}]}, ValueError),
        ({"sample_ids": ["a", "b"], "fields": {"x": x[:2].double()}}, ValueError),
        ({"sample_ids": ["a", "b"], "fields": {"x": x.reshape(2, 2)}}, ValueError),
        ({"sample_ids": ["a", "b"], "fields": {"x": [x[:1], x[:2]]}}, ValueError),
        ({"sample_ids": ["a", "b"], "fields": {"y": [object(), object()]}}, TypeError),
        ({"sample_ids": ["a", 7], "fields": {"x": x[:2]}}, TypeError),
        ({"sample_ids": ["a", "b"], "fields": {"x": x[:2]}, "tags": [{"t": object()}, {}]}, TypeError),
    ]
    for arguments, kind in refused:
        with pytest.raises(kind):
            client.put_samples(partition_id=partition, **arguments)
    assert client.list_samples(partition).sample_ids == ids(4)
    assert client.stats().units[0].live_bytes == before
    wait_until(lambda: client.stats().units[0].reserved_bytes == 0, "space of clients that are gone goes back, too")


def test_a_field_that_differs_says_both(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, {"x": FieldSpec("dense")}, None, [])
    client.put_samples(ids(2), partition, {"x": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match=r"'x'.*float64.*float32"):
        client.put_samples(["t0"], partition, {"x": torch.zeros(1, 3, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"'x'.*\[4\].*\[3\]"):
        client.put_samples(["t0"], partition, {"x": torch.zeros(1, 4)})
    client.clear_samples(ids(2), partition)
    client.put_samples(["t0"], partition, {"x": torch.zeros(1, 4, dtype=torch.float64)})


def test_a_put_says_its_tags_as_they_are_stored(client: DataPlaneClient, partition: str) -> None:
    meta = client.put_samples(ids(1), partition, tags=[{"n": torch.tensor(2), "f": np.float32(0.1), "b": np.True_}])
    assert meta.tags == client.list_samples(partition).tags
    assert meta.tags is not None
    assert [type(value) for value in meta.tags[0].values()] == [int, float, bool]


def test_tags_merge(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(ids(2), partition, {"x": torch.arange(2)}, tags=[{"a": 1, "b": "x"}, {"a": 2.5}])
    client.put_samples(ids(2), partition, tags=[{"b": None}, {"c": True}])
    client.put_samples(ids(2), partition, {"x": torch.arange(2)})
    client.set_tags(["s0"], partition, [{"a": 7}])
    assert client.list_samples(partition).tags == [{"a": 7, "b": None}, {"a": 2.5, "c": True}]
    with pytest.raises(KeyError, match="s9"):
        client.set_tags(["s0", "s9"], partition, [{"a": 1}, {"a": 1}])
    assert client.list_samples(partition).tags[0]["a"] == 7


def test_lengths_ride_on_the_meta(client: DataPlaneClient, partition: str) -> None:
    rows = [torch.arange(n) for n in (3, 1, 2)]
    assert client.put_samples(ids(3), partition, {"input_ids": rows}).sequence_lengths == [3, 1, 2]
    two = client.put_samples(ids(3), partition, {"input_ids": rows, "other": [torch.arange(2)] * 3})
    assert two.sequence_lengths is None


def test_the_meta_of_a_put_has_the_lengths_of_its_tags(client: DataPlaneClient, partition: str) -> None:
    fields = {"input_ids": [torch.arange(3), torch.arange(1)], "patches": [torch.ones(2, 4), torch.ones(5, 4)]}
    tags = [{"input_lengths": 3}, {"input_lengths": 1}]
    meta = client.put_samples(ids(2), partition, fields, tags)
    assert meta.sequence_lengths == client.list_samples(partition).sequence_lengths == [3, 1]
    meta = client.put_samples(meta, partition, {"advantages": torch.ones(2, 3)})
    assert [len(row) for row in client.get_samples(ids(2), partition, ["advantages"])["advantages"].unbind()] == [3, 1]


def test_get_batch_pads_jagged_fields_only(client: DataPlaneClient, partition: str) -> None:
    rows = [torch.arange(1, n + 1) for n in (3, 0, 2)]
    meta = client.put_samples(ids(3), partition, {"input_ids": rows, "x": torch.rand(3, 2), "o": ["a", "b", "c"]})
    batch = client.get_batch(meta, pad_value_dict={"input_ids": 9}, pad_to_seqlen=4)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [9, 9, 9, 9], [1, 2, 9, 9]]
    assert batch["x"].shape == (3, 2)
    assert list(batch["o"]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"input_ids.*longest row has 3"):
        client.get_batch(meta, ["input_ids"], pad_to_seqlen=2)
    assert client.get_batch(meta, ["input_ids"], layout="jagged")["input_ids"].is_nested


@pytest.mark.parametrize("patches", [(12, 1, 2), (1, 2, 2)])
def test_get_batch_pads_what_is_not_per_token_to_its_own_longest_row(
    client: DataPlaneClient, partition: str, patches: tuple[int, ...]
) -> None:
    """Images with more patches than their sample has tokens, and with fewer."""
    tokens = [torch.arange(n) for n in (3, 1, 2)]
    images = [torch.ones(n, 4) for n in patches]
    meta = client.put_samples(ids(3), partition, {"input_ids": tokens, "score": tokens, "image": images})
    for known in (None, [3, 1, 2]):
        meta = dataclasses.replace(meta, sequence_lengths=known)
        batch = client.get_batch(meta, ["input_ids", "score", "image"], pad_to_seqlen=6)
        shapes = [tuple(batch[name].shape) for name in ("input_ids", "score", "image")]
        assert shapes == [(3, 6), (3, 6), (3, max(patches), 4)]
    assert client.get_batch(meta, ["image"], pad_to_seqlen=6)["image"].shape == (3, max(patches), 4)
    for wrong in ([0], 0.5, "x"):
        with pytest.raises(ValueError, match=r"pad_value_dict=.*: expected a mapping of"):
            client.get_batch(meta, ["image"], pad_value_dict=wrong)  # type: ignore[arg-type]


def test_a_declared_spec_decides(client: DataPlaneClient, partition: str) -> None:
    client.register_partition(partition, {"tokens": FieldSpec("jagged", torch.int64, ())}, None, [])
    client.put_samples(ids(2), partition, {"tokens": torch.zeros(2, 3, dtype=torch.int64)})
    assert client.get_samples(ids(2), partition, ["tokens"])["tokens"].is_nested
    with pytest.raises(ValueError, match=r"int32.*int64"):
        client.put_samples(["t0"], partition, {"tokens": torch.zeros(1, 3, dtype=torch.int32)})


@pytest.mark.parametrize("with_handles", [True, False])
def test_a_meta_of_another_partition_is_refused_with_both_names(
    client: DataPlaneClient, partition: str, with_handles: bool
) -> None:
    other = f"{partition} other"
    client.register_partition(other, ["x"], None, ["train"])
    for name, value in ((partition, 1.0), (other, 2.0)):
        for _ in range(2):  # the second time the short way
            meta = client.put_samples(["a"], name, {"x": torch.tensor([value])}, tags=[{"n": 1}])
            assert client.get_samples(["a"], name, ["x"])["x"].item() == value
    foreign = meta if with_handles else KVBatchMeta(other, None, ["a"])
    row = {"x": torch.zeros(1)}
    for call in (
        lambda: client.put_samples(foreign, partition, row, tags=[{"n": 2}]),
        lambda: client.put_samples(foreign, partition, tags=[{"n": 2}]),
        lambda: client.put_samples(foreign, partition, row, mode="append"),
        lambda: client.get_samples(foreign, partition, ["x"]),
        lambda: client.get_samples(foreign, partition, ["x"], copy=False),
        lambda: client.set_tags(foreign, partition, [{"n": 2}]),
        lambda: client.clear_samples(foreign, partition),
    ):
        both = f"of partition {other!r}, and the call names partition {partition!r}"
        with pytest.raises(InvalidRequestError, match=both):
            call()
    for name, value in ((partition, 1.0), (other, 2.0)):
        assert client.get_samples(["a"], name, ["x"])["x"].item() == value
        assert client.list_samples(name).tags == [{"n": 1}]


@pytest.mark.parametrize("name", [["p"], {"p": 1}, 5, b"p", None])
def test_a_partition_or_task_that_is_no_string_is_refused_with_its_value(
    client: DataPlaneClient, partition: str, name: Any
) -> None:
    row = {"x": torch.zeros(1)}
    meta = client.put_samples(["a"], partition, row)
    calls = {
        "partition_id": [
            lambda: client.register_partition(name, ["x"], None, []),
            lambda: client.put_samples(["a"], name, row),
            lambda: client.put_samples(["a"], name, row, mode="append"),
            lambda: client.put_samples(meta, name, row),
            lambda: client.put_samples(["a"], name, tags=[{"n": 1}]),
            lambda: client.get_samples(["a"], name, ["x"]),
            lambda: client.get_samples(meta, name, ["x"]),
            lambda: client.claim_meta(name, "train", ["x"], 1, timeout_s=0),
            lambda: client.why_blocked(name, "train"),
            lambda: client.check_consumption_status(name, ["train"]),
            lambda: client.clear_samples(["a"], name),
            lambda: client.clear_samples(None, name),
            lambda: client.set_tags(["a"], name, [{"n": 1}]),
            lambda: client.list_samples(name),
            lambda: client.seal(name),
            lambda: client.set_version(name, 1),
            lambda: client.matrix(name),
            lambda: KVBatchMeta(name, None, ["a"]),
        ],
        "task_name": [
            lambda: client.claim_meta(partition, name, ["x"], 1, timeout_s=0),
            lambda: client.why_blocked(partition, name),
        ],
        "sample_id": [lambda: client.show_sample(name, partition)],
    }
    if name is not None:
        calls["partition_id"].append(lambda: client.show_sample("a", name))
        calls["task_name"].append(lambda: KVBatchMeta(partition, name, ["a"]))
    for argument, refused in calls.items():
        kind = "" if name is None else f"{type(name).__name__} "
        message = f"argument {argument}: {kind}{name!r} is not supported here. Pass a string."
        for call in refused:
            with pytest.raises(UnsupportedValueError, match=re.escape(message)):
                call()
    assert client.list_samples(partition).sample_ids == ["a"]


@pytest.mark.parametrize("names", [5, [None], [b"tokens"]])
def test_names_that_are_no_strings_are_refused_with_their_value(
    client: DataPlaneClient, partition: str, names: Any
) -> None:
    client.register_partition(partition, ["x"], None, ["train"])
    meta = client.put_samples(["a"], partition, {"x": torch.zeros(1)})
    refused = names[0] if isinstance(names, list) else names
    for call in (
        lambda: client.claim_meta(partition, "train", names, 1, timeout_s=0),
        lambda: client.get_samples(["a"], partition, names),
        lambda: client.get_samples(["a"], partition, names, inner={"x": slice(1)}),
        lambda: client.get_batch(meta, names),
        lambda: client.register_partition(f"{partition} more", ["x"], None, names),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{refused!r} is not supported here")):
            call()
    for call in (
        lambda: client.put_samples(["b"], partition, {5: torch.zeros(1)}),  # type: ignore[dict-item]
        lambda: client.register_partition(f"{partition} more", [5], None, []),  # type: ignore[list-item]
    ):
        with pytest.raises(InvalidRequestError, match="field names must be non-empty strings, got 5"):
            call()


@pytest.mark.parametrize(
    ("enums", "why"),
    [
        ("ab", "enums='ab': pass a mapping"),
        (["a"], "pass a mapping of tag names"),
        ({"k": "ab"}, "pass a list of names, not one string"),
        ({"k": [0]}, "enums.*k.*row 0: int 0 is not supported"),
        ({"k": None}, "None is not supported"),
        ({0: ["a"]}, "enums, row 0: int 0 is not supported"),
    ],
)
def test_enums_that_are_no_lists_of_texts_are_refused(
    client: DataPlaneClient, partition: str, enums: Any, why: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        client.register_partition(partition, ["x"], None, ["train"], enums=enums)
