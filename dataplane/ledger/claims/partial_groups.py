"""Groups that do not become whole: which of them have been partial for too long, by the ledger's clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dataplane.ledger.commands import Claim, Int64s
from dataplane.ledger.state.claim_terms import conditions
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tasks import ReadyIndex


class Overdue(NamedTuple):
    """`rows` are the unclaimed members of the groups whose time is over, oldest first; `next_at` is when the time of
    the next one is (infinity: of none)."""

    rows: Int64s
    next_at: float


NOTHING = Overdue(np.zeros(0, np.int64), float("inf"))


def overdue(partition: Partition, interest: ReadyIndex, command: Claim, now: float) -> Overdue:
    """Partial groups as the claim sees them: fewer than its `group_size` unclaimed members have all its fields, and one
    of its unclaimed members fulfils its predicates, or may yet. A group is as old as the oldest of those members."""
    if command.partial_after_s is None or command.group_size is None:
        return NOTHING
    tags, where = partition.tags, conditions(partition.version, command)
    rows = partition.rows.in_order()
    rows = rows[(interest.task.claim_ids[rows] == 0) & tags.present(command.group_by, rows)]
    if not len(rows):
        return NOTHING
    groups = tags.codes(command.group_by, rows)
    firsts = np.unique(groups, return_index=True)[1]
    ready = np.bincount(groups[partition.ready(interest.task, interest.fields, rows)], minlength=len(firsts))
    wanted = tags.matches(where, rows) | tags.undecided(where, rows)
    partial = (ready < command.group_size) & (np.bincount(groups[wanted], minlength=len(firsts)) > 0)
    ends = partition.rows.since[rows[firsts]] + command.partial_after_s
    over = partial & (ends <= now)
    return Overdue(rows[over[groups]], float(np.min(ends[partial & ~over], initial=np.inf)))
