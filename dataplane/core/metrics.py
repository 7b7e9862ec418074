"""Name, kind, labels and meaning of every metric (docs/metrics.md has the same table), statistics
of operations, and the sheet on which a scrape writes the values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


@dataclass(frozen=True)
class Family:
    """A metric of the catalogue. Counters start at 0 when the process starts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()


def _families(kind: Literal["counter", "gauge", "histogram"], labels: str, **texts: str) -> list[Family]:
    """Return metrics of one kind with the same labels, which are separated by spaces. texts: by name without "tq_"."""
    return [Family(f"tq_{name}", kind, text, tuple(labels.split())) for name, text in texts.items()]


SERVICE = [
    *_families("gauge", "version epoch durable", service_info="Always 1; the labels identify the service."),
    *_families(
        "counter",
        "",
        ledger_busy_seconds_total="Busy time of the ledger's thread: its rate is the utilisation of the thread.",
        put_samples_total="Samples in puts.",
        new_samples_total="New samples: a sample is not counted again when other fields are put.",
        put_bytes_total="Bytes of all values in puts, including objects; shared values count once.",
        overwritten_bytes_total="Bytes in puts that replaced existing values; the other put bytes were added.",
        got_samples_total="Samples in reads.",
        got_bytes_total="Bytes of all values in reads.",
        claimed_samples_total="Samples in claims.",
        cleared_samples_total="Samples cleared by clients.",
    ),
    *_families("counter", "op outcome", calls_total='Answered calls. outcome: "ok", or the error.'),
    *_families("histogram", "op", call_seconds="Time from the arrival of a call to its answer, including waits."),
    *_families("gauge", "state", sessions="Client sessions by state: live, silent (a heartbeat is overdue) or ending."),
    *_families(
        "gauge",
        "",
        session_silence_seconds="Longest silence of a session that is not ending.",
        pins="Reads in progress: their bytes are pinned, which means that they are not reused.",
        reservations="Puts that have reserved space and are not committed.",
        waiting_puts="Puts that wait for space.",
        partitions="Partitions.",
        partitions_not_shown="Partitions without per-partition metrics, because there are too many partitions.",
    ),
]
JOURNAL = [
    *_families(
        "gauge",
        "",
        journal_lag_records="Records after the journal's last image (a copy of the state); a restart replays them.",
        journal_bytes="Disk space of journal and image.",
    ),
]
UNITS = _families(
    "gauge",
    "unit name",
    unit_connected="1 while the storage unit is connected to the controller.",
    unit_pressed="1 after usage reached the high watermark, until it falls to the low watermark.",
    unit_draining="1 while the unit is being drained and accepts no new rows.",
    unit_growth_failed="1 if the last growth of the arena failed, or the unit has not answered for 5 s.",
    unit_capacity_bytes="Size of the arena.",
    unit_limit_bytes="Maximum usage of the arena by new rows.",
    unit_backed_bytes="Part of the arena that is backed by memory.",
    unit_used_bytes="Used bytes: reserved, live and retired.",
    unit_peak_used_bytes="Maximum of the used bytes.",
    unit_reserved_bytes="Bytes reserved by active puts, and preallocated space.",
    unit_live_bytes="Bytes of samples.",
    unit_retired_bytes="Bytes of cleared samples that are still being read.",
    unit_pinned_bytes="Bytes that are being read; they overlap reserved, live and retired bytes.",
    unit_free_bytes="Backed bytes that are not used.",
    unit_largest_free_bytes="Size of the largest free range.",
    unit_fragmentation_ratio="Fraction of the free bytes that is outside the largest free range.",
    unit_free_ranges="Free ranges.",
    unit_extents="Extents with bytes: the memory of a small put, or of one column of another one.",
)
PARTITIONS = [
    *_families(
        "gauge",
        "partition",
        partition_live_samples="Live samples.",
        partition_born_samples="Samples live when the partition was last registered, and samples created since then.",
        partition_expected_samples="Expected number of samples, if registered.",
        partition_live_bytes="Bytes of extents (see `tq_unit_extents`) that have a live value.",
        partition_used_bytes="Bytes that count against the budget: live, reserved, and cleared but still read.",
        partition_budget_bytes="The budget of the partition, if it has one.",
        partition_limit_bytes="Maximum usage of the budget by new rows.",
        partition_pressed="1 after usage reached the budget's high watermark, until it falls to the low watermark.",
        partition_sealed="1 if the partition accepts no new samples.",
        partition_version="Current version of the partition, from which staleness is measured.",
        partition_waiting_claims="Claims that wait.",
        partition_waiting_puts="Puts that wait for space.",
        partition_oldest_put_wait_seconds="Longest wait of these puts so far.",
    ),
    *_families(
        "counter",
        "partition",
        partition_put_samples_total="Samples in puts.",
        partition_new_samples_total="New samples.",
        partition_put_bytes_total="Bytes of all values in puts.",
        partition_overwritten_bytes_total="Bytes in puts that replaced existing values.",
        partition_got_samples_total="Samples in reads.",
        partition_got_bytes_total="Bytes of all values in reads.",
        partition_claimed_samples_total="Samples in claims.",
        partition_cleared_samples_total="Samples cleared by clients.",
        partition_evicted_samples_total="Consumed samples evicted to free space.",
        partition_evicted_unconsumed_samples_total="Unconsumed samples evicted to free space.",
        partition_dropped_samples_total="Samples cleared because their group stayed incomplete.",
    ),
]
TASKS = [
    *_families(
        "gauge",
        "partition task",
        task_ready_samples="Samples that the task could claim now: they have all fields of its latest claim.",
        task_leased_samples="Samples on lease.",
        task_held_samples="Samples in shares of a step that are held for data-parallel ranks until they request them.",
        task_claimed_samples="Live samples that the task has claimed, including samples on lease.",
        task_waiting_claims="Claims of the task that wait.",
        task_oldest_wait_seconds="Longest wait of these claims so far.",
        task_staleness_versions="How many versions the stalest ready sample is behind the partition's version.",
    ),
    *_families(
        "counter",
        "partition task",
        task_claims_total="Claims of the task that were answered with samples, or with the end of the partition.",
        task_claim_wait_seconds_total="Total wait time of these claims.",
    ),
]
BULK = [
    *_families("gauge", "unit name", bulk_info="Always 1; the labels identify the storage unit."),
    *_families(
        "counter",
        "verb outcome",
        bulk_requests_total='Requests from other hosts, and requests to map the arena. outcome: "ok", or the error.',
    ),
    *_families("histogram", "verb", bulk_request_seconds="Busy time of the unit's thread per request."),
    *_families(
        "counter",
        "",
        bulk_read_bytes_total="Bytes sent to readers on other hosts.",
        bulk_written_bytes_total="Bytes received from writers on other hosts.",
        bulk_fences_total="Fenced sessions: they can no longer access the arena.",
    ),
    *_families(
        "gauge",
        "",
        bulk_attached_sessions="Sessions that have mapped the arena.",
        bulk_arena_capacity_bytes="Size of the arena.",
        bulk_arena_backed_bytes="Part of the arena that is backed by memory.",
    ),
]
CATALOGUE = [*SERVICE, *JOURNAL, *UNITS, *PARTITIONS, *TASKS, *BULK]

BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
"""Upper bounds of a histogram's buckets, in seconds."""


class Op:
    """Statistics of one kind of operation. Only one thread may call `add`; other threads read
    meanwhile. An `observe` and an `inc` of prometheus_client cost three times an `add`, and export
    their creation times, too."""

    __slots__ = ("buckets", "outcomes", "sum_s")

    def __init__(self) -> None:
        self.outcomes = {"ok": 0}  # counts; the other keys are names of error classes
        # Counts of durations, not cumulative; the last is of those above all bounds.
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0  # of the durations

    def add(self, took_s: float, error: Exception | None = None) -> None:
        """Count an operation. error: None if it succeeded."""
        outcome = "ok" if error is None else type(error).__name__
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s


_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Sheet:
    """Collects metric samples for some families of the catalogue."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._metrics = {f.name: _KINDS[f.kind](f.name, f.text, labels=f.labels) for f in families}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample of the counter or gauge `tq_NAME`, unless the value is None. labels: in the family's order."""
        if value is not None:
            self._metrics[f"tq_{name}"].add_metric(labels, float(value))

    def set_ops(self, counter: str, histogram: str, ops: Mapping[str, Op]) -> None:
        """Add samples of the counter and the histogram with these names (without "tq_"), for
        operations by name."""
        for name, op in ops.items():
            # Copies, because another thread may call `add`.
            for outcome, count in dict(op.outcomes).items():
                self.set(counter, count, name, outcome)
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = [*zip(bounds, accumulate(list(op.buckets)), strict=True)]
            self._metrics[f"tq_{histogram}"].add_metric((name,), buckets, op.sum_s)

    def families(self) -> Iterable[Metric]:
        """Return the metrics with their samples, as a collector of prometheus_client yields them."""
        return self._metrics.values()
