"""Prometheus metrics of a controller: the current state of the ledger, and counters since its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dataplane.controller.durable_ledger import DurableLedger
from dataplane.controller.metrics.recorder import MOVED, Moved, Recorder
from dataplane.core.metrics import JOURNAL, PARTITIONS, SERVICE, TASKS, UNITS, Op, Sheet
from dataplane.ledger import commands as c

PARTITIONS_SHOWN = 200
"""Maximum number of partitions with separate metrics: the most recently registered ones."""
TASKS_SHOWN = 32
"""Maximum number of tasks per partition with separate metrics."""
STATES = ("live", "silent", "ending")  # of a session


class ServiceMetrics(Collector):
    """Queries the ledger with `ask` on every scrape. Drops the counters of partitions that no longer exist. journal:
    None for a ledger in memory."""

    def __init__(
        self,
        ask: Callable[[c.Command], c.Result],
        recorder: Recorder,
        journal: DurableLedger | None = None,
    ) -> None:
        self._ask = ask
        self._recorder = recorder
        self._journal = journal

    def collect(self) -> Iterable[Metric]:
        """Return all metrics. Raises the ledger's error if it does not answer."""
        known = self._recorder.partitions  # read before the query, so that a partition created meanwhile is kept
        stats = self._ask(c.Stats())
        waits = self._ask(c.Waits())
        assert isinstance(stats, c.StatsReport)
        assert isinstance(waits, c.WaitList)
        self._recorder.count()  # before `forget`, because pending answers may add counters of these partitions again
        self._recorder.forget(known - {partition.partition for partition in stats.partitions})
        sheet = Sheet([*SERVICE, *(JOURNAL if self._journal is not None else []), *UNITS, *PARTITIONS, *TASKS])
        self._set_service(sheet, stats)
        self._set_counters(sheet)
        for unit in stats.units:
            _set_unit(sheet, unit)
        longest_waits = _longest_waits(waits)
        for partition in stats.partitions[-PARTITIONS_SHOWN:]:  # the newest are last
            self._set_partition(sheet, partition, longest_waits)
        return sheet.families()

    def _set_service(self, sheet: Sheet, stats: c.StatsReport) -> None:
        """Set the metrics of the service as a whole: sessions, waiting puts, number of partitions, journal."""
        durable = str(self._journal is not None).lower()
        sheet.set("service_info", 1, _version(), str(stats.epoch), durable)
        for state in STATES:
            sheet.set("sessions", sum(session.state == state for session in stats.sessions), state)
        silences = (session.silent_s for session in stats.sessions if session.state != "ending")
        sheet.set("session_silence_seconds", max(silences, default=0.0))
        sheet.set("pins", sum(session.pins for session in stats.sessions))
        sheet.set("reservations", sum(session.reservations for session in stats.sessions))
        sheet.set("waiting_puts", stats.waiting_allocations)
        sheet.set("partitions", len(stats.partitions))
        sheet.set("partitions_not_shown", max(0, len(stats.partitions) - PARTITIONS_SHOWN))
        if self._journal is not None:
            sheet.set("journal_lag_records", self._journal.lag)
            sheet.set("journal_bytes", self._journal.journal_bytes)

    def _set_counters(self, sheet: Sheet) -> None:
        """Set the metrics that count since the start: busy time, moved samples and bytes, calls."""
        sheet.set("ledger_busy_seconds_total", self._recorder.busy_s)
        _set_moved(sheet, prefix="", moved=self._recorder.moved)
        kinds = dict(self._recorder.ops)  # a copy, because another thread may add kinds
        ops = {kind.operation(): op for kind, op in kinds.items()}
        sheet.set_ops("calls_total", "call_seconds", ops)

    def _set_partition(
        self, sheet: Sheet, partition: c.PartitionStats, longest_waits: dict[tuple[str, str], float]
    ) -> None:
        """Set the metrics of one partition and its tasks. longest_waits: see `_longest_waits`."""
        name = partition.partition
        values = {
            "live_samples": partition.live,
            "born_samples": partition.born,
            "expected_samples": partition.num_samples,
            "live_bytes": partition.live_bytes,
            "used_bytes": partition.used_bytes,
            "budget_bytes": partition.budget_bytes,
            "limit_bytes": partition.limit_bytes,
            "pressed": partition.pressed,
            "sealed": partition.sealed,
            "version": partition.version,
            "waiting_claims": partition.waiting_claims,
            "waiting_puts": partition.waiting_puts,
            "oldest_put_wait_seconds": longest_waits.get((name, ""), 0.0),
            "evicted_samples_total": partition.evicted,
            "evicted_unconsumed_samples_total": partition.evicted_unconsumed,
            "dropped_samples_total": partition.dropped,
        }
        for metric, value in values.items():
            sheet.set(f"partition_{metric}", value, name)
        _set_moved(sheet, "partition_", self._recorder.by_partition.get(name, Counter()), name)
        for task in partition.tasks[:TASKS_SHOWN]:
            self._set_task(sheet, name, task, longest_waits)

    def _set_task(
        self, sheet: Sheet, partition: str, task: c.TaskStats, longest_waits: dict[tuple[str, str], float]
    ) -> None:
        """Set the metrics of one task. longest_waits: see `_longest_waits`."""
        key = partition, task.task
        waited = self._recorder.by_task.get(key) or Op()
        values = {
            "ready_samples": task.ready,
            "leased_samples": task.leased,
            "held_samples": task.held,
            "claimed_samples": task.claimed,
            "waiting_claims": task.waiting,
            "oldest_wait_seconds": longest_waits.get(key, 0.0),
            "staleness_versions": task.lag,
            "claims_total": waited.outcomes["ok"],
            "claim_wait_seconds_total": waited.sum_s,
        }
        for metric, value in values.items():
            sheet.set(f"task_{metric}", value, *key)


def _set_unit(sheet: Sheet, unit: c.UnitStats) -> None:
    """Set the metrics of one storage unit."""
    free = unit.free_bytes
    values = {
        "connected": unit.connected,
        "pressed": unit.pressed,
        "draining": unit.draining,
        "growth_failed": bool(unit.problem),
        "capacity_bytes": unit.capacity_bytes,
        "limit_bytes": unit.limit_bytes,
        "backed_bytes": unit.capacity_bytes - unit.unbacked_bytes,
        "used_bytes": unit.used_bytes,
        "peak_used_bytes": unit.peak_used_bytes,
        "reserved_bytes": unit.reserved_bytes,
        "live_bytes": unit.live_bytes,
        "retired_bytes": unit.retired_bytes,
        "pinned_bytes": unit.pinned_bytes,
        "free_bytes": free,
        "largest_free_bytes": unit.largest_free_bytes,
        "fragmentation_ratio": 1.0 - unit.largest_free_bytes / free if free else 0.0,
        "free_ranges": unit.fragments,
        "extents": unit.extents,
    }
    for metric, value in values.items():
        sheet.set(f"unit_{metric}", value, str(unit.unit), unit.name)


def _set_moved(sheet: Sheet, prefix: str, moved: Moved, *labels: str) -> None:
    for name in MOVED:
        sheet.set(f"{prefix}{name}_total", moved[name], *labels)


def _longest_waits(waits: c.WaitList) -> dict[tuple[str, str], float]:
    """Return the longest wait in seconds of the waiting calls, by (partition, task). Puts have task ""."""
    longest: dict[tuple[str, str], float] = {}
    for wait in waits.waits:
        key = wait.partition, wait.task
        longest[key] = max(longest.get(key, 0.0), waits.now - wait.since)
    return longest


def _version() -> str:
    try:
        return version("rl-dataplane")
    except PackageNotFoundError:
        return "unknown"
