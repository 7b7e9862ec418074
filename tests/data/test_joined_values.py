"""The values of several columns behave like those of one column."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dataplane.core.devices import CPU
from dataplane.data.columns.values import FlatValues, JoinedValues, ListValues, TensorValues

ROWS = [[1, 2, 3], [], [4], [5, 6], [], [7, 8, 9, 10]]


def bytes_of(rows: list[list[int]]) -> bytes:
    return b"".join(np.array(row, np.int16).tobytes() for row in rows)


@pytest.fixture
def joined() -> JoinedValues:
    """`ROWS`, in columns of three kinds and one without values."""
    flat = np.frombuffer(bytes_of(ROWS[3:5]), np.uint8)
    return JoinedValues(
        [
            ListValues([torch.tensor(row, dtype=torch.int16) for row in ROWS[:3]]),
            ListValues([]),
            FlatValues(flat, np.array([0, 4]), np.array([4, 0])),
            TensorValues(torch.tensor(ROWS[5], dtype=torch.int16), np.array([0]), np.array([4])),
        ]
    )


RANGES = list(itertools.combinations_with_replacement(range(len(ROWS) + 1), 2))


@pytest.mark.parametrize(("first", "last"), RANGES)
def test_ranges_cross_columns(joined: JoinedValues, first: int, last: int) -> None:
    expected = bytes_of(ROWS[first:last])
    target = np.zeros(len(expected), np.uint8)
    joined.write(first, last, target)
    assert target.tobytes() == expected
    assert b"".join(buffer.tobytes() for buffer in joined.buffers(first, last)) == expected
    assert joined.sizes[first:last].tolist() == [2 * len(row) for row in ROWS[first:last]]


def test_values_are_taken_and_checked(joined: JoinedValues) -> None:
    taken = joined.take(np.array([5, 0, 3]))
    target = np.zeros(int(taken.sizes.sum()), np.uint8)
    taken.write(0, 3, target)
    assert target.tobytes() == bytes_of([ROWS[5], ROWS[0], ROWS[3]])
    alone = ListValues([torch.tensor(row, dtype=torch.int16) for row in ROWS])
    assert joined.checksums().tolist() == alone.checksums().tolist()
    assert joined.device == CPU
