"""`tq drain` and `tq drop`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

import dataplane
from dataplane.cli.completion import units
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import counted, readable, shown, time_limit
from dataplane.cli.output import print_either, print_notice
from dataplane.cli.session import ask, session, unit_stats
from dataplane.errors import DrainError

if TYPE_CHECKING:
    from dataplane import DataPlaneClient
    from dataplane.client.operations.drain_unit import Drained, DrainProgress
    from dataplane.config import DataPlaneConfig
    from dataplane.ledger import commands as c

_TERMINAL_S, _ELSEWHERE_S = 0.2, 10.0
"""Interval in seconds of progress output, on a terminal and otherwise."""
UnitName = Annotated[
    str,
    typer.Argument(metavar="UNIT", help="Number or name of the unit (see `tq status`).", autocompletion=units),
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
    config = target.config("drain")
    stats = _select_unit(config, unit, undo=undo)
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


def _select_unit(config: DataPlaneConfig, unit: str, *, undo: bool) -> c.UnitStats:
    """Return the statistics of the unit. With `undo`, then allow new rows on it again."""
    from dataplane.ledger import commands as c

    with session(config) as channel:
        stats = unit_stats(channel, unit)
        if undo:
            ask(channel, c.Drain(unit=stats.unit, undo=True))
        return stats


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
            _undo_after_interrupt(client, stats)
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


def _undo_after_interrupt(client: DataPlaneClient, stats: c.UnitStats) -> None:
    """Undo the drain after Ctrl-C, unless the unit was already draining before (`stats`). Print the state."""
    if not stats.draining:
        client.undrain(stats.unit)
    now = "gets no new rows, as before" if stats.draining else "takes new rows again"
    print_notice(f"tq: interrupted: storage unit {_label(stats)} {now}; moved rows stay where they are")


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
