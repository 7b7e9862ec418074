"""Incremental counts for waiting claims, so that a command only examines the samples that it names.

A watch never undercounts: if its counts exclude all claims of its kind, none can be served. Otherwise the selection
decides whether a claim is served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.core.types import Scalar
from dataplane.ledger.commands import Claim
from dataplane.ledger.state.arrays import Bools, Int64s, grown, next_capacity
from dataplane.ledger.state.claim_terms import conditions, least_of
from dataplane.ledger.state.tasks import ReadyIndex

HIT, OPEN = 1, 2
"""States of a row: a claim may take it now (HIT), or not now but possibly later (OPEN)."""
NEVER = float("inf")
Key = tuple[str, Scalar]


class Watch:
    """The parked claims of one `kind`. `waiters`: their (session, number), oldest first. `command`: one of their
    commands. Claims without conditions and groups are counted by `ready_index` alone, and `counts` is None; others are
    counted by `counts`. `leasts`: for each minimum number of samples, the number of claims with it. `next_at`: earliest
    time at which the wait for a partial group may end."""

    def __init__(self, kind: str, ready_index: ReadyIndex, command: Claim) -> None:
        self.kind = kind
        self.ready_index = ready_index
        self.command = command
        self.waiters: dict[tuple[int, int], None] = {}
        self.leasts: dict[int, int] = {}
        self.next_at = NEVER
        # Whether there are conditions does not depend on the version.
        plain = not conditions(version=None, command=command) and command.group_size is None
        self.counts = None if plain else Counts(command)

    def join(self, key: tuple[int, int], command: Claim) -> None:
        """Add a parked claim of this kind."""
        self.waiters[key] = None
        least = least_of(command)
        self.leasts[least] = self.leasts.get(least, 0) + 1

    def leave(self, key: tuple[int, int], command: Claim) -> None:
        """Remove a claim that is no longer parked."""
        del self.waiters[key]
        least = least_of(command)
        self.leasts[least] -= 1
        if not self.leasts[least]:
            del self.leasts[least]

    def note(self, rows: Int64s) -> None:
        """Note that cells, tags or claims of these rows changed, for the next recount. No effect without `counts`."""
        if self.counts is not None:
            self.counts.note(rows)

    def reset(self) -> None:
        """Note that any row may have changed."""
        if self.counts is not None:
            self.counts.stale = True


class Counts:
    """Row counts for claims with conditions or groups; `waiting.refresh` recounts. `states[row]` is HIT (a claim may
    take the row now), OPEN (not now, but possibly later) or 0 (neither); `hits` and `open` count the rows in these
    states, and `states` is extended by the recount. The next recount examines the `noted` rows, or all rows
    if `stale`; `noted_rows` counts the noted rows, repeats included. `groups` is None for claims without groups.
    `typed`: dtype of the group tag ("": no tag) when the rows were last assigned to groups."""

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
        """Note rows for the next recount, unless that examines all rows anyway (`stale`)."""
        if self.stale or not len(rows):
            return
        self.noted.append(rows.copy())  # `rows` may be an array of a command
        self.noted_rows += len(rows)
        if self.noted_rows > len(self.states):  # more than a recount of all rows would examine
            self.stale = True
            self.noted, self.noted_rows = [], 0


class Groups:
    """Groups of unclaimed rows by the value of a tag. `numbers`: group number by key, the type and value of the tag;
    `keys`: key by group number (None: number not in use); `spare`: the numbers not in use. `of[row]`: number of the
    row's group plus one (0: no group). By group number, `members` counts the group's rows, `hits` those in state HIT (a
    claim may take them now), and `oldest` is the earliest creation time of its past and present rows. `whole`: number
    of groups with at least `size` hits."""

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

    def numbers_of(self, values: np.ndarray[Any, Any]) -> Int64s:
        """Return the group number of each value, and create missing groups. Values are equal as in `Tags.codes`: of
        equal value and type."""
        if values.dtype == object:
            return np.array([self._number((type(value).__name__, value)) for value in values.tolist()], np.int64)
        distinct, inverse = np.unique(values, return_inverse=True)
        # NaN differs from itself and would never be found by key.
        keys: list[Key] = [
            ("nan", None) if value != value else (type(value).__name__, value) for value in distinct.tolist()
        ]
        numbers: Int64s = np.array([self._number(key) for key in keys], np.int64)[inverse]
        return numbers

    def _number(self, key: Key) -> int:
        """Return the number of the group with this key, and create the group if it does not exist."""
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
                size = next_capacity(len(self.members), number + 1)
                self.members, self.hits = grown(self.members, size), grown(self.hits, size)
                self.oldest = grown(self.oldest, size)
        self.numbers[key] = number
        self.oldest[number] = NEVER
        return number

    def move(self, rows: Int64s, numbers: Int64s, was: Bools, is_hit: Bools, since: npt.NDArray[np.float64]) -> float:
        """Assign the rows to the groups `numbers` (-1: no group), and remove groups that become empty. was, is_hit:
        whether each row was a hit before and is one now; since: creation times by row. Return the earliest creation
        time in the groups that the rows left or joined, NEVER if there are none."""
        if len(self.of) < len(since):
            self.of = grown(self.of, len(since))
        # The group that each row leaves, and the one that it joins; -1: none.
        left, joined = self.of[rows] - 1, numbers
        touched = np.unique(np.concatenate([left, joined]))
        touched = touched[touched >= 0]
        if not len(touched):
            return NEVER
        whole_before = int(np.count_nonzero(self.hits[touched] >= self.size))
        np.subtract.at(self.members, left[left >= 0], 1)
        np.subtract.at(self.hits, left[was & (left >= 0)], 1)  # `at` counts repeated groups, too
        inside = joined >= 0
        np.add.at(self.members, joined[inside], 1)
        np.add.at(self.hits, joined[is_hit], 1)  # a hit is always in a group
        np.minimum.at(self.oldest, joined[inside], since[rows[inside]])
        self.of[rows] = joined + 1
        self.whole += int(np.count_nonzero(self.hits[touched] >= self.size)) - whole_before
        for number in touched[self.members[touched] == 0].tolist():
            key, self.keys[number] = self.keys[number], None
            assert key is not None, number
            del self.numbers[key]
            self.spare.append(number)
            self.oldest[number] = NEVER
        return float(np.min(self.oldest[touched], initial=NEVER))
