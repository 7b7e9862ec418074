"""`tq ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.cli.completion import partitions
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import ago, counted, pairs, readable, shown
from dataplane.cli.output import print_json, print_table
from dataplane.cli.session import PARTITIONS, ask, not_shown, session, stats

if TYPE_CHECKING:
    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.ledger import commands as c

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
    print_table(columns, [_partition_row(part) for part in report.partitions])
    if not_shown(report):
        print(f"{not_shown(report)}; --limit {report.partition_count} lists all")


def _partition_row(part: c.PartitionStats) -> tuple[object, ...]:
    """Return one partition as a row of the table."""
    notes = ["sealed"] if part.sealed else []
    notes += ["FILLING UP"] if part.pressed else []
    return (
        shown(part.partition),
        part.live,
        part.born,
        "-" if part.num_samples is None else part.num_samples,
        readable(part.live_bytes),
        "-" if part.version is None else part.version,
        ",".join(map(shown, part.claimed)) or "-",
        ",".join(map(shown, part.produced)) or "-",
        ", ".join(notes),
    )


def _print_samples(channel: ControllerChannel, partition: str, limit: int, json: bool) -> None:
    """Print one row for each of the oldest `limit` samples of a partition, or these samples as JSON."""
    from dataplane.ledger import commands as c

    ids = ask(channel, c.List(partition=partition, limit=limit)).ids
    total = ask(channel, c.Describe(partition=partition)).live
    found = [_find_sample(channel, partition, name) for name in ids]
    samples = [sample for sample in found if sample is not None]
    if json:
        rows = [_as_dict(sample) for sample in samples]
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


def _find_sample(channel: ControllerChannel, partition: str, name: str) -> c.Shown | None:
    """Return one sample, or None if it was cleared meanwhile."""
    from dataplane.errors import NotFoundError
    from dataplane.ledger import commands as c

    try:
        return ask(channel, c.Show(partition=partition, samples=c.Samples(ids=(name,))))
    except NotFoundError:
        return None


def _as_dict(sample: c.Shown) -> dict[str, Any]:
    """Return one sample for JSON."""
    return {
        "sample": sample.sample,
        "generation": sample.generation,
        "age_s": sample.now - sample.since,
        "bytes": sum(cell.size_bytes for cell in sample.cells),
        "fields": [cell.field for cell in sample.cells],
        "missing": sample.missing,
        "tags": sample.tags,
        "tasks": {task.task: task.state for task in sample.tasks},
    }
