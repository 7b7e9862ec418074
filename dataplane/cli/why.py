"""`tq why`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.completion import fields_of, partitions, tasks_of
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import ago, shown
from dataplane.cli.output import print_json
from dataplane.cli.session import ask, partition_stats, session, waits
from dataplane.data.conditions import parse_condition
from dataplane.errors import InvalidRequestError

if TYPE_CHECKING:
    from dataplane.client.rpc.channel import ControllerChannel
    from dataplane.ledger import commands as c


def why(
    *,
    partition: Annotated[
        str, typer.Argument(metavar="PARTITION", help="Name of the partition.", autocompletion=partitions)
    ],
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the claiming task.", autocompletion=tasks_of)],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELDS]...",
            help="Fields of the claim (default: those of the task's latest claim).",
            autocompletion=fields_of,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="The claim takes samples whose tags match, e.g. 'reward > 0.5'; may be repeated.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="The claim takes complete groups of this many samples.")
    ] = None,
    group_by: Annotated[str, typer.Option(metavar="TAG", help="The tag that names a sample's group.")] = "group",
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="The claim takes samples at most this many weight versions old.")
    ] = None,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Explain in a sentence why a task's claim would wait now: missing samples, held samples, the last writers.

    The exit code is 0 even if the claim would wait.
    """
    from dataplane.ledger import commands as c

    conditions = tuple(map(_parse_predicate, where or ()))
    with session(target.config("why")) as channel:
        claim_fields = tuple(fields or _latest_fields(channel, partition, task))
        command = c.WhyBlocked(
            partition=partition,
            task=task,
            fields=claim_fields,
            where=conditions,
            group_by=group_by,
            group_size=group_size,
            max_lag=max_lag,
        )
        blocked = ask(channel, command)
        claims = waits(channel, partition, task)
    if json:
        waiting = {"waits": claims.waits, "total": claims.total, "now": claims.now}
        print_json({"fields": claim_fields, "blocked": blocked, **waiting})
    else:
        print(f"task {shown(task)} in partition {shown(partition)}: {shown(blocked.why)}")
        if claims.waits:
            longest = claims.waits[0]
            since = ago(claims.now - longest.since)
            print(f"waiting claims: {claims.total}, the longest for {since}, by {shown(longest.client)}")
    return 0


def _parse_predicate(text: str) -> c.Predicate:
    """Parse a condition of `--where`; see `conditions.parse_condition`."""
    from dataplane.ledger import commands as c

    try:
        tag, operator, value = parse_condition(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from None
    return c.Predicate(tag=tag, op=operator, value=value)


def _latest_fields(channel: ControllerChannel, partition: str, task: str) -> tuple[str, ...]:
    """Return the fields of the task's latest claim; empty if the task has not claimed or does not exist."""
    for stats in partition_stats(channel, partition).tasks:
        if stats.task == task:
            return stats.fields
    return ()
