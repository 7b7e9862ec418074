"""What `benchmarks/` computes and plans. Nothing here is timed, and the peers are not needed."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from typing import Any

import pytest
import torch

from benchmarks.cases import SINGLE_PUTS, Case, Op, read_back, repeat, stored
from benchmarks.compare import compare
from benchmarks.measure import (
    MIN_REPETITIONS,
    Machine,
    Spread,
    alternating,
    anonymous_bytes,
    cpu_seconds,
    percentile,
    ratios,
    steady,
)
from benchmarks.payload import Batch, BatchSpec, Shape, build, digest, spans
from benchmarks.plan import plan
from benchmarks.probes.base import Figure
from benchmarks.race import Outcome
from benchmarks.runner import ENTRIES
from benchmarks.systems.base import Span
from benchmarks.systems.ceiling import Ceiling
from benchmarks.systems.round_trip import REFERENCE_S, at_reference
from benchmarks.targets import BESIDE, COROUTINES, MANY, NATIVE, TARGETS, Results, Target, judge
from tests.children import Child

pytestmark = pytest.mark.integration

SMALL = BatchSpec(shape=Shape.TOKENS, rows=40, length=16)


# --- measuring ------------------------------------------------------------------------------------------------


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert percentile([5.0], 0.9) == 5.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_a_spread_is_the_median_quartiles_and_tenths() -> None:
    spread = Spread.of([float(value) for value in range(21)])
    assert (spread.p10, spread.p25, spread.median, spread.p75, spread.p90) == (2.0, 5.0, 10.0, 15.0, 18.0)
    assert spread.rounds == 21


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that becomes ten times slower for some rounds changes no quotient of them."""
    assert ratios([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_a_latency_is_scaled_by_the_round_trip_of_its_round() -> None:
    assert at_reference([1.0, 2.0], [REFERENCE_S, 2 * REFERENCE_S]) == pytest.approx([1.0, 1.0])


def test_the_order_of_a_round_alternates() -> None:
    assert list(alternating("AB", 3)) == ["AB", "BA", "AB"]


def test_a_turn_is_the_median_of_its_repetitions() -> None:
    taken = iter([5.0, 1.0, 2.0])
    assert steady(lambda: next(taken), turn_s=0.0) == 5.0
    assert gc.isenabled()
    assert steady(lambda: float(gc.isenabled()), turn_s=0.0) == 0.0


def test_what_the_kernel_says_of_a_process() -> None:
    """Of one whose threads all live on: time that another's thread has used goes with it."""
    code = "for _ in range(2):\n    sum(range(1_000_000))\n    print(flush=True)\n    input()"
    with Child([sys.executable, "-c", code]) as process:
        process.line()
        before = cpu_seconds(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.line()
        assert cpu_seconds(process.pid) > before > 0
        assert anonymous_bytes(process.pid) > 1 << 20
        assert process.finish("\n")[0] == 0
    assert cpu_seconds(os.getpid()) > 0
    assert Machine.here().cores >= 1


def test_padded_slices_have_as_many_bytes_as_the_padded_tensors() -> None:
    batch = build(SMALL)
    whole = sum(
        torch.nested.to_padded_tensor(column, 0).nbytes if column.is_nested else column.nbytes
        for column in batch.columns.values()
    )
    assert batch.padded_nbytes(1) == whole
    assert batch.nbytes == batch.padded_nbytes(len(batch.ids)) < batch.padded_nbytes(4) <= whole


# --- payloads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(Shape))
def test_a_batch_is_the_same_each_time_and_its_digest_tells(shape: Shape) -> None:
    spec = BatchSpec(shape=shape, rows=40, length=16, fields=3)
    first = build(spec)
    build.cache_clear()
    again = build(spec)
    assert first is not again
    assert digest(first.columns) == digest(again.columns)
    name, column = next(iter(again.columns.items()))
    values = column.values() if column.is_nested else column
    values.view(-1)[7] += 1
    assert {each for each in first.columns if digest(first.columns)[each] != digest(again.columns)[each]} == {name}
    build.cache_clear()


def test_a_digest_sees_the_lengths_of_rows() -> None:
    values = torch.arange(6)
    one = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    other = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 6]))
    assert digest({"x": one}) != digest({"x": other})


def test_bytes_of_a_batch() -> None:
    columns = {"dense": torch.zeros(2, 3), "text": ["é", "ab"], "jagged": build(SMALL).columns["input_ids"]}
    assert Batch(ids=["a", "b"], columns=columns).nbytes == 24 + 4 + columns["jagged"].values().numel() * 8


def test_spans_cover_all_rows_once() -> None:
    assert spans(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert Span(100, 200, 10).part(2, 5) == Span(120, 150, 3)


# --- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_every_row_is_planned(quick: bool) -> None:
    chosen = plan(quick=quick)
    cases = _cases(quick)
    assert all(group.rounds >= MIN_REPETITIONS for group in chosen)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.op for case in cases} == set(Op)
    assert {case.batch.shape for case in cases} == set(Shape)
    known = {entry.name for entry in ENTRIES}
    assert {name for case in cases for name in case.systems} == known
    assert all("local" in case.systems for case in cases)


def test_quick_has_the_rows_of_the_whole_plan() -> None:
    def rows(quick: bool) -> set[tuple[Op, Shape]]:
        return {(case.op, case.batch.shape) for case in _cases(quick)}

    assert rows(True) == rows(False)
    assert len(_cases(True)) < len(_cases(False))


@pytest.mark.parametrize("quick", [False, True])
def test_every_budget_on_a_case_can_be_judged(quick: bool) -> None:
    outcomes = [
        Outcome(case=case, nbytes=1, seconds=dict.fromkeys(case.systems, [1.0] * group.rounds), cold={}, load=0.0)
        for group in plan(quick=quick)
        for case in group.cases
    ]
    judged = {target.text for target, _ in judge(Results.of(outcomes, _figures()))}
    assert judged == {target.text for target in TARGETS}


def _cases(quick: bool) -> list[Case]:
    return [case for group in plan(quick=quick) for case in group.cases]


def _figures() -> list[Figure]:
    """One of each name that a budget asks for."""
    names = [
        *(f"{COROUTINES}, CPU of {whose}" for whose in ("the client", "all")),
        *(f"native: get_batch of {rows} rows, CPU of the client" for rows in (64, 512)),
        *(f"native : TransferQueue, {work}" for work in NATIVE),
        "single-sample puts, 64 clients",
        "commit -> claim returns, p50",
        "commit -> claim returns, p99",
        "put of one row -> claim returns, p50",
        *(f"read 512 rows by {how} at {live}" for how in ("meta", "ids") for live in ("1,000", "100,000")),
        "controller memory, 100,000 samples x 10 fields",
        *(f"commands of put, 1 row{how}" for how in ("", ", pipelined", ", in groups")),
        "commands of put, 512 rows",
        "leader broadcast, bytes",
        "leader broadcast, payload collectives",
        "broadcast of 16 MB to 3 workers, time",
        "channel : ray.util.queue.Queue, 64 KB items",
        "channel : ray.util.queue.Queue, 4 MB items",
        *(f"put beside a put that waits for eviction at {live}" for live in ("1,000", "200,000")),
        *(f"put beside 16 claims that wait at {live}" for live in ("100", "20,000")),
        *(f"put beside claims of one task that wait at {count}" for count in ("0", "8,000")),
        "put 512 rows at 100,000",
        "put 512 rows at 100,000, every second cleared",
        "peak of a put beyond the caller's payload",
        "peak of a read",
        *(f"adapter : TransferQueue, {work.replace(MANY, '10,000')}" for work in BESIDE),
        "tokens of the heaviest rank, concatenative",
        "shard_meta_for_dp of 100,000, modified_first_fit_decreasing",
    ]
    return [Figure(name=name, rounds=[1.0], unit="") for name in names]


# --- budgets --------------------------------------------------------------------------------------------------


def test_growth_is_read_off_the_most_samples() -> None:
    figures = {"read 512 rows by ids at 1,000": [1.0, 2.0], "read 512 rows by ids at 1,000,000": [3.0, 8.0]}
    results = Results({}, {**figures, "read 512 rows by ids at 100,000": [2.0, 2.0]})
    assert results.last("read 512 rows by ids at") == "read 512 rows by ids at 1,000,000"
    [(target, spread)] = judge(results)
    assert (target.text, spread.median) == ("512 rows by ids, most samples : 10^3", 3.5)


def test_a_ratio_above_one_says_ours_is_faster() -> None:
    results = Results({"row": {"local": [1.0], "TransferQueue": [20.0]}}, {})
    assert results.speed("row", "local", "TransferQueue") == [20.0]
    at_least, at_most = Target("", 20, lambda _: 0.0), Target("", 20, lambda _: 0.0, most=True)
    assert [at_least.met(19.9), at_least.met(20), at_most.met(20), at_most.met(20.1)] == [False, True, True, False]


def test_two_runs_are_compared_budget_by_budget() -> None:
    def run(*reached: float) -> dict[str, Any]:
        needed = [("fast", 2.0, False), ("slow", 2.0, False), ("next to nothing", 1.0, True)]
        return {
            "budgets": [
                {"text": text, "needed": limit, "most": most, "reached": value}
                for (text, limit, most), value in zip(needed, reached, strict=False)
            ]
        }

    found = compare(run(10.0, 1.0, 0.001), run(11.4, 1.2, 0.003))
    assert [(each.text, each.apart) for each in found] == [("fast", False), ("slow", True), ("next to nothing", False)]
    assert found[1].quotient == pytest.approx(1.2)
    assert compare(run(1.2), run(1.0))[0].apart
    assert compare(run(), run(1.0)) == []


# --- work -----------------------------------------------------------------------------------------------------


def test_work_drops_what_it_stored_and_reads_all_slices() -> None:
    class Recorder(Ceiling):
        dropped = 0

        def drop(self, held: Span) -> None:
            Recorder.dropped += 1

    system = Recorder(threads=2)
    batch = build(SMALL)
    for op in (Op.PUT, Op.READ, Op.SLICES, Op.SINGLE):
        held = system.put(batch) if stored(op) else None
        assert repeat(op, system, batch, held) > 0
    assert Recorder.dropped == 1 + SINGLE_PUTS
    assert len(read_back(Op.SLICES, system, batch, system.put(batch))) == 8
    system.close()


def test_cases_can_travel_between_processes_and_be_compared() -> None:
    case = _cases(True)[0]
    assert dataclasses.replace(case) == case
    assert isinstance(case, Case)
    assert hash(case.batch)
