"""`tq drain`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

import dataplane
from dataplane.cli.completion import units
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import counted, duration, readable, shown
from dataplane.cli.output import print_either
from dataplane.cli.session import ask, session, unit_stats
from dataplane.errors import DrainError

if TYPE_CHECKING:
    from dataplane import DataPlaneClient
    from dataplane.client.operations.drain_unit import Drained, DrainProgress
    from dataplane.config import DataPlaneConfig
    from dataplane.ledger import commands as c

_TERMINAL_S, _ELSEWHERE_S = 0.2, 10.0
"""Interval in seconds of progress output, on a terminal and otherwise."""


def drain(
    *,
    unit: Annotated[
        str, typer.Argument(metavar="UNIT", help="Number or name of the unit (see `tq status`).", autocompletion=units)
    ],
    timeout: Annotated[
        float,
        typer.Option("--timeout", parser=duration, metavar="SECONDS", help="Time limit (seconds)."),
    ] = 600.0,
    drop: Annotated[bool, typer.Option("--drop", help="Then remove it from the service, as `tq drop` does.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Allow new rows on it again, and move nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drain even if no other unit has space for new rows: puts then wait.")
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
    found = _find(config, unit, undo=undo)
    if undo:
        facts = {"unit": found.unit, "name": found.name}
        print_either(facts, f"storage unit {_name(found)} takes new rows again", json=json)
        return 0
    done = _drain(config, found, timeout, _Line(found, quiet=json), drop=drop, force=force)
    if done is None:
        return 1
    moved = {"cells": done.cells, "moved_bytes": done.moved_bytes, "pinned_bytes": done.pinned_bytes}
    facts = {"unit": found.unit, "name": found.name, **moved, "dropped": drop}
    print_either(facts, _sentence(found, done, drop=drop), json=json)
    return 0


def _find(config: DataPlaneConfig, unit: str, *, undo: bool) -> c.UnitStats:
    """Return the statistics of the unit. With `undo`, allow new rows on it again."""
    from dataplane.ledger import commands as c

    with session(config) as channel:
        found = unit_stats(channel, unit)
        if undo:
            ask(channel, c.Drain(unit=found.unit, undo=True))
        return found


def _drain(
    config: DataPlaneConfig, found: c.UnitStats, timeout: float, line: _Line, *, drop: bool, force: bool
) -> Drained | None:
    """Drain the unit. Return None after Ctrl-C, when the state of the unit has been printed."""
    with dataplane.DataPlaneClient(config).connect() as client:
        try:
            done = client.drain(found.unit, timeout, force=force, on_progress=line.show)
        except KeyboardInterrupt:
            line.end()
            _undo(client, found)
            return None
        except DrainError as error:
            line.end()
            text = str(error).replace(DrainError.FORCE, "--force")
            raise ValueError(text.replace(DrainError.UNDRAIN, "allow new rows on it again (--undo)")) from error
        line.end()
        try:
            if drop:
                client.drop_unit(found.unit)
        except KeyboardInterrupt:
            empty = f"storage unit {_name(found)} is empty and gets no new rows"
            print(
                f"tq: interrupted: {empty}; it may or may not have been dropped (check `tq status`, run `tq drop`)",
                file=sys.stderr,
            )
            return None
    return done


def _undo(client: DataPlaneClient, found: c.UnitStats) -> None:
    """Undo the drain after Ctrl-C, unless the unit was already draining before."""
    if not found.draining:
        client.undrain(found.unit)
    now = "gets no new rows, as before" if found.draining else "takes new rows again"
    print(f"tq: interrupted: storage unit {_name(found)} {now}; moved rows stay where they are", file=sys.stderr)


class _Line:
    """Progress on standard error: one line updated in place on a terminal, otherwise a line every few seconds."""

    def __init__(self, found: c.UnitStats, *, quiet: bool) -> None:
        self._name = _name(found)
        self._quiet = quiet
        self._in_place = sys.stderr.isatty()
        self._next_at = 0.0
        self._width = 0

    def show(self, progress: DrainProgress) -> None:
        """Print the progress, at most once per interval. Called after each page of cells."""
        now = time.monotonic()
        if self._quiet or now < self._next_at:
            return
        self._next_at = now + (_TERMINAL_S if self._in_place else _ELSEWHERE_S)
        moved = f"{counted(progress.cells, 'cell')} moved ({readable(progress.moved_bytes)})"
        text = f"storage unit {self._name}: {moved}, {progress.left_cells:,} left"
        if self._in_place:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the current line, so that the next output begins a new one."""
        if self._width:
            print(file=sys.stderr)


def _sentence(found: c.UnitStats, done: Drained, *, drop: bool) -> str:
    text = f"storage unit {_name(found)} is empty: {counted(done.cells, 'cell')} moved ({readable(done.moved_bytes)})"
    if done.pinned_bytes:
        text += f", {readable(done.pinned_bytes)} there are still pinned by readers"
    return text + (", and it is dropped" if drop else "")


def _name(found: c.UnitStats) -> str:
    return f"{found.unit} {shown(found.name)}"
