"""Splitting over data-parallel ranks: how balanced the ranks are, and how long it takes. No service."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import uncollected
from benchmarks.probes.base import Figure
from dataplane import KVBatchMeta, shard_meta_for_dp
from dataplane.data.packing import PackingAlgorithm, get_packer

RANKS = 8
LONGEST = 8192
SAMPLES = 100_000
BATCHES = ((256, 16384), (256, 20480), (512, 8192), (512, 16384), (1024, 16384), (1024, 32768), (4096, 32768))
"""Number of samples, and tokens of a micro-batch."""


def sharding(*, quick: bool) -> list[Figure]:
    """Measure the tokens of the heaviest rank over the mean, the worst of several log-normal batches, beside a
    round-robin distribution of the same bins; and the milliseconds of one split of many samples."""
    return [*_balance(seeds=2 if quick else 10), *_times(repetitions=5 if quick else 15)]


def _balance(*, seeds: int) -> list[Figure]:
    figures = []
    for algorithm in PackingAlgorithm:
        ours, in_turn = [], []
        for samples, budget in BATCHES:
            for seed in range(seeds):
                lengths = _lengths(samples, seed)
                packing = {"algorithm": algorithm.name, "max_tokens_per_microbatch": budget}
                metas, _ = shard_meta_for_dp(_meta(lengths), dp_world=RANKS, sequence_packing_args=packing)
                ours.append(_unevenness([sum(meta.sequence_lengths or ()) for meta in metas]))
                bins = get_packer(algorithm, budget, bin_count_multiple=RANKS).pack(lengths)
                loads = [int(lengths[rows].sum()) for rows in bins]
                in_turn.append(_unevenness([sum(loads[rank::RANKS]) for rank in range(RANKS)]))
        note = f"worst of {len(ours)} log-normal batches of 256 to 4096 samples, {RANKS} ranks"
        name = f"tokens of the heaviest rank, {algorithm.value}"
        figures.append(Figure(name=name, rounds=[max(ours)], unit="x mean", note=note))
        turn_note = f"the same bins distributed round-robin; median {median(in_turn):.3f}"
        figures.append(Figure(name=f"{name}, in turn", rounds=[max(in_turn)], unit="x mean", note=turn_note))
    return figures


def _times(*, repetitions: int) -> list[Figure]:
    meta = _meta(_lengths(SAMPLES, 0))
    ways: dict[str, Mapping[str, Any]] = {
        algorithm.value: {
            "sequence_packing_args": {"algorithm": algorithm.name, "max_tokens_per_microbatch": LONGEST},
        }
        for algorithm in PackingAlgorithm
    }
    ways["dynamic"] = {
        "dynamic_batching_args": {"sequence_length_round": 64, "max_tokens_per_microbatch": LONGEST},
    }
    ways["plain"] = {}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, arguments in ways.items():
            with uncollected():
                start = time.perf_counter()
                shard_meta_for_dp(meta, dp_world=RANKS, **arguments)
                taken[name].append((time.perf_counter() - start) * 1e3)
    note = f"with tags, lengths and row handles; {RANKS} ranks, {repetitions} repetitions"
    return [
        Figure(name=f"shard_meta_for_dp of {SAMPLES:,}, {name}", rounds=each, unit="ms", note=note)
        for name, each in taken.items()
    ]


def _lengths(samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw log-normal lengths with a median of 665 tokens."""
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.0, samples).astype(np.int64)
    return np.minimum(drawn, LONGEST)


def _meta(lengths: npt.NDArray[np.int64]) -> KVBatchMeta:
    rows = np.arange(len(lengths))
    meta = KVBatchMeta(
        "train",
        "train",
        [f"sample-{row}" for row in range(len(lengths))],
        sequence_lengths=lengths.tolist(),
        tags=[{"group": row // 8} for row in range(len(lengths))],
    )
    return meta.with_handles(rows, rows)


def _unevenness(tokens: list[int]) -> float:
    return max(tokens) * len(tokens) / sum(tokens)
