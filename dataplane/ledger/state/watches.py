"""What waiting claims wait for, counted as samples change, so that a command looks at the samples it names only.

A watch never says too little: where it says that no claim of its kind can be served, none can. Whether one is served,
the selection says.
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
"""A claim may take the row now; it cannot now, but may yet."""
NEVER = float("inf")
Key = tuple[str, Scalar]


class Watch:
    """The parked claims of one `kind`, by (session, number), oldest first. `command` is one of theirs. Plain ones are
    counted by their interest alone, the others by `counts`. `leasts` says how many wait for at least so many samples.
    `next_at`: a partial group's time may be over from then on, not before."""

    def __init__(self, kind: str, ready_index: ReadyIndex, command: Claim) -> None:
        self.kind = kind
        self.ready_index = ready_index
        self.command = command
        self.waiters: dict[tuple[int, int], None] = {}
        self.leasts: dict[int, int] = {}
        self.next_at = NEVER
        plain = not conditions(None, command) and command.group_size is None
        self.counts = None if plain else Counts(command)

    def join(self, key: tuple[int, int], command: Claim) -> None:
        self.waiters[key] = None
        least = least_of(command)
        self.leasts[least] = self.leasts.get(least, 0) + 1

    def leave(self, key: tuple[int, int], command: Claim) -> None:
        del self.waiters[key]
        least = least_of(command)
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
                size = next_capacity(len(self.members), number + 1)
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
