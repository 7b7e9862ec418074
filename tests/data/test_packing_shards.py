"""Samples to data-parallel ranks: plainly, packed, and in dynamic micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.schema import PACKING_KEYS
from dataplane.data.batch import BatchedDataDict
from dataplane.data.meta import KVBatchMeta
from dataplane.data.packing import PackingAlgorithm, inverse_permutation, plan_shards, shard_meta_for_dp
from dataplane.data.packing.balance import deal, even_runs, even_shares, level_ranks
from dataplane.data.packing.bins import loads_of
from tests.data.columns_helpers import nested_of
from tests.profiles import budget


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


@budget(40)
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
        (7, 2, None, "7 rows cannot be split evenly over 2 shards: pass a multiple of 2 rows"),
        (8, 2, 3, "8 rows are not a multiple of the global batch size 3: pass a multiple of 3 rows, or another"),
        (6, 2, 3, "3 rows of a global batch cannot be split evenly over 2 shards: pass a global batch size that is"),
        (6, 0, None, "0 shards"),
        (6, 2, 0, "batch_size=0: expected 1 or more"),
    ],
)
def test_uneven_splits_name_both_numbers(size: int, dp_world: int, batch_size: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shard_meta_for_dp(meta_of(size), dp_world=dp_world, batch_size=batch_size)


def test_inverse_permutation() -> None:
    assert inverse_permutation(np.array([0, 1, 2])) is None
    assert inverse_permutation(np.array([2, 0, 1])) == [1, 2, 0]


# --- micro-batches ------------------------------------------------------------------------------------------------

PACKED = {"algorithm": "modified_first_fit_decreasing", "max_tokens_per_microbatch": 10}
DYNAMIC = {"max_tokens_per_microbatch": 10}


def meta_with(lengths: list[int]) -> KVBatchMeta:
    """Lengths, tags, row handles, and what was said of another split before."""
    size = len(lengths)
    meta = KVBatchMeta(
        "train",
        "policy",
        [f"s{i}" for i in range(size)],
        fields=["x"],
        sequence_lengths=lengths,
        extra_info={"global_forward_pad_seqlen": 64, "micro_batch_indices": "of another split"},
        tags=[{"i": i} for i in range(size)],
    )
    return meta.with_handles(np.arange(size) + 100, np.arange(size) + 200)


def batch_with(lengths: list[int]) -> BatchedDataDict[Any]:
    """The data of `meta_with`, in every kind of column."""
    objects = np.empty(len(lengths), dtype=object)
    objects[:] = [{"i": i} for i in range(len(lengths))]
    return BatchedDataDict(
        {
            "input_ids": torch.arange(len(lengths))[:, None].expand(-1, max(lengths, default=0)),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "tokens": nested_of([torch.full((length,), i) for i, length in enumerate(lengths)]),
            "object": objects,
            "text": [f"s{i}" for i in range(len(lengths))],
        }
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], int, int | None, dict[str, Any]]:
    """(lengths, ranks, batch_size, the other arguments) that can be split."""
    limit, multiple = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    ranks, each, batches = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    size = ranks * each * batches
    lengths = draw(st.lists(st.integers(0, limit // multiple * multiple), min_size=size, max_size=size))
    kind = draw(st.sampled_from(["plain", "packing", "dynamic"]))
    arguments: dict[str, Any] = {"max_tokens_per_microbatch": limit, "input_lengths_key": "input_lengths"}
    if kind == "packing":
        arguments |= {
            "algorithm": draw(st.sampled_from(PackingAlgorithm)).name,
            "sequence_length_pad_multiple": multiple,
            "microbatch_order": draw(st.sampled_from(["packer", "largest_first"])),
            "input_key": "input_ids",
        }
        return lengths, ranks, draw(st.sampled_from([None, ranks * each])), {"sequence_packing_args": arguments}
    arguments |= {"sequence_length_round": multiple, "input_key": "input_ids"}
    given_ = {} if kind == "plain" else {"dynamic_batching_args": arguments}
    return lengths, ranks, draw(st.sampled_from([None, ranks * each])), given_


@budget(60)
@given(splits())
def test_a_meta_is_split_as_its_data_is(split: tuple[list[int], int, int | None, dict[str, Any]]) -> None:
    lengths, ranks, batch_size, arguments = split
    meta, batch = meta_with(lengths), batch_with(lengths)
    metas, inverse = shard_meta_for_dp(meta, dp_world=ranks, batch_size=batch_size, **arguments)
    sharded = batch.shard_by_batch_size(ranks, batch_size, **arguments)
    parts, order = sharded if isinstance(sharded, tuple) else (sharded, None)
    for part, shard in zip(metas, parts, strict=True):
        assert shard["text"] == part.sample_ids
        assert shard["input_lengths"].tolist() == part.sequence_lengths
        assert shard["object"].tolist() == part.tags
        assert [row.tolist() for row in shard["tokens"].unbind()] == [
            [tag["i"]] * length for tag, length in zip(part.tags or (), part.sequence_lengths or (), strict=True)
        ]
        for key in PACKING_KEYS:
            assert part.extra_info.get(key) == getattr(shard, key)
        assert part.extra_info["global_forward_pad_seqlen"] == 64
        rows, generations = part.handles or (np.zeros(0), np.zeros(0))
        assert (
            [f"s{row - 100}" for row in rows]
            == [f"s{generation - 200}" for generation in generations]
            == part.sample_ids
        )
    together = KVBatchMeta.concat(metas)
    assert (together if inverse is None else together.subset(inverse)).sample_ids == meta.sample_ids
    whole = BatchedDataDict.from_batches(parts)
    if order is not None:
        assert [f"s{row}" for row in order] == whole["text"]
        whole.reorder_data(order)
        assert whole["text"] == batch["text"]


@budget(200)
@given(splits())
def test_every_rank_has_as_many_micro_batches_within_the_budget(
    split: tuple[list[int], int, int | None, dict[str, Any]],
) -> None:
    lengths, ranks, batch_size, arguments = split
    metas, _ = shard_meta_for_dp(meta_with(lengths), dp_world=ranks, batch_size=batch_size, **arguments)
    if not arguments:
        return
    ((kind, given_),) = arguments.items()
    multiple = given_.get("sequence_length_pad_multiple", given_.get("sequence_length_round"))
    counts = set()
    for meta in metas:
        info, tokens = meta.extra_info, [-(-length // multiple) * multiple for length in meta.sequence_lengths or ()]
        counts.add(tuple(len(indices) for indices in info["micro_batch_indices"]))
        first = 0
        for indices, sizes, rows in zip(
            info["micro_batch_indices"], info["micro_batch_lengths"], info["elem_counts_per_gb"], strict=True
        ):
            ends = [end for _, end in indices]
            assert [start for start, _ in indices] == [0, *ends[:-1]]
            assert ends[-1] == rows
            assert all(start < end for start, end in indices)
            for (start, end), size in zip(indices, sizes, strict=True):
                held = tokens[first + start : first + end]
                if kind == "sequence_packing_args":
                    assert sum(held) == size <= given_["max_tokens_per_microbatch"]
                else:
                    assert max(held) <= size
                    assert size * len(held) <= given_["max_tokens_per_microbatch"]
            if given_.get("microbatch_order") == "largest_first":
                assert sizes == sorted(sizes, reverse=True)
            first += rows
        assert first == meta.size
    assert len(counts) == 1


def test_a_packed_split_by_example() -> None:
    packed = {**PACKED, "sequence_length_pad_multiple": 2, "max_tokens_per_microbatch": 8}
    metas, inverse = shard_meta_for_dp(meta_with([1, 7, 3, 4, 2, 6]), dp_world=2, sequence_packing_args=packed)
    # At a multiple of 2: 2 8 4 4 2 6, so bins of 8, 6 + 2, 4 + 4, 2. The ranks get 8 + 8 and 8 + 2, then one 4 moves.
    assert [meta.sequence_lengths for meta in metas] == [[7, 4], [6, 1, 2, 3]]
    assert [meta.extra_info["micro_batch_lengths"] for meta in metas] == [[[8, 4]], [[8, 6]]]
    assert [meta.extra_info["micro_batch_indices"] for meta in metas] == [[[[0, 1], [1, 2]]], [[[0, 2], [2, 4]]]]
    assert [meta.extra_info["elem_counts_per_gb"] for meta in metas] == [[2], [4]]
    assert inverse == [3, 0, 5, 1, 4, 2]


def test_dynamic_batches_by_example() -> None:
    metas, inverse = shard_meta_for_dp(
        meta_with([5, 1, 2, 2, 3, 1, 9, 4]), dp_world=2, dynamic_batching_args={**DYNAMIC, "sequence_length_round": 2}
    )
    # From the shortest: 1 1 2 2 3 4 5 9, in turn to both ranks; at a multiple of 2 a rank's rows are 2 2 4 10 long.
    assert [meta.sequence_lengths for meta in metas] == [[1, 2, 3, 5], [1, 2, 4, 9]]
    for meta in metas:
        assert meta.extra_info["micro_batch_indices"] == [[[0, 2], [2, 3], [3, 4]]]
        assert meta.extra_info["micro_batch_lengths"] == [[2, 4, 10]]
        assert meta.extra_info["elem_counts_per_gb"] == [4]
    assert inverse == [3, 0, 1, 5, 2, 4, 7, 6]


def test_micro_batches_in_the_packers_order_or_the_largest_first() -> None:
    lengths = [1, 9, 2, 9, 8, 3]
    concatenative = {**PACKED, "algorithm": "concatenative"}
    for order, sizes in (({}, [1, 9, 2, 9, 8, 3]), ({"microbatch_order": "largest_first"}, [9, 9, 8, 3, 2, 1])):
        (meta,), _ = shard_meta_for_dp(
            meta_with(lengths),
            dp_world=1,
            sequence_packing_args={**concatenative, "max_tokens_per_microbatch": 9, **order},
        )
        assert meta.sequence_lengths == sizes
        assert meta.extra_info["micro_batch_lengths"] == [sizes]


def test_nothing_to_split() -> None:
    for arguments in ({}, {"sequence_packing_args": PACKED}, {"dynamic_batching_args": DYNAMIC}):
        metas, inverse = shard_meta_for_dp(meta_with([]), dp_world=2, batch_size=4, **arguments)  # type: ignore[arg-type]
        assert [meta.size for meta in metas] == [0, 0]
        assert inverse is None
        assert metas[0].extra_info.get("elem_counts_per_gb", []) == []


# --- balance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
@pytest.mark.parametrize(
    ("size", "capacity"),
    [(256, 8192), (256, 20480), (512, 8192), (512, 32768), (512, 65536), (1024, 32768), (4096, 16384)],
)
def test_tokens_of_ranks_balance(algorithm: PackingAlgorithm, size: int, capacity: int) -> None:
    for seed in range(4):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.0, size).astype(np.int64), 8192)
        arguments = {"algorithm": algorithm.name, "max_tokens_per_microbatch": capacity}
        plan = plan_shards(size, lambda _, lengths=lengths: lengths, shards=8, sequence_packing_args=arguments)  # type: ignore[misc]
        tokens = [lengths[shard.rows].sum() for shard in plan]
        assert max(tokens) / np.mean(tokens) <= 1.05


@budget(100)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_dealing_and_levelling(ranks: int, each: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=ranks * each, max_size=40))
    bins: list[list[int]] = [[] for _ in range(ranks * each)]
    for row in range(len(sizes)):
        bins[row % len(bins)].append(row)
    loads = loads_of(bins, np.array(sizes))
    capacity = int(loads.max())
    dealt = deal(loads, ranks)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(bins)))
    assert {len(numbers) for numbers in dealt} == {each}
    before = max(int(loads[numbers].sum()) for numbers in dealt)
    level_ranks(bins, loads, dealt, sizes, capacity)
    assert max(int(loads[numbers].sum()) for numbers in dealt) <= before
    assert sorted(row for rows in bins for row in rows) == list(range(len(sizes)))
    assert all(bins)
    assert loads.tolist() == [sum(sizes[row] for row in rows) for rows in bins]
    assert max(loads) <= capacity


def test_the_lightest_rank_gets_the_heaviest_bin_of_a_round() -> None:
    assert deal(np.array([9, 8, 2, 1]), 2) == [[0, 3], [1, 2]]
    assert deal(np.array([1, 9, 1, 1, 8, 1]), 3) == [[1, 5], [3, 4], [0, 2]]


def test_rows_that_fit_no_bin_stay() -> None:
    bins = [[0, 1], [2, 3], [4], [5]]
    loads = np.array([10, 10, 6, 6])
    level_ranks(bins, loads, [[0, 1], [2, 3]], [5, 5, 5, 5, 6, 6], 10)
    assert bins == [[0, 1], [2, 3], [4], [5]]
    assert loads.tolist() == [10, 10, 6, 6]


def test_single_rows_move_to_the_rank_with_space() -> None:
    bins, sizes = [[0, 1, 2], [3]], [4, 3, 2, 1]
    loads = np.array([9, 1])
    level_ranks(bins, loads, [[0], [1]], sizes, 9)
    assert bins == [[1, 2], [3, 0]]
    assert loads.tolist() == [5, 5]


@budget(150)
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_even_shares(ranks: int, each: int, data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=ranks * each, max_size=40)))
    runs = even_runs(sizes, ranks * each)
    loads = loads_of(runs, sizes)
    capacity = int(loads.max()) + data.draw(st.integers(0, 5))
    before = max(int(loads[numbers].sum()) for numbers in deal(loads, ranks))
    bins, loads, dealt = even_shares(runs, sizes, ranks, capacity)
    assert [row for rows in bins for row in rows] == list(range(len(sizes)))
    assert len(bins) == ranks * each
    assert all(bins)
    assert loads.tolist() == [int(sizes[rows].sum()) for rows in bins]
    assert max(loads) <= capacity
    assert {len(numbers) for numbers in dealt} == {each}
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(bins)))
    assert max(int(loads[numbers].sum()) for numbers in dealt) <= before


def test_ends_of_runs_and_whole_runs_go_where_there_is_less() -> None:
    sizes = np.array([3, 3, 2, 1, 1])
    assert even_shares([[0, 1, 2], [3, 4]], sizes, 2, 8)[0] == [[0, 1], [2, 3, 4]]
    assert even_shares([[0, 1, 2], [3, 4]], sizes, 2, 3)[0] == [[0, 1, 2], [3, 4]], "no space there"
    sizes = np.array([9, 8, 7, 6, 5, 1])  # dealt: 9 + 6 + 5 and 8 + 7 + 1; then 9 and 7 change ranks
    _, _, dealt = even_shares([[row] for row in range(6)], sizes, 2, 9)
    assert dealt == [[2, 3, 4], [0, 1, 5]]


def test_even_runs() -> None:
    tokens = np.array([5, 1, 1, 1, 1, 1, 5])
    assert even_runs(tokens, 2) == [[0, 1, 2, 3], [4, 5, 6]]
    assert even_runs(tokens, 3) == [[0], [1, 2, 3, 4, 5], [6]]
    assert even_runs(np.array([0, 0, 3]), 3) == [[0], [1], [2]]


# --- what cannot be split -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"sequence_packing_args": PACKED, "dynamic_batching_args": DYNAMIC}, "exclude each other"),
        ({"sequence_packing_args": {}}, "sequence_packing_args lacks the required key 'max_tokens_per_microbatch'"),
        ({"dynamic_batching_args": {}}, "dynamic_batching_args lacks the required key 'max_tokens_per_microbatch'"),
        ({"sequence_packing_args": {**PACKED, "algorithm": "best"}}, "unknown packing algorithm 'best'"),
        ({"sequence_packing_args": {**PACKED, "microbatch_order": "random"}}, "packer, largest_first, got 'random'"),
        (
            {"sequence_packing_args": {**PACKED, "sequence_length_pad_multiple": 0}},
            "'sequence_length_pad_multiple'.*got 0",
        ),
        ({"dynamic_batching_args": {**DYNAMIC, "sequence_length_round": 1.5}}, "'sequence_length_round'.*got 1.5"),
        ({"sequence_packing_args": {**PACKED, "max_tokens_per_microbatch": True}}, "got True"),
        ({"sequence_packing_args": {**PACKED, "max_tokens_per_microbatch": "10"}}, "got '10'"),
        (
            {"dynamic_batching_args": {**DYNAMIC, "max_tokens_per_microbatch": 0, "budget_name": "train_mb_tokens"}},
            "'train_mb_tokens'.*1 or more, got 0",
        ),
        ({"batch_size": 2.0}, "batch_size=2.0: expected an integer"),
        ({"batch_size": "2"}, "batch_size='2': expected an integer"),
        ({"dp_world": 2.0}, "shards=2.0: expected an integer"),
        ({"sequence_packing_args": PACKED, "dp_world": 3}, "4 rows cannot be split evenly over 3"),
        ({"dynamic_batching_args": DYNAMIC, "batch_size": 3}, "not a multiple of the global batch size 3"),
    ],
)
def test_arguments_that_cannot_be(arguments: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shard_meta_for_dp(meta_with([1, 2, 3, 4]), **{"dp_world": 2, **arguments})


def test_a_sample_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"^sample 's1' has 11 tokens, outside 0 to max_tokens_per_microbatch=10; "):
        shard_meta_for_dp(meta_with([1, 11, 12, 4]), dp_world=2, sequence_packing_args=PACKED)
    rounding = {**DYNAMIC, "sequence_length_round": 4}
    with pytest.raises(
        ValueError, match=r"^sample 's2' has 9 tokens \(12 rounded up to a multiple of 4\), outside .*=10$"
    ):
        shard_meta_for_dp(meta_with([1, 2, 9, 4]), dp_world=2, dynamic_batching_args=rounding)
    named = {**PACKED, "budget_name": "train_mb_tokens"}
    with pytest.raises(ValueError, match=r"^sample 's1' has 11 tokens, outside 0 to train_mb_tokens=10$"):
        shard_meta_for_dp(meta_with([1, 11, 2, 4]), dp_world=2, sequence_packing_args=named)
    with pytest.raises(ValueError, match=r"^row 1 has 11 tokens"):
        batch_with([1, 11]).shard_by_batch_size(2, sequence_packing_args=PACKED)


def test_micro_batches_need_lengths() -> None:
    meta = KVBatchMeta("train", None, ["a", "b"])
    assert [part.sample_ids for part in shard_meta_for_dp(meta, dp_world=2)[0]] == [["a"], ["b"]]
    with pytest.raises(ValueError, match="no sequence_lengths"):
        shard_meta_for_dp(meta, dp_world=2, dynamic_batching_args=DYNAMIC)
