"""Two looks at a service, and what went on between them."""

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
class Look:
    """What a service held at `at_s` by this process's clock, who waited, and what went through it in the time before
    (None: nobody was asked)."""

    at_s: float
    report: c.StatsReport
    waits: c.WaitList
    flow: FlowRates | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one partition, a second: samples that were `born` and that were `dropped` (cleared or evicted), and the
    `grown` bytes of what lives. None where the partition was registered anew in between, or is new."""

    born: float | None = None
    dropped: float | None = None
    grown_bytes: float | None = None


def look(channel: ControllerChannel, flow: Callable[[], FlowRates] | None = None) -> Look:
    """At the service now; flow: asks what goes through it."""
    return Look(
        at_s=time.monotonic(),
        report=stats(channel),
        waits=waits(channel),
        flow=None if flow is None else flow(),
    )


def rates(before: Look, after: Look) -> dict[str, Rates]:
    """What went on in each partition that there is now."""
    seconds = max(after.at_s - before.at_s, 1e-6)
    earlier = {part.partition: part for part in before.report.partitions}
    return {part.partition: _rates(earlier.get(part.partition), part, seconds) for part in after.report.partitions}


def _rates(before: c.PartitionStats | None, after: c.PartitionStats, seconds: float) -> Rates:
    if before is None or after.born < before.born:
        return Rates()
    born = after.born - before.born
    return Rates(
        born=born / seconds,
        dropped=(born - (after.live - before.live)) / seconds,
        grown_bytes=(after.live_bytes - before.live_bytes) / seconds,
    )


def as_json(before: Look, after: Look) -> dict[str, Any]:
    """Both, for scripts: `seconds` between them, the latest report, waits and flow, and the rates of
    each partition."""
    return {
        "seconds": after.at_s - before.at_s,
        "report": after.report,
        "waits": after.waits.waits,
        "rates": rates(before, after),
        "flow": after.flow,
    }
