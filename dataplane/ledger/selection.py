"""Which samples a claim takes, and whether more of them can come."""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Claim, Int64s, Order
from dataplane.ledger.partition import Partition
from dataplane.ledger.tasks import Interest, Task

LOOK = 1024
"""A filtered claim looks at this many ready samples first, then at eight times as many, and so on."""


def least_of(command: Claim) -> int:
    """How many ready samples end the wait."""
    least = command.batch_size if command.min_batch_size is None else command.min_batch_size
    if command.group_size is not None:
        least = least // command.group_size * command.group_size
    return least


def select(partition: Partition, interest: Interest, command: Claim) -> Int64s | None:
    """Rows the claim takes now (not more than its batch), or None if it should wait."""
    least = least_of(command)
    if interest.count < least and not partition.complete and command.blocking:
        return None
    rows = _candidates(partition, interest, command)
    if not command.blocking or len(rows) >= least:
        return rows
    if partition.complete and not _more_can_come(partition, interest, command):
        return rows
    return None


def _candidates(partition: Partition, interest: Interest, command: Claim) -> Int64s:
    """The ready samples it would take, in its order."""
    order = partition.rows.order
    if command.group_size is not None:
        positions = interest.ready() if command.order is Order.OLDEST else interest.ready()[::-1]
        rows = order[positions]
        return _whole_groups(partition, rows[partition.tags.matches(command.where, rows)], command)
    if not command.where:
        return order[interest.first(command.batch_size, command.order)]
    wanted = max(4 * command.batch_size, LOOK)
    while True:
        rows = order[interest.first(wanted, command.order)]
        found = rows[np.flatnonzero(partition.tags.matches(command.where, rows))[: command.batch_size]]
        if len(found) == command.batch_size or len(rows) < wanted:
            return found
        wanted *= 8


def _whole_groups(partition: Partition, rows: Int64s, command: Claim) -> Int64s:
    """The first whole groups that fit the batch; a group stands where its first member stands."""
    size = command.group_size
    assert size is not None
    rows = rows[partition.tags.present(command.group_by, rows)]
    groups: dict[tuple[type, object], list[int]] = {}
    for row, value in zip(rows.tolist(), partition.tags.values(command.group_by, rows), strict=True):
        groups.setdefault((type(value), value), []).append(row)
    taken: list[int] = []
    for members in groups.values():
        if len(taken) + size > command.batch_size:
            break
        if len(members) >= size:
            taken += members[:size]
    return np.array(taken, np.int64)


def _more_can_come(partition: Partition, interest: Interest, command: Claim) -> bool:
    """Whether an unclaimed sample of a complete partition may still become one that this claim takes."""
    task = interest.task
    if not command.where and command.group_size is None:
        return interest.count < partition.rows.live - task.claimed
    rows = partition.rows.in_order()
    rows = rows[task.stamps[rows] == 0]
    tags = partition.tags
    undecided = tags.undecided(command.where, rows)
    matching = tags.matches(command.where, rows)
    if command.group_size is not None:
        undecided |= matching & ~tags.present(command.group_by, rows)
    return bool((undecided | (matching & ~partition.ready(task, interest.fields, rows))).any())


def lacking(partition: Partition, task: Task, fields: tuple[str, ...]) -> tuple[int, dict[str, int]]:
    """Unclaimed live samples, and how many of them lack each field."""
    rows = partition.rows.in_order()
    rows = rows[task.stamps[rows] == 0]
    missing = {}
    for name in fields:
        field = partition.fields.get(name)
        missing[name] = len(rows) if field is None else int(np.count_nonzero(field.extents[rows] == 0))
    return len(rows), missing


def why(partition: Partition, interest: Interest, command: Claim | None) -> str:
    """One sentence: what keeps the task's next samples from it."""
    task, fields = interest.task, interest.fields
    unclaimed, missing = lacking(partition, task, fields)
    unknown = [name for name in fields if name not in partition.fields]
    silent = [name for name in fields if name in partition.fields and not partition.fields[name].live]
    parts = []
    if unknown:
        parts.append(f"nobody declared or produced {_names(unknown)}")
    if silent:
        parts.append(f"nobody has produced {_names(silent)} for any live sample")
    late = [f"{count} lack {name!r}" for name, count in missing.items() if count and name not in unknown + silent]
    parts.append(
        f"of {unclaimed} unclaimed live samples {interest.count} have all fields"
        if fields
        else f"{unclaimed} live samples are unclaimed"
    )
    if late:
        parts[-1] += f" ({', '.join(late[:5])})"
    if task.claimed:
        leased = task.leased()
        parts.append(f"{task.claimed} are claimed" + (f", {leased} of them on lease" if leased else ""))
    if command is not None and command.where:
        tests = ", ".join(f"{p.tag} {p.op} {p.value!r}" for p in command.where)
        parts.append(f"only those with {tests} count")
    if command is not None and command.group_size is not None:
        parts.append(f"only groups of {command.group_size} with equal tag {command.group_by!r} count")
    if not partition.complete:
        expected = "an unknown number" if partition.num_samples is None else str(partition.num_samples)
        parts.append(f"{partition.born} of {expected} samples have been put")
    return "; ".join(parts)


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"fields {shown}" if len(names) > 1 else f"field {shown}"
