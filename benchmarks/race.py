"""Runs a plan: every case on its systems in turns, A B A B, after warm-up and one comparison of what came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.cases import Case
from benchmarks.measure import Spread, load
from benchmarks.payload import build
from benchmarks.plan import Plan
from benchmarks.runner import ENTRIES, Entry, Runner

WITHOUT_DATA = ("memcpy-1", "memcpy-all", "raw-zmq")
"""Systems that move bytes of no meaning, so that there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case: seconds by system. `cold`: of the very first round, before warm-up. `nbytes` of its batch. `load` when
    it was done."""

    case: Case
    nbytes: int
    seconds: Mapping[str, Spread]
    cold: Mapping[str, float]
    load: float


class Race:
    """The processes of all systems of a plan. As a context manager ends them, whatever happened."""

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
        for runner in self._runners.values():
            runner.close()

    def run(self, plan: Plan, progress: Callable[[str], None]) -> list[Outcome]:
        """Every case of the plan, in order; cases with systems that were not started are run on the others."""
        outcomes = []
        for case in plan.cases:
            progress(case.name)
            outcomes.append(self._case(case, plan.repetitions))
        return outcomes

    def _case(self, case: Case, repetitions: int) -> Outcome:
        systems = [name for name in case.systems if name in self._of]
        cold = {name: self._of[name].call("prepare", name, case) for name in systems}
        self._compare(case, [name for name in systems if name not in WITHOUT_DATA])
        taken: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(repetitions):
            for name in systems:
                taken[name].append(self._of[name].call("turn", name, case))
        for name in systems:
            self._of[name].call("finish", name)
        return Outcome(
            case=case,
            nbytes=build(case.batch).nbytes,
            seconds={name: Spread.of(values) for name, values in taken.items()},
            cold=cold,
            load=load(),
        )

    def _compare(self, case: Case, systems: Sequence[str]) -> None:
        found = {name: self._of[name].call("digests", name, case) for name in systems}
        first = next(iter(found), None)
        wrong = [name for name in found if first is not None and found[name] != found[first]]
        if wrong:
            raise RuntimeError(f"{case.name}: {', '.join(wrong)} gave back other values than {first}")
