"""Decide whether parked claims may be served. Watches are first updated with the samples that changed."""

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
    """Count the samples that changed since the last call. Returns at once if none did."""
    if watch.counts is None:
        return
    all_again, earliest = _recount(watch.counts, partition, watch.ready_index)
    after = watch.command.partial_after_s
    if all_again:
        watch.next_at = NEVER
    if after is not None:
        watch.next_at = min(watch.next_at, earliest + after)


def hopeful(watch: Watch, partition: Partition, now: float) -> bool:
    """Return whether any claim of the watch may be served."""
    return _enough(watch, min(watch.leasts)) or _due(watch, partition, now)


def may_serve(watch: Watch, partition: Partition, command: Claim, now: float) -> bool:
    """Return whether this claim may be served."""
    return _enough(watch, least_of(command)) or _due(watch, partition, now)


def _enough(watch: Watch, least: int) -> bool:
    """Return whether a claim may take at least `least` samples now, which are whole groups if it wants groups. Without
    conditions and groups, the ready index alone counts."""
    counts = watch.counts
    if counts is None:
        return watch.ready_index.count >= least
    if counts.groups is not None:
        return counts.groups.whole >= least // counts.groups.size
    return counts.hits >= least


def _due(watch: Watch, partition: Partition, now: float) -> bool:
    """Return whether a group is overdue, or no more samples can come."""
    if watch.next_at <= now:
        return True
    if not partition.complete:
        return False
    if watch.counts is not None:
        return not watch.counts.open
    return watch.ready_index.count >= partition.rows.live - watch.ready_index.task.claimed


def _recount(counts: Counts, partition: Partition, ready_index: ReadyIndex) -> tuple[bool, float]:
    """Count the samples that changed. Return whether all samples were counted again, and the earliest creation
    time in a group that changed."""
    tag = partition.tags.columns.get(counts.command.group_by) if counts.groups is not None else None
    all_again = counts.stale or (tag is not None and tag.values.dtype.str != counts.typed)
    if not all_again and not counts.noted:
        return False, NEVER
    rows = np.unique(np.concatenate(counts.noted)) if counts.noted and not all_again else partition.rows.in_order()
    counts.noted, counts.noted_rows = [], 0
    counts.stale = True  # cleared at the end: after an exception, everything is counted again
    if all_again:
        _begin(counts, tag)
    if len(counts.states) < partition.rows.capacity:
        counts.states = grown(counts.states, partition.rows.capacity)
    earliest = _count(counts, partition, ready_index, rows, tag)
    counts.stale = False
    return all_again, earliest


def _begin(counts: Counts, tag: Tag | None) -> None:
    """Clear the counts, before all samples are counted again. tag: by which samples are grouped, if it exists."""
    counts.states[:] = 0
    counts.hits = counts.open = 0
    counts.typed = "" if tag is None else tag.values.dtype.str
    if counts.groups is not None:
        counts.groups = Groups(counts.groups.size)


def _count(counts: Counts, partition: Partition, ready_index: ReadyIndex, rows: Int64s, tag: Tag | None) -> float:
    """Update the counts of these rows. Return the earliest creation time in a group that changed."""
    command, tags, task = counts.command, partition.tags, ready_index.task
    free = (partition.rows.generations[rows] > 0) & (task.claim_ids[rows] == 0)
    mine = rows[free]
    where = conditions(partition.version, command)
    ready, matching = partition.ready(task, ready_index.fields, mine), tags.matches(where, mine)
    hit, possible = ready & matching, tags.undecided(where, mine) | (matching & ~ready)
    if counts.groups is not None:
        tagged = tags.present(command.group_by, mine)
        hit, possible = hit & tagged, possible | (matching & ~tagged)
    old, new = counts.states[rows], np.zeros(len(rows), np.int8)
    new[free] = np.where(hit, HIT, np.where(possible, OPEN, 0))
    counts.hits += int(np.count_nonzero(new == HIT)) - int(np.count_nonzero(old == HIT))
    counts.open += int(np.count_nonzero(new == OPEN)) - int(np.count_nonzero(old == OPEN))
    counts.states[rows] = new
    if counts.groups is None:
        return NEVER
    numbers = np.full(len(rows), -1)
    if tag is not None:
        places = np.flatnonzero(free)[tagged]
        numbers[places] = counts.groups.numbers_of(tag.values[rows[places]])
    return counts.groups.move(rows, numbers, old == HIT, new == HIT, partition.rows.since)
