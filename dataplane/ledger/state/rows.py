"""The samples of one partition: ids, row slots (reused), generation numbers (never reused) and age order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

from dataplane.ledger.commands import Int64s
from dataplane.ledger.state.arrays import Bools, grown, next_capacity

SLACK = 1024
"""Number of dead positions tolerated before the age order is compacted."""


class Rows:
    """Table of samples. A row is the slot number of a sample: `ids` has the row by sample id,
    oldest sample first, `names` the sample id by row. `generations[row]` is 0 for a free slot;
    `free` lists the free slots. `since[row]` is the ledger time of creation. `order[:end]` holds
    the rows by age, with -1 for removed rows; `positions[row]` is the index of a live row in it."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.names: list[str | None] = []
        self.generations: Int64s = np.zeros(0, np.int64)
        self.since: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self.positions: Int64s = np.zeros(0, np.int64)
        self.order: Int64s = np.zeros(0, np.int64)
        self.end = 0
        self.free: list[int] = []

    @property
    def live(self) -> int:
        return len(self.ids)

    @property
    def capacity(self) -> int:
        return len(self.generations)

    def find(self, ids: Sequence[str]) -> Int64s:
        """Return the rows of `ids`, -1 for ids without a live sample."""
        return np.fromiter(map(self.ids.get, ids, repeat(-1)), np.int64, len(ids))

    def holds(self, rows: Int64s, generations: Int64s) -> Bools:
        """Return which of these handles, (rows[i], generations[i]), refer to live samples."""
        if len(rows) and np.minimum.reduce(rows) >= 0 and np.maximum.reduce(rows) < len(self.names):
            held: Bools = (self.generations[rows] == generations) & (generations > 0)
            return held
        valid = (rows >= 0) & (rows < len(self.names)) & (generations > 0)  # invalid handles may have any numbers
        if not len(self.generations):
            return valid  # there are no rows: all flags are false
        live: Bools = valid & (self.generations[np.where(valid, rows, 0)] == generations)
        return live

    def hold(self, rows: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether these handles, at least one, all refer to live samples. For a few."""
        if not len(rows) == len(generations) > 0 or min(generations) <= 0:
            return False
        if min(rows) < 0 or max(rows) >= len(self.names):
            return False
        held: list[int] = self.generations[list(rows)].tolist()
        return held == list(generations)

    def names_of(self, rows: Int64s) -> tuple[str, ...]:
        names = self.names
        return tuple([names[row] or "" for row in rows.tolist()])

    def oldest(self, count: int | None) -> tuple[str, ...]:
        """Return the ids of the oldest `count` samples (None: of all), oldest first."""
        return tuple(self.ids) if count is None else tuple(islice(self.ids, count))

    def in_order(self) -> Int64s:
        """Return all live rows, oldest first."""
        order = self.order[: self.end]
        return order[order >= 0]

    def create(self, ids: Sequence[str], first_generation: int, now: float) -> Int64s:
        """Create rows for `ids` (none of which has a live sample) in this order, with creation time `now` and the
        generations from `first_generation` on. Return the rows."""
        count = len(ids)
        fresh = max(count - len(self.free), 0)  # new slots; the others come from the end of `free`
        first_reused = len(self.free) - (count - fresh)
        reused = self.free[first_reused:]
        del self.free[first_reused:]
        used = len(self.names)  # slots so far, free ones included
        self.names.extend([None] * fresh)
        if used + fresh > self.capacity:
            self._grow(used + fresh)
        slots = [*reused[::-1], *range(used, used + fresh)]  # the slot freed last is reused first
        rows = np.array(slots, np.int64)
        self.ids.update(zip(ids, slots, strict=True))
        for name, row in zip(ids, slots, strict=True):
            self.names[row] = name
        if self.end + count > len(self.order):
            self.order = grown(self.order, next_capacity(len(self.order), self.end + count))
        self.generations[rows] = np.arange(first_generation, first_generation + count)
        self.since[rows] = now
        self.positions[rows] = np.arange(self.end, self.end + count)
        self.order[self.end : self.end + count] = rows
        self.end += count
        return rows

    def create_one(self, name: str, generation: int, now: float) -> int:
        """Create one row as `create` does, and return it. The tables have room (see `room`)."""
        if self.free:
            row = self.free.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
        self.ids[name] = row
        self.generations[row] = generation
        self.since[row] = now
        self.positions[row] = self.end
        self.order[self.end] = row
        self.end += 1
        return row

    @property
    def room(self) -> int:
        """How many rows can be created before a table grows or the age order is compacted."""
        if self.is_mostly_dead:
            return 0
        return min(len(self.free) + self.capacity - len(self.names), len(self.order) - self.end)

    @property
    def is_mostly_dead(self) -> bool:
        """Whether the age order is to be compacted."""
        return self.end > 2 * len(self.ids) + SLACK

    def remove(self, rows: Int64s) -> None:
        """Remove these live rows; their slots may be reused."""
        self.order[self.positions[rows]] = -1
        self.generations[rows] = 0
        dead = rows.tolist()
        for row in dead:
            name = self.names[row]
            assert name is not None, row
            del self.ids[name]
            self.names[row] = None
        self.free.extend(dead[::-1])  # `create` takes slots from the end: these rows in their order

    def compact(self) -> Int64s | None:
        """Compact the age order if it is mostly dead. Return the old positions of the remaining rows; None if nothing
        was done."""
        if not self.is_mostly_dead:
            return None
        kept = np.flatnonzero(self.order[: self.end] >= 0)
        order = np.zeros(next_capacity(0, len(kept)), np.int64)
        order[: len(kept)] = self.order[kept]
        self.order = order
        self.end = len(kept)
        self.positions[order[: self.end]] = np.arange(self.end)
        return kept

    def _grow(self, wanted: int) -> None:
        capacity = next_capacity(self.capacity, wanted)
        self.generations = grown(self.generations, capacity)
        self.since = grown(self.since, capacity)
        self.positions = grown(self.positions, capacity)
