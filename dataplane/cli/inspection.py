"""The commands that look inside a service once: `tq status`, `tq ls`, `tq show` and `tq why`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.output import ago, counted, pairs, print_json, print_table, readable, shown
from dataplane.cli.session import (
    PARTITIONS,
    ask,
    fields_of,
    not_shown,
    partition_stats,
    partitions,
    session,
    stats,
    tasks_of,
    waits,
)
from dataplane.data.conditions import parse_condition
from dataplane.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from dataplane.client.rpc.channel import ControllerChannel
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
    for partition in report.partitions:
        lines += _partition_lines(partition)
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


def _partition_lines(partition: c.PartitionStats) -> list[str]:
    """Describe a partition in one line. Further lines have its budget, evictions, fields, tasks and waiting calls."""
    born = (
        f"{partition.born} born"
        if partition.num_samples is None
        else f"{partition.born} of {partition.num_samples} born"
    )
    live = f"{partition.live} live ({readable(partition.live_bytes)})"
    lines = [f"  partition {shown(partition.partition)}: {live}, {born}{', sealed' if partition.sealed else ''}"]
    if partition.budget_bytes is not None:
        lines.append(
            f"    {readable(partition.used_bytes)} of a budget of {readable(partition.budget_bytes)} used,"
            f" peak {readable(partition.peak_used_bytes)}{', FILLING UP' if partition.pressed else ''}"
        )
    if partition.evicted or partition.evicted_unconsumed:
        lines.append(f"    {partition.evicted} evicted, plus {partition.evicted_unconsumed} evicted unconsumed")
    if partition.waiting_puts:
        lines.append(f"    {counted(partition.waiting_puts, 'put')} waiting for space")
    lines += [f"    field {shown(name)}: {count} produced" for name, count in partition.produced.items()]
    lines += [
        f"    task {shown(name)}: {count} of {partition.live} claimed" for name, count in partition.claimed.items()
    ]
    if partition.waiting_claims:
        lines.append(f"    {counted(partition.waiting_claims, 'claim')} waiting")
    return lines


SAMPLES = 50
"""Number of samples that are listed without --limit."""


def ls(
    *,
    partition: Annotated[
        str | None,
        typer.Argument(metavar="[PARTITION]", help="List its samples, oldest first.", autocompletion=partitions),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", "-n", min=1, help="Maximum number of samples (default: 50) or partitions (1000)."),
    ] = None,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """List the partitions of a service, or the samples of one partition with their fields and tags."""
    with session(target.config("ls")) as channel:
        if partition is None:
            _print_partitions(stats(channel, limit or PARTITIONS), json=json)
        else:
            _print_samples(channel, partition, limit or SAMPLES, json=json)
    return 0


def _print_partitions(report: c.StatsReport, json: bool) -> None:
    """Print one row per partition of the report, or the partitions as JSON."""
    if json:
        print_json({"partitions": report.partitions, "total": report.partition_count})
        return
    if not report.partitions:
        print("no partitions")
        return
    columns = ("partition", ">live", ">born", ">expected", ">bytes", ">version", "tasks", "fields", "")
    print_table(columns, [_partition_row(partition) for partition in report.partitions])
    if not_shown(report):
        print(f"{not_shown(report)}; --limit {report.partition_count} lists all")


def _partition_row(partition: c.PartitionStats) -> tuple[object, ...]:
    """Return one partition as a row of the table."""
    notes = ["sealed"] if partition.sealed else []
    notes += ["FILLING UP"] if partition.pressed else []
    return (
        shown(partition.partition),
        partition.live,
        partition.born,
        "-" if partition.num_samples is None else partition.num_samples,
        readable(partition.live_bytes),
        "-" if partition.version is None else partition.version,
        ",".join(map(shown, partition.claimed)) or "-",
        ",".join(map(shown, partition.produced)) or "-",
        ", ".join(notes),
    )


def _print_samples(channel: ControllerChannel, partition: str, limit: int, json: bool) -> None:
    """Print one row for each of the oldest `limit` samples of a partition, or these samples as JSON."""
    from dataplane.ledger import commands as c

    ids = ask(channel, c.List(partition=partition, limit=limit)).ids
    total = ask(channel, c.Describe(partition=partition)).live
    samples: list[c.Shown] = []
    for name in ids:
        with contextlib.suppress(NotFoundError):  # it was cleared meanwhile
            command = c.Show(partition=partition, samples=c.Samples(ids=(name,)))
            samples.append(ask(channel, command))
    if json:
        rows = [
            {
                "sample": sample.sample,
                "generation": sample.generation,
                "age_s": sample.now - sample.since,
                "bytes": sum(cell.size_bytes for cell in sample.cells),
                "fields": [cell.field for cell in sample.cells],
                "missing": sample.missing,
                "tags": sample.tags,
                "tasks": {task.task: task.state for task in sample.tasks},
            }
            for sample in samples
        ]
        print_json({"partition": partition, "total": total, "samples": rows})
        return
    print_table(
        ("sample", ">age", ">bytes", "fields", "lacking", "tags"),
        [
            (
                shown(sample.sample),
                ago(sample.now - sample.since),
                readable(sum(cell.size_bytes for cell in sample.cells)),
                ",".join(shown(cell.field) for cell in sample.cells) or "-",
                ",".join(map(shown, sample.missing)) or "-",
                pairs(sample.tags) or "-",
            )
            for sample in samples
        ],
    )
    if total > limit:
        print(f"the oldest {limit:,} of {counted(total, 'sample')}; --limit {total} lists all")


def show(
    *,
    sample: Annotated[str, typer.Argument(metavar="SAMPLE", help="Id of the sample.")],
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            "-p",
            metavar="NAME",
            help="Partition to search (default: the first that has the sample).",
            autocompletion=partitions,
        ),
    ] = None,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Show one sample: location and length of each field, its tags, and its state in each task."""
    from dataplane.ledger import commands as c

    with session(target.config("show")) as channel:
        shown_sample = ask(channel, c.Show(partition=partition or "", samples=c.Samples(ids=(sample,))))
        # The limit is for the partitions: every report has all units.
        units = {unit.unit: unit.name for unit in stats(channel, limit=1).units}
    if json:
        print_json(shown_sample)
    else:
        _print_sample(shown_sample, units)
    return 0


def _print_sample(sample: c.Shown, units: dict[int, str]) -> None:
    """Print the sample. units: the names of the storage units, by id."""
    born = f"born {ago(sample.now - sample.since)} ago as generation {sample.generation}"
    print(f"sample {shown(sample.sample)} of partition {shown(sample.partition)}, {born}")
    print(f"tags: {pairs(sample.tags) or 'none'}")
    if sample.missing:
        print(f"not produced: {', '.join(map(shown, sample.missing))}")
    print()
    columns = ("field", "type", ">length", ">bytes", "unit", ">offset", "")
    print_table(columns, [_cell_row(cell, units) for cell in sample.cells])
    if sample.tasks:
        print()
        print_table(("task", "state", "", "lacking"), [_task_row(task, sample.now) for task in sample.tasks])


def _cell_row(cell: c.ShownCell, units: dict[int, str]) -> tuple[object, ...]:
    """Return a cell (the value of one field) as a row of the table."""
    notes = ["shared"] if cell.shared else []
    notes += ["being read"] if cell.pinned else []
    unit = f"{cell.unit} {shown(units.get(cell.unit, ''))}".strip()
    return shown(cell.field), cell.spec, cell.length, readable(cell.size_bytes), unit, cell.offset, ", ".join(notes)


def _task_row(task: c.ShownTask, now: float) -> tuple[object, ...]:
    """Return the state of the sample in a task as a row of the table. now: the time of the service."""
    lease = ""  # empty without a lease
    if task.until is not None:
        lease = f"by {shown(task.client)} for another {ago(task.until - now)}"
    return shown(task.task), task.state, lease, ", ".join(map(shown, task.lacking)) or "-"


def why(
    *,
    partition: Annotated[
        str, typer.Argument(metavar="PARTITION", help="Name of the partition.", autocompletion=partitions)
    ],
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the claiming task.", autocompletion=tasks_of)],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELDS]...",
            help="Fields of the claim (default: those of the task's latest claim).",
            autocompletion=fields_of,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="The claim takes samples whose tags match, e.g. 'reward > 0.5'; may be repeated.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="The claim takes complete groups of this many samples.")
    ] = None,
    group_by: Annotated[str, typer.Option(metavar="TAG", help="The tag that names a sample's group.")] = "group",
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="The claim takes samples at most this many weight versions old.")
    ] = None,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Explain in a sentence why a task's claim would wait now: missing samples, held samples, the last writers.

    The exit code is 0 even if the claim would wait.
    """
    from dataplane.ledger import commands as c

    conditions = tuple(map(_parse_predicate, where or ()))
    with session(target.config("why")) as channel:
        claim_fields = tuple(fields or ())
        if not claim_fields:  # those of the latest claim; none if the task has not claimed
            tasks = partition_stats(channel, partition).tasks
            claim_fields = next((each.fields for each in tasks if each.task == task), ())
        command = c.WhyBlocked(
            partition=partition,
            task=task,
            fields=claim_fields,
            where=conditions,
            group_by=group_by,
            group_size=group_size,
            max_lag=max_lag,
        )
        blocked = ask(channel, command)
        claims = waits(channel, partition, task)
    if json:
        waiting = {"waits": claims.waits, "total": claims.total, "now": claims.now}
        print_json({"fields": claim_fields, "blocked": blocked, **waiting})
    else:
        print(f"task {shown(task)} in partition {shown(partition)}: {shown(blocked.why)}")
        if claims.waits:
            longest = claims.waits[0]
            since = ago(claims.now - longest.since)
            print(f"waiting claims: {claims.total}, the longest for {since}, by {shown(longest.client)}")
    return 0


def _parse_predicate(text: str) -> c.Predicate:
    """Parse a condition of `--where`; see `conditions.parse_condition`."""
    from dataplane.ledger import commands as c

    try:
        tag, operator, value = parse_condition(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from None
    return c.Predicate(tag=tag, op=operator, value=value)
