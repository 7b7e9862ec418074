"""Packers: sequences into bins. And sharding with them."""

from __future__ import annotations

import itertools
import re
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
from dataplane.data.packing import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
    inverse_permutation,
    plan_shards,
    shard_meta_for_dp,
)
from dataplane.data.packing.balance import deal, even_runs, even_shares, level_ranks
from dataplane.data.packing.bins import (
    MOST_OPEN,
    Bins,
    concatenate,
    fewest_bins,
    first_fit,
    first_fit_decreasing,
    loads_of,
    modified_first_fit_decreasing,
    split,
)
from tests.data.columns_helpers import nested_of
from tests.profiles import budget


@st.composite
def capacity_and_lengths(draw: st.DrawFn) -> tuple[int, list[int]]:
    capacity = draw(st.integers(1, 60))
    return capacity, draw(st.lists(st.integers(0, capacity), min_size=1, max_size=40))


def naive_first_fit(lengths: list[int], order: list[int], capacity: int) -> Bins:
    bins: Bins = []
    for row in order:
        for rows in bins:
            if sum(lengths[each] for each in rows) + lengths[row] <= capacity:
                rows.append(row)
                break
        else:
            bins.append([row])
    return bins


def falling(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


# --- each algorithm -----------------------------------------------------------------------------------------------


@budget(100)
@given(capacity_and_lengths())
def test_first_fit_decreasing_is_first_fit_from_the_longest_on(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    expected = naive_first_fit(lengths, falling(lengths), capacity)
    assert first_fit_decreasing(np.array(lengths), capacity) == expected


@budget(100)
@given(capacity_and_lengths(), st.randoms(use_true_random=False))
def test_first_fit_takes_rows_in_the_order_given(given_: tuple[int, list[int]], random: object) -> None:
    capacity, lengths = given_
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert first_fit(np.array(lengths), np.array(order), capacity) == naive_first_fit(lengths, order, capacity)


@pytest.mark.parametrize("seed", range(3))
def test_first_fit_into_many_bins_with_space(seed: int) -> None:
    """More of them than are looked through one after another."""
    draw = np.random.default_rng(seed)
    lengths = [*draw.integers(51, 70, 2 * MOST_OPEN).tolist(), *draw.integers(0, 60, 100).tolist()]
    order = list(range(len(lengths)))
    assert first_fit(np.array(lengths), np.array(order), 100) == naive_first_fit(lengths, order, 100)


@budget(100)
@given(capacity_and_lengths())
def test_concatenation_fills_one_bin_after_another(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    bins = concatenate(np.array(lengths), capacity)
    assert [row for rows in bins for row in rows] == list(range(len(lengths)))
    for rows, following in itertools.pairwise(bins):
        tokens = sum(lengths[row] for row in rows)
        assert tokens <= capacity < tokens + lengths[following[0]]


@budget(300)
@given(capacity_and_lengths())
def test_modified_never_takes_more_bins_than_plain(given_: tuple[int, list[int]]) -> None:
    capacity, lengths = given_
    array = np.array(lengths)
    plain, modified = first_fit_decreasing(array, capacity), modified_first_fit_decreasing(array, capacity)
    assert fewest_bins(array, capacity) <= len(modified) <= len(plain)
    assert sorted(row for rows in modified for row in rows) == list(range(len(lengths)))


def test_where_the_modification_wins_and_where_it_would_lose() -> None:
    better = np.array([9, 8, 10, 13, 41, 11, 20, 29, 26])
    assert len(first_fit_decreasing(better, 43)) == 5
    bins = modified_first_fit_decreasing(better, 43)
    assert [sorted(better[rows].tolist(), reverse=True) for rows in bins] == [[41], [29, 13], [26, 9, 8], [20, 11, 10]]
    worse = np.array([14, 10, 44, 43, 56, 10, 34])
    assert len(modified_first_fit_decreasing(worse, 56)) == len(first_fit_decreasing(worse, 56)) == 4


@pytest.mark.parametrize(
    ("capacity", "lengths", "fewest"),
    [
        (10, [4, 3, 3], 1),
        (10, [4, 3, 4], 2),
        (10, [6, 6, 6], 3),
        (10, [8, 8, 3, 3], 3),
        (10, [0, 0], 0),
        (9, [5, 5], 2),
    ],
)
def test_the_bound_on_the_number_of_bins(capacity: int, lengths: list[int], fewest: int) -> None:
    assert fewest_bins(np.array(lengths), capacity) == fewest


def test_long_lengths_are_sorted_as_short_ones_are() -> None:
    short = np.random.default_rng(0).integers(0, 1 << 15, 300)
    assert first_fit_decreasing(short * 4, 1 << 18) == first_fit_decreasing(short, 1 << 16)


# --- packers ------------------------------------------------------------------------------------------------------


@budget(200)
@given(
    capacity_and_lengths(),
    st.sampled_from(PackingAlgorithm),
    st.none() | st.integers(0, 10),
    st.none() | st.integers(1, 8),
)
def test_every_packer(
    given_: tuple[int, list[int]], algorithm: PackingAlgorithm, least: int | None, multiple: int | None
) -> None:
    capacity, lengths = given_
    unbound = len(get_packer(algorithm, capacity).pack(lengths))
    count = max(unbound, least or 0)
    count += -count % (multiple or 1)
    packer = get_packer(algorithm, capacity, min_bin_count=least, bin_count_multiple=multiple)
    if count > len(lengths):
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences cannot fill {count} bins"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == count
    assert all(bins)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= capacity
    assert packer.pack(np.array(lengths)) == bins, "the same lengths, the same bins"


def test_the_fullest_bin_is_cut_in_halves() -> None:
    lengths = np.array([1, 1, 6, 2, 4, 9])
    assert split([[5], [2, 4], [3, 0, 1]], lengths, 4) == [[5], [2], [4], [3, 0, 1]]
    assert split([[0, 1, 2, 3, 4, 5]], lengths, 3) == [[0, 1, 2, 3], [4], [5]]
    assert split([[0, 1, 5]], lengths, 3) == [[0], [1], [5]]
    assert split([[0, 1, 3, 5]], lengths, 3) == [[0, 1], [3], [5]]
    assert split([[0, 1], [5]], np.zeros(6, dtype=np.int64), 3) == [[0], [1], [5]]


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_nothing_to_pack(algorithm: PackingAlgorithm) -> None:
    assert get_packer(algorithm, 8, bin_count_multiple=4).pack([]) == []
    with pytest.raises(ValueError, match="0 sequences cannot fill 1 bins"):
        get_packer(algorithm, 8, min_bin_count=1).pack([])


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_empty_rows_are_packed(algorithm: PackingAlgorithm) -> None:
    packer = get_packer(algorithm, 8)
    assert [sorted(rows) for rows in packer.pack([0, 0, 0])] == [[0, 1, 2]]
    assert sorted(row for rows in packer.pack([8, 0, 8, 0]) for row in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("algorithm", PackingAlgorithm)
def test_what_fits_no_bin_is_refused_by_name(algorithm: PackingAlgorithm) -> None:
    with pytest.raises(
        ValueError, match=r"^sequence 1 has 9 tokens, more than bin_capacity=8; 2 sequences are too long$"
    ):
        get_packer(algorithm, 8).pack([8, 9, 0, 10])


@pytest.mark.parametrize(
    ("lengths", "told"),
    [([3, -1], "sequence 1 has -1 tokens"), ([0.5], "integers"), ([[1]], "integers"), ([True], "integers")],
)
def test_lengths_are_integers_of_zero_or_more(lengths: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        get_packer("concatenative", 8).pack(lengths)


def test_packers_by_name() -> None:
    for algorithm, kind in (
        ("concatenative", ConcatenativePacker),
        ("FIRST_FIT_DECREASING", FirstFitDecreasingPacker),
        ("First_Fit_Shuffle", FirstFitShufflePacker),
        (PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING, ModifiedFirstFitDecreasingPacker),
    ):
        packer = get_packer(algorithm, 10)
        assert type(packer) is kind
        assert isinstance(packer, SequencePacker)


@pytest.mark.parametrize("other", ["best_fit", "", None, 1, ConcatenativePacker, ["concatenative"]])
def test_what_is_no_packing_algorithm_is_refused_with_the_choices(other: Any) -> None:
    known = f"{re.escape(repr(other))}; expected one of CONCATENATIVE, FIRST_FIT_DECREASING, "
    with pytest.raises(ValueError, match=known):
        get_packer(other, 10)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bin_capacity": 0}, "bin_capacity=0"),
        ({"bin_capacity": 1, "min_bin_count": -1}, "min_bin_count=-1"),
        ({"bin_capacity": 1, "bin_count_multiple": 0}, "bin_count_multiple=0"),
    ],
)
def test_numbers_out_of_range(arguments: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        get_packer("concatenative", **arguments)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_metrics_of_one_packing() -> None:
    packer = get_packer("concatenative", 10)
    metrics = packer.compute_metrics([4, 6, 5], [[0, 1], [2]])
    assert metrics == {
        "num_sequences": 3,
        "num_bins": 2,
        "total_sequence_length": 15,
        "total_bin_capacity": 20,
        "total_waste": 5,
        "average_utilization": 0.75,
        "waste_ratio": 0.25,
        "bin_balance": pytest.approx(1 - 12.5**0.5 / 7.5),
        "theoretical_min_bins": 2,
        "bin_efficiency": 1.0,
    }
    assert set(packer.compute_metrics([], []).values()) == {0}
    assert packer.compute_metrics([0, 0], [[0], [1]])["bin_balance"] == 1.0
    assert packer.get_aggregated_metrics() == {}


def test_metrics_of_all_packings() -> None:
    packer = get_packer("concatenative", 10, collect_metrics=True)
    assert packer.get_aggregated_metrics() == {}
    packer.pack([4, 6, 5])
    packer.pack([1])
    assert packer.get_aggregated_metrics() == {
        "total_sequences": 4,
        "total_bins": 3,
        "average_utilization": pytest.approx(16 / 30),
        "min_utilization": 0.1,
        "max_utilization": 0.75,
        "average_waste_ratio": pytest.approx(14 / 30),
        "min_waste_ratio": 0.25,
        "max_waste_ratio": 0.9,
        "average_bin_count": 1.5,
        "bin_efficiency": pytest.approx(2 / 3),
    }
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    silent = get_packer("concatenative", 10)
    silent.pack([1])
    assert silent.get_aggregated_metrics() == {}


# --- Samples to data-parallel ranks: plainly, packed, and in dynamic micro-batches.


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
        (6, 0, None, "dp_world=0: expected an integer of 1 or more"),
        (6, 2, 0, "batch_size=0: expected an integer of 1 or more"),
    ],
)
def test_uneven_splits_name_both_numbers(size: int, dp_world: int, batch_size: int | None, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shard_meta_for_dp(meta_of(size), dp_world=dp_world, batch_size=batch_size)


def test_only_a_meta_is_split() -> None:
    for wrong in (None, {"x": torch.zeros(2)}, "s0"):
        with pytest.raises(TypeError, match=r"argument meta: .* Pass a KVBatchMeta"):
            shard_meta_for_dp(wrong, dp_world=1)  # type: ignore[arg-type]


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
        ({"dp_world": 2.0}, "dp_world=2.0: expected an integer"),
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
