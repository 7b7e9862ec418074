"""Shell completion of partitions, tasks, fields and units, queried from the service if it answers quickly.

Users of the service choose these names, and a shell inserts them verbatim. Names with characters that are special to a
shell, and names that look like an option, are therefore not completed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from dataplane.cli.flags import TargetFlags

if TYPE_CHECKING:
    from dataplane.ledger import commands as c

WAIT_S = 0.4
"""Time limit in seconds for the connection and for the answer, because a user waits for the completion."""
PLAIN = frozenset("_-./:@+,")
"""Characters without a special meaning in any shell, besides letters and digits."""


def partitions(context: typer.Context) -> list[str]:
    """Complete names of partitions."""
    return _complete(context, lambda report: [part.partition for part in report.partitions])


def tasks_of(context: typer.Context) -> list[str]:
    """Complete names of tasks of the partition on the command line."""
    return _complete(context, lambda report: [name for part in _given(context, report) for name in part.claimed])


def fields_of(context: typer.Context) -> list[str]:
    """Complete names of fields of the partition on the command line, except those already given."""
    given = context.params.get("fields") or ()
    names = _complete(context, lambda report: [name for part in _given(context, report) for name in part.produced])
    return [name for name in names if name not in given]


def units(context: typer.Context) -> list[str]:
    """Complete names of storage units."""
    return _complete(context, lambda report: [unit.name for unit in report.units])


def _given(context: typer.Context, report: c.StatsReport) -> list[c.PartitionStats]:
    """Return the statistics of the partition on the command line, as a list; empty if it does not exist."""
    return [part for part in report.partitions if part.partition == context.params.get("partition")]


def _complete(context: typer.Context, names_in: Callable[[c.StatsReport], list[str]]) -> list[str]:
    """Return the names in a report of the service that need no quotes in any shell. Return none without an address or
    a quick answer, and on any error, because completion cannot report errors."""
    from dataplane.cli.session import session, stats

    with contextlib.suppress(Exception):
        # The flags given so far on the command line.
        flags = {name: context.params.get(name) for name in TargetFlags.__dataclass_fields__}
        config = TargetFlags(**flags).config("completion")
        with session(replace(config, connect_timeout_s=WAIT_S, call_timeout_s=WAIT_S)) as channel:
            names = names_in(stats(channel))
        return [name for name in names if name[:1] != "-" and all(char.isalnum() or char in PLAIN for char in name)]
    return []
