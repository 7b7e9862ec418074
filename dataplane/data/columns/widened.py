"""Fields whose kind widened: rows that were put before are converted to the present kind while they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dataplane.core.row_copy import Int64s, UInt8s
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns.decode import decode
from dataplane.data.columns.row_source import RowSource
from dataplane.data.columns.values import RaggedValues, Values, row_values
from dataplane.data.tensor_memory import TORCH_DTYPES, tensor_of_numbers


class StoredPart(NamedTuple):
    """Rows of a field that are stored in one of its columns. places: their positions in the result `[n]`."""

    places: Int64s
    source: RowSource


def widened(spec: FieldSpec, parts: Sequence[StoredPart], rows: int) -> RowSource:
    """Return all `rows` rows of a field as rows of `spec`, ragged or dense. Rows of other specs are converted into new
    memory; the others stay where they are, and keep their check. Raises `ChecksumError` for rows to convert that do not
    match their checksums."""
    present = [part for part in parts if part.source.spec == spec]
    buffers: list[UInt8s] = []
    which = np.zeros(rows, np.int32)
    offsets = np.zeros(rows, np.int64)
    lengths = np.zeros(rows, np.int64)
    check = None
    for places, source in present:  # at most one
        which[places] = 0 if source.which is None else source.which
        offsets[places] = source.offsets
        lengths[places] = source.lengths
        buffers += source.buffers
        check = None if source.check is None else _PartCheck(source, _positions(places, rows))
    for places, source in parts:
        if source.spec != spec:
            sizes, memory = _converted(source, spec)
            which[places] = len(buffers)
            offsets[places] = np.cumsum(sizes) - sizes
            lengths[places] = sizes if spec.kind is FieldKind.RAGGED else 1
            buffers.append(memory)
    return RowSource(spec, buffers, which, offsets, lengths, check=check)


def _converted(source: RowSource, spec: FieldSpec) -> tuple[Int64s, UInt8s]:
    """Return the rows of `source`, which are dense, jagged or plain numbers, as rows of `spec`: the size of each row,
    and the bytes of all rows one after another."""
    column = decode(source)
    rows = column if isinstance(column, Tensor) else tensor_of_numbers(list(column), TORCH_DTYPES[spec.dtype or ""])
    values: Values = RaggedValues(rows.unbind()) if spec.kind is FieldKind.RAGGED else row_values(rows, lengths=None)
    memory = np.empty(int(values.sizes.sum()), np.uint8)
    values.write(0, len(values.sizes), memory)
    return values.sizes, memory


def _positions(places: Int64s, rows: int) -> Int64s:
    """Return the index in `places` of each of the rows; -1 for the others."""
    positions = np.full(rows, -1, np.int64)
    positions[places] = np.arange(len(places))
    return positions


@dataclasses.dataclass(frozen=True)
class _PartCheck:
    """Verifies those rows of a field that `source` has. A `Check`. positions: see `_positions`."""

    source: RowSource
    positions: Int64s

    def __call__(self, memory: UInt8s, offsets: Int64s, rows: Int64s | slice) -> None:
        positions = self.positions[rows]
        own = positions >= 0
        assert self.source.check is not None
        self.source.check(memory, offsets[own], positions[own])
