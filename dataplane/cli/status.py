"""`tq status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.formatting import counted, readable, shown
from dataplane.cli.output import print_json
from dataplane.cli.session import not_shown, session, stats

if TYPE_CHECKING:
    from dataplane.ledger import commands as c


def status(*, address: Address = None, target: TargetFlags, json: Json = False) -> int:
    """Print the state of a service: units, partitions, fields, tasks, sessions and waiting calls."""
    config = target.config("status", address)
    with session(config) as channel:
        report = stats(channel)
    if json:
        print_json(report)
    else:
        print(describe(config.address or "", report))
    return 0


def describe(address: str, report: c.StatsReport) -> str:
    """Format the report as text."""
    lines = [f"data plane service at {address}, epoch {report.epoch}"]
    for unit in report.units:
        lines += _unit_lines(unit)
    for part in report.partitions:
        lines += _partition_lines(part)
    if not_shown(report):
        lines.append(f"  {not_shown(report)}; `tq ls` lists them")
    puts = f"{counted(report.waiting_allocations, 'put')} waiting for space"
    lines.append(f"  {counted(len(report.sessions), 'session')}, {puts}")
    return "\n".join(lines)


def _unit_lines(unit: c.UnitStats) -> list[str]:
    """Describe a storage unit in one line, and a second one if it has a problem."""
    used = unit.live_bytes + unit.reserved_bytes + unit.retired_bytes  # retired: cleared, but still read
    lines = [
        f"  unit {unit.unit} {shown(unit.name)}: {readable(used)} of {readable(unit.capacity_bytes)} used"
        f" ({readable(unit.live_bytes)} live, {readable(unit.reserved_bytes)} reserved,"
        f" {readable(unit.pinned_bytes)} pinned), peak {readable(unit.peak_used_bytes)}"
        f"{', FILLING UP' if unit.pressed else ''}{', DRAINING' if unit.draining else ''}"
        f"{'' if unit.connected else ', NOT CONNECTED'}"
    ]
    if unit.problem:
        lines.append(f"    cannot grow: {unit.problem}")
    return lines


def _partition_lines(part: c.PartitionStats) -> list[str]:
    """Describe a partition in one line. Further lines have its budget, evictions, fields, tasks and waiting calls."""
    born = f"{part.born} born" if part.num_samples is None else f"{part.born} of {part.num_samples} born"
    live = f"{part.live} live ({readable(part.live_bytes)})"
    lines = [f"  partition {shown(part.partition)}: {live}, {born}{', sealed' if part.sealed else ''}"]
    if part.budget_bytes is not None:
        lines.append(
            f"    {readable(part.used_bytes)} of a budget of {readable(part.budget_bytes)} used,"
            f" peak {readable(part.peak_used_bytes)}{', FILLING UP' if part.pressed else ''}"
        )
    if part.evicted or part.evicted_unconsumed:
        lines.append(f"    {part.evicted} evicted, plus {part.evicted_unconsumed} evicted unconsumed")
    if part.waiting_puts:
        lines.append(f"    {counted(part.waiting_puts, 'put')} waiting for space")
    lines += [f"    field {shown(name)}: {count} produced" for name, count in part.produced.items()]
    lines += [f"    task {shown(name)}: {count} of {part.live} claimed" for name, count in part.claimed.items()]
    if part.waiting_claims:
        lines.append(f"    {counted(part.waiting_claims, 'claim')} waiting")
    return lines
