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
from dataplane.cli.output import print_json
from dataplane.cli.session import ask, session, unit_stats
from dataplane.errors import DrainError

if TYPE_CHECKING:
    from dataplane import DataPlaneClient
    from dataplane.client.operations.drain_unit import Drained, DrainProgress
    from dataplane.config import DataPlaneConfig
    from dataplane.ledger import commands as c

_TERMINAL_S, _ELSEWHERE_S = 0.2, 10.0
"""How often it is said how far it is."""


def drain(
    *,
    unit: Annotated[
        str, typer.Argument(metavar="UNIT", help="Its number or its name (`tq status`).", autocompletion=units)
    ],
    timeout: Annotated[
        float,
        typer.Option("--timeout", parser=duration, metavar="SECONDS", help="How long it may take (seconds)."),
    ] = 600.0,
    drop: Annotated[bool, typer.Option("--drop", help="Then let the service forget it, as `tq drop` does.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let new rows onto it again, and move nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no other unit has space for new rows: puts then wait.")
    ] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Move everything that lives on a storage unit to others, while all go on; nothing new goes there from then on.

    The rows travel through this process: run it near the units. Exit code 1 if it did not get done; the unit then still
    takes nothing new, until it is drained again, or --undo. Ctrl-C ends it, and undoes it.
    """
    if undo and drop:
        raise typer.BadParameter("it cannot both stay and go", param_hint="--undo and --drop")
    config = target.config("drain")
    found = _find(config, unit, undo=undo)
    if undo:
        _say({"unit": found.unit, "name": found.name}, f"storage unit {_name(found)} takes new rows again", json)
        return 0
    done = _drain(config, found, timeout, _Line(found, quiet=json), drop=drop, force=force)
    if done is None:
        return 1
    facts = {"unit": found.unit, "name": found.name, "cells": done.cells, "moved_bytes": done.moved_bytes}
    _say({**facts, "pinned_bytes": done.pinned_bytes, "dropped": drop}, _sentence(found, done, drop=drop), json)
    return 0


def _find(config: DataPlaneConfig, unit: str, *, undo: bool) -> c.UnitStats:
    """The unit that is meant, which takes new rows again with `undo`."""
    from dataplane.ledger import commands as c

    with session(config) as channel:
        found = unit_stats(channel, unit)
        if undo:
            ask(channel, c.Drain(unit=found.unit, undo=True))
        return found


def _drain(
    config: DataPlaneConfig, found: c.UnitStats, timeout: float, line: _Line, *, drop: bool, force: bool
) -> Drained | None:
    """None if it was interrupted: what became of the unit was said."""
    with dataplane.DataPlaneClient(config).connect() as client:
        try:
            done = client.drain(found.unit, timeout, force=force, on_progress=line.show)
        except KeyboardInterrupt:
            line.end()
            _undo(client, found)
            return None
        except DrainError as error:
            line.end()
            raise ValueError(
                str(error)
                .replace("(force=True)", "(--force)")
                .replace("or undrain it", "or let new rows onto it (--undo)")
            ) from error
        line.end()
        try:
            if drop:
                client.drop_unit(found.unit)
        except KeyboardInterrupt:
            empty = f"storage unit {_name(found)} is empty and takes nothing new"
            print(
                f"tq: given up: {empty}; it may or may not have been dropped (`tq status`; `tq drop` does it)",
                file=sys.stderr,
            )
            return None
    return done


def _undo(client: DataPlaneClient, found: c.UnitStats) -> None:
    """A unit that was drained before stays as it was."""
    if not found.draining:
        client.undrain(found.unit)
    now = "takes nothing new, as before" if found.draining else "takes new rows again"
    print(f"tq: given up: storage unit {_name(found)} {now}; what was moved stays where it is", file=sys.stderr)


class _Line:
    """How far it is, on standard error: one line that changes on a terminal, elsewhere one every few seconds."""

    def __init__(self, found: c.UnitStats, *, quiet: bool) -> None:
        self._name = _name(found)
        self._quiet = quiet
        self._in_place = sys.stderr.isatty()
        self._next_at = 0.0
        self._width = 0

    def show(self, progress: DrainProgress) -> None:
        """Called after each page."""
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
        """What is printed next begins a line."""
        if self._width:
            print(file=sys.stderr)


def _sentence(found: c.UnitStats, done: Drained, *, drop: bool) -> str:
    text = f"storage unit {_name(found)} is empty: {counted(done.cells, 'cell')} moved ({readable(done.moved_bytes)})"
    if done.pinned_bytes:
        text += f", {readable(done.pinned_bytes)} are still being read there"
    return text + (", and it is dropped" if drop else "")


def _name(found: c.UnitStats) -> str:
    return f"{found.unit} {shown(found.name)}"


def _say(facts: dict[str, object], text: str, json: bool) -> None:
    if json:
        print_json(facts)
    else:
        print(text)
