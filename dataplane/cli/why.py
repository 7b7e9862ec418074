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
        print(_headline(task, partition, claim_fields, blocked, claims))
        print()
        print_table(("", ">samples"), _count_rows(blocked))
        _print_writers(blocked)
        _print_waits(claims)
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


def _headline(task: str, partition: str, claim_fields: tuple[str, ...], blocked: c.Blocked, claims: c.WaitList) -> str:
    """Summarize in one sentence what a claim would get now, or what waits, with the explanation of the service.
    claims: the task's claims that wait now."""
    fields = f" with {', '.join(map(shown, claim_fields))}" if claim_fields else ""
    # What the claim takes: samples, or groups of samples (`groups` is None if it takes no groups).
    ready = blocked.matching if blocked.groups is None else blocked.groups
    noun = "sample" if blocked.groups is None else "complete group"
    ready_text = f"{counted(ready, noun)}{fields}"
    why = shown(blocked.why)
    who = f"task {shown(task)} in partition {shown(partition)}"
    if claims.waits:
        fewest = min(wait.wanted for wait in claims.waits)
        return f"{who} waits: {counted(claims.total, 'claim')} of at least {fewest}, and {ready_text} ready: {why}"
    if ready:
        return f"{who} can claim {ready_text} now: {why}"
    if blocked.complete and not blocked.unclaimed:
        return f"{who} has nothing left to claim: the partition is complete, and all of its samples are claimed"
    return f"{who} would wait, because no {noun}{fields} is ready: {why}"


def _count_rows(blocked: c.Blocked) -> list[tuple[str, object]]:
    """Return the rows of the table: what each number of samples is, and the number."""
    rows: list[tuple[str, object]] = []
    if blocked.waiting_puts:
        rows.append(("puts waiting for space", blocked.waiting_puts))
    rows += [
        ("put so far", blocked.born),
        ("expected", "unknown" if blocked.expected is None else blocked.expected),
        ("live and not claimed by the task", blocked.unclaimed),
    ]
    # The following are parts of the row above, which their indentation shows.
    rows += [(f"  lack {shown(name)}", count) for name, count in blocked.lacking.items() if count]
    rows.append(("  have all fields", blocked.ready))
    if blocked.filtered:
        rows += [(f"    fail {shown(text)}", count) for text, count in blocked.filtered.items()]
        rows.append(("    match all conditions", blocked.matching))
    rows += [
        ("live and claimed by the task", blocked.claimed),
        ("  on lease", blocked.leased),
        ("  held for their ranks", blocked.held),
    ]
    if blocked.groups is not None:
        rows += [("complete groups", blocked.groups), ("partial groups", blocked.partial_groups)]
    if blocked.dropped:
        rows.append(("dropped with partial groups", blocked.dropped))
    return rows


def _print_writers(blocked: c.Blocked) -> None:
    """Print the clients that put the partition's fields last, if any is known."""
    if blocked.writers:
        print()
        rows = [
            (
                shown(writer.name),
                ago(writer.ago_s),
                ", ".join(map(shown, writer.fields)) or "-",
                _connection_state(writer),
            )
            for writer in blocked.writers
        ]
        print_table(("last writers", ">ago", "last writer of", ""), rows)


def _connection_state(writer: c.Writer) -> str:
    return "connected" if writer.live else "disconnected"


def _print_waits(claims: c.WaitList) -> None:
    """Print the claims that wait, if any."""
    if claims.waits:
        print()
        rows = [
            (
                shown(wait.client),
                ", ".join(map(shown, wait.fields)) or "-",
                wait.wanted,
                wait.ready,
                ago(claims.now - wait.since),
                ago(wait.until - claims.now),
            )
            for wait in claims.waits
        ]
        print_table(("waits now", "for fields", ">wants", ">ready", ">since", ">times out in"), rows)
        if waits_not_shown(claims):
            print(waits_not_shown(claims))
