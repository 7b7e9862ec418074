"""Snapshots of a service, and the rates of change between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataplane.cli.session import stats, waits

if TYPE_CHECKING:
    from dataplane.cli.throughput import FlowRates
    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.ledger import commands as c


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot of a service: statistics and waiting calls at `at_s` (this process's monotonic clock), and the
    throughput before that time (None: not requested)."""

    at_s: float
    report: c.StatsReport
    waits: c.WaitList
    flow: FlowRates | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one partition per second: samples `born`, samples `dropped` (cleared or evicted), and growth of the live
    bytes. None if the partition is new or was registered again in between."""

    born: float | None = None
    dropped: float | None = None
    grown_bytes: float | None = None


def take_snapshot(channel: ControllerChannel, flow: Callable[[], FlowRates] | None = None) -> Snapshot:
    """Take a snapshot of the service. flow: queries its throughput (None: the snapshot has none)."""
    return Snapshot(
        at_s=time.monotonic(),
        report=stats(channel),
        waits=waits(channel),
        flow=None if flow is None else flow(),
    )


def rates(before: Snapshot, after: Snapshot) -> dict[str, Rates]:
    """Return the rates of each partition in `after`, by its name."""
    seconds = max(after.at_s - before.at_s, 1e-6)  # never 0: it is a divisor
    earlier = {part.partition: part for part in before.report.partitions}
    return {
        part.partition: _partition_rates(earlier.get(part.partition), part, seconds) for part in after.report.partitions
    }


def _partition_rates(before: c.PartitionStats | None, after: c.PartitionStats, seconds: float) -> Rates:
    """Return the rates of one partition. before: its earlier statistics, or None if it is new."""
    if before is None or after.born < before.born:  # fewer samples ever born: it was registered again
        return Rates()
    born = after.born - before.born
    return Rates(
        born=born / seconds,
        # Each born sample raises the number of live samples by one, each dropped sample lowers it by one.
        dropped=(born - (after.live - before.live)) / seconds,
        grown_bytes=(after.live_bytes - before.live_bytes) / seconds,
    )


def as_json(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return two snapshots as JSON: the `seconds` between them, the latest report, waits and flow, and the rates of
    each partition."""
    return {
        "seconds": after.at_s - before.at_s,
        "report": after.report,
        "waits": after.waits.waits,
        "rates": rates(before, after),
        "flow": after.flow,
    }
