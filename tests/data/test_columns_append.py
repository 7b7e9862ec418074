"""Stored rows and what is put behind them, joined."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.types import FieldKind, FieldSpec
from dataplane.data.columns import RowSource, Shared, appended, encode_fields
from tests.profiles import budget

WORDS = FieldSpec(FieldKind.JAGGED, "int32", ())


@budget(150)
@given(
    heads=st.lists(st.none() | st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6),
    data=st.data(),
    shared=st.booleans(),
    split=st.booleans(),
)
def test_each_row_is_its_head_and_its_tail(
    heads: list[list[int] | None], data: st.DataObject, shared: bool, split: bool
) -> None:
    count = len(heads)
    tails = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=count, max_size=count))
    value = [torch.tensor(tail, dtype=torch.int32) for tail in tails]
    put: object = Shared(value, list(range(count))[::-1]) if shared else value
    (column,) = encode_fields({"x": put}, rows=count, specs={"x": WORDS})
    places = np.array([i for i, head in enumerate(heads) if head is not None], np.int64)
    kept = [np.array(head, np.int32) for head in heads if head is not None]
    buffers, which, offsets = [np.zeros(3, np.uint8), np.zeros(0, np.uint8)], [], []
    for number, head in enumerate(kept):
        into = number % 2 if split else 0
        which.append(into)
        offsets.append(buffers[into].nbytes)
        buffers[into] = np.concatenate([buffers[into], head.view(np.uint8)])
    stored = RowSource(
        WORDS,
        buffers,
        np.array(which, np.int32) if split else None,
        np.array(offsets, np.int64),
        np.array([len(head) for head in kept], np.int64),
    )
    whole = appended(column, stored, np.array([len(head) for head in kept], np.int64), places)
    target = np.zeros(whole.nbytes, np.uint8)
    whole.write(0, count, target)
    expected = [(head or []) + tail for head, tail in zip(heads, tails[::-1] if shared else tails, strict=True)]
    assert whole.lengths.tolist() == [len(row) for row in expected]
    assert target.view(np.int32).tolist() == [item for row in expected for item in row]
    assert whole.index is None
