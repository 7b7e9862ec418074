"""The workers of a broadcast, as callers of `Worker.broadcast` specify them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from workers.directory.address import WorkerAddress

Ranks = int | tuple[int, ...] | list[int] | list[tuple[int, ...]]
"""A rank, the path of one worker, or a list of ranks or of paths."""


def participants(groups: Sequence[tuple[str, Ranks]]) -> list[WorkerAddress]:
    """Return the workers of `groups` in their order: `("g", 0)` is one worker, `("g", [0, 1])` are two, `("g", (0,
    1))` is the worker of that path, `("g", [(0, 0), (0, 1)])` are the two of those paths. ValueError if there are
    none or one occurs twice."""
    workers = []
    for name, ranks in groups:
        rank_list: Sequence[int | tuple[int, ...]] = ranks if isinstance(ranks, list) else [ranks]
        workers += [WorkerAddress(name, rank) for rank in rank_list]
    check(workers)
    return workers


def check(workers: Sequence[WorkerAddress]) -> None:
    """Raise ValueError if there are no workers or one occurs twice."""
    if not workers:
        raise ValueError("workers is empty: a broadcast needs at least one worker")
    twice = {name for name, count in Counter(worker.get_name() for worker in workers).items() if count > 1}
    if twice:
        raise ValueError(f"the workers of a broadcast must be distinct; named more than once: {sorted(twice)}")


def stream_of(workers: Sequence[WorkerAddress]) -> bytes:
    """Return the name of the stream of broadcasts among these workers, the same on each of them."""
    names = "\n".join(sorted(worker.get_name() for worker in workers))
    return hashlib.sha256(names.encode()).digest()[:16]


def listed(workers: Sequence[WorkerAddress]) -> str:
    """Return the names of the workers for messages, at most 10."""
    more = f" and {len(workers) - 10} more" if len(workers) > 10 else ""
    return ", ".join(worker.get_name() for worker in workers[:10]) + more
