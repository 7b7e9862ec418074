"""Rough latency and throughput of a service, measured from this process; too imprecise for comparisons."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dataplane.cli.local_service import temporary_partition
from dataplane.config import MIB, DataPlaneConfig

if TYPE_CHECKING:
    import torch

    from dataplane import DataPlaneClient

SMALL_BYTES = 1 << 10
LARGE_ROWS, LARGE_BYTES = 16, MIB
MANY_ROWS, MANY_BYTES = 1024, 4 << 10
"""Numbers of rows of a call, and bytes per row."""
MIN_CALLS, WARM_UP_CALLS = 5, 8
"""Minimum number of timed calls, and number of warm-up calls before them, which allocate memory."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Result for one operation `what`, called `count` times with `samples` samples and `nbytes` bytes per call."""

    what: str
    count: int
    samples: int
    nbytes: int
    median_ms: float
    p99_ms: float

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6 bytes) per second at the median."""
        return self.nbytes / self.median_ms / 1000

    @property
    def samples_per_s(self) -> float:
        """Samples per second at the median."""
        return self.samples / self.median_ms * 1000


def measure(config: DataPlaneConfig, budget_s: float) -> Iterator[Measure]:
    """Measure each operation for `budget_s` seconds, one after the other, in a temporary partition."""
    import torch

    from dataplane import DataPlaneClient, FieldKind, FieldSpec

    torch.manual_seed(0)
    fields = {"x": FieldSpec(FieldKind.JAGGED, "uint8", ())}
    # First all operations over the best connection, then only the large rows over ZMQ.
    for remote, connection_kind in ((False, ""), (True, " over ZMQ")):
        settings = replace(config, force_remote=remote)
        with DataPlaneClient(settings).connect() as client, temporary_partition(client, "bench", fields) as name:
            bench = _Bench(client, name, budget_s)
            if not remote:
                yield from bench.measure_small()
                yield bench.measure_claim()
            yield from bench.measure_rows(f"{LARGE_ROWS} rows of 1 MiB{connection_kind}", LARGE_ROWS, LARGE_BYTES)
            if not remote:
                yield from bench.measure_rows(f"{MANY_ROWS} rows of 4 KiB", MANY_ROWS, MANY_BYTES)


class _Bench:
    """Measures one client in one partition, each operation for `_budget_s` seconds. _numbers: counts all samples, for
    unique ids."""

    def __init__(self, client: DataPlaneClient, partition: str, budget_s: float) -> None:
        self._client = client
        self._partition = partition
        self._budget_s = budget_s
        self._numbers = itertools.count()

    def measure_small(self) -> Iterator[Measure]:
        """Measure a request for statistics, and a put and a get of one small row."""
        yield self._measure(
            "ask for statistics", samples=0, nbytes=0, prepare=lambda: None, act=lambda _: self._client.stats()
        )
        yield from self.measure_rows("1 row of 1 KiB", 1, SMALL_BYTES)

    def measure_claim(self) -> Measure:
        """Measure a claim of one ready sample."""

        def put() -> None:
            self._put(_rows(1, SMALL_BYTES))

        def claim(_: object) -> None:
            self._client.claim_meta(self._partition, "bench", ["x"], 1)

        return self._measure("claim 1 sample", samples=1, nbytes=0, prepare=put, act=claim)

    def measure_rows(self, what: str, count: int, nbytes: int) -> Iterator[Measure]:
        """Measure a put and a get of `count` rows of `nbytes` bytes. what: describes these rows in the results."""
        rows = _rows(count, nbytes)
        total = count * nbytes
        yield self._measure(f"put {what}", count, total, prepare=lambda: None, act=lambda _: self._put(rows))
        ids = self._put(rows)

        def get(_: object) -> None:
            self._client.get_samples(ids, self._partition, ["x"])

        yield self._measure(f"get {what}", count, total, prepare=lambda: None, act=get)
        self._clear(ids)

    def _put(self, rows: list[torch.Tensor]) -> list[str]:
        ids = [f"s{next(self._numbers)}" for _ in rows]
        self._client.put_samples(ids, self._partition, {"x": rows})
        return ids

    def _clear(self, ids: list[str]) -> None:
        self._client.clear_samples(ids, self._partition)

    def _measure(
        self, what: str, samples: int, nbytes: int, prepare: Callable[[], Any], act: Callable[[Any], Any]
    ) -> Measure:
        """Time calls of `act` for the budget after the warm-up. Before each call, `prepare` is called; it is not timed,
        and `act` gets its result. Samples whose ids `act` returns are cleared. what, samples, nbytes: see `Measure`."""
        times_ms: list[float] = []
        end = math.inf  # of the budget, which begins after the warm-up
        while len(times_ms) < WARM_UP_CALLS + MIN_CALLS or time.monotonic() < end:
            if len(times_ms) == WARM_UP_CALLS:  # the warm-up is over
                end = time.monotonic() + self._budget_s
            prepared = prepare()
            began = time.perf_counter()
            result = act(prepared)
            times_ms.append((time.perf_counter() - began) * 1000)
            if isinstance(result, list):
                self._clear(result)
        times_ms = sorted(times_ms[WARM_UP_CALLS:])
        return Measure(
            what=what,
            count=len(times_ms),
            samples=samples,
            nbytes=nbytes,
            median_ms=statistics.median(times_ms),
            p99_ms=times_ms[math.ceil(0.99 * len(times_ms)) - 1],
        )


def _rows(count: int, nbytes: int) -> list[torch.Tensor]:
    import torch

    return list(torch.randint(0, 256, (count, nbytes), dtype=torch.uint8))
