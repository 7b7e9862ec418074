"""Appends: stored rows and newly put values are concatenated into replacement rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from dataplane.core.row_copy import Int64s, gather
from dataplane.data.columns.encode import EncodedColumn
from dataplane.data.columns.row_source import RowSource
from dataplane.data.columns.values import FlatValues


def appended(column: EncodedColumn, stored: RowSource, stored_lengths: Int64s, rows: Int64s) -> EncodedColumn:
    """Return the jagged column with its values appended to the stored ones.

    Row `rows[i]` begins with row i of `stored`, which has `stored_lengths[i]` elements (of 0 bytes if the inner shape
    contains a 0). Other rows keep their values. Copies both into new memory; values that rows shared are duplicated.
    Raises `ChecksumError` if stored rows do not match their checksums.
    """
    values, lengths = column.values, column.lengths
    if column.index is not None:
        values, lengths = values.take(column.index), lengths[column.index]
    count = len(lengths)
    tails = np.empty(int(values.sizes.sum()), np.uint8)
    values.write(0, count, tails)
    # Each row has two parts: part 0 is the stored row (without bytes if there is none), part 1 is the appended value.
    # `which` is the number of the buffer that has a part: one of `stored.buffers`, or `tails` after them.
    which = np.full((count, 2), len(stored.buffers), np.int32)
    offsets, sizes = np.zeros((count, 2), np.int64), np.zeros((count, 2), np.int64)
    which[rows, 0] = 0 if stored.which is None else stored.which
    offsets[rows, 0], sizes[rows, 0] = stored.offsets, stored.sizes
    offsets[:, 1], sizes[:, 1] = np.cumsum(values.sizes) - values.sizes, values.sizes
    # A stored row without bytes may have any offset: let it begin at the start of `tails`.
    which[sizes[:, 0] == 0, 0], offsets[sizes[:, 0] == 0, 0] = len(stored.buffers), 0
    joined = np.empty(int(sizes.sum()), np.uint8)
    # Row-major: the two parts of each row follow each other.
    gather([*stored.buffers, tails], which.reshape(-1), offsets.reshape(-1), sizes.reshape(-1), joined)
    totals: Int64s = sizes.sum(axis=1)
    starts = np.cumsum(totals) - totals
    if stored.check is not None:
        stored.check(joined, starts[rows], slice(None))  # all stored rows, at their new location
    flat = FlatValues(joined, starts, totals)
    total_lengths = lengths.copy()
    total_lengths[rows] += stored_lengths
    return dataclasses.replace(column, lengths=total_lengths, sizes=totals, index=None, values=flat)
