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
        found = ask(channel, c.Show(partition=partition or "", samples=c.Samples(ids=(sample,))))
        units = {unit.unit: unit.name for unit in stats(channel, 1).units}
    if json:
        print_json(found)
    else:
        _print(found, units)
    return 0


def _print(found: c.Shown, units: dict[int, str]) -> None:
    born = f"born {ago(found.now - found.since)} ago as number {found.generation}"
    print(f"sample {shown(found.sample)} of partition {shown(found.partition)}, {born}")
    print(f"tags: {pairs(found.tags) or 'none'}")
    if found.missing:
        print(f"not produced: {', '.join(map(shown, found.missing))}")
    print()
    columns = ("field", "type", ">length", ">bytes", "unit", ">offset", "")
    print_table(columns, [_cell(cell, units) for cell in found.cells])
    if found.tasks:
        print()
        print_table(("task", "state", "", "lacking"), [_task(task, found.now) for task in found.tasks])


def _cell(cell: c.ShownCell, units: dict[int, str]) -> tuple[object, ...]:
    notes = [word for word, true in (("shared", cell.shared), ("being read", cell.pinned)) if true]
    unit = f"{cell.unit} {shown(units.get(cell.unit, ''))}".strip()
    return shown(cell.field), cell.spec, cell.length, readable(cell.size_bytes), unit, cell.offset, ", ".join(notes)


def _task(task: c.ShownTask, now: float) -> tuple[object, ...]:
    lease = ""
    if task.until is not None:
        lease = f"by {shown(task.client)} for another {ago(task.until - now)}"
    return shown(task.task), task.state, lease, ", ".join(map(shown, task.lacking)) or "-"
