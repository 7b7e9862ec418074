"""Copies of many ranges of bytes by one kernel, between memory that a GPU can access."""

from __future__ import annotations

import functools
import importlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from dataplane.core.row_copy import Int64s

log = logging.getLogger(__name__)

Ranges = tuple[Int64s, Int64s, Int64s]
"""Copies of n ranges: source addresses, target addresses and sizes in bytes. Targets do not overlap."""

_PIECE_BYTES = 32 << 10
"""What one program of the kernel copies."""
_BLOCK_WORDS = 1024
_WARPS = 8
_LINE_BYTES = 128
"""The unit of transfers over the bus; see `copy_kernel.copy_ranges`."""


@functools.cache
def copy_kernel() -> ModuleType | None:
    """Return the module of the kernel, or None, which is logged, if Triton is not installed."""
    try:
        return importlib.import_module("dataplane.core.copy_kernel")
    except ImportError as error:
        log.warning("Triton is not available (%s); reads to GPUs are padded on the CPU", error)
        return None


def plan(columns: Sequence[Ranges]) -> dict[int, Int64s]:
    """Return the table of copies for each word size in bytes: the largest one, up to 8, to which all addresses and
    sizes of a column are aligned. A table `[4, M]` has the source and target addresses, the numbers of words, and the
    sums of the numbers of pieces, each with those of the ranges before it."""
    by_word: defaultdict[int, list[Ranges]] = defaultdict(list)
    for column in columns:
        used = column[2] > 0  # ranges without bytes may have any address
        sources, targets, sizes = column if used.all() else tuple(array[used] for array in column)
        bits = 8 | int(np.bitwise_or.reduce(sources | targets | sizes))
        by_word[bits & -bits].append((sources, targets, sizes))  # the lowest bit that is set
    tables = {}
    for word_bytes, triples in by_word.items():
        table = np.empty((4, sum(len(sizes) for _, _, sizes in triples)), np.int64)
        for row in range(3):
            np.concatenate([ranges[row] for ranges in triples], out=table[row])
        sources, _, sizes, ends = table
        np.cumsum((sources % _LINE_BYTES + sizes + _PIECE_BYTES - 1) // _PIECE_BYTES, out=ends)
        sizes //= word_bytes
        if len(ends):
            tables[word_bytes] = table
    return tables


def copy(columns: Sequence[Ranges], device: torch.device) -> None:
    """Enqueue the copies on the current stream of `device`, with one kernel for each word size (see `plan`). Needs
    Triton (see `copy_kernel`)."""
    for word_bytes, table in plan(columns).items():
        launch(word_bytes, _upload(table, device), int(table[3, -1]))


def _upload(table: Int64s, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table).pin_memory().to(device, non_blocking=True)


def launch(word_bytes: int, table: torch.Tensor, pieces: int) -> None:
    """Enqueue the copies of one table of `plan`, which is on the device and has `pieces` pieces."""
    kernel = copy_kernel()
    assert kernel is not None
    with torch.cuda.device(table.device):
        kernel.copy_ranges[(pieces,)](
            *table,
            table.shape[1],
            WORD=getattr(kernel.tl, f"int{8 * word_bytes}"),
            WORD_BYTES=word_bytes,
            PIECE=_PIECE_BYTES // word_bytes,
            BLOCK=_BLOCK_WORDS,
            num_warps=_WARPS,
        )
