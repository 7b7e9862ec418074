"""A storage unit's counters and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataplane.core.metrics import BULK, Op, Sheet


class BulkMetrics(Collector):
    """Counters of a bulk server, and the unit's collector for Prometheus. One thread counts
    requests, another rejected handshakes; any thread may read. The counters survive a replacement
    of the bulk server.

    add_arena: adds samples of the unit and its arena, if it is running."""

    def __init__(self, add_arena: Callable[[Sheet], None] = lambda _: None) -> None:
        self._add_arena = add_arena
        self.verbs: dict[str, Op] = {}
        self.read_bytes = 0
        self.written_bytes = 0
        self.fences = 0

    def note(self, verb: str | None, error: Exception | None, took_s: float) -> None:
        """Count an answered request and its duration. verb: None if it has no known one. error:
        that of the reply."""
        self.verbs.setdefault(verb or "unknown", Op()).add(took_s, error)

    def collect(self) -> Iterable[Metric]:
        sheet = Sheet(BULK)
        verbs = dict(self.verbs)  # a copy, because the server's thread adds verbs
        sheet.set_ops("bulk_requests_total", "bulk_request_seconds", verbs)
        sheet.set("bulk_read_bytes_total", self.read_bytes)
        sheet.set("bulk_written_bytes_total", self.written_bytes)
        sheet.set("bulk_fences_total", self.fences)
        self._add_arena(sheet)
        return sheet.families()
