"""What waiting claims wait for, counted as samples change, so that a command looks at the samples it names only.

A watch never says too little: where it says that no claim of its kind can be served, none can. Whether one is served,
the selection says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.core.types import Scalar
from dataplane.ledger.commands import Claim
from dataplane.ledger.state.arrays import Bools, Int64s, grown, room_for
from dataplane.ledger.state.claim_terms import conditions, least_of
from dataplane.ledger.state.tags import Tag
from dataplane.ledger.state.tasks import ReadyIndex

if TYPE_CHECKING:
    from dataplane.ledger.state.partition import Partition
    from dataplane.ledger.state.sessions import ParkedClaim

HIT, OPEN = 1, 2
"""A claim may take the row now; it cannot now, but may yet."""
NEVER = float("inf")
Key = tuple[str, Scalar]


def kind_of(interest: ReadyIndex, command: Claim) -> str:
    """Claims of one kind wait for the same, if not for as many."""
    version = None if command.max_lag is None else (command.max_lag, command.version_tag)
    groups = None
    if command.group_size is not None:
        groups = command.group_by, command.group_size, command.partial_after_s
    return repr((interest.task.name, interest.fields, command.where, version, groups))


class Watch:
    """The parked claims of one `kind`, by (session, number). `command` is one of theirs. Plain ones are counted by
    their interest alone, the others by `counts`. `leasts` says how many wait for at least so many samples. `next_at`: a
    partial group's time may be over from then on, not before."""

    def __init__(self, kind: str, interest: ReadyIndex, command: Claim) -> None:
        self.kind = kind
        self.interest = interest
        self.command = command
        self.waiters: dict[tuple[int, int], ParkedClaim] = {}
        self.leasts: dict[int, int] = {}
        self.next_at = NEVER
        plain = not conditions_of(command) and command.group_size is None
        self.counts = None if plain else Counts(command)

    def join(self, parked: ParkedClaim) -> None:
        self.waiters[parked.key] = parked
        least = least_of(parked.command)
        self.leasts[least] = self.leasts.get(least, 0) + 1

    def leave(self, parked: ParkedClaim) -> None:
        del self.waiters[parked.key]
        least = least_of(parked.command)
        self.leasts[least] -= 1
        if not self.leasts[least]:
            del self.leasts[least]

    def note(self, rows: Int64s) -> None:
        """These rows changed, for the task or for all."""
        if self.counts is not None:
            self.counts.note(rows)

    def reset(self) -> None:
        """Any row may have changed."""
        if self.counts is not None:
            self.counts.stale = True

    def refresh(self, partition: Partition) -> None:
        """Look at what changed. Costs nothing where nothing did."""
        if self.counts is None:
            return
        again, earliest = self.counts.refresh(partition, self.interest)
        after = self.command.partial_after_s
        if again:
            self.next_at = NEVER
        if after is not None:
            self.next_at = min(self.next_at, earliest + after)

    def hopeful(self, partition: Partition, now: float) -> bool:
        """Whether one of the claims may be served."""
        return self._enough(min(self.leasts)) or self._due(partition, now)

    def may_serve(self, partition: Partition, command: Claim, now: float) -> bool:
        """Whether this one may be."""
        return self._enough(least_of(command)) or self._due(partition, now)

    def _enough(self, least: int) -> bool:
        counts = self.counts
        if counts is None:
            return self.interest.count >= least
        if counts.groups is not None:
            return counts.groups.whole >= least // counts.groups.size
        return counts.hits >= least

    def _due(self, partition: Partition, now: float) -> bool:
        """Whether a group's time is over, or no more can come."""
        if self.next_at <= now:
            return True
        if not partition.complete:
            return False
        if self.counts is not None:
            return not self.counts.open
        return self.interest.count >= partition.rows.live - self.interest.task.claimed


def conditions_of(command: Claim) -> bool:
    """Whether a sample's tags decide."""
    return bool(command.where) or command.max_lag is not None


class Counts:
    """`states[row]` is HIT, OPEN or neither (0); `hits` and `open` count them. What was noted is looked at by
    `refresh`; `stale`: everything is. `typed` is the type of the groups' tag when their rows were numbered last."""

    def __init__(self, command: Claim) -> None:
        self.command = command
        self.states: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self.hits = 0
        self.open = 0
        self.noted: list[Int64s] = []
        self.noted_rows = 0
        self.stale = True
        self.typed = ""
        self.groups = None if command.group_size is None else Groups(command.group_size)

    def note(self, rows: Int64s) -> None:
        if self.stale or not len(rows):
            return
        self.noted.append(rows.copy())
        self.noted_rows += len(rows)
        if self.noted_rows > len(self.states):
            self.stale = True
            self.noted, self.noted_rows = [], 0

    def refresh(self, partition: Partition, interest: ReadyIndex) -> tuple[bool, float]:
        """Count what changed. Whether everything was counted again, and the earliest generation in a group that
        changed."""
        tag = partition.tags.columns.get(self.command.group_by) if self.groups is not None else None
        again = self.stale or (tag is not None and tag.values.dtype.str != self.typed)
        if not again and not self.noted:
            return False, NEVER
        rows = np.unique(np.concatenate(self.noted)) if self.noted and not again else partition.rows.in_order()
        self.noted, self.noted_rows = [], 0
        self.stale = True  # until it is done: what cannot be counted is not taken for counted
        if again:
            self._begin(tag)
        if len(self.states) < partition.rows.capacity:
            self.states = grown(self.states, partition.rows.capacity)
        earliest = self._count(partition, interest, rows, tag)
        self.stale = False
        return again, earliest

    def _begin(self, tag: Tag | None) -> None:
        self.states[:] = 0
        self.hits = self.open = 0
        self.typed = "" if tag is None else tag.values.dtype.str
        if self.groups is not None:
            self.groups = Groups(self.groups.size)

    def _count(self, partition: Partition, interest: ReadyIndex, rows: Int64s, tag: Tag | None) -> float:
        command, tags, task = self.command, partition.tags, interest.task
        free = (partition.rows.generations[rows] > 0) & (task.claim_ids[rows] == 0)
        mine = rows[free]
        where = conditions(partition.version, command)
        ready, matching = partition.ready(task, interest.fields, mine), tags.matches(where, mine)
        hit, may = ready & matching, tags.undecided(where, mine) | (matching & ~ready)
        if self.groups is not None:
            tagged = tags.present(command.group_by, mine)
            hit, may = hit & tagged, may | (matching & ~tagged)
        old, new = self.states[rows], np.zeros(len(rows), np.int8)
        new[free] = np.where(hit, HIT, np.where(may, OPEN, 0))
        self.hits += int(np.count_nonzero(new == HIT)) - int(np.count_nonzero(old == HIT))
        self.open += int(np.count_nonzero(new == OPEN)) - int(np.count_nonzero(old == OPEN))
        self.states[rows] = new
        if self.groups is None:
            return NEVER
        numbers = np.full(len(rows), -1)
        if tag is not None:
            places = np.flatnonzero(free)[tagged]
            numbers[places] = self.groups.numbered(tag.values[rows[places]])
        return self.groups.move(rows, numbers, old == HIT, new == HIT, partition.rows.since)


class Groups:
    """The unclaimed rows that carry the tag, by its value. `of[row]` is the number of the row's group, plus one (0: in
    none); by number, `members` and `hits` count its rows and `oldest` is the earliest generation of any it had. `whole`
    groups have `size` hits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.whole = 0
        self.numbers: dict[Key, int] = {}
        self.keys: list[Key | None] = []
        self.spare: list[int] = []
        self.of: Int64s = np.zeros(0, np.int64)
        self.members: Int64s = np.zeros(0, np.int64)
        self.hits: Int64s = np.zeros(0, np.int64)
        self.oldest: npt.NDArray[np.float64] = np.zeros(0, np.float64)

    def numbered(self, values: np.ndarray[Any, Any]) -> Int64s:
        """The group of each of these values, as `Tags.codes` tells them apart."""
        if values.dtype == object:
            return np.array([self._number((type(one).__name__, one)) for one in values.tolist()], np.int64)
        each, inverse = np.unique(values, return_inverse=True)
        keys: list[Key] = [("nan", None) if one != one else (type(one).__name__, one) for one in each.tolist()]
        found: Int64s = np.array([self._number(key) for key in keys], np.int64)[inverse]
        return found

    def _number(self, key: Key) -> int:
        number = self.numbers.get(key)
        if number is not None:
            return number
        if self.spare:
            number = self.spare.pop()
            self.keys[number] = key
        else:
            number = len(self.keys)
            self.keys.append(key)
            if number >= len(self.members):
                size = room_for(len(self.members), number + 1)
                self.members, self.hits = grown(self.members, size), grown(self.hits, size)
                self.oldest = grown(self.oldest, size)
        self.numbers[key] = number
        self.oldest[number] = NEVER
        return number

    def move(self, rows: Int64s, numbers: Int64s, was: Bools, is_hit: Bools, since: npt.NDArray[np.float64]) -> float:
        """The rows are in the groups `numbers` now (-1: in none); the earliest generation in a group that they left or
        joined."""
        if len(self.of) < len(since):
            self.of = grown(self.of, len(since))
        left, joined = self.of[rows] - 1, numbers
        touched = np.unique(np.concatenate([left, joined]))
        touched = touched[touched >= 0]
        if not len(touched):
            return NEVER
        before = int(np.count_nonzero(self.hits[touched] >= self.size))
        np.subtract.at(self.members, left[left >= 0], 1)
        np.subtract.at(self.hits, left[was & (left >= 0)], 1)
        inside = joined >= 0
        np.add.at(self.members, joined[inside], 1)
        np.add.at(self.hits, joined[is_hit], 1)
        np.minimum.at(self.oldest, joined[inside], since[rows[inside]])
        self.of[rows] = joined + 1
        self.whole += int(np.count_nonzero(self.hits[touched] >= self.size)) - before
        for number in touched[self.members[touched] == 0].tolist():
            key, self.keys[number] = self.keys[number], None
            assert key is not None, number
            del self.numbers[key]
            self.spare.append(number)
            self.oldest[number] = NEVER
        return float(np.min(self.oldest[touched], initial=NEVER))
