"""Rows of all columns in one arena are checked together and copied in blocks: the result is that of
columns which are decoded one by one from several buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.checksums import checksums_of
from dataplane.core.row_copy import LONG_BYTES
from dataplane.core.types import FieldKind
from dataplane.data.columns import RowSource, assemble, checked, decode_batch, encode_fields
from dataplane.errors import ChecksumError, InternalError
from dataplane.ledger.commands import FieldLocations
from tests.data.columns_helpers import pick, random_tensor, same_bits, same_rows, store
from tests.profiles import budget

DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.complex128)


def random_fields(generator: np.random.Generator, count: int, longest: int) -> dict[str, Any]:
    """Columns of each kind, two of them with equal lengths."""
    lengths = generator.integers(0, longest + 1, count).tolist()
    fields: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        inner = (3,) if number == 1 else ()
        shuffled = lengths if number < 2 else generator.permutation(lengths).tolist()
        fields[f"jagged {dtype}"] = [random_tensor((n, *inner), dtype, seed=number + n) for n in shuffled]
        fields[f"dense {dtype}"] = random_tensor((count, *inner), dtype, seed=number)
    fields["equal"] = [random_tensor((longest,), torch.int16, seed=row) for row in range(count)]
    fields["object"] = [{"row": row} if row % 2 else "x" * row for row in range(count)]
    fields["ragged"] = [torch.zeros(1 + row % 3, *[2] * (row % 2)) for row in range(count)]
    return fields


def in_one_arena(sources: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """The same rows in one buffer."""
    starts: dict[str, list[int]] = {}
    used = 0
    for name, source in sources.items():
        starts[name] = []
        for buffer in source.buffers:
            starts[name].append(used)
            used += -(-buffer.nbytes // 64) * 64
    arena = np.zeros(used, np.uint8)
    for name, source in sources.items():
        for start, buffer in zip(starts[name], source.buffers, strict=True):
            arena[start : start + buffer.nbytes] = buffer
    arena.flags.writeable = False
    buffers = [arena]
    return {
        name: dataclasses.replace(
            source, buffers=buffers, which=None, offsets=source.offsets + np.array(starts[name])[source.which]
        )
        for name, source in sources.items()
    }


def in_halves(source: RowSource) -> RowSource:
    """The same rows of a jagged column, in two pieces each."""
    first = source.lengths // 2
    lengths = np.stack([first, source.lengths - first], axis=1).reshape(-1)
    offsets = np.stack([source.offsets, source.offsets + first * source.spec.unit_bytes], axis=1).reshape(-1)
    assert source.which is not None
    return dataclasses.replace(source, which=np.repeat(source.which, 2), offsets=offsets, lengths=lengths, pieces=2)


def with_checksums(sources: Mapping[str, RowSource], memory: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """The sources with the checksums of the rows that `memory` has in one arena."""
    located = [
        FieldLocations(
            name=name,
            spec=source.spec,
            units=np.ones(len(source), np.int32),
            offsets=source.offsets,
            lengths=source.lengths,
            checksums=checksums_of(source.buffers[0], source.offsets, source.sizes),
        )
        for name, source in memory.items()
    ]
    samples = [str(row) for row in range(len(located[0].lengths))]
    return checked(sources, located, "train", samples)


def same_column(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.tolist() == other.tolist())
    if isinstance(one, list) or one.is_nested:
        return same_rows(one, list(other))
    return same_bits(one, other)


def column_of(value: Any) -> Any:
    """A column of a TensorDict: a tensor, a list of ragged tensors, or an array of objects."""
    if isinstance(value, torch.Tensor):
        return value
    rows = value.tolist()
    return rows if isinstance(rows[0], torch.Tensor) else np.array(rows, object)


@budget(60)
@given(data=st.data())
def test_one_arena_gives_what_several_buffers_give(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    count = data.draw(st.sampled_from([1, 2, 7, 70]))
    longest = data.draw(st.sampled_from([0, 1, 9, 300]))
    pieces = data.draw(st.integers(1, 3))
    misalign = data.draw(st.sampled_from([0, 0, 1, 8]))
    encoded = encode_fields(random_fields(generator, count, longest), rows=count, specs={})
    order = generator.permutation(count) if data.draw(st.booleans()) else np.arange(count)
    several = {column.name: pick(store(column, pieces=pieces, misalign=misalign), order) for column in encoded}
    halved = data.draw(st.booleans())
    if not halved and data.draw(st.booleans()):
        several = with_checksums(several, in_one_arena(several))
    if halved:
        several |= {name: in_halves(source) for name, source in several.items() if name.startswith("jagged")}
    together = in_one_arena(several)

    options: dict[str, Any] = {
        "layout": data.draw(st.sampled_from(["padded", "padded", "jagged"])),
        "pad_value_dict": {f"jagged {dtype}": data.draw(st.sampled_from([0, 1, 1.0])) for dtype in DTYPES},
        "pad_to_seqlen": longest + data.draw(st.sampled_from([0, 1, 5])),
        "others": data.draw(st.sampled_from([[], ["equal"]])),
    }
    expected = {name: decode_batch({name: source}, **options)[name] for name, source in several.items()}
    batch = decode_batch(together, **options)
    assert list(batch) == list(expected)
    for name, column in batch.items():
        assert same_column(column, expected[name]), name
    if not halved:
        views = assemble(together, copy=False)
        copies = assemble(several)
        for name in views.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
            assert same_column(column_of(views.get(name)), column_of(copies.get(name))), name


@pytest.mark.parametrize("elements", [LONG_BYTES // 8 - 1, LONG_BYTES // 8, 2 * LONG_BYTES // 8])
@pytest.mark.parametrize("pad", [0, 7])
def test_rows_around_the_sizes_of_blocks_and_long_copies(elements: int, pad: int) -> None:
    lengths = [elements, 1, 0, elements // 2, elements]
    rows = [random_tensor((length,), torch.int64, seed=length) for length in lengths]
    source = store(encode_fields({"x": rows}, rows=len(rows), specs={})[0])
    for width in (elements, elements + 3, 5 * elements):
        batch: Any = decode_batch(in_one_arena({"x": source}), pad_value_dict={"x": pad}, pad_to_seqlen=width)
        assert batch["x"].shape == (len(rows), width)
        for row, got in zip(rows, batch["x"], strict=True):
            assert torch.equal(got[: len(row)], row)
            assert (got[len(row) :] == pad).all()


@pytest.mark.parametrize("name", ["jagged torch.int64", "dense torch.float32", "object", "ragged"])
def test_a_damaged_row_is_named_in_one_arena_too(name: str) -> None:
    encoded = encode_fields(random_fields(np.random.default_rng(1), 5, 9), rows=5, specs={})
    sources = in_one_arena({column.name: store(column) for column in encoded})
    verified = with_checksums(sources, sources)
    row = int(np.flatnonzero(sources[name].sizes)[-1])
    buffer = sources[name].buffers[0]
    buffer.flags.writeable = True
    buffer[sources[name].offsets[row]] ^= 1
    with pytest.raises(ChecksumError) as raised:
        decode_batch(verified)
    assert (raised.value.facts["field"], raised.value.facts["sample"]) == (name, str(row))


@pytest.mark.parametrize("offset", [-1, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("length", [9, -1, 1 << 40, 1 << 43, 1 << 62])
def test_a_row_outside_the_arena_is_named(offset: int, length: int) -> None:
    encoded = encode_fields(random_fields(np.random.default_rng(1), 5, 9), rows=5, specs={})
    sources = in_one_arena({column.name: store(column) for column in encoded})
    offsets = sources["equal"].offsets.copy()
    lengths = sources["equal"].lengths.copy()
    offsets[2] = offset
    lengths[2] = length
    sources["equal"] = dataclasses.replace(sources["equal"], offsets=offsets, lengths=lengths)
    with pytest.raises(InternalError, match=r"row 2 of length .* is outside"):
        decode_batch(sources)


def test_an_empty_row_may_have_any_offset() -> None:
    rows = [torch.arange(3), torch.arange(0), torch.arange(2)]
    source = store(encode_fields({"x": rows}, rows=3, specs={})[0])
    assert source.spec.kind is FieldKind.JAGGED
    sources = in_one_arena({"x": source, "y": source})
    offsets = sources["x"].offsets.copy()
    offsets[1] = 1 << 50
    sources["x"] = dataclasses.replace(sources["x"], offsets=offsets)
    batch: Any = decode_batch(sources)
    assert batch["x"].tolist() == batch["y"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
