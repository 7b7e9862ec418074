"""A stand-in for arena and service: stores encoded columns in plain buffers and says where their rows are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataplane.core.types import FieldSpec
from dataplane.data.columns import Column, EncodedColumn, RowSource, decode, encode_fields
from dataplane.data.tensor_memory import byte_view

GUARD = 64


def encode_one(value: Any, rows: int, spec: FieldSpec | None = None, **more: Any) -> EncodedColumn:
    """The only column of a put of one field named x."""
    specs = {} if spec is None else {"x": spec}
    (column,) = encode_fields({"x": value}, rows=rows, specs=specs, partition="train", **more)
    return column


def store(column: EncodedColumn, *, pieces: int = 1, misalign: int = 0) -> RowSource:
    """Writes the column into `pieces` buffers, each within guard bytes that must not change; checks that `buffers`
    gives the same bytes."""
    count = len(column.sizes)
    cuts = [count * piece // pieces for piece in range(pieces + 1)]
    buffers: list[np.ndarray[Any, Any]] = []
    which = np.zeros(count, dtype=np.int32)
    offsets = np.zeros(count, dtype=np.int64)
    for piece, (first, last) in enumerate(itertools.pairwise(cuts)):
        nbytes = int(column.sizes[first:last].sum())
        start = GUARD + misalign
        memory = np.full(start + nbytes + GUARD, 0xA5, dtype=np.uint8)
        column.write(first, last, memory[start : start + nbytes])
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + nbytes :] == 0xA5).all()
        joined = b"".join(bytes(part) for part in column.buffers(first, last))
        assert joined == memory[start : start + nbytes].tobytes()
        memory.flags.writeable = False
        buffers.append(memory)
        which[first:last] = piece
        offsets[first:last] = start + np.cumsum(column.sizes[first:last]) - column.sizes[first:last]
    index = column.index if column.index is not None else np.arange(count)
    return RowSource(column.spec, buffers, which[index], offsets[index], column.lengths[index])


def pick(source: RowSource, rows: Sequence[int]) -> RowSource:
    """The same column, other rows."""
    chosen = np.array(rows, dtype=np.int64)
    return dataclasses.replace(
        source, which=source.which[chosen], offsets=source.offsets[chosen], lengths=source.lengths[chosen]
    )


def roundtrip(value: Any, rows: int, spec: FieldSpec | None = None, *, pieces: int = 1, **more: Any) -> Column:
    return decode(store(encode_one(value, rows, spec, **more), pieces=pieces))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN payloads and negative zeros too)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = byte_view(one.detach().cpu().contiguous()), byte_view(other.detach().cpu().contiguous())
    return bool(np.array_equal(left, right))


def same_rows(column: Column, rows: Sequence[torch.Tensor]) -> bool:
    """Whether a dense, jagged or ragged column holds exactly these rows."""
    have = list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)
    return len(have) == len(rows) and all(same_bits(one, other) for one, other in zip(have, rows, strict=True))


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all of the dtype (bool: 0 and 1)."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count).astype(bool)).reshape(tuple(shape))
    raw = generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    flat = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype)
    return flat.reshape(tuple(shape))


def nested_of(rows: Mapping[str, Any] | Sequence[torch.Tensor]) -> torch.Tensor:
    """A jagged tensor of these rows, made with torch alone."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
