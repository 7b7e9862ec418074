"""The selected part of each element is what numpy's slices select."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.inner_slice import InnerSlice

shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def slices_of(draw: st.DrawFn, shape: list[int]) -> tuple[slice, ...]:
    bound = st.one_of(st.none(), st.integers(-5, 5))
    count = draw(st.integers(0, len(shape)))
    return tuple(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3]))) for _ in range(count))


@given(st.data(), shapes, st.sampled_from([1, 4]), st.integers(0, 3), st.integers(0, 5))
def test_as_numpy_slices(data: st.DataObject, shape: list[int], item_bytes: int, elements: int, before: int) -> None:
    slices = data.draw(slices_of(shape))
    dtype = np.dtype(f"u{item_bytes}")
    row = np.arange(elements * int(np.prod(shape, dtype=int))).astype(dtype).reshape(elements, *shape)
    expected = row[(slice(None), *slices)]
    inner = InnerSlice.of(shape, item_bytes, slices)
    assert inner.unit_bytes == item_bytes * int(np.prod(shape, dtype=int))
    assert elements * inner.nbytes == expected.nbytes
    buffer = np.concatenate([np.zeros(before, np.uint8), np.frombuffer(row.tobytes(), np.uint8)])
    target = np.zeros(expected.nbytes, np.uint8)
    inner.copy(buffer, before, elements, target)
    assert target.tobytes() == expected.tobytes()
    if inner.nbytes and elements:
        chosen = np.zeros(row.shape, bool)
        chosen[(slice(None), *slices)] = True
        places = np.flatnonzero(chosen[0])
        assert inner.first == places[0] * item_bytes
        assert inner.extent == (places[-1] - places[0] + 1) * item_bytes


def test_runs_are_as_long_as_possible() -> None:
    assert InnerSlice.of((47, 4), 2, [slice(12, 24)]) == InnerSlice(376, 96, (), (), 96)
    assert InnerSlice.of((6, 5, 4), 1, [slice(2, 4), slice(1, 3)]) == InnerSlice(120, 44, (2,), (20,), 8)
    assert InnerSlice.of((6,), 8, [slice(None, None, 2)]) == InnerSlice(48, 0, (3,), (16,), 8)
    assert InnerSlice.of((6, 5), 4, []) == InnerSlice(120, 0, (), (), 120)
