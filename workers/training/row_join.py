"""Rows that are joined from the parts of several ranks: which part goes where, and whether the parts cover all rows.

No collectives. All ranks make the same plan from the same descriptions, so that all raise the same errors.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from dataplane import KVBatchMeta
from dataplane.core.row_copy import Int64s
from dataplane.data.jagged import jagged_from_values, offsets_of
from dataplane.data.row_parts import RowParts, row_parts
from dataplane.data.tensor_memory import TORCH_DTYPES
from dataplane.errors import InvalidRequestError
from workers.training.row_fetch import arguments


class FieldPart(msgspec.Struct, frozen=True, array_like=True):
    """The description of a rank's part of a field. part: encoded token ranges and slices, see `row_fetch.encoded`.
    inner: shape of an element of the values. lengths: int64 lengths of the whole rows as bytes, b"" for those of the
    meta, None for a dense field."""

    name: str
    part: bytes
    dtype: str
    inner: tuple[int, ...]
    lengths: bytes | None


def encode_parts(parts: Sequence[FieldPart]) -> bytes:
    return msgspec.msgpack.encode(parts)


def decode_parts(data: bytes) -> list[FieldPart]:
    return msgspec.msgpack.decode(data, type=list[FieldPart])


@dataclass(frozen=True)
class PlacedPart:
    """A part of a field, from the values of `rank`. starts, stops: `[N, ranges per row]` elements of each row. slices:
    of the first inner dimensions."""

    rank: int
    part: FieldPart
    lengths: Int64s
    starts: Int64s
    stops: Int64s
    slices: tuple[slice, ...]

    @classmethod
    def of(cls, rank: int, part: FieldPart, meta: KVBatchMeta) -> PlacedPart:
        if part.lengths is None:
            lengths = np.ones(meta.size, np.int64)
        elif part.lengths:
            lengths = np.frombuffer(part.lengths, np.int64)
        else:
            lengths = np.array(meta.sequence_lengths or [], np.int64)
        given = arguments(part.part)
        rows = row_parts(given.get("tokens"), given.get("inner"), meta.size, [part.name]) or RowParts(None, {})
        starts, stops = rows.bounds(lengths)
        return cls(rank, part, lengths, starts, stops, rows.slices.get(part.name, ()))

    @property
    def elements(self) -> Int64s:
        """The number of elements of each sample `[N]`, tokens or a dense row."""
        counts: Int64s = (self.stops - self.starts).sum(axis=1)
        return counts

    @property
    def nbytes(self) -> int:
        return int(self.elements.sum()) * math.prod(self.part.inner) * TORCH_DTYPES[self.part.dtype].itemsize

    def sizes(self, dimension: int) -> tuple[int, int, int]:
        """Return the smallest size of an inner dimension that this part fits in, the size up to the end of its slice,
        and the largest size."""
        taken = self.part.inner[dimension]
        each = self.slices[dimension] if dimension < len(self.slices) else slice(None)
        start, step = each.start or 0, each.step or 1
        smallest, following = start + (taken - 1) * step + 1 if taken else 0, start + taken * step
        if each.stop is None or following < each.stop:  # a larger dimension has another value for the slice
            return smallest, smallest, following
        return smallest, each.stop if taken else 0, sys.maxsize

    def indices(self, sizes: Sequence[int]) -> list[range]:
        """Return the selected indices of each inner dimension, of these sizes."""
        whole = [slice(None)] * (len(sizes) - len(self.slices))
        return [range(size)[each] for size, each in zip(sizes, (*self.slices, *whole), strict=True)]


@dataclass(frozen=True)
class JoinedField:
    """A field that is joined from parts which cover its rows exactly. lengths: elements of each row `[N]`. inner: the
    shape of an element."""

    name: str
    dtype: torch.dtype
    jagged: bool
    lengths: Int64s
    inner: tuple[int, ...]
    parts: tuple[PlacedPart, ...]

    def empty(self) -> torch.Tensor:
        """Return memory for the values of all rows, `[elements, *inner]` on the CPU."""
        return torch.empty((int(self.lengths.sum()), *self.inner), dtype=self.dtype)

    def place(self, values: torch.Tensor, placed: PlacedPart, data: torch.Tensor) -> None:
        """Copy a part, uint8 `[placed.nbytes]`, to its place in the values."""
        part = data.cpu().view(self.dtype).view(-1, *placed.part.inner)
        begin = (np.cumsum(self.lengths) - self.lengths)[:, None]
        bounds = ((begin + edge).reshape(-1).tolist() for edge in (placed.starts, placed.stops))
        end = 0
        for first, last in zip(*bounds, strict=True):
            taken, end = end, end + last - first
            if last > first:
                values[(slice(first, last), *placed.slices)] = part[taken:end]

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """Return the column of the values: jagged rows, or `[N, *inner]`."""
        return jagged_from_values(values, offsets_of(torch.tensor(self.lengths))) if self.jagged else values


def join_plan(described: Sequence[Sequence[FieldPart]], leader: int, meta: KVBatchMeta) -> list[JoinedField]:
    """Return the fields to join from the parts of each rank, in rank order. A part that several ranks have is taken
    from the leader if it has it, else from the first of these ranks.

    InvalidRequestError (a ValueError), naming the field and the sample or the rank, if parts do not fit together,
    overlap without being equal, or leave something out.
    """
    by_field: dict[str, dict[bytes, PlacedPart]] = {}
    for rank in sorted(range(len(described)), key=lambda rank: rank != leader):
        for part in described[rank]:
            distinct = by_field.setdefault(part.name, {})
            placed = PlacedPart.of(rank, part, meta)
            first = distinct.setdefault(part.part, placed)
            _check_alike(placed, first, next(iter(distinct.values())), meta)
    return [_joined(name, list(distinct.values()), meta) for name, distinct in by_field.items()]


def _check_alike(placed: PlacedPart, equal: PlacedPart, first: PlacedPart, meta: KVBatchMeta) -> None:
    """Check a part against a part of the same ranges and slices, and against the first part of the field."""
    mine, other = placed.part, first.part
    forms = [
        f"{part.dtype} {'dense' if part.lengths is None else 'jagged'} values with {len(part.inner)} inner dimensions"
        for part in (mine, other)
    ]
    if forms[0] != forms[1]:
        raise _error(mine.name, f"rank {placed.rank} has {forms[0]}, but rank {first.rank} has {forms[1]}")
    if mine.inner != equal.part.inner:
        raise _error(
            mine.name,
            f"ranks {equal.rank} and {placed.rank} have the same part, but elements of {list(equal.part.inner)} and "
            f"{list(mine.inner)}",
        )
    different = np.flatnonzero(placed.lengths != first.lengths)
    if len(different):
        number = int(different[0])
        raise _error(
            mine.name,
            f"rank {placed.rank} has a row of {placed.lengths[number]} elements for sample "
            f"{meta.sample_ids[number]!r}, but rank {first.rank} one of {first.lengths[number]}",
        )


def _joined(name: str, parts: list[PlacedPart], meta: KVBatchMeta) -> JoinedField:
    first = parts[0]
    inner = tuple(_inner_size([part.sizes(number) for part in parts]) for number in range(len(first.part.inner)))
    for part in parts:
        expected = [len(indices) for indices in part.indices(inner)]
        if expected != list(part.part.inner):
            raise _error(
                name,
                f"rank {part.rank} has elements of shape {list(part.part.inner)}, but its part of elements of shape "
                f"{list(inner)}, joined from all ranks, has shape {expected}",
            )
    joined = JoinedField(
        name, TORCH_DTYPES[first.part.dtype], first.part.lengths is not None, first.lengths, inner, tuple(parts)
    )
    _check_disjoint(joined, meta)
    _check_complete(joined, meta)
    return joined


def _inner_size(sizes: Sequence[tuple[int, int, int]]) -> int:
    """Return the size of an inner dimension from the `PlacedPart.sizes` of all parts: up to the end of the last slice,
    or less if a slice ends beyond the dimension."""
    ends = max(end for _, end, _ in sizes)
    return max(max(smallest for smallest, _, _ in sizes), min(ends, min(largest for _, _, largest in sizes)))


def _check_disjoint(field: JoinedField, meta: KVBatchMeta) -> None:
    indexed = [(part, part.indices(field.inner)) for part in field.parts]
    for (one, of_one), (other, of_other) in itertools.combinations(indexed, 2):
        common = _first_common(of_one, of_other)
        if common is None:
            continue
        starts = np.maximum(one.starts[:, :, None], other.starts[:, None, :])  # [N, ranges of one, ranges of other]
        both = np.argwhere(starts < np.minimum(one.stops[:, :, None], other.stops[:, None, :]))
        if len(both):
            where = tuple(both[0])
            raise _error(
                field.name,
                f"ranks {one.rank} and {other.rank} both have {_place(field, int(starts[where]), common)} of "
                f"sample {meta.sample_ids[where[0]]!r}; parts of ranks must be equal or disjoint",
            )


def _first_common(one: Sequence[range], other: Sequence[range]) -> tuple[int, ...] | None:
    """Return the first index that is in both parts of an element; None: they are disjoint."""
    found = [next((index for index in mine if index in theirs), None) for mine, theirs in zip(one, other, strict=True)]
    return None if None in found else tuple(index for index in found if index is not None)


def _check_complete(field: JoinedField, meta: KVBatchMeta) -> None:
    """Check that the disjoint parts of a field have as many elements as its rows."""
    covered = np.sum([part.elements * math.prod(part.part.inner) for part in field.parts], axis=0).tolist()
    size = math.prod(field.inner)  # can exceed int64, because bounds of slices can be large
    rows = zip(covered, field.lengths.tolist(), strict=True)
    short = [number for number, (has, length) in enumerate(rows) if has < length * size]
    if short:
        sample = short[0]
        missing = _first_missing(field, sample)
        raise _error(
            field.name,
            f"no rank has {_place(field, missing[0], missing[1:])} of sample {meta.sample_ids[sample]!r} "
            f"({field.lengths[sample]} elements of shape {list(field.inner)})",
        )


def _first_missing(field: JoinedField, sample: int) -> tuple[int, ...]:
    """Return the first element of a sample that no part has, and the index in it."""
    # The first missing index is among the first n + 1 of a dimension in which the parts have n indices.
    had = [sum(part.part.inner[number] for part in field.parts) for number in range(len(field.inner))]
    inner = [min(size, count + 1) for size, count in zip(field.inner, had, strict=True)]
    has = np.zeros((int(field.lengths[sample]), *inner), np.bool_)
    for part in field.parts:
        for start, stop in zip(part.starts[sample].tolist(), part.stops[sample].tolist(), strict=True):
            has[(slice(start, stop), *part.slices)] = True
    return tuple(int(index) for index in np.unravel_index(int(has.argmin()), has.shape))


def _place(field: JoinedField, element: int, inner: Sequence[int]) -> str:
    where = [f"token {element}"] if field.jagged else []
    where += [f"inner index {list(inner)}"] if inner else []
    return " at ".join(where) or "the row"


def _error(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"write-back of {name!r}: {why}")
