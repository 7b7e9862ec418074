"""Inputs for pytest: good ones as they are, damaged in a few places or put together, and noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

INTERESTING = (b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 4, b"\xff" * 9 + b"\x01", b"\0" * 8)
MOST_DAMAGES = 8


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Three of four are damaged seeds."""
    damaged = st.builds(damage, st.sampled_from(list(seeds)), st.sampled_from(list(seeds)), st.integers(0, 1 << 32))
    return st.one_of(damaged, damaged, damaged, st.binary(max_size=256))


def damage(content: bytes, other: bytes, seed: int) -> bytes:
    """`content` with up to `MOST_DAMAGES` of it changed, cut, doubled or taken from `other`; seed 0 leaves it alone."""
    chance, changed = random.Random(seed), bytearray(content)
    for _ in range(chance.randint(1, MOST_DAMAGES) if seed else 0):
        _damage_once(changed, other, chance)
    return bytes(changed)


def _damage_once(content: bytearray, other: bytes, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    length = chance.choice((1, 2, 4, 8, 32))
    match chance.randrange(7):
        case 0 if at < len(content):
            content[at] ^= 1 << chance.randrange(8)
        case 1:
            content[at : at + length] = chance.randbytes(length)
        case 2:
            del content[at : at + length]
        case 3:
            del content[at:]
        case 4:
            start = chance.randrange(len(content) + 1)
            content[at:at] = content[start : start + chance.choice((1, 8, 64))]
        case 5:
            start = chance.randrange(len(other) + 1)
            content[at : at + length] = other[start : start + length]
        case _:
            written = chance.choice(INTERESTING)
            content[at : at + len(written)] = written
