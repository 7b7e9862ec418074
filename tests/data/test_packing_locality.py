"""Samples go to ranks on their own host where that costs nothing, and only then."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.data.meta import KVBatchMeta
from dataplane.data.packing import PackingAlgorithm, Shard, plan_shards, shard_meta_for_dp
from dataplane.data.packing.locality import Exchange, Locality
from tests.profiles import budget

BUDGET = 64
HOSTS = [None, "one", "two", "three"]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic": {"dynamic_batching_args": {"max_tokens_per_microbatch": BUDGET}},
    "dynamic, rounded": {"dynamic_batching_args": {"max_tokens_per_microbatch": BUDGET, "sequence_length_round": 8}},
    **{
        algorithm.value: {"sequence_packing_args": {"max_tokens_per_microbatch": BUDGET, "algorithm": algorithm.value}}
        for algorithm in PackingAlgorithm
    },
    "padded": {
        "sequence_packing_args": {
            "max_tokens_per_microbatch": BUDGET,
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 8,
        }
    },
}


class Case:
    """Lengths and hosts of samples, the hosts of ranks, and the plan without and with them."""

    def __init__(
        self, way: str, lengths: list[int], rows: list[str | None], ranks: list[str | None], batches: int, *, tell: bool
    ) -> None:
        self.lengths, self.rows, self.ranks, self.way = lengths, rows, ranks, way
        self.per_batch = len(lengths) // batches
        arguments = {"shards": len(ranks), "batch_size": self.per_batch, **WAYS[way]}
        size = len(lengths)
        self.plain = plan_shards(size, lambda _: lengths, **arguments)
        told = lengths if tell else None
        self.near = plan_shards(
            size, lambda _: lengths, locality=Locality(rows=rows, shards=ranks, lengths=told), **arguments
        )

    def padded(self, row: int) -> int:
        given = WAYS[self.way].get("sequence_packing_args", {}).get("sequence_length_pad_multiple", 1)
        return -(-self.lengths[row] // given) * given

    def totals(self, plan: list[Shard]) -> list[list[int]]:
        """Tokens of each shard in each global batch."""
        batches = len(self.lengths) // self.per_batch
        return [
            [sum(self.padded(row) for row in shard.rows.tolist() if row // self.per_batch == batch) for shard in plan]
            for batch in range(batches)
        ]

    def at_home(self, plan: list[Shard]) -> int:
        """Tokens in shards on their own host."""
        return sum(
            self.padded(row)
            for shard, host in zip(plan, self.ranks, strict=True)
            for row in shard.rows.tolist()
            if host is not None and self.rows[row] == host
        )


@st.composite
def cases(draw: st.DrawFn, way: str, *, tell: bool = True) -> Case:
    ranks = draw(st.integers(1, 5))
    batches, each = draw(st.integers(1, 2)), draw(st.integers(1, 12))
    size = batches * ranks * each
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=size, max_size=size))
    hosts = st.sampled_from(HOSTS)
    rows = draw(st.lists(hosts, min_size=size, max_size=size))
    return Case(way, lengths, rows, draw(st.lists(hosts, min_size=ranks, max_size=ranks)), batches, tell=tell)


def micro_batches(shard: Shard) -> list[list[int]]:
    """The rows of each."""
    assert shard.micro_batch_indices is not None
    assert shard.elem_counts_per_gb is not None
    found, first = [], 0
    for ranges, count in zip(shard.micro_batch_indices, shard.elem_counts_per_gb, strict=True):
        found += [shard.rows[first + start : first + end].tolist() for start, end in ranges]
        first += count
    return found


@pytest.mark.parametrize("way", WAYS)
@budget(60)
@given(data=st.data())
def test_nothing_gets_worse_and_more_is_near(way: str, data: st.DataObject) -> None:
    case = data.draw(cases(way))
    rows = np.concatenate([shard.rows for shard in case.near])
    assert sorted(rows.tolist()) == list(range(len(case.lengths)))
    if "sequence_packing_args" not in WAYS[way]:
        assert [len(shard.rows) for shard in case.near] == [len(shard.rows) for shard in case.plain]
    for before, after in zip(case.totals(case.plain), case.totals(case.near), strict=True):
        assert max(after) <= max(before)
    assert case.at_home(case.near) >= case.at_home(case.plain)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
@budget(60)
@given(data=st.data())
def test_micro_batches_are_as_many_and_within_the_budget(way: str, data: st.DataObject) -> None:
    case = data.draw(cases(way))
    for before, after in zip(case.plain, case.near, strict=True):
        assert after.micro_batch_lengths is not None
        assert before.micro_batch_lengths is not None
        assert list(map(len, after.micro_batch_lengths)) == list(map(len, before.micro_batch_lengths))
        if way.startswith("dynamic"):
            assert after.micro_batch_lengths == before.micro_batch_lengths
            assert after.micro_batch_indices == before.micro_batch_indices
        widths = [width for batch in after.micro_batch_lengths for width in batch]
        for rows, width in zip(micro_batches(after), widths, strict=True):
            assert rows
            if way.startswith("dynamic"):
                assert max(case.lengths[row] for row in rows) <= width
                assert len(rows) * width <= BUDGET
            else:
                assert sum(case.padded(row) for row in rows) == width <= BUDGET


@pytest.mark.parametrize("way", WAYS)
@budget(30)
@given(data=st.data(), host=st.sampled_from(HOSTS))
def test_where_there_is_nothing_to_choose_all_is_as_without(way: str, data: st.DataObject, host: str | None) -> None:
    case = data.draw(cases(way))
    size, ranks = len(case.lengths), len(case.ranks)
    for rows, shards in (
        ([host] * size, case.ranks if host is None else [host] * ranks),
        (case.rows, [host] * ranks),
        (["elsewhere"] * size, case.ranks),
    ):
        same = Case(way, case.lengths, rows, shards, size // case.per_batch, tell=True)
        assert str(same.near) == str(same.plain)


@budget(30)
@given(data=st.data())
def test_plain_shards_without_lengths_are_exchanged_as_freely(data: st.DataObject) -> None:
    case = data.draw(cases("plain", tell=False))
    for first in range(0, len(case.lengths), case.per_batch):
        batch = range(first, first + case.per_batch)
        for host in {host for host in case.ranks if host is not None}:
            space = sum(len(shard.rows) for shard, at in zip(case.plain, case.ranks, strict=True) if at == host)
            space = space * case.per_batch // len(case.lengths)
            there = sum(case.rows[row] == host for row in batch)
            home = sum(
                case.rows[row] == host
                for shard, at in zip(case.near, case.ranks, strict=True)
                if at == host
                for row in shard.rows.tolist()
                if row in batch
            )
            assert home == min(space, there)


def test_rows_of_a_shard_stay_in_order() -> None:
    near = Locality(rows=["b", "a", "b", "a", "a", "b"], shards=["a", "b"])
    shards = plan_shards(6, lambda _: [], shards=2, locality=near)
    assert [shard.rows.tolist() for shard in shards] == [[1, 3, 4], [0, 2, 5]]


def test_most_of_a_packed_batch_comes_home() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 256, 512).tolist()
    hosts = [f"host {number % 4}" for number in range(512)]
    ranks = [f"host {number}" for number in (0, 0, 1, 1, 2, 2, 3, 3)]
    meta = KVBatchMeta("p", None, [str(number) for number in range(512)], sequence_lengths=lengths)
    arguments = {"max_tokens_per_microbatch": 1024, "algorithm": "modified_first_fit_decreasing"}

    def near(**told: Any) -> float:
        shards, inverse = shard_meta_for_dp(meta, dp_world=8, sequence_packing_args=arguments, **told)
        together = KVBatchMeta.concat(shards)
        assert inverse is not None
        assert together.subset(inverse).sample_ids == meta.sample_ids
        home = [
            length
            for shard, host in zip(shards, ranks, strict=True)
            for name, length in zip(shard.sample_ids, shard.sequence_lengths or [], strict=True)
            if hosts[int(name)] == host
        ]
        return sum(home) / sum(lengths)

    assert near() < 0.4
    assert near(row_hosts=hosts, rank_hosts=ranks) > 0.75


def test_bins_without_space_are_tried_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that fill nearly every bin: what helps is found, not looked for."""
    rng, size = np.random.default_rng(0), 4096
    lengths = rng.integers(1, 1024, size).tolist()
    near = Locality(
        rows=[f"host {number}" for number in rng.integers(0, 8, size).tolist()],
        shards=[f"host {number % 8}" for number in range(32)],
        lengths=lengths,
    )
    tries, real = 0, Exchange._swap_rows

    def counted(*arguments: Any) -> bool:
        nonlocal tries
        tries += 1
        return real(*arguments)

    monkeypatch.setattr(Exchange, "_swap_rows", counted)
    arguments = {"max_tokens_per_microbatch": 4096, "algorithm": "modified_first_fit_decreasing"}
    plan = plan_shards(size, lambda _: lengths, shards=32, sequence_packing_args=arguments, locality=near)
    home = [
        near.rows[row] == host for shard, host in zip(plan, near.shards, strict=True) for row in shard.rows.tolist()
    ]
    assert sum(home) > 0.6 * size
    assert tries < 4 * size


def test_hosts_that_do_not_fit_the_rows_are_an_error() -> None:
    meta = KVBatchMeta("p", None, ["a", "b"])
    with pytest.raises(ValueError, match="row_hosts has 1 entries and rank_hosts 2; expected 2, one per sample"):
        shard_meta_for_dp(meta, dp_world=2, row_hosts=["x"], rank_hosts=["x", "y"])


def test_ranges_of_micro_batches_follow_one_another() -> None:
    case = Case("dynamic", [8, 60, 9, 50, 30, 31], ["one", "two"] * 3, ["two", "one"], 1, tell=True)
    for shard in case.near:
        assert shard.micro_batch_indices is not None
        for ranges in shard.micro_batch_indices:
            assert all(one[1] == other[0] for one, other in pairwise(ranges))
