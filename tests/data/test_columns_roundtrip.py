from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import RowSource, Shared, assemble, decode, decode_views, encode_fields
from dataplane.data.columns.values import pack_rows
from dataplane.data.jagged import jagged_from_values
from dataplane.data.tensor_memory import TORCH_DTYPES, byte_view
from tests.data.columns_helpers import (
    encode_one,
    nested_of,
    pick,
    random_tensor,
    roundtrip,
    same_bits,
    same_rows,
    store,
)

LENGTHS = [3, 0, 5, 1, 0]
JAGGED = FieldSpec(FieldKind.JAGGED)
RAGGED = FieldSpec(FieldKind.RAGGED)

devices = pytest.mark.parametrize(
    "device", ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
)
every_dtype = pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)


def rows_of(dtype: torch.dtype, lengths: list[int] = LENGTHS, inner: tuple[int, ...] = ()) -> list[torch.Tensor]:
    return [random_tensor((length, *inner), dtype, seed) for seed, length in enumerate(lengths)]


@devices
@every_dtype
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (0, 3), (1,), (4, 0)])
def test_dense_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    tensor = random_tensor(shape, dtype)
    back = roundtrip(tensor.to(device), shape[0])
    assert isinstance(back, torch.Tensor)
    assert same_bits(back, tensor)


@devices
@every_dtype
@pytest.mark.parametrize("inner", [(), (2,), (2, 3)])
def test_jagged_comes_back_bit_for_bit(dtype: torch.dtype, inner: tuple[int, ...], device: str) -> None:
    rows = rows_of(dtype, inner=inner)
    values = torch.cat([row.view(torch.uint8) for row in rows]).view(dtype) if inner else torch.cat(rows)
    offsets = torch.tensor([0, *np.cumsum(LENGTHS)])
    nested = jagged_from_values(values.to(device), offsets.to(device))
    back = roundtrip(nested, 5)
    assert isinstance(back, torch.Tensor)
    assert back.layout == torch.jagged
    assert same_rows(back, rows)


@every_dtype
def test_ragged_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    rows = [random_tensor(shape, dtype, seed) for seed, shape in enumerate([(2, 3), (3, 2), (), (0, 4), (1, 1, 5)])]
    back = roundtrip(rows, 5)
    assert isinstance(back, list)
    assert same_rows(back, rows)


@pytest.mark.parametrize("read", [decode, decode_views])
def test_ragged_rows_of_equally_many_elements_keep_their_own_shapes(read: Callable[[RowSource], Any]) -> None:
    shapes = [(2, 3, 4), (2, 4, 3), (4, 3, 2), (1, 2, 3, 4), (1, 4, 2, 3), (24,)]
    rows = [random_tensor(shape, torch.int16, seed) for seed, shape in enumerate(shapes)]
    source = store(encode_one(rows, len(rows)))
    assert same_rows(read(source), rows)
    others = [4, 1, 5, 0]
    assert same_rows(read(pick(source, others)), [rows[i] for i in others])


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_padded_rows_are_cut_to_the_lengths_given(dtype: torch.dtype, device: str) -> None:
    padded = random_tensor((5, 6, 2), dtype)
    back = roundtrip(padded.to(device), 5, JAGGED, token_lengths=LENGTHS)
    assert same_rows(back, [padded[i, :length] for i, length in enumerate(LENGTHS)])


NON_CONTIGUOUS = {
    "transposed": lambda: random_tensor((3, 5, 4), torch.float32).transpose(0, 1),
    "inner transposed": lambda: random_tensor((5, 4, 3), torch.float32).transpose(1, 2),
    "every second row": lambda: random_tensor((10, 4), torch.float32)[::2],
    "all but the first token": lambda: random_tensor((5, 7), torch.float32)[:, 1:],
    "every second token": lambda: random_tensor((5, 8), torch.float32)[:, ::2],
    "one row five times": lambda: random_tensor((1, 4), torch.float32).expand(5, 4),
    "one column": lambda: random_tensor((5, 4, 2), torch.float32)[..., 1],
    "conjugate": lambda: random_tensor((5, 4), torch.complex64).nan_to_num(0, 1, 2).conj(),
    "with grad": lambda: random_tensor((5, 4), torch.float32).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(random_tensor((5, 4), torch.float32)),
}


@devices
@pytest.mark.parametrize("make", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS)
@pytest.mark.parametrize("kind", ["dense", "jagged", "cut", "ragged"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_any_strides(make: Any, kind: str, pieces: int, device: str) -> None:
    tensor = make()
    if type(tensor) is torch.Tensor:
        tensor = tensor.to(device) if device != "cpu" else tensor
    lengths = [2, 0, 3, 1, 3] if kind == "cut" else None
    spec = {"dense": None, "ragged": RAGGED}.get(kind, JAGGED)
    back = roundtrip(tensor, 5, spec, pieces=pieces, token_lengths=lengths)
    plain = tensor.detach().cpu().resolve_conj()
    assert same_rows(back, [row[: lengths[i]] if lengths else row for i, row in enumerate(plain)])


def test_rows_are_packed_on_their_device_before_they_leave_it() -> None:
    values = torch.arange(24).reshape(12, 2)
    packed, starts = pack_rows(values, np.array([8, 0, 3]), np.array([3, 0, 4]))
    assert starts.tolist() == [0, 3, 3]
    assert same_bits(packed, torch.cat([values[8:11], values[3:7]]))


def test_nested_tensors_with_holes_and_strided_values() -> None:
    values = random_tensor((12, 2), torch.int32)
    offsets, lengths = torch.tensor([0, 4, 8, 12]), torch.tensor([3, 0, 4])
    expected = [values[0:3], values[4:4], values[8:12]]
    assert same_rows(roundtrip(jagged_from_values(values, offsets, lengths=lengths), 3), expected)
    strided = values.t().contiguous().t()
    assert not strided.is_contiguous()
    assert same_rows(roundtrip(jagged_from_values(strided, offsets, lengths=lengths), 3), expected)
    assert same_rows(roundtrip(jagged_from_values(strided, offsets), 3, pieces=2), list(values.split(4)))
    int32_offsets = jagged_from_values(values, offsets.to(torch.int32))
    assert same_rows(roundtrip(int32_offsets, 3), list(values.split(4)))


def test_nested_tensor_with_another_ragged_dimension_is_rows_of_its_shapes() -> None:
    rows = [random_tensor((length, 2), torch.float32) for length in (3, 1)]
    back = roundtrip(nested_of(rows).transpose(1, 2), 2)
    assert isinstance(back, list)
    assert same_rows(back, [row.t() for row in rows])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensor_of_strided_layout() -> None:
    rows = [random_tensor((length, 2), torch.float32) for length in (3, 1)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided)
    back = roundtrip(nested, 2)
    assert isinstance(back, torch.Tensor)
    assert same_rows(back, rows)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4], [0], [0, 0], []], ids=str)
def test_jagged_stays_jagged(lengths: list[int]) -> None:
    rows = rows_of(torch.int64, lengths)
    back = decode(store(encode_one(rows, len(rows), FieldSpec("jagged", "int64", ()))))  # type: ignore[arg-type]
    assert isinstance(back, torch.Tensor)
    assert back.is_nested
    assert back.layout == torch.jagged
    assert same_rows(back, rows)


@pytest.mark.parametrize("count", [5, 200])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("misalign", [0, 1, 4])
@pytest.mark.parametrize("inner", [(), (3,)])
def test_rows_gathered_in_any_order(count: int, pieces: int, misalign: int, inner: tuple[int, ...]) -> None:
    generator = np.random.default_rng(7)
    rows = rows_of(torch.int32, generator.integers(0, 9, count).tolist(), inner)
    source = store(encode_one(rows, count), pieces=pieces, misalign=misalign)
    order = generator.permutation(count).tolist()
    back = decode(pick(source, [*order, 0, 0]))
    assert same_rows(back, [rows[i] for i in [*order, 0, 0]])
    scalars = random_tensor((count, *inner), torch.int16)
    dense = decode(pick(store(encode_one(scalars, count), pieces=pieces, misalign=misalign), order))
    assert isinstance(dense, torch.Tensor)
    assert same_bits(dense, scalars[order])


def test_long_rows_scattered() -> None:
    rows = rows_of(torch.float64, list(range(100, 200)))
    source = store(encode_one(rows, 100), pieces=2)
    assert same_rows(decode(pick(source, range(99, -1, -1))), rows[::-1])


@pytest.mark.parametrize(
    "values",
    [["a", None, {"k": [1, (2, 3)]}], np.array([b"x", 2.5, [True]], dtype=object), NonTensorStack("a", 1, None)],
    ids=["list", "object array", "NonTensorStack"],
)
def test_objects(values: Any) -> None:
    back = roundtrip(values, 3)
    assert isinstance(back, np.ndarray)
    assert back.dtype == object
    expected = values.tolist() if isinstance(values, NonTensorStack) else list(values)
    assert back.tolist() == expected


def test_object_rows_that_are_sequences_stay_rows() -> None:
    back = roundtrip([[1, 2], [3, 4]], 2)
    assert isinstance(back, np.ndarray)
    assert back.shape == (2,)
    assert back.tolist() == [[1, 2], [3, 4]]


def test_shared_rows_are_stored_once() -> None:
    prompts = rows_of(torch.int64, [4, 2, 3])
    column = encode_one(Shared(prompts, torch.tensor([2, 0, 0, 2, 2])), 5)
    assert column.lengths.tolist() == [4, 3], "the value nobody points at is left out"
    assert column.index is not None
    assert column.index.tolist() == [1, 0, 0, 1, 1]
    assert int(column.sizes.sum()) == 7 * 8
    assert same_rows(decode(store(column)), [prompts[i] for i in (2, 0, 0, 2, 2)])


@pytest.mark.parametrize(
    "values",
    [
        random_tensor((3, 2), torch.float32),
        random_tensor((2, 3), torch.float32).t(),
        [torch.zeros(1, 2), torch.ones(2, 1), torch.ones(3, 3)],
        nested_of([torch.zeros(2), torch.ones(3), torch.ones(1)]),
    ],
    ids=["dense", "strided", "ragged", "nested"],
)
def test_shared_of_every_kind(values: Any) -> None:
    index = [1, 1, 2, 1]
    rows = list(values.unbind()) if isinstance(values, torch.Tensor) else values
    assert same_rows(roundtrip(Shared(values, np.array(index)), 4), [rows[i] for i in index])


def test_shared_objects() -> None:
    back = roundtrip(Shared(["a", "b"], [0, 1, 1]), 3)
    assert list(back) == ["a", "b", "b"]


def test_numpy_arrays_are_tensors() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    read_only = array.copy()
    read_only.flags.writeable = False
    for variant in (array, array[::-1][::-1], array.astype(">f4"), np.asfortranarray(array), read_only):
        assert same_rows(roundtrip(variant, 3), list(torch.from_numpy(array)))
    assert same_rows(roundtrip(array[::-1], 3), list(torch.from_numpy(array).flip(0)))
    assert same_rows(roundtrip([array[0], array[1]], 2), list(torch.from_numpy(array[:2])))
    record = np.zeros(3, dtype=[("a", "u1"), ("b", "<f4")])
    record["b"] = [1, 2, 3]
    assert same_rows(roundtrip(record["b"], 3), list(torch.tensor([1.0, 2.0, 3.0])))


def test_tensordict_in_tensordict_out() -> None:
    fields = TensorDict(
        {
            "dense": random_tensor((3, 2), torch.bfloat16),
            "ids": nested_of([torch.arange(3), torch.arange(2), torch.arange(4)]),
            "objects": NonTensorStack("a", {"b": 1}, None),
        },
        batch_size=[3],
    )
    fields["array"] = np.array([1, "x", (2,)], dtype=object)
    columns = encode_fields(fields, rows=3, specs={})
    ragged = encode_fields({"ragged": [torch.zeros(1, 2), torch.zeros(2, 1), torch.zeros(())]}, rows=3, specs={})
    back = assemble({column.name: store(column) for column in columns + ragged})
    assert back.batch_size == torch.Size([3])
    assert same_bits(back["dense"], fields["dense"])
    assert same_rows(back["ids"], list(fields["ids"].unbind()))
    assert back.get("objects").tolist() == ["a", {"b": 1}, None]
    assert back.get("array").tolist() == [1, "x", (2,)]
    assert [list(row.shape) for row in back.get("ragged").tolist()] == [[1, 2], [2, 1], []]


def test_columns_of_equal_lengths_can_be_combined() -> None:
    lengths = [2, 0, 3]
    fields = {name: rows_of(torch.float32, lengths) for name in ("a", "b")} | {"c": rows_of(torch.float32, [1, 1, 1])}
    for name in ("a", "b", "c"):
        fields[name] = [row.nan_to_num(0, 1, 2) for row in fields[name]]
    back = assemble({column.name: store(column) for column in encode_fields(fields, rows=3, specs={})})
    assert back["a"].offsets() is back["b"].offsets()
    assert same_rows(back["a"] + back["b"], [a + b for a, b in zip(fields["a"], fields["b"], strict=True)])
    assert back["c"].offsets() is not back["a"].offsets()


def test_no_rows() -> None:
    specs = {"d": FieldSpec("dense", "int8", (2,)), "o": FieldSpec("object"), "r": FieldSpec("ragged", "int8")}  # type: ignore[arg-type]
    fields: dict[str, Any] = {"d": torch.zeros((0, 2), dtype=torch.int8), "o": [], "r": [], "unknown": []}
    columns = encode_fields(fields, rows=0, specs=specs)
    assert [column.name for column in columns] == ["d", "o", "r"]
    back = assemble({column.name: store(column) for column in columns})
    assert back.batch_size == torch.Size([0])
    assert assemble({}).batch_size == torch.Size([0])


@pytest.mark.parametrize("misalign", [1, 8])
def test_memory_not_aligned_to_the_element(misalign: int) -> None:
    # torch's vector instructions crash on complex numbers that are not aligned
    tensor = random_tensor((40, 8), torch.complex128)
    rows = list(tensor)
    ragged = [tensor, tensor[:3, :2], tensor[0]]
    for value, count, expected in (
        (tensor, 40, rows),
        (rows, 40, rows),
        (tensor[:, ::2], 40, [row[::2] for row in rows]),
        (nested_of(rows), 40, rows),
        (ragged, 3, ragged),
    ):
        assert same_rows(decode(store(encode_one(value, count), misalign=misalign)), expected)
    raw = np.zeros(40 * 8 * 16 + 16, dtype=np.uint8)[misalign:][: 40 * 8 * 16]
    raw[...] = byte_view(tensor)
    assert same_rows(roundtrip(raw.view(np.complex128).reshape(40, 8), 40), rows)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=80),
    dtype=st.sampled_from(list(TORCH_DTYPES.values())),
    inner=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    data=st.data(),
)
def test_jagged_property(lengths: list[int], dtype: torch.dtype, inner: tuple[int, ...], data: st.DataObject) -> None:
    rows = rows_of(dtype, lengths, inner)
    source = store(
        encode_one(rows, len(rows)), pieces=data.draw(st.integers(1, 3)), misalign=data.draw(st.integers(0, 9))
    )
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=100))
    back = decode(pick(source, chosen))
    assert isinstance(back, torch.Tensor)
    assert same_rows(back, [rows[i] for i in chosen])
