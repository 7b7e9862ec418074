"""Parts that are joined: which rank sends, how large the rows are, and what is missing. No ranks."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane import KVBatchMeta
from dataplane.data.row_parts import row_parts
from dataplane.errors import InvalidRequestError
from workers.training.row_fetch import encoded
from workers.training.row_join import FieldPart, JoinedField, join_plan

META = KVBatchMeta("p", "train", ["a"], sequence_lengths=[4])


def test_copies_are_taken_from_the_leader_wherever_it_is() -> None:
    meta = KVBatchMeta("p", "train", ["a"], sequence_lengths=[4])
    for leader, senders in ((0, [0, 2]), (1, [1, 2]), (3, [3, 0])):
        ranges = [(0, 2), (0, 2), (2, 4), (2, 4)]
        described = [
            [FieldPart("x", encoded(row_parts(bounds, None, 1, ["x"])), "int64", (), b"")] for bounds in ranges
        ]
        (field,) = join_plan(described, leader, meta)
        assert [placed.rank for placed in field.parts] == senders


def joined(*parts: tuple[Any, tuple[int, ...]], meta: KVBatchMeta = META) -> JoinedField:
    """Join the parts of ranks 0, 1, ... of a field of whole rows: (slices, shape of an element)."""
    described = []
    for slices, inner in parts:
        rows = row_parts(None, {"x": slices}, meta.size, ["x"])
        described.append([FieldPart("x", encoded(rows), "uint8", inner, b"")])
    (field,) = join_plan(described, 0, meta)
    return field


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([(slice(0, 7, 2), (3,)), (slice(1, 7, 2), (3,))], 6),
        ([(slice(0, 8, 2), (3,)), (slice(1, 8, 2), (3,))], 6),
        ([(slice(0, 8, 2), (4,)), (slice(1, 8, 2), (4,))], 8),
        ([(slice(0, 8, 3), (3,)), (slice(1, 8, 3), (2,)), (slice(2, 8, 3), (2,))], 7),
        ([(slice(first, 9, 4), (2 - first // 2,)) for first in range(4)], 6),
        ([(slice(0, None, 2), (3,)), (slice(1, None, 2), (2,))], 5),
        ([(slice(0, 3), (3,)), (slice(3, 10**30), (2,))], 5),
        ([(slice(0, 10**30, 10**30), (1,)), (slice(1, 10**12), (2,))], 3),
        ([(slice(0, 6), (6,)), (slice(6, 12), (0,))], 6),
        ([(slice(0, 6), (0,))], 0),
    ],
)
def test_slices_may_end_beyond_the_dimension(parts: list[Any], size: int) -> None:
    assert joined(*parts).inner == (size,)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(slice(0, 8, 2), (4,))], r"no rank has token 0 at inner index \[1\] of sample 'a'"),
        ([(slice(0, 3), (3,)), (slice(4, 8), (3,))], r"no rank has token 0 at inner index \[3\] of sample 'a'"),
        ([(slice(0, 3), (3,)), (slice(10**12, None), (2,))], r"no rank has token 0 at inner index \[3\]"),
        ([(slice(10**30, None), (1,))], r"no rank has token 0 at inner index \[0\]"),
        ([([slice(2), slice(10**12, 10**13)], (2, 1))], r"no rank has token 0 at inner index \[0, 0\]"),
        (
            [([slice(10**12, None)] * 3, (1, 1, 1)), ([slice(1)] * 3, (1, 1, 1))],
            r"no rank has token 0 at inner index \[0, 0, 1\]",
        ),
        (
            [(slice(0, 6), (6,)), (slice(6, 12), (7,))],
            r"rank 1 has elements of shape \[7\], but its part .*shape \[6\]",
        ),
        ([(slice(5, 3), (1,))], r"rank 0 has elements of shape \[1\], but its part .* has shape \[0\]"),
    ],
)
def test_slices_that_leave_something_out_are_refused_in_words(parts: list[Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        joined(*parts)


@pytest.mark.parametrize("lengths", [[], None])
def test_no_samples_are_joined(lengths: list[int] | None) -> None:
    meta = KVBatchMeta("p", "train", [], sequence_lengths=lengths)
    described = []
    for tokens in ((0, 3), (2, 4), [], (5, 9)):
        rows = row_parts(tokens, None, 0, ["x"])
        described.append([FieldPart("x", encoded(rows), "uint8", (2,), b"")])
    (field,) = join_plan(described, 0, meta)
    assert field.empty().shape == (0, 2)
