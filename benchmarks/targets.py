"""What the numbers should be, and whether they are: the budgets of this project, computed from what a run measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measure import Spread
from benchmarks.probes.base import Figure
from benchmarks.race import Outcome


@dataclass(frozen=True)
class Results:
    """What a run measured, by name."""

    cases: Mapping[str, Mapping[str, Spread]]
    figures: Mapping[str, float]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], figures: Sequence[Figure]) -> Results:
        return cls(
            {outcome.case.name: outcome.seconds for outcome in outcomes},
            {figure.name: figure.value for figure in figures},
        )

    def speed(self, case: str, system: str, other: str) -> float:
        """How many times as fast as `other` the system is. KeyError where one was not measured."""
        seconds = self.cases[case]
        return seconds[other].median / seconds[system].median

    def growth(self, small: str, large: str) -> float:
        """Milliseconds of the second figure over those of the first."""
        return self.figures[large] / self.figures[small]

    def slower(self, base: str, case: str, system: str = "local") -> float:
        """Seconds of `case` over those of `base`."""
        return self.cases[case][system].median / self.cases[base][system].median

    def beside(self, case: str, system: str, base: str = "local") -> float:
        """Seconds of one system over those of another."""
        return 1 / self.speed(case, system, base)

    def last(self, prefix: str) -> str:
        """Of the figures `prefix` and a count of samples, the name of the one with the most."""
        found = [name for name in self.figures if re.fullmatch(re.escape(prefix) + r" [\d,]+", name)]
        return max(found, key=lambda name: int(name.rpartition(" ")[2].replace(",", "")))


@dataclass(frozen=True)
class Target:
    """At least, or with `most` at most, `needed`."""

    text: str
    needed: float
    value: Callable[[Results], float]
    most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.needed if self.most else value >= self.needed


PUT, SLICES, READ = "put 19 MB jagged", "8 padded slices", "read 19 MB"
STEP = "GRPO step"
LARGE_PUT, LARGE_READ = "put large dense", "read large dense"
TQ = "TransferQueue"

TARGETS: tuple[Target, ...] = (
    Target("put 19 MB: x TransferQueue", 20, lambda r: r.speed(PUT, "local", TQ)),
    Target("put 19 MB: of memcpy, one thread", 0.5, lambda r: r.speed(PUT, "local", "memcpy-1")),
    Target("8 padded slices: x TransferQueue", 20, lambda r: r.speed(SLICES, "local", TQ)),
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
    Target("GRPO step with the journal: x the time without", 1.1, lambda r: r.beside(STEP, "journal"), most=True),
    Target("single-sample put: x TransferQueue", 10, lambda r: r.speed("single-sample put", "local", TQ)),
    Target("single-sample puts of 64 clients, /s", 1500, lambda r: r.figures["single-sample puts, 64 clients"]),
    Target("commit -> claim returns, p50 ms", 1, lambda r: r.figures["commit -> claim returns, p50"], most=True),
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
        "controller MB per 10^6 samples x 10 fields",
        500,
        lambda r: max(_per_million(name, value) for name, value in r.figures.items() if "controller memory" in name),
        most=True,
    ),
    Target("commands of one row per CPU second", 5000, lambda r: _worst(r, "1 row")),
    Target("commands of 512 rows per CPU second", 1000, lambda r: _worst(r, "512 rows")),
    Target("19 MB as views, ms", 1, lambda r: r.cases[READ]["views"].median * 1e3, most=True),
    Target(
        "large dense as views : 19 MB as views",
        1.2,
        lambda r: r.cases[LARGE_READ]["views"].median / r.cases[READ]["views"].median,
        most=True,
    ),
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
    Target(
        "tokens of the heaviest rank, x mean, any algorithm",
        1.05,
        lambda r: max(
            value for name, value in r.figures.items() if re.fullmatch(r"tokens of the heaviest rank, \w+", name)
        ),
        most=True,
    ),
    Target(
        "split of 10^5 samples, ms, any algorithm",
        100,
        lambda r: max(value for name, value in r.figures.items() if name.startswith("shard_meta_for_dp of 100,000, ")),
        most=True,
    ),
)


def judge(results: Results) -> list[tuple[Target, float]]:
    """Each target whose rows were measured, with what was reached."""
    judged = []
    for target in TARGETS:
        try:
            judged.append((target, target.value(results)))
        except (KeyError, ValueError, StopIteration):
            continue
    return judged


def _worst(results: Results, rows: str) -> float:
    return min(value for name, value in results.figures.items() if re.fullmatch(rf"commands of \w+, {rows}", name))


def _per_million(name: str, megabytes: float) -> float:
    found = re.search(r"([\d,]+) samples", name)
    assert found is not None, name
    return megabytes * 1e6 / int(found[1].replace(",", ""))


def _cleared(results: Results) -> float:
    after = next(name for name in results.figures if name.endswith("every second cleared"))
    return results.growth(after.partition(", every")[0], after)
