"""Copies of many ranges of bytes by one kernel, between memory that a GPU can access."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import numpy as np
import torch

from dataplane.core.row_copy import Int64s, merge_copies

log = logging.getLogger(__name__)

_RANGE_BYTES = 32 << 10
"""Longer copies are split, so that all multiprocessors take part in a copy of few rows."""
_BLOCK_WORDS = 1024
_MOST_WORD_BYTES = 8


@functools.cache
def copy_kernel() -> ModuleType | None:
    """Return the module of the kernel, or None, which is logged, if Triton is not installed."""
    try:
        return importlib.import_module("dataplane.core.copy_kernel")
    except ImportError as error:
        log.warning("Triton is not available (%s); reads to GPUs are padded on the CPU", error)
        return None


def split_copies(sources: Int64s, targets: Int64s, sizes: Int64s) -> list[tuple[int, Int64s]]:
    """Plan copies of `sizes[i]` bytes from address `sources[i]` to `targets[i]`, which do not overlap.

    Return (word size in bytes, table `[3, M]` of source and target addresses and numbers of words), at most one for
    each word size: the largest one (up to 8) to which a range is aligned. Adjacent copies are merged, long ones split.
    """
    filled = sizes > 0
    if not filled.all():
        sources, targets, sizes = sources[filled], targets[filled], sizes[filled]
    if not len(sizes):
        return []
    sources, targets, sizes = merge_copies(sources, targets, sizes)
    pieces = -(-sizes // _RANGE_BYTES)
    starts = (np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _RANGE_BYTES
    sources, targets = np.repeat(sources, pieces) + starts, np.repeat(targets, pieces) + starts
    sizes = np.minimum(np.repeat(sizes, pieces) - starts, _RANGE_BYTES)
    bits = sources | targets | sizes | _MOST_WORD_BYTES
    word_bytes = bits & -bits  # the lowest bit that is set
    tables = []
    for size in np.unique(word_bytes).tolist():
        chosen = word_bytes == size
        tables.append((size, np.stack([sources[chosen], targets[chosen], sizes[chosen] // size])))
    return tables


def copy(sources: Int64s, targets: Int64s, sizes: Int64s, device: torch.device) -> None:
    """Enqueue copies of `sizes[i]` bytes from address `sources[i]` to `targets[i]` on the current stream of `device`,
    with one kernel for each alignment. They must not overlap. Needs Triton (see `copy_kernel`)."""
    for word_bytes, table in split_copies(sources, targets, sizes):
        launch(word_bytes, _upload(table, device))


def _upload(table: Int64s, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)


def launch(word_bytes: int, table: torch.Tensor) -> None:
    """Enqueue the copies of one table of `split_copies`, which is on the device."""
    kernel = copy_kernel()
    assert kernel is not None
    word = getattr(kernel.tl, f"int{8 * word_bytes}")
    kernel.copy_ranges[(table.shape[1],)](*table, WORD=word, BLOCK=_BLOCK_WORDS)
