"""One session with a running service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar, cast

from dataplane.cli.formatting import shown

if TYPE_CHECKING:
    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.config import DataPlaneConfig
    from dataplane.ledger import commands as c

R = TypeVar("R", bound="c.Result")
PARTITIONS = 1000
"""How many partitions a command asks for, unless `--limit` says otherwise."""
WAITS = 1000
"""How many waiting calls a command asks for."""


@contextlib.contextmanager
def session(config: DataPlaneConfig) -> Iterator[ControllerChannel]:
    """Open to the service at `config.address`; raises as `ControllerChannel.open`. Loads no torch."""
    from dataplane.client.rpc.channel import ControllerChannel

    channel = ControllerChannel.open(config)
    try:
        yield channel
    finally:
        channel.close()


def ask(channel: ControllerChannel, command: c.Answered[R]) -> R:
    """The answer to a command. Raises the error that it got."""
    _, result = channel.call(command)
    return cast("R", result)


def stats(channel: ControllerChannel, limit: int = PARTITIONS) -> c.StatsReport:
    """What the service holds; of its partitions the oldest `limit`, 0 for all."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Stats(limit=limit))


def not_shown(report: c.StatsReport) -> str:
    """How many partitions are not in the report, as a line; "" for none."""
    return _more(report.partition_count - len(report.partitions), "partitions")


def waits(channel: ControllerChannel, partition: str = "", task: str = "") -> c.WaitList:
    """The `WAITS` calls that wait longest, for anything or for what is named."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Waits(partition=partition, task=task, limit=WAITS))


def waits_not_shown(found: c.WaitList) -> str:
    """How many calls are not in the list, as a line; "" for none."""
    return _more(found.total - len(found.waits), "calls")


def _more(left: int, what: str) -> str:
    return f"and {left:,} more {what}" if left > 0 else ""


def partition_stats(channel: ControllerChannel, name: str) -> c.PartitionStats:
    """What one partition holds. `PartitionNotFoundError` if it is not there."""
    from dataplane.ledger import commands as c

    return ask(channel, c.Stats(partitions=(name,))).partitions[0]


def unit_stats(channel: ControllerChannel, unit: str) -> c.UnitStats:
    """What one storage unit holds, by its number or else its name. `InvalidRequestError` if there is none such, or if
    several are called so."""
    from dataplane.errors import InvalidRequestError

    units = stats(channel, 1).units
    found = [each for each in units if str(each.unit) == unit] or [each for each in units if each.name == unit]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"{each.unit} {shown(each.name)}" for each in units) or "none"
    why = "several are called so: give its number" if found else "there is none such"
    raise InvalidRequestError(f"storage unit {unit!r}: {why}; there are {have}")
