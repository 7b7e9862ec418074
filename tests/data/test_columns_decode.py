from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.inner_slice import InnerSlice
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.batch import materialize
from dataplane.data.columns import (
    InnerPart,
    RowSource,
    assemble,
    decode,
    decode_batch,
    decode_padded,
    decode_views,
    encode_fields,
)
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import InternalError, InvalidRequestError
from tests.data.columns_helpers import encode_one, pick, random_tensor, same_bits, same_rows, store


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
