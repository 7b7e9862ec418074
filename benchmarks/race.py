"""Runs groups of cases in rounds, A B B A, after a warm-up and one comparison of the values that the systems
return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.cases import Case
from benchmarks.measure import Spread, alternating, load, ratios
from benchmarks.payload import build
from benchmarks.plan import Group
from benchmarks.runner import ENTRIES, Entry, Runner

WITHOUT_DATA = ("memcpy-1", "memcpy-all", "raw-zmq", "round-trip")
"""Systems that move meaningless bytes, whose values are not compared."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case: seconds of each round, by system. `cold`: seconds of the very first repetition, before warm-up.
    `nbytes`: of its batch. `load`: after its group."""

    case: Case
    nbytes: int
    seconds: Mapping[str, Sequence[float]]
    cold: Mapping[str, float]
    load: float

    def times_local(self, name: str) -> float | None:
        """Return the seconds of this system over those of our local connection: the median of the rounds'
        quotients."""
        if not {name, "local"} <= self.seconds.keys():
            return None
        return Spread.of(ratios(self.seconds[name], self.seconds["local"])).median


class Race:
    """The processes of all systems of a plan. A context manager that ends them on exit, also after an error."""

    def __init__(self, systems: Sequence[str]) -> None:
        chosen = [entry for entry in ENTRIES if entry.name in systems]
        by_process: dict[str, list[Entry]] = {}
        for entry in chosen:
            by_process.setdefault(entry.process, []).append(entry)
        self._runners = {process: Runner(entries) for process, entries in by_process.items()}
        self._of = {entry.name: self._runners[entry.process] for entry in chosen}

    def __enter__(self) -> Self:
        try:
            for runner in self._runners.values():
                runner.begin("open")
            for runner in self._runners.values():
                runner.end()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Runner.close, self._runners.values()))

    def run(self, groups: Sequence[Group], progress: Callable[[str], None]) -> list[Outcome]:
        """Run every case, in order. Systems that were not started are left out."""
        outcomes = []
        for group in groups:
            progress(group.name)
            outcomes += self._group(group)
        return outcomes

    def _group(self, group: Group) -> list[Outcome]:
        """Run a group. The turns of one system on the group's cases are adjacent."""
        names = dict.fromkeys(name for case in group.cases for name in case.systems if name in self._of)
        turns = [(name, case) for name in names for case in group.cases if name in case.systems]
        cold = {(name, case): self._of[name].call("prepare", name, case) for name, case in turns}
        for case in group.cases:
            self._compare(case, [name for name, each in turns if each == case and name not in WITHOUT_DATA])
        taken: dict[tuple[str, Case], list[float]] = {turn: [] for turn in turns}
        for order in alternating(turns, group.rounds):
            for name, case in order:
                taken[name, case].append(self._of[name].call("turn", name, case))
        for name, case in turns:
            self._of[name].call("finish", name, case)
        return [
            Outcome(
                case=case,
                nbytes=build(case.batch).nbytes,
                seconds={name: taken[name, case] for name, each in turns if each == case},
                cold={name: cold[name, case] for name, each in turns if each == case},
                load=load(),
            )
            for case in group.cases
        ]

    def _compare(self, case: Case, systems: Sequence[str]) -> None:
        found = {name: self._of[name].call("digests", name, case) for name in systems}
        first = next(iter(found), None)
        wrong = [name for name in found if first is not None and found[name] != found[first]]
        if wrong:
            raise RuntimeError(f"{case.name}: {', '.join(wrong)} returned different values than {first}")
