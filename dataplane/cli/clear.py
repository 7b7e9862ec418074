"""`tq clear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.completion import partitions
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import counted, readable, shown
from dataplane.cli.output import print_either, print_notice
from dataplane.cli.session import ask, partition_stats, session

if TYPE_CHECKING:
    from dataplane.ledger import commands as c


def clear(
    *,
    partition: Annotated[
        str, typer.Argument(metavar="PARTITION", help="Name of the partition.", autocompletion=partitions)
    ],
    samples: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SAMPLES]...", help="Drop only these (default: the whole partition with its schema)."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", metavar="", help="Do not ask before a whole partition is dropped.")
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Drop samples, or a whole partition with its schema and the calls that wait on it.

    Exit code 1 if a sample or the partition does not exist; existing samples are dropped.
    """
    from dataplane.ledger import commands as c

    ids = tuple(dict.fromkeys(samples or ()))  # without ids: the whole partition
    with session(target.config("clear")) as channel:
        stats = partition_stats(channel, partition)  # raises an error if the partition does not exist
        if not ids and not yes:
            typer.confirm(_question(stats), abort=True, err=True)
        count = ask(channel, c.Clear(partition=partition, samples=c.Samples(ids=ids) if ids else None)).count
    whole = "" if ids else ", and the partition itself"
    text = f"cleared {counted(count, 'sample')} of partition {shown(partition)}{whole}"
    print_either({"partition": partition, "cleared": count}, text, json=json)
    if count < len(ids):
        print_notice(f"tq: {len(ids) - count} of {counted(len(ids), 'sample')} not found")
        return 1
    return 0


def _question(stats: c.PartitionStats) -> str:
    waiting = f", and {counted(stats.waiting_claims, 'claim')} waiting for more" if stats.waiting_claims else ""
    content = f"{counted(stats.live, 'live sample')}, {readable(stats.live_bytes)}"
    return f"Drop the whole partition {shown(stats.partition)} ({content}{waiting})?"
