"""`tq clear`, `tq checkpoint`, `tq restore`, `tq drain` and `tq drop`: change and save a service."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

import dataplane
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.output import counted, print_either, print_notice, readable, shown, time_limit
from dataplane.cli.session import ask, partition_stats, partitions, session, unit_stats, units
from dataplane.errors import DrainError, PartitionExistsError

if TYPE_CHECKING:
    from dataplane import CheckpointInfo, DataPlaneClient
    from dataplane.client.operations.drain_unit import Drained, DrainProgress
    from dataplane.config import DataPlaneConfig
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
            waiting = ""
            if stats.waiting_claims:
                waiting = f", and {counted(stats.waiting_claims, 'claim')} waiting for more"
            content = f"{counted(stats.live, 'live sample')}, {readable(stats.live_bytes)}{waiting}"
            question = f"Drop the whole partition {shown(partition)} ({content})?"
            typer.confirm(question, abort=True, err=True)
        count = ask(channel, c.Clear(partition=partition, samples=c.Samples(ids=ids) if ids else None)).count
    whole = "" if ids else ", and the partition itself"
    text = f"cleared {counted(count, 'sample')} of partition {shown(partition)}{whole}"
    print_either({"partition": partition, "cleared": count}, text, json=json)
    if count < len(ids):
        print_notice(f"tq: {len(ids) - count} of {counted(len(ids), 'sample')} not found")
        return 1
    return 0


AddressAndPath = Annotated[
    list[str],
    typer.Argument(metavar="[ADDRESS] PATH", help="host:port of the controller, and the checkpoint's directory."),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--partition",
        metavar="NAME",
        help="Only this partition; may be repeated (default: all).",
        autocompletion=partitions,
    ),
]


def checkpoint(
    *, address_and_path: AddressAndPath, partition: Partitions = None, target: TargetFlags, json: Json = False
) -> int:
    """Save a consistent snapshot of partitions to a directory."""
    client, path = _connect("checkpoint", address_and_path, target)
    with client:
        info = client.checkpoint(path, partition or None)
    print_either(info, f"checkpoint of {_summarize_checkpoint(info)} at {info.path}", json=json)
    return 0


def restore(
    *,
    address_and_path: AddressAndPath,
    partition: Partitions = None,
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="Drop existing partitions of the same names.")
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Restore the partitions of a checkpoint, all or none."""
    client, path = _connect("restore", address_and_path, target)
    with client:
        try:
            info = client.restore(path, partition or None, replace=replace)
        except PartitionExistsError as error:
            raise ValueError(
                f"partition {error.partition!r} exists already; clear it (`tq clear`), restore only others "
                "(--partition), or replace it (--replace)"
            ) from error
    print_either(info, f"restored {_summarize_checkpoint(info)} from {info.path}", json=json)
    return 0


def _summarize_checkpoint(info: CheckpointInfo) -> str:
    """Summarize the saved or restored partitions in one line."""
    names = ", ".join(f"{shown(name)} ({counted(count, 'sample')})" for name, count in info.partitions.items())
    return f"{names or 'no partitions'}, {readable(info.nbytes)} in {counted(info.files, 'file')}"


def _connect(name: str, address_and_path: list[str], target: TargetFlags) -> tuple[DataPlaneClient, str]:
    """Connect a client for the command `name`. Return it and the path of the checkpoint. address_and_path: the
    positional arguments, [ADDRESS] PATH."""
    if len(address_and_path) > 2:
        raise typer.BadParameter(
            f"got {len(address_and_path)} arguments, expected an optional address and a path", param_hint="PATH"
        )
    config = target.config(name, address_and_path[0] if len(address_and_path) == 2 else None)
    return dataplane.DataPlaneClient(config).connect(), address_and_path[-1]


_TERMINAL_S = 0.2
_ELSEWHERE_S = 10.0
"""Interval in seconds of progress output, on a terminal and otherwise."""
UnitName = Annotated[
    str,
    typer.Argument(metavar="UNIT", help="Id or name of the unit (see `tq status`).", autocompletion=units),
]


def drain(
    *,
    unit: UnitName,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            parser=time_limit,
            metavar="SECONDS",
            help="Time limit (seconds; inf: none).",
        ),
    ] = 600.0,
    drop: Annotated[
        bool, typer.Option("--drop", metavar="", help="Then remove it from the service, as `tq drop` does.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", metavar="", help="Allow new rows on it again, and move nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="Drain even if no other unit has space for new rows: puts then wait."),
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Move all live rows of a storage unit to other units, without interrupting clients. The unit gets no new rows.

    The rows pass through this process: run it near the units. Exit code 1 if the drain is refused or does not finish. A
    unit whose drain did not finish still gets no new rows; run it again, or --undo. Ctrl-C stops and undoes the drain.
    """
    if undo and drop:
        raise typer.BadParameter("the flags exclude each other; pass only one", param_hint="--undo and --drop")
    from dataplane.ledger import commands as c

    config = target.config("drain")
    with session(config) as channel:
        stats = unit_stats(channel, unit)
        if undo:
            ask(channel, c.Drain(unit=stats.unit, undo=True))
    if undo:
        facts = {"unit": stats.unit, "name": stats.name}
        print_either(facts, f"storage unit {_label(stats)} takes new rows again", json=json)
        return 0
    drained = _drain_and_drop(config, stats, timeout, _ProgressLine(stats, quiet=json), drop=drop, force=force)
    if drained is None:
        return 1
    moved = {"cells": drained.cells, "moved_bytes": drained.moved_bytes, "pinned_bytes": drained.pinned_bytes}
    facts = {"unit": stats.unit, "name": stats.name, **moved, "dropped": drop}
    print_either(facts, _summary(stats, drained, drop=drop), json=json)
    return 0


def drop(
    *,
    unit: UnitName,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Drop it even if it has live rows: they are cleared.")
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Remove a storage unit from a service permanently, so that the unit's process can exit.

    Exit code 1 if the unit has live rows and --force is not given, or if the unit does not exist.
    """
    from dataplane.ledger import commands as c

    with session(target.config("drop")) as channel:
        stats = unit_stats(channel, unit)
        ask(channel, c.Forget(unit=stats.unit, force=force))
    facts = {"unit": stats.unit, "name": stats.name, "live_bytes": stats.live_bytes}
    lost = f", and {readable(stats.live_bytes)} of live rows with it" if stats.live_bytes else ""
    print_either(facts, f"dropped storage unit {stats.unit} {shown(stats.name)}{lost}", json=json)
    return 0


def _drain_and_drop(
    config: DataPlaneConfig, stats: c.UnitStats, timeout: float, progress: _ProgressLine, *, drop: bool, force: bool
) -> Drained | None:
    """Drain the unit, then drop it if `drop` is set. After Ctrl-C, print the state of the unit and return None.
    A `DrainError` is raised as a ValueError whose text names the flags of this command."""
    with dataplane.DataPlaneClient(config).connect() as client:
        try:
            drained = client.drain(stats.unit, timeout, force=force, on_progress=progress.show)
        except KeyboardInterrupt:
            progress.end()
            if not stats.draining:  # it was not draining before
                client.undrain(stats.unit)
            now = "gets no new rows, as before" if stats.draining else "takes new rows again"
            rest = f"storage unit {_label(stats)} {now}; moved rows stay where they are"
            print_notice(f"tq: interrupted: {rest}")
            return None
        except DrainError as error:
            progress.end()
            text = str(error).replace(DrainError.FORCE, "--force")
            raise ValueError(text.replace(DrainError.UNDRAIN, "allow new rows on it again (--undo)")) from error
        progress.end()
        try:
            if drop:
                client.drop_unit(stats.unit)
        except KeyboardInterrupt:
            empty = f"storage unit {_label(stats)} is empty and gets no new rows"
            unsure = "it may or may not have been dropped (check `tq status`, run `tq drop`)"
            print_notice(f"tq: interrupted: {empty}; {unsure}")
            return None
    return drained


class _ProgressLine:
    """Progress on standard error: one line updated in place on a terminal, otherwise a line every few seconds.

    _quiet: print nothing. _next_at: monotonic time before which nothing is printed. _width: length of the text on the
    terminal's unfinished line (0: no such line).
    """

    def __init__(self, stats: c.UnitStats, *, quiet: bool) -> None:
        self._name = _label(stats)
        self._quiet = quiet
        self._in_place = sys.stderr.isatty()
        self._next_at = 0.0
        self._width = 0

    def show(self, progress: DrainProgress) -> None:
        """Print the progress, at most once per interval (the `on_progress` of `DataPlaneClient.drain`)."""
        now = time.monotonic()
        if self._quiet or now < self._next_at:
            return
        self._next_at = now + (_TERMINAL_S if self._in_place else _ELSEWHERE_S)
        moved = f"{counted(progress.cells, 'cell')} moved ({readable(progress.moved_bytes)})"
        text = f"storage unit {self._name}: {moved}, {progress.left_cells:,} left"
        if self._in_place:
            # Padded to the previous text, to overwrite all of it.
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print_notice(text)

    def end(self) -> None:
        """End the current line, so that the next output begins a new one."""
        if self._width:
            print(file=sys.stderr)


def _summary(stats: c.UnitStats, drained: Drained, *, drop: bool) -> str:
    """Say in one sentence what was moved and whether the unit was dropped."""
    moved = f"{counted(drained.cells, 'cell')} moved ({readable(drained.moved_bytes)})"
    text = f"storage unit {_label(stats)} is empty: {moved}"
    if drained.pinned_bytes:
        text += f", {readable(drained.pinned_bytes)} there are still pinned by readers"
    return text + (", and it is dropped" if drop else "")


def _label(stats: c.UnitStats) -> str:
    return f"{stats.unit} {shown(stats.name)}"
