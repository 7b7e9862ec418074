"""Every metric there is: its name, kind, labels and meaning. docs/operations.md has the same table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataplane.core.metrics.histograms import Histogram


@dataclass(frozen=True)
class Family:
    """A metric of the catalogue. Counters count from the start of the process."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()


def _families(kind: Literal["counter", "gauge", "histogram"], labels: str, **texts: str) -> list[Family]:
    return [Family(f"tq_{name}", kind, text, tuple(labels.split())) for name, text in texts.items()]


SERVICE = [
    *_families("gauge", "version epoch durable", service_info="Always 1; the labels tell which service this is."),
    *_families(
        "counter",
        "",
        ledger_busy_seconds_total="Time in which the ledger's thread was busy: its rate is that thread's utilisation.",
        put_samples_total="Samples in puts.",
        new_samples_total="Samples that were born: not counted again when other fields are put.",
        put_bytes_total="Bytes of all values in puts, objects included; shared values once.",
        overwritten_bytes_total="Those of them that only replaced values: put less overwritten is what was added.",
        got_samples_total="Samples in reads.",
        got_bytes_total="Bytes of all values in reads.",
        claimed_samples_total="Samples in claims.",
        cleared_samples_total="Samples that were cleared by clients.",
    ),
    *_families("counter", "op outcome", calls_total='Calls that were answered. outcome: "ok", or the error.'),
    *_families("histogram", "op", call_seconds="From a call's arrival to its answer, waiting included."),
    *_families(
        "gauge", "state", sessions="Sessions of clients that are live, silent (a heartbeat is overdue) or ending."
    ),
    *_families(
        "gauge",
        "",
        session_silence_seconds="The longest silence of a session that is not ending.",
        pins="Reads whose bytes are pinned now.",
        reservations="Puts that have space and are not committed.",
        waiting_puts="Puts that wait for space.",
        partitions="Partitions.",
        partitions_not_shown="Those of them that are too many to have metrics of their own.",
    ),
]
JOURNAL = [
    *_families(
        "gauge",
        "",
        journal_lag_records="Records that are not in the journal's last image: what a restart has to go through.",
        journal_bytes="What journal and image take of the disk.",
    ),
    *_families("histogram", "", journal_sync_seconds='How long forcing the journal to the disk took ("machine").'),
]
UNITS = _families(
    "gauge",
    "unit name",
    unit_connected="1 while the storage unit has its connection to the controller.",
    unit_pressed="1 from when it has reached the high watermark until it is down to the low one.",
    unit_draining="1 while it gets nothing new, because it is to go.",
    unit_growth_failed="1 when its arena could not grow when it was asked last, or its unit has not answered for 5 s.",
    unit_capacity_bytes="Size of its arena.",
    unit_limit_bytes="What new rows may take of it.",
    unit_backed_bytes="How much of the arena is backed by memory.",
    unit_used_bytes="Reserved, live and retired together.",
    unit_peak_used_bytes="The most that these ever were.",
    unit_reserved_bytes="Of puts under way, and preallocated space.",
    unit_live_bytes="Of samples.",
    unit_retired_bytes="Cleared, and still read.",
    unit_pinned_bytes="Read now; these overlap the other three.",
    unit_free_bytes="Backed and not used.",
    unit_largest_free_bytes="Size of the largest free range.",
    unit_fragmentation_ratio="The part of the free bytes that is not in the largest free range.",
    unit_free_ranges="Free ranges.",
    unit_extents="Columns of puts that hold bytes.",
)
PARTITIONS = [
    *_families(
        "gauge",
        "partition",
        partition_live_samples="Samples that live.",
        partition_born_samples="Samples that were put since it was registered.",
        partition_expected_samples="Samples that were announced, where a number was.",
        partition_live_bytes="Bytes of extents with live cells.",
        partition_used_bytes="What counts against its budget: live, reserved, cleared and still read.",
        partition_budget_bytes="Its budget, where it has one.",
        partition_limit_bytes="What new rows may take of the budget.",
        partition_pressed="1 from when it has reached the high watermark of its budget until it is at the low one.",
        partition_sealed="1 once it takes no new samples.",
        partition_version="Its version, from which staleness counts.",
        partition_waiting_claims="Claims that wait.",
        partition_waiting_puts="Puts that wait for space.",
        partition_oldest_put_wait_seconds="How long the longest of these has waited.",
    ),
    *_families(
        "counter",
        "partition",
        partition_put_samples_total="Samples in puts.",
        partition_new_samples_total="Samples that were born.",
        partition_put_bytes_total="Bytes of all values in puts.",
        partition_overwritten_bytes_total="Those of them that only replaced values.",
        partition_got_samples_total="Samples in reads.",
        partition_got_bytes_total="Bytes of all values in reads.",
        partition_claimed_samples_total="Samples in claims.",
        partition_cleared_samples_total="Samples that were cleared by clients.",
        partition_evicted_samples_total="Consumed samples that went to make space.",
        partition_evicted_unconsumed_samples_total="Samples that went to make space and were not consumed.",
        partition_dropped_samples_total="Samples that went as members of partial groups.",
    ),
]
TASKS = [
    *_families(
        "gauge",
        "partition task",
        task_ready_samples="Samples it could claim now: with all fields of its latest claim.",
        task_leased_samples="Samples on lease.",
        task_held_samples="Samples that wait for their data-parallel ranks.",
        task_claimed_samples="Live samples it has claimed, those on lease included.",
        task_waiting_claims="Its claims that wait.",
        task_oldest_wait_seconds="How long the longest of these has waited.",
        task_staleness_versions="How many versions the stalest of its oldest ready samples is behind the partition's.",
    ),
    *_families(
        "counter",
        "partition task",
        task_claims_total="Its claims that were answered with samples, or with none left.",
        task_claim_wait_seconds_total="How long these waited, together.",
    ),
]
BULK = [
    *_families("gauge", "unit name", bulk_info="Always 1; the labels tell which storage unit this is."),
    *_families(
        "counter",
        "verb outcome",
        bulk_requests_total='Requests from other hosts, and attachments. outcome: "ok", or the error of a refusal.',
    ),
    *_families("histogram", "verb", bulk_request_seconds="How long the unit's thread was busy with a request."),
    *_families(
        "counter",
        "",
        bulk_read_bytes_total="Bytes that were sent to readers on other hosts.",
        bulk_written_bytes_total="Bytes that came from writers on other hosts.",
        bulk_fences_total="Sessions that were fenced: nothing of them can touch the arena any more.",
    ),
    *_families(
        "gauge",
        "",
        bulk_attached_sessions="Sessions that have mapped the arena.",
        bulk_arena_capacity_bytes="Size of the arena.",
        bulk_arena_backed_bytes="How much of it is backed by memory.",
    ),
]
CATALOGUE = [*SERVICE, *JOURNAL, *UNITS, *PARTITIONS, *TASKS, *BULK]

Value = float | int | bool


class Sheet:
    """Samples of some of the catalogue's metrics, as they are found."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._made: dict[str, Metric] = {family.name: _made(family) for family in families}

    def set(self, name: str, value: Value | None, *labels: str) -> None:
        """A sample of `tq_NAME`; none where the value is None."""
        if value is not None:
            made = self._made[f"tq_{name}"]
            assert isinstance(made, GaugeMetricFamily | CounterMetricFamily)
            made.add_metric(labels, float(value))

    def histogram(self, name: str, found: Histogram, *labels: str) -> None:
        made = self._made[f"tq_{name}"]
        assert isinstance(made, HistogramMetricFamily)
        made.add_metric(labels, found.cumulated(), found.sum_s)

    def families(self) -> Iterable[Metric]:
        return self._made.values()


def _made(family: Family) -> Metric:
    labels: Sequence[str] = family.labels
    match family.kind:
        case "counter":
            return CounterMetricFamily(family.name, family.text, labels=labels)
        case "gauge":
            return GaugeMetricFamily(family.name, family.text, labels=labels)
        case "histogram":
            return HistogramMetricFamily(family.name, family.text, labels=labels)
