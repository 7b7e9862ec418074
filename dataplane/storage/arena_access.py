"""Access of requests to byte ranges of an arena: checks, reads and writes. No sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from dataplane.core.row_copy import gather
from dataplane.storage.arena import Arena
from dataplane.storage.transport.interface import Fill
from dataplane.storage.transport.request_chunks import MAX_REQUEST_BYTES, Bytes

FEW_RANGES = 64
"""Reads of more ranges than this use one vectorised gather."""


class ArenaAccess:
    """Access to the backed bytes of one arena. Not thread-safe: used by the unit's thread only. `fault` creates the
    error for invalid ranges, and for ranges that cannot be written to disk."""

    def __init__(self, arena: Arena, fault: Callable[[str], Exception]) -> None:
        self._arena = arena
        self._fault = fault

    def ranges(self, offsets: Iterable[int], sizes: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the ranges as lists. Raises the error of `fault` unless all ranges are within the backed bytes and
        have at most `MAX_REQUEST_BYTES` in total. (They are not negative: on the wire they are unsigned.)"""
        starts, lengths = list(offsets), list(sizes)
        if len(starts) != len(lengths):
            raise self._fault(f"{len(starts)} offsets for {len(lengths)} sizes")
        backed = self._arena.backed_bytes
        for start, length in zip(starts, lengths, strict=True):
            if start + length > backed:
                raise self._fault(f"bytes {start} to {start + length} are outside the {backed} backed bytes")
        if sum(lengths) > MAX_REQUEST_BYTES:
            raise self._fault(
                f"the ranges of one request have {sum(lengths):,} bytes, more than the fixed limit of "
                f"{MAX_REQUEST_BYTES:,}; split it into smaller requests"
            )
        return starts, lengths

    def write(self, offsets: list[int], sizes: list[int], fill: Fill) -> None:
        """Let `fill` copy a payload into ranges that `ranges` returned, and fsync them if the arena must survive a
        restart of the machine."""
        fill(self._arena.data.data, offsets, sizes)
        if self._arena.fsynced:
            try:
                self._arena.force(offsets, sizes)
            except OSError as error:
                raise self._fault(str(error)) from error

    def read(self, offsets: list[int], sizes: list[int], target: Bytes) -> None:
        """Copy ranges that `ranges` returned into `target`, one after another. Its length is the sum of `sizes`."""
        if len(offsets) > FEW_RANGES:
            arena = [self._arena.data]
            gather(arena, which=None, offsets=np.array(offsets, np.int64), sizes=np.array(sizes, np.int64), out=target)
            return
        position = 0
        for offset, size in zip(offsets, sizes, strict=True):
            target[position : position + size] = self._arena.data[offset : offset + size]
            position += size
