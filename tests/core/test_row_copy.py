from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.row_copy import LONG_BYTES, WORD_TYPES, Run, copy_runs, gather, gather_padded, merge_runs


def test_rows_that_follow_one_another_are_merged() -> None:
    which = np.array([0, 0, 1, 1, 0], dtype=np.int32)
    offsets, sizes = np.array([0, 4, 8, 99, 8]), np.array([4, 4, 2, 0, 3])
    assert merge_runs(which, offsets, sizes) == ([0, 1, 0], [0, 8, 8], [8, 10, 11])
    assert merge_runs(None, offsets, sizes) == ([0, 0], [0, 8], [10, 11])
    assert merge_runs(None, offsets[:0], sizes[:0]) == ([], [], [])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_gather_is_concatenation(data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    count = data.draw(st.sampled_from([0, 1, 7, 120]))
    shift = data.draw(st.integers(0, 3))
    buffers = [generator.integers(0, 256, 4096, dtype=np.uint8)[shift:] for _ in range(2)]
    which = generator.integers(0, 2, count).astype(np.int32)
    sizes = generator.integers(0, 12, count) * unit
    offsets = generator.integers(0, (4000 - 12 * 16) // unit, count) * unit
    rows = [buffers[b][o : o + n] for b, o, n in zip(which, offsets, sizes, strict=True)]
    out = np.zeros(int(sizes.sum()) + 8, dtype=np.uint8)
    gather(buffers, which, offsets, sizes, out[3:-5])
    assert out[3:-5].tobytes() == b"".join(row.tobytes() for row in rows)
    assert not out[:3].any()
    assert not out[-5:].any()

    pad = np.frombuffer(bytes(range(1, unit + 1)), dtype=WORD_TYPES[unit]).reshape(())
    padded = np.empty((count, 12 * unit), dtype=np.uint8)
    gather_padded(buffers, which, offsets, sizes, padded, pad)
    for row, got in zip(rows, padded, strict=True):
        assert got.tobytes() == row.tobytes() + pad.tobytes() * ((12 * unit - len(row)) // unit)


def test_long_copies_are_left_to_the_caller() -> None:
    """Rows of 1 byte, of a long run, and of a bit less: two buffers, padded or not."""
    generator = np.random.default_rng(0)
    buffers = [generator.integers(0, 256, 4 * LONG_BYTES, dtype=np.uint8) for _ in range(2)]
    which, sizes = np.array([0, 1, 0, 1], np.int32), np.array([1, LONG_BYTES, LONG_BYTES - 1, 3 * LONG_BYTES])
    offsets = np.array([7, 5, LONG_BYTES, LONG_BYTES])
    rows = [buffers[b][o : o + n] for b, o, n in zip(which, offsets, sizes, strict=True)]
    later: list[Run] = []
    out = np.zeros(int(sizes.sum()), np.uint8)
    gather(buffers, which, offsets, sizes, out, later=later)
    assert [target.nbytes for target, _ in later] == [LONG_BYTES, 3 * LONG_BYTES]
    copy_runs(later)
    assert np.array_equal(out, np.concatenate(rows))

    later.clear()
    padded = np.zeros((4, 3 * LONG_BYTES), np.uint8)
    gather_padded(buffers, which, offsets, sizes, padded, np.array(9, np.uint8), later=later)
    assert [target.nbytes for target, _ in later] == [
        3 * LONG_BYTES - 1,
        LONG_BYTES,
        2 * LONG_BYTES,
        2 * LONG_BYTES + 1,
        3 * LONG_BYTES,
    ]
    copy_runs(later)
    for row, got in zip(rows, padded, strict=True):
        assert np.array_equal(got[: len(row)], row)
        assert (got[len(row) :] == 9).all()


def test_rows_outside_a_buffer_are_caught_before_anything_is_copied() -> None:
    buffer, out = np.zeros(8, dtype=np.uint8), np.ones(1, dtype=np.uint8)
    for offset in (8, 100, -1):
        with pytest.raises(AssertionError, match="outside its buffer"):
            gather([buffer], None, np.array([offset]), np.array([1]), out)
    assert out[0] == 1
