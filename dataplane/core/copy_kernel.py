"""The Triton kernel that copies ranges of bytes from and to any memory that a GPU can access."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def copy_ranges(  # type: ignore[no-untyped-def]
    sources,
    targets,
    counts,
    ends,
    ranges,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy range i, `counts[i]` elements of type WORD, from address `sources[i]` to address `targets[i]`.

    Each program copies one piece of PIECE elements, BLOCK at a time; range i has the pieces before `ends[i]`. Blocks
    begin at multiples of 128 bytes of the source, because a load across two of them takes two transfers over the bus.
    """
    piece = tl.program_id(0)
    low = 0
    high = ranges - 1
    while low < high:  # the first range that ends after this piece
        middle = (low + high) // 2
        if tl.load(ends + middle) > piece:
            high = middle
        else:
            low = middle + 1
    address = tl.load(sources + low)
    source = address.to(tl.pointer_type(WORD))
    target = tl.load(targets + low).to(tl.pointer_type(WORD))
    count = tl.load(counts + low)
    lead = (address % 128) // WORD_BYTES
    pieces = (count + lead + PIECE - 1) // PIECE
    start = (piece - tl.load(ends + low) + pieces) * PIECE - lead
    lanes = tl.arange(0, BLOCK)
    for first in range(0, PIECE, BLOCK):
        indices = start + first + lanes
        inside = (indices >= 0) & (indices < count)
        tl.store(target + indices, tl.load(source + indices, mask=inside), mask=inside)
