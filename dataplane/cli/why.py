"""`tq why`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dataplane.cli.completion import fields_of, partitions, tasks_of
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import ago, counted, shown
from dataplane.cli.output import print_json, print_table
from dataplane.cli.session import ask, partition_stats, session, waits, waits_not_shown
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
    """Explain why a task's claim would wait now: missing samples, held samples, and the last writers.

    The exit code is 0 even if the claim would wait.
    """
    from dataplane.ledger import commands as c

    conditions = tuple(map(_condition, where or ()))
    with session(target.config("why")) as channel:
        wanted = tuple(fields or _latest(channel, partition, task))
        command = c.WhyBlocked(
            partition=partition,
            task=task,
            fields=wanted,
            where=conditions,
            group_by=group_by,
            group_size=group_size,
            max_lag=max_lag,
        )
        found = ask(channel, command)
        mine = waits(channel, partition, task)
    if json:
        print_json({"fields": wanted, "blocked": found, "waits": mine.waits, "total": mine.total, "now": mine.now})
    else:
        print(_headline(task, partition, wanted, found, mine))
        print()
        print_table(("", ">samples"), _counts(found))
        _print_writers(found)
        _print_waits(mine)
    return 0


def _condition(text: str) -> c.Predicate:
    """Parse a condition of `--where`; see `conditions.parse_condition`."""
    from dataplane.ledger import commands as c

    try:
        tag, operator, value = parse_condition(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error), param_hint="--where") from None
    return c.Predicate(tag=tag, op=operator, value=value)


def _latest(channel: ControllerChannel, partition: str, task: str) -> tuple[str, ...]:
    """Return the fields of the task's latest claim; empty if the task has not claimed or does not exist."""
    named = [found for found in partition_stats(channel, partition).tasks if found.task == task]
    return named[0].fields if named else ()


def _headline(task: str, partition: str, wanted: tuple[str, ...], found: c.Blocked, mine: c.WaitList) -> str:
    """Summarize in one sentence what a claim would get now, or what waits, with the explanation of the service."""
    fields = f" with {', '.join(map(shown, wanted))}" if wanted else ""
    ready = found.matching if found.groups is None else found.groups
    noun = "sample" if found.groups is None else "complete group"
    some = f"{counted(ready, noun)}{fields}"
    why = shown(found.why)
    who = f"task {shown(task)} in partition {shown(partition)}"
    if mine.waits:
        least = min(wait.wanted for wait in mine.waits)
        return f"{who} waits: {counted(mine.total, 'claim')} of at least {least}, and {some} ready: {why}"
    if ready:
        return f"{who} can claim {some} now: {why}"
    if found.complete and not found.unclaimed:
        return f"{who} has nothing left to claim: the partition is complete, and all of its samples are claimed"
    return f"{who} would wait, because no {noun}{fields} is ready: {why}"


def _counts(found: c.Blocked) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        *([("puts waiting for space", found.waiting_puts)] if found.waiting_puts else []),
        ("put so far", found.born),
        ("expected", "unknown" if found.expected is None else found.expected),
        ("live and not claimed by the task", found.unclaimed),
        *((f"  lack {shown(name)}", count) for name, count in found.lacking.items() if count),
        ("  have all fields", found.ready),
        *((f"    fail {shown(text)}", count) for text, count in found.filtered.items()),
        *([("    match all conditions", found.matching)] if found.filtered else []),
        ("live and claimed by the task", found.claimed),
        ("  on lease", found.leased),
        ("  held for their ranks", found.held),
    ]
    if found.groups is not None:
        rows += [("complete groups", found.groups), ("partial groups", found.partial_groups)]
    if found.dropped:
        rows.append(("dropped with partial groups", found.dropped))
    return rows


def _print_writers(found: c.Blocked) -> None:
    if found.writers:
        print()
        rows = [
            (shown(writer.name), ago(writer.ago_s), ", ".join(map(shown, writer.fields)) or "-", _living(writer))
            for writer in found.writers
        ]
        print_table(("last writers", ">ago", "last writer of", ""), rows)


def _living(writer: c.Writer) -> str:
    return "connected" if writer.live else "disconnected"


def _print_waits(mine: c.WaitList) -> None:
    if mine.waits:
        print()
        rows = [
            (
                shown(wait.client),
                ", ".join(map(shown, wait.fields)) or "-",
                wait.wanted,
                wait.ready,
                ago(mine.now - wait.since),
                ago(wait.until - mine.now),
            )
            for wait in mine.waits
        ]
        print_table(("waits now", "for fields", ">wants", ">ready", ">since", ">times out in"), rows)
        if waits_not_shown(mine):
            print(waits_not_shown(mine))
