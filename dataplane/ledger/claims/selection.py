"""Select the samples of a claim, decide whether more can come, and find groups that have been partial for too long."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dataplane.ledger.claims import samplers
from dataplane.ledger.commands import Claim, Int64s, Order
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tasks import ReadyIndex, conditions, least_of

LOOK = 1024
"""A claim with predicates examines at least this many ready samples first, then eight times as many, and so on."""


class Chosen(NamedTuple):
    """The samples chosen for a claim: their `rows`, and the group of each, 0, 1, ... ascending (None: every row is a
    separate unit)."""

    rows: Int64s
    groups: Int64s | None = None

    @property
    def picked(self) -> samplers.Picked:
        """The rows with their units."""
        single_units = samplers.single(len(self.rows)).units
        return samplers.Picked(self.rows, single_units if self.groups is None else self.groups)

    @property
    def amount(self) -> int:
        """The number of units."""
        return len(self.rows) if self.groups is None else self.picked.amount


def sampler_of(command: Claim) -> str:
    """Return the name of the claim's strategy."""
    shared = command.dp_world is not None
    return command.sampler or samplers.default(grouped=command.group_size is not None, shared=shared)


def select(
    partition: Partition, ready_index: ReadyIndex, command: Claim, released: Int64s, *, pending: bool = False
) -> Chosen | None:
    """Return the samples that the claim takes now (at most its batch), or None if it must wait or be retried later.

    `released` are members of partial groups that count as whole. `pending`: more groups may be released later.
    """
    least = least_of(command)
    # Cheap test first: with too few ready samples the claim certainly waits.
    if ready_index.count < least and not len(released) and not partition.complete and command.blocking:
        return None
    chosen = _find_candidates(partition, ready_index, command, released)
    if chosen.amount >= least // (command.group_size or 1):  # in units: groups, or single samples
        if command.dp_world is not None:
            # The same number of units for each rank. The fields of `Picked` become rows and groups.
            return Chosen(*chosen.picked.first(chosen.amount // command.dp_world * command.dp_world))
        return chosen
    if partition.complete and not pending and not _more_can_come(partition, ready_index, command):
        return chosen  # the last, smaller batch
    # Too few for now. The shares of a step are not made of too few samples, even for a claim that does not wait.
    if command.blocking or command.dp_world is not None:
        return None
    return chosen


def _find_candidates(partition: Partition, ready_index: ReadyIndex, command: Claim, released: Int64s) -> Chosen:
    """Return the ready samples that the claim would take, in its order, at most its batch. `released` members make
    their partial group count as whole."""
    row_at = partition.rows.order  # by position in the order of age
    if command.group_size is None and not command.where and command.max_lag is None:
        return Chosen(row_at[ready_index.first(command.batch_size, command.order)])
    where = conditions(partition.version, command)
    if command.group_size is not None:
        positions = ready_index.ready() if command.order is Order.OLDEST else ready_index.ready()[::-1]
        rows = row_at[positions]
        rows = rows[partition.tags.matches(where, rows)]
        groups = partition.tags.codes(command.group_by, rows)
        wanted = command.batch_size // command.group_size
        is_released = np.isin(rows, released) if len(released) else None
        picked = samplers.whole_groups(groups, command.group_size, wanted, is_released)
        return Chosen(rows[picked.positions], picked.units)  # each unit is a group
    # Examine more and more ready samples, until enough match or none is left.
    examined = max(4 * command.batch_size, LOOK)
    while True:
        rows = row_at[ready_index.first(examined, command.order)]
        matching = rows[np.flatnonzero(partition.tags.matches(where, rows))[: command.batch_size]]
        if len(matching) == command.batch_size or len(rows) < examined:
            return Chosen(matching)
        examined *= 8


def _more_can_come(partition: Partition, ready_index: ReadyIndex, command: Claim) -> bool:
    """Return whether this claim may still get more samples of a complete partition. Counts samples that are
    unclaimed, and samples on lease, which may become unclaimed again."""
    task = ready_index.task
    where = conditions(partition.version, command)
    if not where and command.group_size is None:  # are more samples unclaimed or on lease than are ready?
        return ready_index.count < partition.rows.live - task.claimed + task.unsettled
    rows = partition.rows.in_order()
    rows = rows[(task.claim_ids[rows] == 0) | task.not_settled(rows)]
    tags = partition.tags
    undecided = tags.undecided(where, rows)  # a missing tag may still be set
    matching = tags.matches(where, rows)
    if command.group_size is not None:
        undecided |= matching & ~tags.present(command.group_by, rows)
    # A sample that matches and is ready now is counted already; one that is not ready may become ready.
    return bool((undecided | (matching & ~partition.ready(task, ready_index.fields, rows))).any())


class Overdue(NamedTuple):
    """`rows` are the unclaimed members of the overdue groups, oldest first. `next_at` is when the next group is
    overdue (infinity: none)."""

    rows: Int64s
    next_at: float


NONE_OVERDUE = Overdue(np.zeros(0, np.int64), float("inf"))


def overdue(partition: Partition, ready_index: ReadyIndex, command: Claim, now: float) -> Overdue:
    """Find the overdue partial groups of a claim. A group is partial if fewer than `group_size` of its unclaimed
    members have all fields, and an unclaimed member matches the predicates or may still do so. The age of a
    group is that of its oldest unclaimed member."""
    assert command.partial_after_s is not None
    assert command.group_size is not None
    tags = partition.tags
    where = conditions(partition.version, command)
    rows = partition.rows.in_order()
    rows = rows[(ready_index.task.claim_ids[rows] == 0) & tags.present(command.group_by, rows)]
    if not len(rows):
        return NONE_OVERDUE
    groups = tags.codes(command.group_by, rows)  # group of each row: 0, 1, ...
    firsts = np.unique(groups, return_index=True)[1]  # position of each group's oldest row
    is_ready = partition.ready(ready_index.task, ready_index.fields, rows)
    may_match = tags.matches(where, rows) | tags.undecided(where, rows)
    ready_counts = np.bincount(groups[is_ready], minlength=len(firsts))
    matching_counts = np.bincount(groups[may_match], minlength=len(firsts))
    partial = (ready_counts < command.group_size) & (matching_counts > 0)
    ends = partition.rows.since[rows[firsts]] + command.partial_after_s
    over = partial & (ends <= now)  # by group
    return Overdue(rows[over[groups]], float(np.min(ends[partial & ~over], initial=np.inf)))
