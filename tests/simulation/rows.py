"""Rows that describe themselves: a value's bytes follow from whose it is, which field, which version, how long."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dataplane.core.checksums import checksums_of

POISON = 0xDB


class Value(NamedTuple):
    """One value that some client writes. `version` is unique in a run, so no two values have the same bytes."""

    owner: str
    field: str
    version: int
    nbytes: int


@lru_cache(maxsize=4096)
def content(value: Value) -> bytes:
    """The bytes of the value."""
    return hashlib.shake_128(f"{value.owner}/{value.field}/{value.version}".encode()).digest(value.nbytes)


def checksum(data: bytes) -> int:
    """What the writer of these bytes gives them."""
    memory = np.frombuffer(data, np.uint8)
    return int(checksums_of(memory, np.zeros(1, np.int64), np.array([len(data)]))[0])
