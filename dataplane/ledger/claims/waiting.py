"""Decide whether parked claims may be served. Watches are first updated with the samples that changed.

A watch (`state.watches.Watch`) stands for all parked claims that wait for the same samples.
"""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Claim, Int64s
from dataplane.ledger.state.arrays import grown
from dataplane.ledger.state.claim_terms import conditions, least_of
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.tags import Tag
from dataplane.ledger.state.tasks import ReadyIndex
from dataplane.ledger.state.watches import HIT, NEVER, OPEN, Counts, Groups, Watch


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
    return _enough_ready(watch, min(watch.leasts)) or _overdue_or_final(watch, partition, now)


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
    return counts.hits >= least


def _overdue_or_final(watch: Watch, partition: Partition, now: float) -> bool:
    """Return whether the claims of the watch may take fewer samples than they want: a partial group is overdue, or the
    partition is complete and no unclaimed sample can become ready."""
    if watch.next_at <= now:
        return True
    if not partition.complete:
        return False
    if watch.counts is not None:
        return not watch.counts.open
    return watch.ready_index.count >= partition.rows.live - watch.ready_index.task.claimed  # all unclaimed are ready


def _recount(counts: Counts, partition: Partition, ready_index: ReadyIndex) -> tuple[bool, float]:
    """Count the samples that changed. Return whether all samples were counted again, and the earliest creation time in
    the groups that changed (NEVER: no group did)."""
    tag = partition.tags.columns.get(counts.command.group_by) if counts.groups is not None else None
    # The dtype of the tag decides whether NaN values form one group (see `Groups.numbers_of`).
    all_again = counts.stale or (tag is not None and tag.values.dtype.str != counts.typed)
    if all_again:
        rows = partition.rows.in_order()
    elif counts.noted:
        rows = np.unique(np.concatenate(counts.noted))
    else:
        return False, NEVER
    counts.noted, counts.noted_rows = [], 0
    counts.stale = True  # cleared at the end: after an exception, everything is counted again
    if all_again:
        _restart_counts(counts, tag)
    if len(counts.states) < partition.rows.capacity:
        counts.states = grown(counts.states, partition.rows.capacity)
    earliest = _count_rows(counts, partition, ready_index, rows, tag)
    counts.stale = False
    return all_again, earliest


def _restart_counts(counts: Counts, tag: Tag | None) -> None:
    """Clear the counts, before all samples are counted again. tag: the one by which samples are grouped, if any."""
    counts.states[:] = 0
    counts.hits = counts.open = 0
    counts.typed = "" if tag is None else tag.values.dtype.str
    if counts.groups is not None:
        counts.groups = Groups(counts.groups.size)


def _count_rows(counts: Counts, partition: Partition, ready_index: ReadyIndex, rows: Int64s, tag: Tag | None) -> float:
    """Update the counts of these rows. Return the earliest creation time in the groups that changed (NEVER: none)."""
    command, tags, task = counts.command, partition.tags, ready_index.task
    unclaimed = (partition.rows.generations[rows] > 0) & (task.claim_ids[rows] == 0)
    candidates = rows[unclaimed]
    where = conditions(partition.version, command)
    ready, matching = partition.ready(task, ready_index.fields, candidates), tags.matches(where, candidates)
    # hit: may be taken now; possible: may be taken later, with more fields or tags.
    hit, possible = ready & matching, tags.undecided(where, candidates) | (matching & ~ready)
    if counts.groups is not None:
        # A sample without the group tag is in no group; the tag may be set later.
        tagged = tags.present(command.group_by, candidates)
        hit, possible = hit & tagged, possible | (matching & ~tagged)
    old, new = counts.states[rows], np.zeros(len(rows), np.int8)
    new[unclaimed] = np.where(hit, HIT, np.where(possible, OPEN, 0))
    counts.hits += int(np.count_nonzero(new == HIT)) - int(np.count_nonzero(old == HIT))
    counts.open += int(np.count_nonzero(new == OPEN)) - int(np.count_nonzero(old == OPEN))
    counts.states[rows] = new
    if counts.groups is None:
        return NEVER
    numbers = np.full(len(rows), -1)  # the group of each row; -1: none
    if tag is not None:
        tagged_positions = np.flatnonzero(unclaimed)[tagged]
        numbers[tagged_positions] = counts.groups.numbers_of(tag.values[rows[tagged_positions]])
    return counts.groups.move(rows, numbers, was=old == HIT, is_hit=new == HIT, since=partition.rows.since)
