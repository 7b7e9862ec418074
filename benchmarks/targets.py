"""The budgets of this project, computed from the measurements of a run, and whether they are met."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.cases import PARTS
from benchmarks.measure import Spread, ratios
from benchmarks.payload import build
from benchmarks.plan import TOKENS
from benchmarks.probes.base import Figure
from benchmarks.race import Outcome
from benchmarks.systems.round_trip import at_reference


@dataclass(frozen=True)
class Results:
    """Measured rounds by name: seconds of cases by system, and figures."""

    cases: Mapping[str, Mapping[str, Sequence[float]]]
    figures: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], figures: Sequence[Figure]) -> Results:
        return cls(
            {outcome.case.name: outcome.seconds for outcome in outcomes},
            {figure.name: figure.rounds for figure in figures},
        )

    def speed(self, case: str, system: str, other: str) -> list[float]:
        """Return how many times as fast as `other` the system is. KeyError if one was not measured."""
        return ratios(self.cases[case][other], self.cases[case][system])

    def growth(self, small: str, large: str) -> list[float]:
        """Return the second figure over the first."""
        return ratios(self.figures[large], self.figures[small])

    def slower(self, base: str, case: str, system: str = "local") -> list[float]:
        """Return the seconds of `case` over those of `base`, which is in the same group."""
        return ratios(self.cases[case][system], self.cases[base][system])

    def last(self, prefix: str) -> str:
        """Return the name of the figure with the most samples, of those named `prefix` and a number of samples."""
        found = [name for name in self.figures if re.fullmatch(re.escape(prefix) + r" [\d,]+", name)]
        return max(found, key=lambda name: int(name.rpartition(" ")[2].replace(",", "")))

    def matching(self, pattern: str) -> list[Sequence[float]]:
        """Return the rounds of the figures whose name matches, lowest median first. ValueError if none does."""
        found = [rounds for name, rounds in self.figures.items() if re.fullmatch(pattern, name)]
        if not found:
            raise ValueError(f"no figure matches {pattern!r}")
        return sorted(found, key=median)


@dataclass(frozen=True)
class Target:
    """A lower limit `needed`, or an upper limit with `most`. `value`: of each round; the median is compared."""

    text: str
    needed: float
    value: Callable[[Results], Sequence[float]]
    most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.needed if self.most else value >= self.needed


PUT, SLICES, READ = "put 19 MB jagged", "8 padded slices", "read 19 MB"
STEP = "GRPO step"
VIEWS, LARGE_VIEWS = "19 MB as views", "large dense as views"
LARGE_PUT, LARGE_READ = "put large dense", "read large dense"
EVICTION, CLAIMS = "put beside a put that waits for eviction", "put beside 16 claims that wait"
UNSATISFIED = "put beside claims of one task that wait"
TQ = "TransferQueue"
COROUTINES = "native: 64 coroutines, one rollout"
MANY = r"\d+,\d+"
BESIDE = {
    "put of 512 rows": 8,
    "read of 512 rows": 8,
    "8 slices": 10,
    "kv_clear of 512 keys": 8,
    "kv_clear of 512 keys x 28 fields": 8,
    "put of one key": 8,
    "read of one key": 8,
    "tags of one key": 6,
    "tags of 512 keys": 6,
    "kv_list of 512 keys": 5,
    f"kv_list of {MANY} keys": 5,
    "64 in flight": 8,
    "64 in flight, 20 small columns": 6,
}
"""Minimum speed of the adapter relative to the package, by operation (`probes/adapter.py`)."""
NATIVE = {
    "put of one sample": 10,
    "get of one sample": 8,
    "64 coroutines, one rollout": 15,
    "64 coroutines, 20 small columns": 10,
    "clear of 512 samples x 28 fields": 15,
}
"""The same of the native clients (`probes/native.py`)."""


def _beside(kind: str, work: str, results: Results) -> Sequence[float]:
    return results.matching(f"{kind} : TransferQueue, {work}")[0]


def _of_service(results: Results, work: str) -> Sequence[float]:
    client = results.figures[f"{work}, CPU of the client"]
    total = results.figures[f"{work}, CPU of all"]
    return [every - own for every, own in zip(total, client, strict=True)]


def _client_of_get_batch(rows: int, results: Results) -> Sequence[float]:
    return results.figures[f"native: get_batch of {rows} rows, CPU of the client"]


TARGETS: tuple[Target, ...] = (
    Target("put 19 MB: x TransferQueue", 20, lambda r: r.speed(PUT, "local", TQ)),
    Target("put 19 MB: of memcpy, one thread", 0.5, lambda r: r.speed(PUT, "local", "memcpy-1")),
    Target("8 padded slices: x TransferQueue", 20, lambda r: r.speed(SLICES, "local", TQ)),
    Target("8 padded slices: of the memory limit", 0.6, lambda r: _of_memory_limit(r)),
    Target("large dense put: x TransferQueue", 4, lambda r: r.speed(LARGE_PUT, "local", TQ)),
    Target("large dense read: x TransferQueue", 8, lambda r: r.speed(LARGE_READ, "local", TQ)),
    Target("large dense put: of memcpy, one thread", 0.6, lambda r: r.speed(LARGE_PUT, "local", "memcpy-1")),
    Target("large dense read: of memcpy, one thread", 0.6, lambda r: r.speed(LARGE_READ, "local", "memcpy-1")),
    Target(
        "put in 32 fields: x the time of 1",
        1.3,
        lambda r: r.slower("put fixed bytes in 1 field", "put fixed bytes in 32 fields"),
        most=True,
    ),
    Target(
        "read in 32 fields: x the time of 1",
        1.3,
        lambda r: r.slower("read fixed bytes in 1 field", "read fixed bytes in 32 fields"),
        most=True,
    ),
    Target(
        "GRPO step with the journal: x the time without", 1.1, lambda r: r.speed(STEP, "local", "journal"), most=True
    ),
    Target("single-sample put: x TransferQueue", 10, lambda r: r.speed("single-sample put", "local", TQ)),
    Target(
        "put of 64 coroutines, CPU of the client, ms",
        0.25,
        lambda r: r.figures[f"{COROUTINES}, CPU of the client"],
        most=True,
    ),
    Target(
        "put of 64 coroutines, CPU of the service, ms",
        0.05,
        lambda r: _of_service(r, COROUTINES),
        most=True,
    ),
    Target("single-sample puts of 64 clients, /s", 1500, lambda r: r.figures["single-sample puts, 64 clients"]),
    Target("commit -> claim returns, p50 ms", 1, lambda r: r.figures["commit -> claim returns, p50"], most=True),
    Target(
        "put of one row -> claim returns, p50 ms",
        1,
        lambda r: r.figures["put of one row -> claim returns, p50"],
        most=True,
    ),
    Target("commit -> claim returns, p99 ms", 5, lambda r: r.figures["commit -> claim returns, p99"], most=True),
    Target(
        "512 rows by meta, most samples : 10^3",
        1.5,
        lambda r: r.growth("read 512 rows by meta at 1,000", r.last("read 512 rows by meta at")),
        most=True,
    ),
    Target(
        "512 rows by ids, most samples : 10^3",
        5,
        lambda r: r.growth("read 512 rows by ids at 1,000", r.last("read 512 rows by ids at")),
        most=True,
    ),
    Target(
        "put beside a put that waits for eviction, most samples : 10^3",
        1.5,
        lambda r: r.growth(f"{EVICTION} at 1,000", r.last(f"{EVICTION} at")),
        most=True,
    ),
    Target(
        "put beside 16 claims that wait, 20,000 samples : 100",
        1.5,
        lambda r: r.growth(f"{CLAIMS} at 100", r.last(f"{CLAIMS} at")),
        most=True,
    ),
    Target(
        "put beside 8,000 claims of one task that wait, 8,000 : 0",
        1.2,
        lambda r: r.growth(f"{UNSATISFIED} at 0", f"{UNSATISFIED} at 8,000"),
        most=True,
    ),
    Target(
        "controller MB per 10^6 samples x 10 fields",
        500,
        lambda r: _per_million(r),
        most=True,
    ),
    Target(
        "commands of one row per CPU second",
        8000,
        lambda r: r.matching(r"commands of \w+, 1 row")[0],
    ),
    Target(
        "the same, pipelined",
        15_000,
        lambda r: r.figures["commands of put, 1 row, pipelined"],
    ),
    Target(
        "the same, in groups",
        40_000,
        lambda r: r.figures["commands of put, 1 row, in groups"],
    ),
    Target("commands of 512 rows per CPU second", 1000, lambda r: r.matching(r"commands of \w+, 512 rows")[0]),
    Target("19 MB as views, ms", 1, lambda r: _views_ms(r), most=True),
    Target("large dense as views : 19 MB as views", 1.2, lambda r: r.slower(VIEWS, LARGE_VIEWS, "views"), most=True),
    Target("leader broadcast, x jagged bytes", 1.02, lambda r: r.figures["leader broadcast, bytes"], most=True),
    Target(
        "leader broadcast, payload collectives",
        1,
        lambda r: r.figures["leader broadcast, payload collectives"],
        most=True,
    ),
    Target(
        "channel, 64 KB items: x ray.util.queue.Queue",
        10,
        lambda r: r.figures["channel : ray.util.queue.Queue, 64 KB items"],
    ),
    Target(
        "channel, 4 MB items: x ray.util.queue.Queue",
        5,
        lambda r: r.figures["channel : ray.util.queue.Queue, 4 MB items"],
    ),
    Target(
        "broadcast of 16 MB to 3 workers: x Gloo",
        1.15,
        lambda r: r.figures["broadcast of 16 MB to 3 workers, time"],
        most=True,
    ),
    Target("remote put: of raw ZMQ", 0.5, lambda r: r.speed(PUT, "remote", "raw-zmq")),
    Target("remote read: of raw ZMQ", 0.5, lambda r: r.speed(READ, "remote", "raw-zmq")),
    Target("remote large put: of raw ZMQ", 0.5, lambda r: r.speed(LARGE_PUT, "remote", "raw-zmq")),
    Target("remote large read: of raw ZMQ", 0.5, lambda r: r.speed(LARGE_READ, "remote", "raw-zmq")),
    Target("remote put: x TransferQueue", 3, lambda r: r.speed(PUT, "remote", TQ)),
    Target("remote 8 slices: x TransferQueue", 3, lambda r: r.speed(SLICES, "remote", TQ)),
    Target("put with every second cleared : before", 2, lambda r: _cleared(r), most=True),
    Target(
        "peak of a put, x payload", 0.1, lambda r: r.figures["peak of a put beyond the caller's payload"], most=True
    ),
    Target("peak of a read, x payload", 1.1, lambda r: r.figures["peak of a read"], most=True),
    *(
        Target(
            f"get_batch of {rows} rows, CPU of the client, ms",
            needed,
            partial(_client_of_get_batch, rows),
            most=True,
        )
        for rows, needed in ((64, 0.35), (512, 2.5))
    ),
    *(
        Target(
            f"{kind}, {work.replace(MANY, 'many')}: x TransferQueue",
            needed,
            partial(_beside, kind, work),
        )
        for kind, works in (("adapter", BESIDE), ("native", NATIVE))
        for work, needed in works.items()
    ),
    Target(
        "tokens of the heaviest rank, x mean, any algorithm",
        1.05,
        lambda r: r.matching(r"tokens of the heaviest rank, \w+")[-1],
        most=True,
    ),
    Target(
        "split of 10^5 samples, ms, any algorithm",
        100,
        lambda r: r.matching("shard_meta_for_dp of 100,000, .*")[-1],
        most=True,
    ),
)


def judge(results: Results) -> list[tuple[Target, Spread]]:
    """Return each target whose rows were measured, with the rounds' values."""
    judged = []
    for target in TARGETS:
        try:
            judged.append((target, Spread.of(target.value(results))))
        except (KeyError, ValueError, StopIteration):  # not measured
            continue
    return judged


def _of_memory_limit(results: Results) -> list[float]:
    """Return the time of the limit over that of the slices. The limit: reading the rows and writing the padded slices
    as fast as a memcpy, which reads and writes the rows."""
    batch = build(TOKENS)
    moved = (batch.nbytes + batch.padded_nbytes(PARTS)) / (2 * batch.nbytes)
    return [moved * each for each in results.speed(SLICES, "local", "memcpy-1")]


def _views_ms(results: Results) -> list[float]:
    measured = results.cases[VIEWS]
    return at_reference([each * 1e3 for each in measured["views"]], list(measured["round-trip"]))


def _per_million(results: Results) -> list[float]:
    name = next(name for name in results.figures if name.startswith("controller memory"))
    found = re.search(r"([\d,]+) samples", name)
    assert found is not None, name
    return [megabytes * 1e6 / int(found[1].replace(",", "")) for megabytes in results.figures[name]]


def _cleared(results: Results) -> list[float]:
    before = results.last("put 512 rows at")
    return results.growth(before, f"{before}, every second cleared")
