"""A storage unit's counters and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataplane.core.metrics.catalog import BULK, Sheet
from dataplane.core.metrics.histograms import Op


class BulkCounts:
    """Counters of a bulk server. One thread counts requests, another rejected handshakes; any thread may read. The
    counters survive a replacement of the bulk server."""

    def __init__(self) -> None:
        self.verbs: dict[str, Op] = {}
        self.read_bytes = 0
        self.written_bytes = 0
        self.fences = 0

    def note(self, verb: str | None, error: Exception | None, took_s: float) -> None:
        """Count an answered request and its duration. verb: None if it has no known one. error: that of the reply."""
        op = self.verbs.setdefault(verb or "unknown", Op())
        op.took.add(took_s)
        if error is None:
            op.ok += 1
        else:
            op.failed(error)


@dataclass(frozen=True, kw_only=True)
class UnitFacts:
    """A snapshot of a storage unit. `unit` is 0 until the controller has accepted the unit."""

    unit: int
    name: str
    attached: int
    capacity_bytes: int
    backed_bytes: int


class BulkMetrics(Collector):
    """The unit's Prometheus collector. facts: returns the current snapshot, or None while the unit is not running."""

    def __init__(self, counts: BulkCounts, facts: Callable[[], UnitFacts | None]) -> None:
        self._counts = counts
        self._facts = facts

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the bulk server and, while the unit is running, those of its arena."""
        sheet, counts = Sheet(BULK), self._counts
        for verb, op in list(counts.verbs.items()):  # a copy, because the server's thread adds verbs
            for outcome, count in op.outcomes().items():
                sheet.set("bulk_requests_total", count, verb, outcome)
            sheet.histogram("bulk_request_seconds", op.took, verb)
        sheet.set("bulk_read_bytes_total", counts.read_bytes)
        sheet.set("bulk_written_bytes_total", counts.written_bytes)
        sheet.set("bulk_fences_total", counts.fences)
        facts = self._facts()
        if facts is not None:
            sheet.set("bulk_info", 1, str(facts.unit), facts.name)
            sheet.set("bulk_attached_sessions", facts.attached)
            sheet.set("bulk_arena_capacity_bytes", facts.capacity_bytes)
            sheet.set("bulk_arena_backed_bytes", facts.backed_bytes)
        return sheet.families()
