"""The Triton kernel that copies ranges of bytes from and to any memory that a GPU can access."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def copy_ranges(sources, targets, words, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy range i, `words[i]` elements of type WORD, from address `sources[i]` to address `targets[i]`. One program
    copies one range, BLOCK elements at a time."""
    number = tl.program_id(0)
    source = tl.load(sources + number).to(tl.pointer_type(WORD))
    target = tl.load(targets + number).to(tl.pointer_type(WORD))
    count = tl.load(words + number)
    lanes = tl.arange(0, BLOCK)
    for first in range(0, count, BLOCK):
        inside = first + lanes < count
        tl.store(target + first + lanes, tl.load(source + first + lanes, mask=inside), mask=inside)
