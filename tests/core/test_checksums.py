"""Checksums of rows, beside the library that defines them."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.checksums import checksums_of, damaged


def expected(row: bytes) -> int:
    return (xxhash.xxh3_64_intdigest(row) & 0xFFFFFFFF) or 1


def laid_out(rows: list[bytes], gap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows in one memory, `gap` bytes before each."""
    memory = np.frombuffer(b"".join(b"\xa5" * gap + row for row in rows), np.uint8)
    sizes = np.array([len(row) for row in rows], np.int64)
    return memory, np.cumsum(sizes + gap) - sizes, sizes


short_rows = st.binary(min_size=4, max_size=8)


@given(st.lists(st.one_of(short_rows, short_rows, st.binary(max_size=300)), max_size=60), st.integers(0, 3))
def test_each_row_has_the_low_half_of_its_digest(rows: list[bytes], gap: int) -> None:
    found = checksums_of(*laid_out(rows, gap))
    assert found.dtype == np.uint32
    assert found.tolist() == [expected(row) for row in rows]


@given(st.integers(16, 50), st.integers(4, 8), st.randoms(use_true_random=False))
def test_many_short_rows_of_one_size(count: int, size: int, random) -> None:
    rows = [random.randbytes(size) for _ in range(count)]
    assert checksums_of(*laid_out(rows, 0)).tolist() == [expected(row) for row in rows]


def test_no_checksum_is_none_whatever_the_bytes(monkeypatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda row: 7 << 32)
    assert checksums_of(*laid_out([b"abc"], 0)).tolist() == [1]


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=40), st.data())
def test_a_flipped_bit_is_found_in_its_row_and_no_other(rows: list[bytes], data: st.DataObject) -> None:
    memory, offsets, sizes = laid_out(rows, 1)
    sums = checksums_of(memory, offsets, sizes)
    assert not len(damaged(memory, offsets, sizes, sums)[0])
    row = data.draw(st.integers(0, len(rows) - 1))
    hurt = memory.copy()
    hurt[offsets[row] + data.draw(st.integers(0, len(rows[row]) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    wrong, found = damaged(hurt, offsets, sizes, sums)
    assert wrong.tolist() == [row]
    assert found.tolist() == checksums_of(hurt, offsets, sizes)[row : row + 1].tolist()
    sums[row] = 0
    assert not len(damaged(hurt, offsets, sizes, sums)[0]), "a row without a checksum is not compared"
