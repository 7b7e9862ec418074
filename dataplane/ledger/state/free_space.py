"""First-fit allocator for the free ranges of one arena. Adjacent free ranges are merged.

A fragment is a free range with used bytes, or the arena's ends, around it. Fragments are stored in blocks of a few
hundred, sorted by address, and the size of the largest fragment of each block is stored too. A search compares these
sizes in one vector operation and then scans one block. It is exact first fit and takes microseconds even with a million
fragments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from dataplane.core.types import GRANULE_BYTES, granules_up

BLOCK = 512
"""Maximum number of fragments in a block; a larger block is split in two."""


class FreeSpace:
    """The free bytes of an arena. `give` and `take` round sizes up to whole granules.

    `fragments`: the number of free ranges. No bytes are free until `back` sets the part of the arena that is backed by
    memory. `_starts[block][position]` and `_sizes[block][position]` are offset and size of a fragment; `_firsts[block]`
    is the offset of the block's first fragment, `_largest[block]` the size of its largest one.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.backed_bytes = 0
        self.free_bytes = 0
        self.fragments = 0
        self._starts: list[list[int]] = []
        self._sizes: list[list[int]] = []
        self._firsts: list[int] = []
        self._largest = np.zeros(0, np.int64)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest fragment, which is the largest size that `take` can return."""
        return int(self._largest.max(initial=0))

    @property
    def highest_used_bytes(self) -> int:
        """End of the last range in use. All backed bytes above it are free."""
        if self._starts and self._starts[-1][-1] + self._sizes[-1][-1] == self.backed_bytes:
            return self._starts[-1][-1]
        return self.backed_bytes

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield every fragment as (offset, nbytes), by address."""
        for starts, sizes in zip(self._starts, self._sizes, strict=True):
            yield from zip(starts, sizes, strict=True)

    def back(self, to_bytes: int) -> None:
        """Mark the arena as backed up to `to_bytes`; the newly backed bytes are free. A smaller value has no effect."""
        top = min(to_bytes, self.capacity_bytes) // GRANULE_BYTES * GRANULE_BYTES
        old = self.backed_bytes
        if top > old:
            self.backed_bytes = top
            self.give(old, top - old)

    def take(self, nbytes: int) -> int | None:
        """Allocate `nbytes` (> 0) at the lowest possible offset. Return the offset, or None if no fragment is large
        enough."""
        assert nbytes > 0, nbytes
        need = granules_up(nbytes)
        if not self._firsts:
            return None
        fits = self._largest >= need
        block = int(fits.argmax())  # the first block with a large enough fragment, if there is one
        if not fits[block]:
            return None
        position = next(i for i, size in enumerate(self._sizes[block]) if size >= need)
        return self._cut(block, position, need)

    def give(self, offset: int, nbytes: int) -> None:
        """Free [offset, offset + nbytes). Asserts that the range was in use."""
        size = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        assert size > 0, nbytes
        assert offset % GRANULE_BYTES == 0, offset
        assert offset >= 0, offset
        assert offset + size <= self.backed_bytes, (offset, nbytes, self.backed_bytes)
        if self._firsts:
            self._merge_or_insert(offset, size)
        else:
            self._insert_block(0, [offset], [size])
            self.fragments += 1
        self.free_bytes += size

    def _merge_or_insert(self, offset: int, size: int) -> None:
        """Merge the range with adjacent fragments, or insert it as a new fragment."""
        block = max(bisect_right(self._firsts, offset) - 1, 0)
        position = bisect_left(self._starts[block], offset)  # of the next fragment in the block; at its end: none
        joins_previous = self._previous_ends_at(block, position, offset)
        following = self._fragment_at(block, position, offset + size)  # its (block, position) if the range joins it
        if joins_previous and following is not None:  # the range closes a gap: two fragments become one
            size += self._sizes[following[0]][following[1]]
            self._resize(block, position - 1, self._sizes[block][position - 1] + size)
            self._remove(*following)
        elif joins_previous:
            self._resize(block, position - 1, self._sizes[block][position - 1] + size)
        elif following is not None:
            self._move(*following, offset, size + self._sizes[following[0]][following[1]])
        else:
            self._insert(block, position, offset, size)

    def _previous_ends_at(self, block: int, position: int, offset: int) -> bool:
        """Whether the fragment before `position` ends at `offset`. At position 0 there is none, because the position is
        0 only in the first block."""
        if position == 0:
            return False
        end = self._starts[block][position - 1] + self._sizes[block][position - 1]
        assert end <= offset, f"freed twice: [{offset}, ...) overlaps the free bytes up to {end}"
        return end == offset

    def _fragment_at(self, block: int, position: int, end: int) -> tuple[int, int] | None:
        """Return (block, position) of the fragment that starts at `end`, or None. It can only be the fragment at
        `position`, or the first one of the next block if `position` is behind the block's last."""
        if position == len(self._starts[block]):
            block = block + 1
            position = 0
            if block == len(self._firsts):
                return None
        start = self._starts[block][position]
        assert start >= end, f"freed twice: [..., {end}) overlaps the free bytes from {start}"
        return (block, position) if start == end else None

    def _cut(self, block: int, position: int, need: int) -> int:
        """Remove the first `need` bytes from a fragment and return their offset."""
        offset = self._starts[block][position]
        size = self._sizes[block][position]
        self.free_bytes -= need
        if size == need:
            self._remove(block, position)
        else:
            self._move(block, position, offset + need, size - need)
        return offset

    def _move(self, block: int, position: int, offset: int, size: int) -> None:
        """Change offset and size of a fragment, which stays between the same neighbours."""
        self._starts[block][position] = offset
        if position == 0:
            self._firsts[block] = offset
        self._resize(block, position, size)

    def _resize(self, block: int, position: int, size: int) -> None:
        """Change the size of a fragment, and update the largest size of its block."""
        sizes = self._sizes[block]
        old = sizes[position]
        sizes[position] = size
        if size >= self._largest[block]:
            self._largest[block] = size
        elif old == self._largest[block]:
            self._largest[block] = max(sizes)

    def _remove(self, block: int, position: int) -> None:
        """Remove a fragment, and its block if that is empty."""
        starts = self._starts[block]
        sizes = self._sizes[block]
        del starts[position]
        size = sizes.pop(position)
        self.fragments -= 1
        if not starts:
            del self._starts[block], self._sizes[block], self._firsts[block]
            self._largest = np.delete(self._largest, block)
            return
        self._firsts[block] = starts[0]
        if size == self._largest[block]:
            self._largest[block] = max(sizes)

    def _insert(self, block: int, position: int, offset: int, size: int) -> None:
        """Insert a fragment, and split its block if that is too large."""
        starts = self._starts[block]
        sizes = self._sizes[block]
        starts.insert(position, offset)
        sizes.insert(position, size)
        self._firsts[block] = starts[0]
        self._largest[block] = max(size, self._largest[block])
        self.fragments += 1
        if len(starts) > BLOCK:
            half = len(starts) // 2
            self._insert_block(block + 1, starts[half:], sizes[half:])
            del starts[half:], sizes[half:]
            self._largest[block] = max(sizes)

    def _insert_block(self, block: int, starts: list[int], sizes: list[int]) -> None:
        """Insert these fragments as a new block with index `block`."""
        self._starts.insert(block, starts)
        self._sizes.insert(block, sizes)
        self._firsts.insert(block, starts[0])
        self._largest = np.insert(self._largest, block, max(sizes))
