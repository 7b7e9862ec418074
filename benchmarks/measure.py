"""Numbers from repetitions, and what machine they were taken on. No torch."""

from __future__ import annotations

import gc
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MIN_REPETITIONS = 7
"""The fewest rounds that a reported median may rest on."""
TURN_S = 0.06
"""How long one side repeats its work in its turn of a round."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lie, interpolated between neighbours. ValueError if empty."""
    if not values:
        raise ValueError("no values: a percentile needs at least one")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median, quartiles and outer tenths of some rounds, in the unit of the measurement."""

    median: float
    p10: float
    p25: float
    p75: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """ValueError if `values` is empty."""
        return cls(
            median=percentile(values, 0.5),
            p10=percentile(values, 0.1),
            p25=percentile(values, 0.25),
            p75=percentile(values, 0.75),
            p90=percentile(values, 0.9),
            rounds=len(values),
        )


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """`over` / `under`, round by round. Both sides of a quotient come from the same rounds, so that a
    slow phase of the machine slows both. ValueError if they have different numbers of rounds."""
    return [first / second for first, second in zip(over, under, strict=True)]


def steady(once: Callable[[], float], *, turn_s: float = TURN_S) -> float:
    """The median of repetitions of `once`, which returns seconds, until `turn_s` have passed; one at least.
    The garbage collector is off."""
    end = time.perf_counter() + turn_s
    taken: list[float] = []
    with uncollected():
        while not taken or time.perf_counter() < end:
            taken.append(once())
    return percentile(taken, 0.5)


def alternating(sides: Sequence[T], rounds: int) -> Iterator[Sequence[T]]:
    """The sides in the order of each round: forwards, backwards, forwards ..."""
    for number in range(rounds):
        yield sides[::-1] if number % 2 else sides


@contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector is off inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and under what load it ran. `load` is the one-minute average."""

    cores: int
    memory_gib: int
    processor: str
    kernel: str
    python: str
    load: float

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cores=cores(),
            memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
            processor=_processor(),
            kernel=platform.release().split("-")[0],
            python=platform.python_version(),
            load=load(),
        )

    def __str__(self) -> str:
        return f"{self.cores} cores, {self.memory_gib} GiB, {self.processor}, Linux {self.kernel}, Python {self.python}"


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def quieten() -> None:
    """No log lines of torch's about nested tensors, which alarm its tracer for nothing, in this process."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def load() -> float:
    """The one-minute load average, which includes ourselves."""
    return round(os.getloadavg()[0], 2)


def seconds(call: Callable[[], object]) -> float:
    """How long `call` takes; what it returns is dropped before the clock is read again by anyone."""
    begun = time.perf_counter()
    result = call()
    taken = time.perf_counter() - begun
    del result
    return taken


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process: what it holds besides files and shared memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line 'Anonymous:'")


def cpu_seconds(pid: int) -> float:
    """Processor time that the living threads of a process have used."""
    taken_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            taken_ns += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return taken_ns / 1e9


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].replace("(R)", "").split())
    return platform.machine()
