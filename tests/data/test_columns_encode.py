from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.core.checksums import checksums_of
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import Shared, encode_fields
from dataplane.data.jagged import jagged_from_values
from dataplane.errors import InvalidRequestError, SchemaError, UnsupportedValueError
from tests.contract.values import DTYPES
from tests.data.columns_helpers import encode_one, nested_of

DENSE = FieldSpec(FieldKind.DENSE)
JAGGED = FieldSpec(FieldKind.JAGGED)
RAGGED = FieldSpec(FieldKind.RAGGED)
OBJECT = FieldSpec(FieldKind.OBJECT)


@pytest.mark.parametrize(
    ("value", "spec", "expected"),
    [
        (torch.zeros(2), None, "dense float32 inner shape []"),
        (torch.zeros(2, 3), None, "dense float32 inner shape [3]"),
        (torch.zeros(2, 3), FieldSpec(dtype="float32"), "dense float32 inner shape [3]"),
        (torch.zeros(2, 3), JAGGED, "jagged float32 inner shape []"),
        (torch.zeros(2, 3), RAGGED, "ragged float32"),
        (nested_of([torch.zeros(1), torch.zeros(2)]), None, "jagged float32 inner shape []"),
        (nested_of([torch.zeros(1), torch.zeros(2)]), RAGGED, "ragged float32"),
        ([torch.zeros(1, 4), torch.zeros(2, 4)], None, "jagged float32 inner shape [4]"),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], None, "jagged float32 inner shape [4]"),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], DENSE, "dense float32 inner shape [2, 4]"),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], RAGGED, "ragged float32"),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], OBJECT, "object"),
        ([torch.zeros(1, 4), torch.zeros(2, 5)], None, "ragged float32"),
        ([torch.zeros(()), torch.zeros(2)], None, "ragged float32"),
        ([torch.zeros(()), torch.zeros(())], None, "dense float32 inner shape []"),
        ([np.zeros(2), torch.zeros(3, dtype=torch.float64)], None, "jagged float64 inner shape []"),
        (np.zeros((2, 2), dtype=np.uint16), None, "dense uint16 inner shape [2]"),
        (np.array([torch.zeros(1), "x"], dtype=object), None, "object"),
        ([torch.zeros(1), "x"], None, "object"),
        (["x", "y"], None, "object"),
        (("x", 1), None, "object"),
    ],
)
def test_kind_is_declared_or_follows_from_the_type_of_value(value: Any, spec: FieldSpec | None, expected: str) -> None:
    column = encode_one(value, 2, spec)
    assert str(column.spec) == expected
    assert column.spec.settled
    assert len(column.lengths) == len(column.sizes) == 2
    assert column.sizes.tolist() == (column.lengths * column.spec.unit_bytes).tolist()


@pytest.mark.parametrize(
    ("value", "spec", "told"),
    [
        (torch.zeros(2), FieldSpec("dense", "float64", ()), ["dense float32", "float64"]),  # type: ignore[arg-type]
        (torch.zeros(2, 3), FieldSpec("dense", "float32", (4,)), ["[3]", "[4]"]),  # type: ignore[arg-type]
        (torch.zeros(2), JAGGED, ["shape [2]", "jagged"]),
        (nested_of([torch.zeros(1), torch.zeros(2)]), DENSE, ["jagged float32", "dense"]),
        ([torch.zeros(1), torch.zeros(2)], DENSE, ["[1] (row 0)", "[2] (row 1)"]),
        ([torch.zeros(()), torch.zeros(())], JAGGED, ["a row without dimensions (row 0)", "jagged"]),
        (["a", 2.0], DENSE, ["objects", "float", "str", "dense"]),
        (torch.zeros(2), OBJECT, ["tensor (float32)", "object"]),
        (nested_of([torch.zeros(1), torch.zeros(2)]), OBJECT, ["tensor (float32)", "object"]),
    ],
)
def test_what_differs_from_the_schema_is_refused_naming_both(value: Any, spec: FieldSpec, told: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        encode_one(value, 2, spec)
    assert isinstance(caught.value, ValueError)
    for part in ("field 'x' of partition 'train'", *told):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(3), ["3 rows, expected 2"]),
        (["a"], ["1 rows, expected 2"]),
        (torch.zeros(()), ["without dimensions"]),
        (np.array(1.0), ["without dimensions"]),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], ["one dtype", "float32", "int64"]),
        (Shared(["a"], [0, 1]), ["has 1, but its 1 values count from 0"]),
        (Shared(["a"], [0]), ["must be 2 integers"]),
        (Shared(["a"], [0, -1]), ["must be 2 integers"]),
        (Shared(["a"], [0.0, 0.0]), ["must be 2 integers"]),
        (
            jagged_from_values(torch.zeros(4), torch.tensor([0, 2, 4]), lengths=torch.tensor([2, 3])),
            ["outside its values"],
        ),
        (jagged_from_values(torch.zeros(4), torch.tensor([0, 2, 9])), ["outside its values"]),
    ],
)
def test_malformed_values_are_named(value: Any, told: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode_one(value, 2)
    for part in ("field 'x'", *told):
        assert part in str(caught.value)


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "row", "told"),
    [
        (["a", range(2)], 1, "range"),
        ([Color.RED, "a"], 0, "Color"),
        (["a", Number.ONE], 1, "Number"),
        (["a", object()], 1, "object"),
        (NonTensorStack("a", {"k": range(3)}), 1, "range"),
        (torch.zeros(2).to_sparse(), None, "sparse"),
        ([torch.zeros(1), torch.zeros(1).to_sparse()], 1, "sparse"),
        (torch.zeros(2, device="meta"), None, "meta"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), None, "float8_e4m3fnuz"),
        (np.array(["2020", "2021"], dtype="M8[Y]"), None, "datetime64"),
        (np.array([["a", 1], ["b", 2]], dtype=object), None, "[2, 2]"),
        (TensorDict({"a": torch.zeros(2)}, batch_size=[2]), None, "nested"),
        ({"a": torch.zeros(2)}, None, "nested dict"),
        ("ab", None, "str"),
        (None, None, "NoneType"),
        (3.0, None, "float"),
    ],
)
def test_values_no_kind_carries_are_a_type_error_naming_field_row_and_type(
    value: Any, row: int | None, told: str
) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode_one(value, 2)
    assert isinstance(caught.value, TypeError)
    assert caught.value.field == "x"
    assert caught.value.row == row
    assert told in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32], ids=str)
def test_a_dtype_that_no_column_holds_is_refused_with_the_way_out(dtype: torch.dtype) -> None:
    value = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(dtype)
    with pytest.raises(UnsupportedValueError, match=r"x\.view\(torch\.uint8\)"):
        encode_one(value, 2)
    encode_one(value.view(torch.uint8), 2)


def test_bare_non_tensor_data_is_refused() -> None:
    fields = TensorDict({"ok": torch.zeros(2)}, batch_size=[2])
    fields["x"] = NonTensorData("a string", batch_size=[2])
    with pytest.raises(TypeError, match="non-tensor"):
        encode_fields(fields, rows=2, specs={})


def test_tensordict_must_have_a_row_per_sample() -> None:
    for batch_size in ([], [3]):
        fields = TensorDict({"x": torch.zeros(3)}, batch_size=batch_size)
        with pytest.raises(InvalidRequestError, match="batch_size"):
            encode_fields(fields, rows=2, specs={})
    with pytest.raises(UnsupportedValueError, match="mapping"):
        encode_fields([torch.zeros(2)], rows=2, specs={})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="field names"):
        encode_fields({1: torch.zeros(2)}, rows=2, specs={})  # type: ignore[dict-item]


def test_dtensor_is_refused_with_the_way_out(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(torch.zeros(2, 2), mesh)
        with pytest.raises(UnsupportedValueError, match="full_tensor"):
            encode_one(sharded, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_token_lengths_that_do_not_fit() -> None:
    with pytest.raises(InvalidRequestError, match="but the longest sample has 4 tokens"):
        encode_one(torch.zeros(2, 3), 2, JAGGED, token_lengths=[1, 4])
    with pytest.raises(InvalidRequestError, match="3 lengths for 2 rows"):
        encode_one(torch.zeros(2, 3), 2, JAGGED, token_lengths=[1, 1, 1])
    dense = encode_one(torch.zeros(2, 3), 2, token_lengths=[1, 4])
    assert dense.lengths.tolist() == [1, 1], "a dense column is never cut"


@pytest.mark.parametrize("lengths", [[4, 4], [4, 2], [0, 4]])
def test_padded_rows_that_are_not_contiguous_are_cut_to_their_lengths(lengths: list[int]) -> None:
    padded = torch.arange(24).view(2, 3, 4).transpose(1, 2)  # [rows, tokens, 3]
    column = encode_one(padded, 2, JAGGED, token_lengths=lengths)
    written = np.empty(column.nbytes, np.uint8)
    column.write(0, 2, written)
    rows = [row[:length].flatten() for row, length in zip(padded, lengths, strict=True)]
    assert column.lengths.tolist() == lengths
    assert written.view(np.int64).tolist() == torch.cat(rows).tolist()


def test_empty_list_of_a_field_half_declared() -> None:
    with pytest.raises(InvalidRequestError, match="empty list"):
        encode_one([], 0, JAGGED)


def test_contiguous_values_are_one_buffer_of_the_callers_memory() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    for value, spec in ((tensor, None), (tensor, JAGGED), (nested_of(list(tensor)), None)):
        (buffer,) = encode_one(value, 4, spec).buffers(1, 3)
        assert buffer.nbytes == 24
    (buffer,) = encode_one(tensor, 4).buffers(1, 3)
    tensor[1, 0] = -1.0
    assert buffer.view(np.float32)[0] == -1.0


def test_long_rows_of_a_list_are_buffers_of_their_own_and_short_ones_are_joined() -> None:
    long = [torch.zeros(1 << 15), torch.ones(1 << 15)]
    assert len(encode_one(long, 2).buffers(0, 2)) == 2
    assert len(encode_one([torch.zeros(3), torch.ones(2)], 2).buffers(0, 2)) == 1
    assert encode_one([torch.zeros(0), torch.zeros(0)], 2).buffers(0, 2) == []


ARRANGED: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": lambda rows: rows,
    "ragged": lambda rows: [rows[0], rows[1].reshape(-1), rows[2], rows[3].t()],
    "dense": lambda rows: torch.stack([rows[0]] * 4),
    "transposed": lambda rows: torch.stack([rows[0].t()] * 4).transpose(1, 2),
    "jagged": nested_of,
}


@pytest.mark.parametrize(
    ("kind", "dtype", "needs_grad"),
    [*((kind, dtype, False) for kind in ARRANGED for dtype in DTYPES), ("list", torch.float32, True)],
)
def test_checksums_are_of_the_bytes_that_are_written(kind: str, dtype: torch.dtype, needs_grad: bool) -> None:
    rows = [torch.arange(12 * n).to(torch.uint8).view(-1, 2).to(dtype).requires_grad_(needs_grad) for n in (1, 3, 0, 2)]
    (plain,) = encode_fields({"x": ARRANGED[kind](rows)}, rows=4, specs={})
    column = plain.with_checksums()
    assert column.checksums is not None
    memory, expected = np.empty(column.nbytes, np.uint8), np.empty(column.nbytes, np.uint8)
    column.write(0, 4, memory)
    plain.write(0, 4, expected)
    assert np.array_equal(memory, expected)
    starts = np.cumsum(column.sizes) - column.sizes
    assert column.checksums.tolist() == checksums_of(expected, starts, column.sizes).tolist()


@pytest.mark.parametrize("value", [torch.zeros([2] + [1] * 33), [torch.zeros([1] * 34)] * 2])
def test_rows_of_too_many_dimensions_are_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"field 'x': .*at most 32 dimensions.*Reshape"):
        encode_fields({"x": value}, rows=2, specs={})
