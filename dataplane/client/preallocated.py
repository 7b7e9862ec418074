"""Space that a client allocated ahead for its small puts: each takes its part of it and needs no command but its
commit.

Only a client that makes small puts one soon after another asks for such space, only in a unit whose arena it has
mapped, and what it has not used for a heartbeat goes back.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dataplane.core.types import GRANULE_BYTES
from dataplane.data.columns import EncodedColumn
from dataplane.ledger.commands import Placement, Preallocate

SMALL_BYTES = 256 << 10
"""Larger puts ask for their own space: their copy takes longer than the question."""
PUTS_AHEAD = 16
LEAST_BYTES = 64 << 10
MOST_BYTES = 2 << 20
SOON_S = 1.0
"""Small puts further apart than this ask for their own space, and a refusal stands so long."""
ASKS = 4
"""How many puts that begin at the same time ask for preallocated space; the others ask for their own."""


@dataclass(eq=False, slots=True)
class PreallocatedSpace:
    """What call `number` allocated: bytes [offset, end) of the unit's arena are not handed out yet, `parts` are in use.
    `checksums`: commits into it are to have them."""

    number: int
    unit: int
    offset: int
    end: int
    checksums: bool = False
    parts: set[PreallocatedPart] = field(default_factory=set)
    touched: bool = True
    given_up: bool = False


@dataclass(eq=False, frozen=True, slots=True)
class PreallocatedPart:
    """`offset` is where one put's columns begin, each at a granule of its own."""

    space: PreallocatedSpace
    offset: int

    def placements(self, columns: Sequence[EncodedColumn]) -> list[Placement]:
        """Where the columns lie."""
        placements, offset = [], self.offset
        for number, column in enumerate(columns):
            last = len(column.sizes)
            placements.append(Placement(column=number, first=0, last=last, unit=self.space.unit, offset=offset))
            offset += _granules(column.nbytes)
        return placements


class PreallocatedBuffer:
    """The spaces of one session. Thread-safe, and sound after an interrupt at any place, as long as every part goes to
    `finish` in the end. In `returned` are numbers of spaces to give back that nobody can write to any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[PreallocatedSpace] = []
        self._spaces: dict[int, PreallocatedSpace] = {}
        self._asks = 0
        self.returned: collections.deque[int] = collections.deque()
        self._last_put = self._refused = -SOON_S

    def take(self, nbytes: int, taken: list[PreallocatedPart]) -> bool:
        """Space for a put of `nbytes` (see `bytes_of`), until `finish`: `taken` gets the part. False if there is not
        enough."""
        with self._lock:
            space = next((space for space in self._open if space.end - space.offset >= nbytes), None)
            if space is None:
                return False
            part = PreallocatedPart(space, space.offset)
            self._last_put = self._clock()
            space.offset += nbytes
            space.touched = True
            taken.append(part)
            space.parts.add(part)
            return True

    def wish(self, nbytes: int, unit: int | None) -> Preallocate | None:
        """The command that asks for space in `unit`, for a put of `nbytes` that could not `take` any; None: the put
        asks for its own. Spaces that are too small for the put are given up."""
        if not 0 < nbytes <= SMALL_BYTES:
            return None
        with self._lock:
            now = self._clock()
            soon, self._last_put = now - self._last_put < SOON_S, now
            if unit is None or not soon or now - self._refused < SOON_S or self._asks >= ASKS:
                return None
            self._asks += 1
            for space in [space for space in self._open if space.end - space.offset < nbytes]:
                self._give_up(space)
        return Preallocate(unit=unit, nbytes=min(max(PUTS_AHEAD * nbytes, LEAST_BYTES), MOST_BYTES))

    def refused(self) -> None:
        """The service had no space to spare."""
        with self._lock:
            self._refused = self._clock()

    def answered(self) -> None:
        """The command that `wish` returned is answered, or given up."""
        with self._lock:
            self._asks = max(self._asks - 1, 0)

    def add(self, number: int, granted: Preallocate, offset: int, *, checksums: bool = False) -> None:
        """Call `number` allocated space at `offset`."""
        space = PreallocatedSpace(number, granted.unit, offset, offset + granted.nbytes, checksums)
        with self._lock:
            self._spaces[number] = space
            self._open.append(space)

    def forsake(self, number: int) -> None:
        """Call `number` may have allocated space, which was added unless an interrupt came before: it goes back."""
        with self._lock:
            if number in self._spaces:
                self._give_up(self._spaces[number])
            else:
                self.returned.append(number)

    def finish(self, part: PreallocatedPart, *, failed: bool) -> None:
        """No one writes to the part any more and its commit, if it was sent, was answered or given up. After a failure
        the space it is of is not used again. Idempotent."""
        with self._lock:
            part.space.parts.discard(part)
            if failed or part.space.given_up:
                self._give_up(part.space)

    def idle(self) -> None:
        """A heartbeat has passed: give up space that nobody has used since the last. Wishes that are older than that
        count no longer: an interrupt may have kept one from being `answered`."""
        with self._lock:
            self._asks = 0
            for space in tuple(self._spaces.values()):  # an interrupt may have kept one from being given up
                if not space.touched:
                    self._give_up(space)
                space.touched = False

    def _give_up(self, space: PreallocatedSpace) -> None:
        if space in self._open:
            self._open.remove(space)
        space.given_up = True
        if not space.parts and space.number in self._spaces:
            self.returned.append(space.number)
            del self._spaces[space.number]


def bytes_of(columns: Sequence[EncodedColumn]) -> int:
    """What the columns of a put take of an arena."""
    return sum(_granules(column.nbytes) for column in columns)


def _granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
