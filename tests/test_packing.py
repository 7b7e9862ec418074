from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.meta import KVBatchMeta
from dataplane.packing import inverse_permutation, shard_meta_for_dp


def meta_of(count: int) -> KVBatchMeta:
    return KVBatchMeta(
        "train",
        "policy",
        [str(i) for i in range(count)],
        sequence_lengths=list(range(count)),
        extra_info={"global_forward_pad_seqlen": 64},
        tags=[{"i": i} for i in range(count)],
    )


def test_plain_split_is_contiguous_and_carries_everything() -> None:
    shards, inverse = shard_meta_for_dp(meta_of(6), dp_world=3)
    assert inverse is None
    assert [shard.sample_ids for shard in shards] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert shards[2] == meta_of(6).slice(4, 6)


@settings(max_examples=40, deadline=None)
@given(dp_world=st.integers(1, 5), per_rank=st.integers(1, 4), batches=st.integers(0, 4))
def test_global_batches_are_split_each_and_the_inverse_restores_the_order(
    dp_world: int, per_rank: int, batches: int
) -> None:
    meta = meta_of(dp_world * per_rank * batches)
    shards, inverse = shard_meta_for_dp(meta, dp_world=dp_world, batch_size=dp_world * per_rank)
    for rank, shard in enumerate(shards):
        assert shard.size == per_rank * batches
        for batch in range(batches):
            start = (batch * dp_world + rank) * per_rank
            got = shard.slice(batch * per_rank, (batch + 1) * per_rank)
            assert got.sample_ids == meta.slice(start, start + per_rank).sample_ids
    together = KVBatchMeta.concat(shards)
    assert (together if inverse is None else together.subset(inverse)) == meta


@pytest.mark.parametrize(
    ("size", "dp_world", "batch_size", "told"),
    [
        (7, 2, None, "7 rows cannot be split evenly over 2 shards"),
        (8, 2, 3, "8 rows are no multiple of the global batch of 3"),
        (6, 2, 3, "3 rows of a global batch cannot be split evenly over 2 shards"),
        (6, 0, None, "0 shards"),
        (6, 2, 0, "global batch of 0"),
    ],
)
def test_uneven_splits_name_both_numbers(size: int, dp_world: int, batch_size: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shard_meta_for_dp(meta_of(size), dp_world=dp_world, batch_size=batch_size)


def test_packing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sequence_packing_args is not supported"):
        shard_meta_for_dp(meta_of(2), dp_world=1, sequence_packing_args={})
    with pytest.raises(ValueError, match="dynamic_batching_args is not supported"):
        shard_meta_for_dp(meta_of(2), dp_world=1, dynamic_batching_args={})


def test_inverse_permutation() -> None:
    assert inverse_permutation(np.array([0, 1, 2])) is None
    assert inverse_permutation(np.array([2, 0, 1])) == [1, 2, 0]
