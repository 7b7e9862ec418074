"""A part of every element of a row (one token of a jagged row, or a dense row), as strided runs of bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataplane.core.row_copy import UInt8s


@dataclass(frozen=True, slots=True)
class InnerSlice:
    """The selected bytes of an element of `unit_bytes`: runs of `run` bytes, from byte `first` on, repeated
    `counts[i]` times at a distance of `strides[i]` bytes for each dimension i, outermost first."""

    unit_bytes: int
    first: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    run: int

    @classmethod
    def of(cls, inner: Sequence[int], item_bytes: int, slices: Sequence[slice]) -> InnerSlice:
        """Return the part that `element[slices]` selects of elements of shape `inner`. The slices, of the first
        dimensions, have steps of at least 1."""
        ranges = [range(size)[each] for size, each in zip(inner, slices, strict=False)]
        ranges += [range(size) for size in inner[len(slices) :]]
        first = 0
        run = item_bytes
        counts = list[int]()
        strides = list[int]()
        stride = item_bytes  # the distance of two neighbours in the current dimension
        for size, chosen in zip(reversed(inner), reversed(ranges), strict=True):
            first += chosen.start * stride if len(chosen) else 0
            if run == stride and chosen.step == 1:  # every run so far is followed by the next one
                run *= len(chosen)
            else:
                counts.insert(0, len(chosen))
                strides.insert(0, stride * chosen.step)
            stride *= size
        return cls(stride, first, tuple(counts), tuple(strides), run)

    @property
    def nbytes(self) -> int:
        """The selected bytes of one element."""
        return math.prod(self.counts) * self.run

    @property
    def extent(self) -> int:
        """The bytes from the first to the last selected byte of one element; 0 if none is selected."""
        if not self.nbytes:
            return 0
        return self.run + sum((count - 1) * stride for count, stride in zip(self.counts, self.strides, strict=True))

    def view(self, buffer: UInt8s, offset: int, elements: int) -> npt.NDArray[np.void]:
        """Return the selected bytes of the `elements` whole elements that begin at byte `offset` of `buffer`, as an
        array `[elements, *counts]` of runs. The elements must be within the buffer, and `nbytes` not 0."""
        runs = np.ndarray((1,), np.dtype((np.void, self.run)), buffer, offset + self.first)
        return np.lib.stride_tricks.as_strided(
            runs, (elements, *self.counts), (self.unit_bytes, *self.strides), writeable=False
        )

    def copy(self, buffer: UInt8s, offset: int, elements: int, target: UInt8s) -> None:
        """Copy what `view` returns to `target`, which has `elements * nbytes` bytes."""
        if target.nbytes:
            chosen = self.view(buffer, offset, elements)
            target.view(chosen.dtype).reshape(chosen.shape)[...] = chosen
