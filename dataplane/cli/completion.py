"""What shells complete: names of partitions, tasks, fields and units, asked of the service if it answers soon.

Others choose these names, and a shell puts them on the operator's line as they are: those that mean anything to a
shell, or look like an option, are left out and have to be typed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from dataplane.cli.flags import TargetFlags

if TYPE_CHECKING:
    from dataplane.ledger import commands as c

WAIT_S = 0.4
"""How long connecting, and then the answer, may take: somebody has just pressed a key."""
PLAIN = frozenset("_-./:@+,")
"""What no shell takes for anything but itself, besides letters and digits."""


def partitions(context: typer.Context) -> list[str]:
    """Names of partitions."""
    return _plain(found.partition for found in _partitions(context))


def tasks_of(context: typer.Context) -> list[str]:
    """Names of the tasks of the partition that the line names."""
    return _plain(name for found in _named(context) for name in found.claimed)


def fields_of(context: typer.Context) -> list[str]:
    """Names of the fields of the partition that the line names, less those it names already."""
    given = context.params.get("fields") or ()
    return _plain(name for found in _named(context) for name in found.produced if name not in given)


def units(context: typer.Context) -> list[str]:
    """Names of storage units."""
    report = _report(context)
    return [] if report is None else _plain(unit.name for unit in report.units)


def _plain(names: Iterable[str]) -> list[str]:
    """Those that may stand on a line of any shell without quotes."""
    return [name for name in names if name[:1] != "-" and all(sign.isalnum() or sign in PLAIN for sign in name)]


def _named(context: typer.Context) -> list[c.PartitionStats]:
    return [found for found in _partitions(context) if found.partition == context.params.get("partition")]


def _partitions(context: typer.Context) -> list[c.PartitionStats]:
    report = _report(context)
    return [] if report is None else list(report.partitions)


def _report(context: typer.Context) -> c.StatsReport | None:
    """None where no service answers soon, or none is known, or anything else is wrong: completing is no place to say
    so."""
    from dataplane.cli.session import session, stats

    with contextlib.suppress(Exception):
        flags = {name: context.params.get(name) for name in TargetFlags.__dataclass_fields__}
        config = TargetFlags(**flags).config("completion")
        with session(replace(config, connect_timeout_s=WAIT_S, call_timeout_s=WAIT_S)) as channel:
            return stats(channel)
    return None
