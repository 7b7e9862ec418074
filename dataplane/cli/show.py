"""`tq show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.completion import partitions
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import ago, pairs, readable, shown
from dataplane.cli.output import print_json, print_table
from dataplane.cli.session import ask, session, stats

if TYPE_CHECKING:
    from dataplane.ledger import commands as c


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
    """Print the sample. units: the names of the storage units, by number."""
    born = f"born {ago(sample.now - sample.since)} ago as number {sample.generation}"
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
