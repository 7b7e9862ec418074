"""Shell completion of partitions, tasks, fields and units, queried from the service if it answers quickly.

Users of the service choose these names, and a shell inserts them verbatim. Names with characters that are special to a
shell, and names that look like an option, are therefore not completed.
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
"""Time limit in seconds for the connection and for the answer, because a user waits for the completion."""
PLAIN = frozenset("_-./:@+,")
"""Characters without a special meaning in any shell, besides letters and digits."""


def partitions(context: typer.Context) -> list[str]:
    """Complete names of partitions."""
    return _names_without_quotes(stats.partition for stats in _partition_stats(context))


def tasks_of(context: typer.Context) -> list[str]:
    """Complete names of tasks of the partition on the command line."""
    return _names_without_quotes(name for stats in _given_partition(context) for name in stats.claimed)


def fields_of(context: typer.Context) -> list[str]:
    """Complete names of fields of the partition on the command line, except those already given."""
    given = context.params.get("fields") or ()
    names = [name for stats in _given_partition(context) for name in stats.produced]
    return _names_without_quotes(name for name in names if name not in given)


def units(context: typer.Context) -> list[str]:
    """Complete names of storage units."""
    report = _query_stats(context)
    return [] if report is None else _names_without_quotes(unit.name for unit in report.units)


def _names_without_quotes(names: Iterable[str]) -> list[str]:
    """Return the names that need no quotes in any shell."""
    return [name for name in names if name[:1] != "-" and all(char.isalnum() or char in PLAIN for char in name)]


def _given_partition(context: typer.Context) -> list[c.PartitionStats]:
    """Return the statistics of the partition on the command line, as a list; empty if it does not exist."""
    return [stats for stats in _partition_stats(context) if stats.partition == context.params.get("partition")]


def _partition_stats(context: typer.Context) -> list[c.PartitionStats]:
    report = _query_stats(context)
    return [] if report is None else list(report.partitions)


def _query_stats(context: typer.Context) -> c.StatsReport | None:
    """Query the service. Return None without an address or a quick answer, and on any error, because completion cannot
    report errors."""
    from dataplane.cli.session import session, stats

    with contextlib.suppress(Exception):
        # The flags given so far on the command line.
        flags = {name: context.params.get(name) for name in TargetFlags.__dataclass_fields__}
        config = TargetFlags(**flags).config("completion")
        with session(replace(config, connect_timeout_s=WAIT_S, call_timeout_s=WAIT_S)) as channel:
            return stats(channel)
    return None
