"""Decide whether parked claims may be served. Watches are first updated with the samples that changed.

A watch (`state.watches.Watch`) stands for all parked claims that wait for the same samples.
"""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Claim, Int64s
from dataplane.ledger.state.arrays import grown
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tags import Tag
from dataplane.ledger.state.tasks import ReadyIndex, conditions, least_of
from dataplane.ledger.state.watches import (
    EXCLUDED,
    GONE,
    NEVER,
    NOT_YET,
    TAKEABLE,
    Counts,
    Groups,
    States,
    Watch,
)


def refresh(watch: Watch, partition: Partition) -> None:
    """Update the counts of the watch with the samples that changed since the last call, and its `next_at`."""
    if watch.counts is None:  # its ready index counts, and is always up to date
        return
    all_again, earliest = _recount(watch.counts, partition, watch.ready_index)
    after = watch.command.partial_after_s
    if all_again:  # then `earliest` covers all groups
        watch.next_at = NEVER
    if after is not None:
        watch.next_at = min(watch.next_at, earliest + after)


def any_may_be_served(watch: Watch, partition: Partition, now: float) -> bool:
    """Return whether any claim of the watch may be served."""
    return _enough_ready(watch, watch.leasts[0]) or _overdue_or_final(watch, partition, now)


def may_serve(watch: Watch, partition: Partition, command: Claim, now: float) -> bool:
    """Return whether this claim may be served."""
    return _enough_ready(watch, least_of(command)) or _overdue_or_final(watch, partition, now)


def _enough_ready(watch: Watch, least: int) -> bool:
    """Return whether at least `least` samples can be taken now; for claims of groups, as many in whole groups. Without
    conditions and groups, the ready index alone has the count."""
    counts = watch.counts
    if counts is None:
        return watch.ready_index.count >= least
    if counts.groups is not None:
        return counts.groups.whole >= least // counts.groups.size
    return counts.takeable >= least


def _overdue_or_final(watch: Watch, partition: Partition, now: float) -> bool:
    """Return whether the claims of the watch may take fewer samples than they want: a partial group is overdue, or the
    partition is complete and no unclaimed sample can become ready."""
    if watch.next_at <= now:
        return True
    if not partition.complete:
        return False
    if watch.counts is not None:
        return not watch.counts.not_yet
    return watch.ready_index.count >= partition.rows.live - watch.ready_index.task.claimed  # all unclaimed are ready


def _recount(counts: Counts, partition: Partition, ready_index: ReadyIndex) -> tuple[bool, float]:
    """Count the samples that changed. Return whether all samples were counted again, and the
    earliest creation time in the groups that changed (NEVER: no group did)."""
    tag = None
    if counts.groups is not None:
        tag = partition.tags.columns.get(counts.command.group_by)
    # The dtype of the tag decides whether NaN values form one group (see `Groups.numbers_of`).
    all_again = counts.stale or (tag is not None and tag.values.dtype.str != counts.typed)
    if all_again:
        rows = partition.rows.in_order()
    elif counts.noted:
        rows = np.unique(np.concatenate(counts.noted))
    else:
        return False, NEVER
    counts.noted = []
    counts.noted_rows = 0
    counts.stale = True  # cleared at the end: after an exception, everything is counted again
    if all_again:
        _restart_counts(counts, tag)
    if len(counts.states) < partition.rows.capacity:
        counts.states = grown(counts.states, partition.rows.capacity)
    old = counts.states[rows]
    new = _classify(counts.command, partition, ready_index, rows)
    counts.states[rows] = new
    _tally(counts, old, new)
    earliest = NEVER
    if counts.groups is not None:
        earliest = _regroup(counts.groups, partition, rows, old, new, tag)
    counts.stale = False
    return all_again, earliest


def _restart_counts(counts: Counts, tag: Tag | None) -> None:
    """Clear the counts, before all samples are counted again. tag: the one by which samples are
    grouped, if any."""
    counts.states[:] = 0
    counts.takeable = 0
    counts.not_yet = 0
    counts.typed = "" if tag is None else tag.values.dtype.str
    if counts.groups is not None:
        counts.groups = Groups(counts.groups.size)


def _classify(command: Claim, partition: Partition, ready_index: ReadyIndex, rows: Int64s) -> States:
    """Return the state of each row for claims like `command`: TAKEABLE, NOT_YET, EXCLUDED or
    GONE."""
    tags = partition.tags
    task = ready_index.task
    unclaimed = (partition.rows.generations[rows] > 0) & (task.claim_ids[rows] == 0)
    candidates = rows[unclaimed]
    where = conditions(partition.version, command)
    ready = partition.ready(task, ready_index.fields, candidates)
    matching = tags.matches(where, candidates)
    takeable = ready & matching
    not_yet = tags.undecided(where, candidates) | (matching & ~ready)
    if command.group_size is not None:
        # A sample without the group tag is in no group; the tag may be set later.
        tagged = tags.present(command.group_by, candidates)
        takeable &= tagged
        not_yet |= matching & ~tagged
    states = np.full(len(rows), GONE, np.int8)
    states[unclaimed] = np.where(takeable, TAKEABLE, np.where(not_yet, NOT_YET, EXCLUDED))
    return states


def _tally(counts: Counts, old: States, new: States) -> None:
    """Update the counts for rows whose states were `old` and are `new`."""
    counts.takeable += int(np.count_nonzero(new == TAKEABLE))
    counts.takeable -= int(np.count_nonzero(old == TAKEABLE))
    counts.not_yet += int(np.count_nonzero(new == NOT_YET))
    counts.not_yet -= int(np.count_nonzero(old == NOT_YET))


def _regroup(groups: Groups, partition: Partition, rows: Int64s, old: States, new: States, tag: Tag | None) -> float:
    """Move the rows, whose states were `old` and are `new`, to their groups: of equal values of
    `tag` (None: no row has it). Return the earliest creation time in the groups that changed
    (NEVER: none)."""
    numbers = np.full(len(rows), -1)  # the group of each row; -1: none
    if tag is not None:
        grouped = (new != GONE) & tag.present[rows]
        numbers[grouped] = groups.numbers_of(tag.values[rows[grouped]])
    return groups.move(
        rows,
        numbers,
        was_takeable=old == TAKEABLE,
        is_takeable=new == TAKEABLE,
        since=partition.rows.since,
    )
