"""Splitting samples over data-parallel ranks, from their number and lengths alone. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataplane.errors import InvalidRequestError
from dataplane.meta import Int64s, KVBatchMeta


def plain_order(size: int, *, shards: int, batch_size: int | None = None) -> list[Int64s]:
    """Which of `size` rows each of `shards` gets: of every global batch of `batch_size` rows (default: all of them) an
    equal contiguous part, in order. ValueError where the numbers do not divide."""
    if shards < 1:
        raise InvalidRequestError(f"cannot split over {shards} shards")
    per_batch = size if batch_size is None else batch_size
    if per_batch < 1 and size:
        raise InvalidRequestError(f"a global batch of {per_batch} rows")
    if per_batch and size % per_batch:
        raise InvalidRequestError(f"{size} rows are no multiple of the global batch of {per_batch}")
    if per_batch % shards:
        what = "rows" if batch_size is None else "rows of a global batch"
        raise InvalidRequestError(f"{per_batch} {what} cannot be split evenly over {shards} shards")
    # [global batches, shards, rows]
    grid = np.arange(size, dtype=np.int64).reshape(-1, shards, per_batch // shards) if size else None
    return [np.zeros(0, dtype=np.int64) if grid is None else grid[:, shard].reshape(-1) for shard in range(shards)]


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """One meta per data-parallel rank, and what puts their rows back in order.

    Plain split: each rank gets an equal contiguous part of every global batch of `batch_size` samples (default: of the
    whole meta), so that all ranks run the same number of micro-batches. Tags, lengths and `extra_info` ride along.

    The second value is None if the ranks' rows, one rank after another, are in the meta's own order; else the inverse
    permutation: row `inverse[i]` of the concatenated ranks is row i of `meta`.

    ValueError, naming both numbers, where the split is not even; ValueError if packing or dynamic batching is asked
    for, which this release does not do.
    """
    for name, given in (
        ("sequence_packing_args", sequence_packing_args),
        ("dynamic_batching_args", dynamic_batching_args),
    ):
        if given is not None:
            raise InvalidRequestError(f"{name} is not supported in this release: pass None for a plain split")
    order = plain_order(meta.size, shards=dp_world, batch_size=batch_size)
    return [meta.subset(rows) for rows in order], inverse_permutation(np.concatenate(order))


def inverse_permutation(order: Int64s) -> list[int] | None:
    """`inverse` with `order[inverse[i]] == i`; None if `order` is 0, 1, 2, ... already."""
    if np.array_equal(order, np.arange(len(order))):
        return None
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    places: list[int] = inverse.tolist()
    return places
