"""A session with a running service, the queries that several commands share, and the shell completion
of names, which the service is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from dataplane.cli.flags import TargetFlags
from dataplane.cli.output import shown

if TYPE_CHECKING:
    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.config import DataPlaneConfig
    from dataplane.ledger import commands as c

R = TypeVar("R", bound="c.Result")
PARTITIONS = 1000
"""Number of partitions that a command requests, unless `--limit` sets another number."""
WAITS = 1000
"""Number of waiting calls that a command requests."""


@contextlib.contextmanager
def session(config: DataPlaneConfig) -> Iterator[ControllerChannel]:
    """Open a session with the service at `config.address`. Raises the errors of `ControllerChannel.open`. Does not load
    torch."""
    from dataplane.client.rpc.channel import ControllerChannel

    channel = ControllerChannel.open(config)
    try:
        yield channel
    finally:
        channel.close()


def ask(channel: ControllerChannel, command: c.Answered[R]) -> R:
    """Send a command and return its result, or raise the error that the service answers."""
    _, result = channel.call(command)  # the first value is the id of the call
    return cast("R", result)


def stats(channel: ControllerChannel, limit: int = PARTITIONS) -> c.StatsReport:
    """Return the statistics of the service: all units, and the oldest `limit` partitions (0: all)."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Stats(limit=limit))


def not_shown(report: c.StatsReport) -> str:
    """Return a line with the number of partitions that the report omits, or ""."""
    return _omitted(report.partition_count - len(report.partitions), "partitions")


def waits(channel: ControllerChannel, partition: str = "", task: str = "") -> c.WaitList:
    """Return the `WAITS` longest-waiting calls of this partition ("": of all), and only the claims of `task` unless it
    is ""."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Waits(partition=partition, task=task, limit=WAITS))


def waits_not_shown(wait_list: c.WaitList) -> str:
    """Return a line with the number of calls that the list omits, or ""."""
    return _omitted(wait_list.total - len(wait_list.waits), "calls")


def _omitted(count: int, what: str) -> str:
    return f"and {count:,} more {what}" if count > 0 else ""


def partition_stats(channel: ControllerChannel, name: str) -> c.PartitionStats:
    """Return the statistics of one partition. Raises `PartitionNotFoundError` if it does not exist."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Stats(partitions=(name,))).partitions[0]


def unit_stats(channel: ControllerChannel, unit: str) -> c.UnitStats:
    """Return the statistics of one storage unit, given its id or name. Raises `InvalidRequestError` if no unit or
    several units match."""
    from dataplane.errors import InvalidRequestError

    units = stats(channel, limit=1).units  # every report has all units; 1 limits the partitions
    by_id = [each for each in units if str(each.unit) == unit]
    # An id takes precedence over a name.
    matching = by_id or [each for each in units if each.name == unit]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(f"{each.unit} {shown(each.name)}" for each in units) or "none"
    why = "several units have this name, pass an id" if matching else "not found"
    raise InvalidRequestError(f"storage unit {unit!r}: {why}; the service has {known}")


# --- shell completion of names

COMPLETION_S = 0.4
"""Time limit in seconds for the connection and for the answer, because a user waits."""
PLAIN = frozenset("_-./:@+,")
"""Characters without a special meaning in any shell, besides letters and digits."""


def _completion(
    names_in: Callable[[c.StatsReport, dict[str, Any]], list[str]],
) -> Callable[[typer.Context], list[str]]:
    """Return a completion of the names that `names_in` finds in a report of the service, given the
    arguments on the command line. It returns none without an address or a quick answer, and on any
    error, because completion cannot report errors.

    Users of the service choose these names, and a shell inserts them verbatim. Names with
    characters that are special to a shell, and names that look like an option, are therefore not
    completed.
    """

    def complete(context: typer.Context) -> list[str]:
        with contextlib.suppress(Exception):
            flags = {name: context.params.get(name) for name in TargetFlags.__dataclass_fields__}
            config = TargetFlags(**flags).config("completion")
            config = replace(config, connect_timeout_s=COMPLETION_S, call_timeout_s=COMPLETION_S)
            with session(config) as channel:
                names = names_in(stats(channel), context.params)
            return [name for name in names if name[:1] != "-" and all(char.isalnum() or char in PLAIN for char in name)]
        return []

    return complete


partitions = _completion(lambda report, _: [each.partition for each in report.partitions])
units = _completion(lambda report, _: [unit.name for unit in report.units])
# Tasks and fields of the partition on the command line; of the fields, those not given there.
tasks_of = _completion(
    lambda report, given: [
        name for each in report.partitions if each.partition == given.get("partition") for name in each.claimed
    ]
)
fields_of = _completion(
    lambda report, given: [
        name
        for each in report.partitions
        if each.partition == given.get("partition")
        for name in each.produced
        if name not in (given.get("fields") or ())
    ]
)
