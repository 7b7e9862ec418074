# ruff: noqa: F401, F811
"""Rows decoded on a GPU, with the CPU in its place: equal to the rows decoded on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.core.cuda_memory import DeviceBuffer, RegisteredMemory
from dataplane.core.types import FieldKind
from dataplane.data.columns import RowSource, decode_batch, decode_on_device
from dataplane.errors import InvalidRequestError
from tests.data.columns_helpers import encode_one, pick, random_tensor, same_bits, store
from tests.fake_gpu import CPU, FakeGpu, fake_gpu

DTYPES = [torch.int64, torch.int32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.complex128]


@st.composite
def sources(draw: st.DrawFn) -> RowSource:
    """A column of any kind, in several buffers, of which a GPU can read some."""
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20))
    kind = draw(st.sampled_from(["dense", "jagged", "ragged", "object"]))
    lengths = draw(st.lists(st.integers(0, 7) | st.just(20_000), min_size=1, max_size=5))
    inner = draw(st.sampled_from([(), (3,), (2, 0)]))
    value: Any
    if kind == "dense":
        value = random_tensor((len(lengths), *inner), dtype, seed)
    elif kind == "object":
        value = [{"n": length} for length in lengths]
    else:
        value = [random_tensor((length, *inner), dtype, seed + row) for row, length in enumerate(lengths)]
        if kind == "ragged":
            value[0] = random_tensor((2, 2, 2, 2), dtype, seed)
    column = encode_one(value, len(lengths))
    pieces = draw(st.integers(1, 3))
    source = store(column, pieces=pieces, misalign=draw(st.sampled_from([0, 0, 8, 4, 1])))
    readable = [draw(st.sampled_from(["no", "pinned", "registered"])) for _ in range(pieces)]
    buffers = [_as_device_buffer(buffer, how) for buffer, how in zip(source.buffers, readable, strict=True)]
    rows = draw(st.permutations(range(len(lengths))))
    return pick(dataclasses.replace(source, buffers=buffers), rows)


def _as_device_buffer(buffer: Any, how: str) -> Any:
    if how == "no":
        return buffer
    view = buffer.view(DeviceBuffer)
    if how == "registered":
        view.registration = RegisteredMemory(buffer, lambda: buffer.nbytes)
    return view


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return list(one) == list(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if one.is_nested:
        return (
            same_bits(one.values(), other.values())
            and torch.equal(one.offsets(), other.offsets())
            and (one._min_seqlen, one._max_seqlen) == (other._min_seqlen, other._max_seqlen)
        )
    return same_bits(one, other)


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(column=sources(), refuse=st.booleans(), pad=st.sampled_from([0, 1]), extra=st.integers(0, 3))
def test_a_gpu_decodes_what_the_cpu_decodes(
    fake_gpu: FakeGpu, layout: str, column: RowSource, refuse: bool, pad: int, extra: int
) -> None:
    fake_gpu.refuse = refuse
    width = int(column.row_lengths.max()) + extra if column.spec.kind is FieldKind.JAGGED else 0
    options: Any = {"layout": layout, "pad_value_dict": {"x": pad}, "pad_to_seqlen": width}
    expected = decode_batch({"x": column}, **options)["x"]
    assert same(decode_on_device({"x": column}, CPU, **options)["x"], expected)


def test_columns_of_equal_lengths_share_their_offsets(fake_gpu: FakeGpu) -> None:
    rows = [torch.arange(3), torch.arange(0), torch.arange(5)]
    columns = decode_on_device({"a": store(encode_one(rows, 3)), "b": store(encode_one(rows, 3))}, CPU, layout="jagged")
    assert columns["a"].offsets() is columns["b"].offsets()
    assert list(columns) == ["a", "b"]
    assert ((columns["a"] + columns["b"]).values() == 2 * columns["a"].values()).all()


def test_batches_without_samples(fake_gpu: FakeGpu) -> None:
    assert decode_on_device({}, CPU) == {}
    jagged = pick(store(encode_one([torch.arange(3)], 1)), [])
    dense = pick(store(encode_one(torch.ones(1, 2), 1)), [])
    for layout in ("padded", "jagged"):
        columns = decode_on_device({"j": jagged, "d": dense}, CPU, layout=layout)
        expected = decode_batch({"j": jagged, "d": dense}, layout=layout)
        assert all(same(columns[name], expected[name]) for name in ("j", "d"))


def test_without_triton_the_cpu_pads(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.cuda_copy.copy_kernel", lambda: None)
    columns = decode_on_device(
        {name: store(encode_one([torch.arange(3), torch.arange(5)], 2)) for name in "ab"}, CPU, layout="jagged"
    )
    assert columns["a"].offsets() is columns["b"].offsets()
    source = store(encode_one([torch.arange(3), torch.arange(5)], 2))
    padded = decode_on_device({"x": source}, CPU, pad_value_dict={"x": 7})["x"]
    assert padded.tolist() == [[0, 1, 2, 7, 7], [0, 1, 2, 3, 4]]
    assert not fake_gpu.copied


def test_bad_arguments_are_refused_before_anything_is_copied(fake_gpu: FakeGpu) -> None:
    source = store(encode_one([torch.arange(3), torch.arange(5)], 2))
    for options, words in [
        ({"layout": "dense"}, "layout='dense'"),
        ({"pad_to_seqlen": 4}, "field 'x'.*length 4"),
        ({"pad_value_dict": {"x": 0.5}}, "field 'x'.*0.5"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            decode_on_device({"x": source}, CPU, **options)  # type: ignore[arg-type]
    assert not fake_gpu.copied
