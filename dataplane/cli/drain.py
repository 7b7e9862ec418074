"""`tq drain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import dataplane
from dataplane.cli.asking import ask, session, unit_stats
from dataplane.cli.completing import units
from dataplane.cli.flags import Json, Target
from dataplane.cli.output import print_json
from dataplane.cli.text import counted, duration, readable, shown

if TYPE_CHECKING:
    from dataplane.config import DataPlaneConfig
    from dataplane.draining import Drained
    from dataplane.ledger import commands as c


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
    target: Target,
    json: Json = False,
) -> int:
    """Move everything that lives on a storage unit to others, while all go on; nothing new goes there from then on.

    The rows travel through this process: run it near the units. Exit code 1 if it did not get done; the unit then still
    takes nothing new, until it is drained again, or --undo.
    """
    if undo and drop:
        raise typer.BadParameter("it cannot both stay and go", param_hint="--undo and --drop")
    config = target.config("drain")
    found = _find(config, unit, undo=undo)
    if undo:
        _say({"unit": found.unit, "name": found.name}, f"storage unit {_name(found)} takes new rows again", json)
        return 0
    done = _drain(config, found, timeout, drop=drop)
    facts = {"unit": found.unit, "name": found.name, "cells": done.cells, "moved_bytes": done.moved_bytes}
    _say({**facts, "pinned_bytes": done.pinned_bytes, "dropped": drop}, _sentence(found, done, drop=drop), json)
    return 0


def _find(config: DataPlaneConfig, unit: str, *, undo: bool) -> c.UnitStats:
    """The unit that is meant, which takes new rows again with `undo`."""
    from dataplane.ledger import commands as c

    with session(config) as channel:
        found = unit_stats(channel, unit)
        if undo:
            ask(channel, c.Drain(unit=found.unit, undo=True), c.Done)
        return found


def _drain(config: DataPlaneConfig, found: c.UnitStats, timeout: float, *, drop: bool) -> Drained:
    with dataplane.DataPlaneClient(config).connect() as client:
        done = client.drain(found.unit, timeout)
        if drop:
            client.drop_unit(found.unit)
    return done


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
