"""Incremental counts for waiting claims, so that a command only examines the samples that it names.

A watch never undercounts: if its counts exclude all claims of its kind, none can be served. Otherwise the selection
decides whether a claim is served.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.core.types import Scalar
from dataplane.ledger.commands import Claim
from dataplane.ledger.state.arrays import Bools, Int64s, grown, next_capacity
from dataplane.ledger.state.tasks import ReadyIndex, conditions, least_of

GONE = 0
"""State of a row that is claimed or was removed."""
TAKEABLE = 1
"""State of a row that a claim may take now."""
NOT_YET = 2
"""State of a row that a claim may take later, with more fields or tags."""
EXCLUDED = 3
"""State of an unclaimed row that the claim's conditions exclude as it is."""
States = npt.NDArray[np.int8]
NEVER = float("inf")
Key = tuple[str, Scalar]


class Watch:
    """The parked claims of one `kind`."""

    def __init__(self, kind: str, ready_index: ReadyIndex, command: Claim) -> None:
        self.kind = kind
        self.ready_index = ready_index
        # One of the commands of the claims.
        self.command = command
        # The (session, call id) of the claims, oldest first.
        self.waiters: dict[tuple[int, int], None] = {}
        # The minimum numbers of samples of the claims, ascending.
        self.leasts: list[int] = []
        # Earliest time at which the wait for a partial group may end.
        self.next_at = NEVER
        # None for claims without conditions and groups: `ready_index` alone counts for these.
        # Whether there are conditions does not depend on the version.
        plain = not conditions(version=None, command=command) and command.group_size is None
        self.counts = None if plain else Counts(command)

    def join(self, key: tuple[int, int], command: Claim) -> None:
        """Add a parked claim of this kind."""
        self.waiters[key] = None
        bisect.insort(self.leasts, least_of(command))

    def leave(self, key: tuple[int, int], command: Claim) -> None:
        """Remove a claim that is no longer parked."""
        del self.waiters[key]
        del self.leasts[bisect.bisect_left(self.leasts, least_of(command))]

    def note(self, rows: Int64s) -> None:
        """Note that cells, tags or claims of these rows changed, for the next recount. No effect without `counts`."""
        if self.counts is not None:
            self.counts.note(rows)

    def reset(self) -> None:
        """Note that any row may have changed."""
        if self.counts is not None:
            self.counts.stale = True


class Counts:
    """Row counts for claims with conditions or groups; `waiting.refresh` recounts."""

    def __init__(self, command: Claim) -> None:
        self.command = command
        # States by row, extended by the recount.
        self.states: States = np.zeros(0, np.int8)
        # The numbers of rows in state TAKEABLE, and in state NOT_YET.
        self.takeable = 0
        self.not_yet = 0
        # The rows that the next recount examines, unless it examines all of them (`stale`).
        self.noted: list[Int64s] = []
        # The number of noted rows, repeats included.
        self.noted_rows = 0
        self.stale = True
        # The dtype of the group tag ("": no tag) when the rows were last assigned to groups.
        self.typed = ""
        # None for claims without groups.
        self.groups = None if command.group_size is None else Groups(command.group_size)

    def note(self, rows: Int64s) -> None:
        """Note rows for the next recount, unless that examines all rows anyway (`stale`)."""
        if self.stale or not len(rows):
            return
        self.noted.append(rows.copy())  # `rows` may be an array of a command
        self.noted_rows += len(rows)
        if self.noted_rows > len(self.states):  # more than a recount of all rows would examine
            self.stale = True
            self.noted = []
            self.noted_rows = 0


class Groups:
    """Groups of unclaimed rows by the value of a tag."""

    def __init__(self, size: int) -> None:
        self.size = size
        # The number of groups with at least `size` takeable rows.
        self.whole = 0
        # Group numbers by key, the type and value of the tag; and the keys by number (None: not in
        # use).
        self.numbers: dict[Key, int] = {}
        self.keys: list[Key | None] = []
        # The numbers that are not in use.
        self.spare: list[int] = []
        # By row: the number of its group plus one (0: no group).
        self.of: Int64s = np.zeros(0, np.int64)
        # By group number: its rows, and those in state TAKEABLE.
        self.members: Int64s = np.zeros(0, np.int64)
        self.takeable: Int64s = np.zeros(0, np.int64)
        # By group number: the earliest creation time of its past and present rows.
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
                self.members = grown(self.members, size)
                self.takeable = grown(self.takeable, size)
                self.oldest = grown(self.oldest, size)
        self.numbers[key] = number
        self.oldest[number] = NEVER
        return number

    def move(
        self,
        rows: Int64s,
        numbers: Int64s,
        *,
        was_takeable: Bools,
        is_takeable: Bools,
        since: npt.NDArray[np.float64],
    ) -> float:
        """Assign the rows to the groups `numbers` (-1: no group), and remove groups that become
        empty. was_takeable, is_takeable: whether each row was takeable before and is now; since:
        creation times by row. Return the earliest creation time in the groups that the rows left or
        joined, NEVER if there are none."""
        if len(self.of) < len(since):
            self.of = grown(self.of, len(since))
        # The group that each row leaves, and the one that it joins; -1: none.
        left = self.of[rows] - 1
        joined = numbers
        touched = np.unique(np.concatenate([left, joined]))
        touched = touched[touched >= 0]
        if not len(touched):
            return NEVER
        whole_before = int(np.count_nonzero(self.takeable[touched] >= self.size))
        np.subtract.at(self.members, left[left >= 0], 1)
        np.subtract.at(self.takeable, left[was_takeable & (left >= 0)], 1)  # `at` counts repeated groups, too
        inside = joined >= 0
        np.add.at(self.members, joined[inside], 1)
        np.add.at(self.takeable, joined[is_takeable], 1)  # a takeable row is always in a group
        np.minimum.at(self.oldest, joined[inside], since[rows[inside]])
        self.of[rows] = joined + 1
        self.whole += int(np.count_nonzero(self.takeable[touched] >= self.size)) - whole_before
        for number in touched[self.members[touched] == 0].tolist():
            key = self.keys[number]
            self.keys[number] = None
            assert key is not None, number
            del self.numbers[key]
            self.spare.append(number)
            self.oldest[number] = NEVER
        return float(np.min(self.oldest[touched], initial=NEVER))
