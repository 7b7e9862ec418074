""""""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from dataplane.core.inner_slice import InnerSlice
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.batch import materialize
from dataplane.data.columns import (
    InnerPart,
    RowSource,
    Shared,
    appended,
    assemble,
    decode,
    decode_batch,
    decode_padded,
    decode_views,
    encode_fields,
)
from dataplane.data.columns.values import pack_rows
from dataplane.data.jagged import jagged_from_values
from dataplane.data.tensor_memory import TORCH_DTYPES, byte_view
from dataplane.errors import InternalError, InvalidRequestError
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
from tests.profiles import budget


def received(source: RowSource, misalign: int = 0) -> RowSource:
    """The same rows in writable buffers that are ours, beginning `misalign` bytes after a multiple of 64."""
    buffers = []
    for buffer in source.buffers:
        memory = np.zeros(len(buffer) + 128, np.uint8)
        start = -memory.ctypes.data % 64 + misalign
        memory[start : start + len(buffer)] = buffer
        buffers.append(memory[start : start + len(buffer)])
    return dataclasses.replace(source, buffers=buffers, ours=True)


def jagged_rows(lengths: list[int], dtype: torch.dtype = torch.int64, inner: tuple[int, ...] = ()) -> Any:
    return [random_tensor((length, *inner), dtype, seed) for seed, length in enumerate(lengths)]


def padded_by_hand(rows: list[torch.Tensor], width: int, pad: Any) -> torch.Tensor:
    out = torch.full((len(rows), width, *rows[0].shape[1:]), 0, dtype=torch.float32).to(rows[0].dtype)
    out[:] = torch.tensor(pad).to(rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=70),
    dtype=st.sampled_from([dtype for dtype in TORCH_DTYPES.values() if dtype not in (torch.uint32, torch.uint64)]),
    inner=st.sampled_from([(), (3,), (0,), (2, 3)]),
    pad=st.sampled_from([0, 1]),
    extra=st.integers(0, 3),
    data=st.data(),
)
def test_padded(
    lengths: list[int], dtype: torch.dtype, inner: tuple[int, ...], pad: int, extra: int, data: st.DataObject
) -> None:
    rows = jagged_rows(lengths, dtype, inner)
    pieces, misalign = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 3))
    source = store(encode_one(rows, len(rows)), pieces=pieces, misalign=misalign)
    order = data.draw(st.permutations(range(len(rows))))
    width = max(lengths) + extra
    padded = decode_padded(pick(source, order), pad_value=pad, width=width)
    expected = padded_by_hand([rows[i] for i in order], width, pad)
    assert same_bits(padded, expected)


@pytest.mark.parametrize("mean", [4, 400])
def test_padded_many_rows_short_and_long(mean: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 2 * mean, 100).tolist()
    rows = jagged_rows(lengths, torch.float32)
    source = store(encode_one(rows, 100))
    assert same_bits(decode_padded(source, pad_value=-2.5), padded_by_hand(rows, max(lengths), -2.5))


def test_pad_values() -> None:
    source = store(encode_one(jagged_rows([1, 0], torch.uint64), 2))
    assert decode_padded(source, pad_value=2**64 - 1, width=1)[1].tolist() == [2**64 - 1]
    floats = store(encode_one([torch.zeros(1), torch.zeros(0)], 2))
    assert torch.isnan(decode_padded(floats, pad_value=float("nan"))[1]).all()
    assert decode_padded(floats, pad_value=np.float64(1.5))[1].tolist() == [1.5]
    assert decode_padded(floats, pad_value=torch.tensor(2))[1].tolist() == [2.0]
    for dtype, bad in ((torch.uint8, 256), (torch.int8, 0.5), (torch.bool, 2), (torch.int64, float("nan"))):
        column = store(encode_one(jagged_rows([1, 0], dtype), 2))
        with pytest.raises(ValueError, match="cannot be represented"):
            decode_padded(column, pad_value=bad)
    with pytest.raises(ValueError, match="must be a number"):
        decode_padded(floats, pad_value="0")
    with pytest.raises(ValueError, match="cannot be represented"):
        decode_padded(floats, pad_value=1j)


def test_padding_is_for_jagged_columns_wide_enough() -> None:
    source = store(encode_one(jagged_rows([3, 1]), 2))
    with pytest.raises(InvalidRequestError, match="cannot pad to length 2: the longest row has 3"):
        decode_padded(source, width=2)
    with pytest.raises(InvalidRequestError, match="only jagged"):
        decode_padded(store(encode_one(torch.zeros(2), 2)))
    assert decode_padded(pick(source, [])).shape == (0, 0)
    assert decode_padded(pick(source, []), width=4).shape == (0, 4)


def batch_sources() -> dict[str, RowSource]:
    fields = {
        "ids": jagged_rows([3, 1, 2]),
        "pixels": jagged_rows([2, 0, 7], torch.float32, (2,)),
        "reward": torch.tensor([1.0, 2.0, 3.0]),
        "fixed": torch.zeros(3, 2),
        "text": ["a", "b", {"c": 1}],
        "boxes": [torch.zeros(1, 2), torch.zeros(2, 1), torch.zeros(3, 3)],
    }
    return {column.name: store(column) for column in encode_fields(fields, rows=3, specs={})}


@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_batch_is_what_materialize_makes_of_the_same_columns(layout: Any) -> None:
    sources = batch_sources()
    fast = decode_batch(sources, layout=layout, pad_value_dict={"ids": 9}, pad_to_seqlen=8)
    slow = materialize(assemble(sources), layout=layout, pad_value_dict={"ids": 9}, pad_to_seqlen=8)
    assert list(fast) == list(slow)
    for name, column in fast.items():
        other = slow[name]
        assert type(column) is type(other)
        if isinstance(column, np.ndarray):
            assert column.tolist() == other.tolist()
        elif isinstance(column, list) or column.is_nested:
            assert same_rows(column, list(other))
        else:
            assert same_bits(column, other)
    if layout == "padded":
        assert fast["ids"].tolist()[1][1:] == [9] * 7
        assert fast["fixed"].shape == (3, 2), "a fixed shape is never padded"


def test_a_batch_pads_other_columns_to_their_own_longest_row() -> None:
    batch = decode_batch(batch_sources(), pad_to_seqlen=6, others=["pixels"])
    assert [tuple(batch[name].shape) for name in ("ids", "pixels")] == [(3, 6), (3, 7, 2)]  # type: ignore[union-attr]


def test_batch_errors_name_the_field() -> None:
    with pytest.raises(InvalidRequestError, match=r"'pixels'.*longest row has 7"):
        decode_batch(batch_sources(), pad_to_seqlen=6)
    with pytest.raises(InvalidRequestError, match="layout"):
        decode_batch(batch_sources(), layout="packed")


# --- views --------------------------------------------------------------------------------------------------------


def view_of(column: Any) -> torch.Tensor:
    return column.values() if column.is_nested else column


@pytest.mark.parametrize(
    "value",
    [
        random_tensor((4, 3), torch.float64),
        random_tensor((4,), torch.bool),
        jagged_rows([2, 0, 3, 1], torch.bfloat16),
        jagged_rows([2, 0, 3, 1], torch.int16, (2, 3)),
    ],
    ids=["dense", "bool", "jagged", "jagged of matrices"],
)
def test_views_lie_in_the_buffer(value: Any) -> None:
    source = store(encode_one(value, 4))
    views = decode_views(source)
    assert isinstance(views, torch.Tensor)
    copied = decode(source)
    assert isinstance(copied, torch.Tensor)
    assert same_rows(views, list(copied.unbind()))
    begin = source.buffers[0].__array_interface__["data"][0]
    assert begin <= view_of(views).data_ptr() < begin + source.buffers[0].nbytes
    assert not begin <= view_of(copied).data_ptr() < begin + source.buffers[0].nbytes
    middle = decode_views(pick(source, [1, 2]))
    assert isinstance(middle, torch.Tensor)
    assert same_rows(middle, list(copied.unbind())[1:3])


def test_ragged_views_need_not_lie_together() -> None:
    rows = [torch.ones(2, 1), torch.zeros(1, 2), torch.ones(3, 3), torch.zeros(2, 0)]
    source = store(encode_one(rows, 4), pieces=2)
    views = decode_views(pick(source, [2, 0, 3]))
    assert isinstance(views, list)
    assert same_rows(views, [rows[2], rows[0], rows[3]])
    begin = source.buffers[1].__array_interface__["data"][0]
    assert begin <= views[0].data_ptr() < begin + source.buffers[1].nbytes


def test_no_views_of_rows_apart_misaligned_or_objects() -> None:
    dense = encode_one(random_tensor((4, 3), torch.float64), 4)
    assert decode_views(pick(store(dense), [0, 2])) is None
    assert decode_views(store(dense, pieces=2)) is None
    assert decode_views(store(dense, misalign=4)) is None
    assert decode_views(store(encode_one([torch.zeros(1, 2), torch.zeros(2, 1)], 2), misalign=1)) is None
    assert decode_views(store(encode_one(["a"], 1))) is None
    mixed = assemble({"x": pick(store(dense), [2, 0]), "y": store(encode_one(["a", "b"], 2))}, copy=False)
    assert mixed["x"].shape == (2, 3)
    assert mixed.get("y").tolist() == ["a", "b"]


def test_views_of_nothing() -> None:
    source = store(encode_one(jagged_rows([0, 0]), 2))
    views = decode_views(source)
    assert isinstance(views, torch.Tensor)
    assert [len(row) for row in views.unbind()] == [0, 0]


@pytest.mark.parametrize("kind", ["dense", "jagged", "ragged"])
def test_the_storage_of_a_view_keeps_the_very_buffer_object(kind: str) -> None:
    value: Any = torch.zeros(3, 4) if kind == "dense" else [torch.zeros(1, 2), torch.zeros(2, 2)]
    if kind == "ragged":
        value = [torch.zeros(1, 2), torch.zeros(2, 1)]
    source = store(encode_one(value, len(value)))
    # a window of a longer-lived buffer, as a client hands out of its mapping: numpy alone would keep the buffer, not it
    whole = source.buffers[0]
    window = whole[:]
    gone: list[bool] = []
    weakref.finalize(window, gone.append, True)
    views = decode_views(RowSource(source.spec, [window], source.which, source.offsets, source.lengths))
    assert views is not None
    del window
    first = views[0] if kind == "ragged" else view_of(views)[:1]  # type: ignore[arg-type]
    part = torch.as_strided(first, (1,), (1,))
    del views, first
    gc.collect()
    assert not gone, "a tensor over the storage is alive"
    del part
    gc.collect()
    assert gone


# --- damage -------------------------------------------------------------------------------------------------------


def flat_source(kind: FieldKind, data: bytes, dtype: str | None = None) -> RowSource:
    none = np.zeros(1, dtype=np.int64)
    return RowSource(
        FieldSpec(kind, dtype), [np.frombuffer(data, dtype=np.uint8)], none.astype(np.int32), none, none + len(data)
    )


@pytest.mark.parametrize("read", [decode, decode_views, decode_padded])
@pytest.mark.parametrize("offset", [-8, 9, 1 << 62])
def test_a_part_of_elements_that_are_outside_their_buffer_is_an_error(read: Any, offset: int) -> None:
    """The selected bytes alone would be inside, or the sums overflow."""
    whole, part = (FieldSpec(FieldKind.JAGGED, "uint8", (size,)) for size in (8, 1))
    inner = InnerPart(whole, part, (slice(1),), InnerSlice.of((8,), 1, (slice(1),)))
    buffer = np.zeros(16, np.uint8)
    source = RowSource(part, [buffer], None, np.array([offset]), np.array([1]), part=inner, whole_buffers=1)
    with pytest.raises(InternalError, match="outside the memory"):
        read(source)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=64))
def test_damaged_rows_are_a_named_error(data: bytes) -> None:
    for source in (flat_source(FieldKind.OBJECT, data), flat_source(FieldKind.RAGGED, data, "int16")):
        with contextlib.suppress(InternalError):
            decode(source)


@pytest.mark.parametrize("data", [b"", b"\1", b"\xff" * 16, b"\2" + bytes(15), bytes([1, *bytes(7), 9, *bytes(7)])])
def test_damaged_ragged_headers(data: bytes) -> None:
    if data == b"\2" + bytes(15):
        data = data[:8] + (1 << 62).to_bytes(8, "little") + (4).to_bytes(8, "little") + bytes(8)
    with pytest.raises(InternalError, match="malformed"):
        decode(flat_source(FieldKind.RAGGED, data, "int16"))


@pytest.mark.parametrize("wrong", [{"offsets": 10_000}, {"offsets": 2**63 - 1}, {"lengths": 2**40}, {"lengths": -1}])
def test_rows_outside_their_buffer_are_told_before_memory_is_taken(wrong: dict[str, int]) -> None:
    source = store(encode_one([torch.zeros(2, 2), torch.zeros(1, 2)], 2))
    ((name, value),) = wrong.items()
    plan = getattr(source, name).copy()
    plan[1] = value
    beyond = dataclasses.replace(source, **{name: plan})
    for read in (decode, decode_views, decode_padded):
        with pytest.raises(InternalError, match=r"row 1 .* is outside the memory that was read"):
            read(beyond)


def test_an_entry_outside_its_buffer_is_named_by_its_row_and_piece() -> None:
    source = store(encode_one([torch.zeros(2, 2), torch.zeros(1, 2)], 2))
    offsets = np.repeat(source.offsets, 2)
    offsets[3] = 10_000
    lengths = np.repeat(source.lengths, 2)
    pieces = dataclasses.replace(source, which=None, offsets=offsets, lengths=lengths, pieces=2)
    outside = r"piece 1 of row 1 of length 1 at byte 10000 is outside"
    with pytest.raises(InternalError, match=outside):
        _ = pieces.sizes


@pytest.mark.parametrize(("misalign", "in_place"), [(0, True), (8, False)])
def test_what_is_ours_is_kept_where_it_lies_together_and_is_aligned(misalign: int, in_place: bool) -> None:
    rows = jagged_rows([5, 0, 300, 7], torch.complex128)
    source = received(store(encode_one(rows, 4)), misalign)
    (buffer,) = source.buffers
    for order, together in (([0, 1, 2, 3], True), ([1, 2, 3], True), ([2, 0], False), ([0, 0], False)):
        column: Any = decode(pick(source, order))
        assert same_rows(column, [rows[i] for i in order])
        inside = 0 <= column.values().data_ptr() - buffer.ctypes.data < len(buffer)
        assert inside == (together and in_place), order
    kept: Any = decode(source)
    kept.values()[0] = 7
    assert kept.values()[0] == 7


def test_padded_rows_are_never_kept() -> None:
    rows = jagged_rows([4, 4])
    source = received(store(encode_one(rows, 2)))
    padded = decode_padded(source)
    padded[:] = 9
    assert same_rows(decode(source), rows)


# --- columns roundtrip


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


# --- Stored rows and what is put behind them, joined.


WORDS = FieldSpec(FieldKind.JAGGED, "int32", ())


@budget(150)
@given(
    heads=st.lists(st.none() | st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6),
    data=st.data(),
    shared=st.booleans(),
    split=st.booleans(),
)
def test_each_row_is_its_head_and_its_tail(
    heads: list[list[int] | None], data: st.DataObject, shared: bool, split: bool
) -> None:
    count = len(heads)
    tails = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=count, max_size=count))
    value = [torch.tensor(tail, dtype=torch.int32) for tail in tails]
    put: object = Shared(value, list(range(count))[::-1]) if shared else value
    (column,) = encode_fields({"x": put}, rows=count, specs={"x": WORDS})
    places = np.array([i for i, head in enumerate(heads) if head is not None], np.int64)
    kept = [np.array(head, np.int32) for head in heads if head is not None]
    buffers, which, offsets = [np.zeros(3, np.uint8), np.zeros(0, np.uint8)], [], []
    for number, head in enumerate(kept):
        into = number % 2 if split else 0
        which.append(into)
        offsets.append(buffers[into].nbytes)
        buffers[into] = np.concatenate([buffers[into], head.view(np.uint8)])
    stored = RowSource(
        WORDS,
        buffers,
        np.array(which, np.int32) if split else None,
        np.array(offsets, np.int64),
        np.array([len(head) for head in kept], np.int64),
    )
    whole = appended(column, stored, np.array([len(head) for head in kept], np.int64), places)
    target = np.zeros(whole.nbytes, np.uint8)
    whole.write(0, count, target)
    expected = [(head or []) + tail for head, tail in zip(heads, tails[::-1] if shared else tails, strict=True)]
    assert whole.lengths.tolist() == [len(row) for row in expected]
    assert target.view(np.int32).tolist() == [item for row in expected for item in row]
    assert whole.index is None
