"""Copies of long byte runs with several threads: one core cannot use the full memory bandwidth of a machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from dataplane.core.helpers import Helpers
from dataplane.core.row_copy import Run, UInt8s, copy_runs

MAX_DEFAULT_THREADS = 4
FROM_BYTES = 2 << 20
"""If the long runs have fewer bytes than this, the calling thread copies them: waking threads takes as long."""
LONG_BYTES = 256 << 10
"""The calling thread copies shorter runs: several threads would contend for the interpreter lock between them."""
_PIECE_BYTES = 1 << 20


def default_threads() -> int:
    """Return the number of cores that this process may use, at most 4: beyond that the memory is the bottleneck."""
    return min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


class Copier:
    """Copies with up to `threads` threads, including the calling one. Thread-safe."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self._helpers = Helpers(threads - 1)

    def copy(self, runs: Sequence[Run]) -> None:
        """Copy every run, a (target, source) pair of byte arrays. The calling thread copies, too. Returns or
        raises as `Helpers.run`."""
        long = [run for run in runs if run[0].nbytes >= LONG_BYTES] if self._helpers.most else []
        if sum(target.nbytes for target, _ in long) < FROM_BYTES:
            copy_runs(runs)
            return
        copy_runs(run for run in runs if run[0].nbytes < LONG_BYTES)
        self._helpers.run(_pieces(long))

    def close(self) -> None:
        """End the helper threads; the calling thread makes all later copies. Idempotent."""
        self._helpers.close()


def _copy(target: UInt8s, source: UInt8s) -> None:
    target[...] = source


def _pieces(runs: Sequence[Run]) -> list[partial[None]]:
    """Return the copies of pieces of the runs, each of at most `_PIECE_BYTES`, for the threads to take one by one."""
    return [
        partial(_copy, target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        for target, source in runs
        for start in range(0, target.nbytes, _PIECE_BYTES)
    ]
