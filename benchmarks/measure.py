"""Statistics of repetitions, and the machine that they ran on. No torch."""

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
from typing import NamedTuple, TypeVar

T = TypeVar("T")
MIN_REPETITIONS = 7
"""Fewest rounds for a reported median."""
TURN_S = 0.06
"""How long one system repeats its work in its turn of a round."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of `values` lie, interpolated between neighbours. ValueError if
    empty."""
    if not values:
        raise ValueError("no values: a percentile needs at least one value")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median, quartiles and outer deciles of the values of rounds, in the unit of the measurement."""

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
    """Return `over` / `under`, round by round. Both sides of a quotient come from the same rounds, so that a slow
    phase of the machine slows both. ValueError if they have different numbers of rounds."""
    return [first / second for first, second in zip(over, under, strict=True)]


def steady(once: Callable[[], float], *, turn_s: float = TURN_S) -> float:
    """Return the median of repetitions of `once`, which returns seconds, until `turn_s` have passed, at least one.
    The garbage collector is off."""
    end = time.perf_counter() + turn_s
    taken: list[float] = []
    with uncollected():
        while not taken or time.perf_counter() < end:
            taken.append(once())
    return percentile(taken, 0.5)


def alternating(sides: Sequence[T], rounds: int) -> Iterator[Sequence[T]]:
    """Yield the sides in the order of each round: forwards, backwards, forwards ..."""
    for number in range(rounds):
        yield sides[::-1] if number % 2 else sides


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off inside this context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run and its load. `load` is the one-minute average."""

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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def quieten() -> None:
    """Silence torch's log lines about nested tensors in this process: false alarms of its tracer."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def load() -> float:
    """Return the one-minute load average, which includes this process."""
    return round(os.getloadavg()[0], 2)


def seconds(call: Callable[[], object]) -> float:
    """Return how long `call` takes. Its result is dropped afterwards, outside of the measured time."""
    begun = time.perf_counter()
    result = call()
    taken = time.perf_counter() - begun
    del result
    return taken


class Cost(NamedTuple):
    """The seconds of some work, and the processor seconds of this process, and of it and all of its
    descendants."""

    seconds: float
    client: float
    total: float


def cost(call: Callable[[], object], times: int = 1) -> Cost:
    """Return the cost of `call` divided by `times`. Its result is dropped afterwards."""
    others = _descendants(os.getpid())
    before = sum(map(cpu_seconds, others))
    client = time.process_time()
    taken = seconds(call)
    client = time.process_time() - client
    total = client + sum(map(cpu_seconds, others)) - before
    return Cost(taken / times, client / times, total / times)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the median of each component."""
    return Cost(*[percentile(values, 0.5) for values in zip(*costs, strict=True)])


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError):  # the process ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="utf-8").split()):
                found += [child, *_descendants(child)]
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the private memory of a process, without files and shared memory."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line 'Anonymous:'")


def cpu_seconds(pid: int) -> float:
    """Return the processor time that the current threads of a process have used."""
    taken_ns = 0
    with suppress(FileNotFoundError):  # the process ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
                taken_ns += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return taken_ns / 1e9


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].replace("(R)", "").split())
    return platform.machine()
