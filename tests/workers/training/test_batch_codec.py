"""Columns as a header and one flat buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from dataplane.core.types import DTYPE_BYTES
from dataplane.errors import UnsupportedValueError
from workers.training.batch_codec import Header, pack, unpack


def through(batch: dict[str, Any]) -> dict[str, Any]:
    packed = pack(batch)
    header = Header.decode(packed.header.encode())
    assert header == packed.header
    flat = packed.flat()
    assert flat.numel() == header.payload_bytes
    return unpack(header, flat)


def jagged(lengths: list[int], dtype: torch.dtype = torch.int64, inner: tuple[int, ...] = ()) -> torch.Tensor:
    values = torch.randint(0, 2, (sum(lengths), *inner)).to(dtype)
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_dense_and_jagged(name: str) -> None:
    dtype = getattr(torch, name)
    dense = torch.randint(0, 2, (5, 3)).to(dtype)
    nested = jagged([2, 0, 3], dtype, (2,))
    back = through({"dense": dense, "nested": nested})
    assert same_bits(back["dense"], dense)
    assert same_bits(back["nested"].values(), nested.values())
    assert back["nested"].offsets().tolist() == [0, 2, 2, 5]


def test_nan_payloads_and_signs_survive() -> None:
    values = torch.tensor([0x7FC12345, -0x80000000, 0x7F800001 - (1 << 32)], dtype=torch.int64).to(torch.int32)
    floats = values.view(torch.float32)
    assert through({"x": floats})["x"].view(torch.int32).equal(values)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1, 4)[:, 0],
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.arange(4).expand(3, 4),
        torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        torch.empty(0, 7),
        torch.empty(3, 0),
        torch.tensor(5.0),
        torch.ones(3, requires_grad=True),
    ],
    ids=["one element", "transposed", "strided", "expanded", "conjugate", "no rows", "empty rows", "scalar", "grad"],
)
def test_dense_of_any_strides(value: torch.Tensor) -> None:
    back = through({"x": value})["x"]
    assert back.equal(value.detach().resolve_conj())
    assert back.is_contiguous()
    assert not back.requires_grad


def test_jagged_with_holes_or_a_prefix_comes_back_tight() -> None:
    values = torch.arange(10)
    offsets = torch.tensor([1, 4, 9])
    plain = torch.nested.nested_tensor_from_jagged(values, offsets)
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([2, 3]))
    back = through({"plain": plain, "holes": holes})
    assert back["plain"].values().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert back["holes"].values().tolist() == [1, 2, 4, 5, 6]
    assert back["holes"].offsets().tolist() == [0, 2, 5]


def test_equal_lengths_share_offsets_and_are_sent_once() -> None:
    packed = pack({"a": jagged([3, 1]), "b": jagged([3, 1], torch.bool), "c": jagged([1, 3])})
    assert len(packed.header.lengths) == 2
    back = unpack(packed.header, packed.flat())
    assert back["a"].offsets() is back["b"].offsets()
    assert (back["a"] + back["b"]).values().numel() == 4


def test_ragged_rows() -> None:
    rows = [torch.arange(6.0).reshape(2, 3), torch.empty(0, 5), torch.tensor(7.0)]
    back = through({"rows": rows})["rows"]
    assert [row.shape for row in back] == [row.shape for row in rows]
    assert all(a.equal(b) for a, b in zip(back, rows, strict=True))


@pytest.mark.parametrize("kind", ["array", "list", "stack"])
def test_objects_come_back_in_their_container(kind: str) -> None:
    values = ["text", b"\x00\xff", 3, None, (1, [2.5, {"k": True}]), "é" * 300]
    array = np.empty(len(values), dtype=object)
    array[:] = values
    column = {"array": array, "list": values, "stack": NonTensorStack(*values)}[kind]
    back = through({"x": column})["x"]
    assert type(back) is type(column)
    assert list(back.tolist() if kind == "stack" else back) == values


def test_arrays_and_tensors_inside_objects() -> None:
    row = {"image": np.arange(6, dtype=np.uint16).reshape(2, 3), "mask": torch.tensor([True, False])}
    back = through({"x": [row]})["x"][0]
    assert back["image"].dtype == np.uint16
    assert np.array_equal(back["image"], row["image"])
    assert back["mask"].equal(row["mask"])


def test_starts_are_aligned_and_padding_is_not_sent() -> None:
    batch = {"a": jagged([100, 7, 900]), "b": jagged([100, 7, 900], torch.bfloat16), "c": torch.ones(3)}
    packed = pack(batch)
    assert all(column.start % 64 == 0 for column in packed.header.columns)
    jagged_bytes = 1007 * 8 + 1007 * 2 + 12
    assert jagged_bytes <= packed.header.payload_bytes < jagged_bytes + 3 * 64


def test_columns_that_are_not_views_do_not_hold_the_payload() -> None:
    packed = pack({"a": jagged([1000]), "b": torch.ones(1), "r": [torch.ones(2)]})
    back = unpack(packed.header, packed.flat())
    assert back["b"].untyped_storage().nbytes() == 4
    assert back["r"][0].untyped_storage().nbytes() == 8


def test_values_for_the_whole_batch() -> None:
    batch = {
        "task": "math",
        "cfg": {"t": 0.5, "stop": [1, None]},
        "step": 3,
        "on": True,
        "none": None,
        "pair": (1, b"x"),
    }
    assert through(batch) == batch
    back = through({"wrapped": NonTensorData("math"), "grid": np.arange(4).reshape(2, 2), "ids": {"t": torch.ones(2)}})
    assert back["wrapped"] == "math"
    assert back["grid"].tolist() == [[0, 1], [2, 3]]
    assert back["ids"]["t"].equal(torch.ones(2))


def test_nothing_at_all() -> None:
    assert through({}) == {}
    assert through({"x": []}) == {"x": []}


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"'x'.*type range"):
        pack({"x": range(1)})
    with pytest.raises(TypeError, match=r"'x'.*must have the same dtype"):
        pack({"x": [torch.ones(1), torch.ones(1).int()]})
    with pytest.raises(UnsupportedValueError, match="'x', row 1"):
        pack({"x": ["fine", object()]})
