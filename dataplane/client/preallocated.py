"""Preallocated space for the small puts of a client: each put takes a portion of it and sends only
its commit.

A client requests such space only when small puts follow each other quickly, and only in a unit whose arena it has
mapped. Space that is unused for one heartbeat is returned, and all unused space when the session
closes.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dataplane.core.types import granules_up
from dataplane.data.columns import EncodedColumn
from dataplane.ledger.commands import Placement, Preallocate

SMALL_BYTES = 256 << 10
"""Larger puts allocate their own space: their copy takes longer than the request."""
PUTS_AHEAD = 64
MOST_PUTS_AHEAD = 1024
"""A request asks for the space of `PUTS_AHEAD` puts of the current size. If it follows the last
request within `SOON_S`, it asks for the space of twice as many puts as that one, up to
`MOST_PUTS_AHEAD`. The two limits below apply, too."""
LEAST_BYTES = 64 << 10
MOST_BYTES = 8 << 20
SHARE = 128
"""A request asks for at most 1/SHARE of the unit's capacity, or for the space of one put if that is more."""
SOON_S = 1.0
"""Small puts further apart than this allocate their own space. A rejected request blocks new ones for this time."""


@dataclass(eq=False, slots=True)
class PreallocatedSpace:
    """Space allocated by call `call_id`: bytes [offset, end) of the unit's arena are unused, `portions` are in use.
    `checksums`: commits into the space must have checksums. `touched`: used since the last `give_up_idle`.
    `given_up`: no further put takes a portion; the space is released after its last portion is finished."""

    call_id: int
    unit: int
    offset: int
    end: int
    checksums: bool = False
    portions: set[PreallocatedPortion] = field(default_factory=set)
    touched: bool = True
    given_up: bool = False


@dataclass(eq=False, frozen=True, slots=True)
class PreallocatedPortion:
    """Space of one put. Its columns begin at `offset`, each at a granule boundary."""

    space: PreallocatedSpace
    offset: int

    def placements(self, columns: Sequence[EncodedColumn]) -> list[Placement]:
        """Return the placements of the columns, one after another."""
        placements = []
        unit = self.space.unit
        offset = self.offset
        for number, column in enumerate(columns):
            last = len(column.sizes)
            place = Placement(column=number, first=0, last=last, unit=unit, offset=offset)
            placements.append(place)
            offset += granules_up(column.nbytes)
        return placements


class PreallocatedBuffer:
    """The preallocated spaces of one session. Thread-safe. Every portion is passed to `finish`. `returned` has the
    call ids of spaces to release; no put can still write to them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[PreallocatedSpace] = []  # spaces that puts may take portions of
        self._spaces: dict[int, PreallocatedSpace] = {}  # by call id: the open ones, and those with portions in use
        # Completed when the request in progress, which `next_request` returned, has ended.
        self._requested: Future[None] | None = None
        self._requested_at = -SOON_S
        self._puts_ahead = PUTS_AHEAD
        self.returned: collections.deque[int] = collections.deque()
        self._last_put_at = self._rejected_at = -SOON_S  # times of the last small put, and of the last rejection

    def take(self, nbytes: int) -> PreallocatedPortion | None:
        """Return the portion for a put of `nbytes` (see `bytes_of`); it is in use until `finish`. None if no space has
        enough left."""
        with self._lock:
            for space in self._open:
                if space.end - space.offset >= nbytes:
                    break
            else:
                return None
            portion = PreallocatedPortion(space, space.offset)
            self._last_put_at = self._clock()
            space.offset += nbytes
            space.touched = True
            space.portions.add(portion)
            return portion

    @property
    def in_use(self) -> bool:
        """Whether a small put was made a short time ago."""
        return self._clock() - self._last_put_at < SOON_S

    def next_request(
        self, nbytes: int, unit: int | None, most_bytes: int = MOST_BYTES
    ) -> Preallocate | Future[None] | None:
        """Return the command that requests space in `unit` after `take` failed for a put of
        `nbytes`; if another put's request is in progress, the future of its end; or None if the put
        must allocate its own space. The caller calls `end_request` after the command. Spaces that
        are too small for the put are given up. unit: a unit whose arena is mapped; None if there is
        none."""
        if not 0 < nbytes <= SMALL_BYTES:
            return None
        with self._lock:
            now = self._clock()
            soon = self.in_use
            self._last_put_at = now
            if unit is None or not soon:  # no arena is mapped, or small puts are rare
                return None
            if now - self._rejected_at < SOON_S:
                return None
            if self._requested is not None:
                return self._requested
            self._requested = Future()
            follows = now - self._requested_at < SOON_S
            self._puts_ahead = min(2 * self._puts_ahead, MOST_PUTS_AHEAD) if follows else PUTS_AHEAD
            self._requested_at = now
            for space in [space for space in self._open if space.end - space.offset < nbytes]:
                self._give_up(space)
            wanted_bytes = min(max(self._puts_ahead * nbytes, LEAST_BYTES), most_bytes)
        return Preallocate(unit=unit, nbytes=max(wanted_bytes, nbytes))

    def record_rejection(self) -> None:
        """Record that the service had no space to preallocate."""
        with self._lock:
            self._rejected_at = self._clock()

    def end_request(self) -> None:
        """Record that the command of `next_request` was answered or abandoned."""
        with self._lock:
            requested = self._requested
            self._requested = None
        if requested is not None:
            requested.set_result(None)

    def add(self, call_id: int, granted: Preallocate, offset: int, *, checksums: bool = False) -> None:
        """Add space at `offset`, allocated by call `call_id`. granted: the command of this call. checksums: see
        `PreallocatedSpace`."""
        space = PreallocatedSpace(call_id, granted.unit, offset, offset + granted.nbytes, checksums)
        with self._lock:
            self._spaces[call_id] = space
            self._open.append(space)

    def finish(self, portion: PreallocatedPortion, *, failed: bool) -> None:
        """End the use of a portion: no thread writes to it, and its commit, if sent, was answered or abandoned. After
        a failure its space is not used again. Idempotent."""
        with self._lock:
            portion.space.portions.discard(portion)
            if failed or portion.space.given_up:
                self._give_up(portion.space)

    def give_up_idle(self) -> None:
        """Give up spaces that were unused since the last heartbeat."""
        with self._lock:
            for space in tuple(self._spaces.values()):
                if not space.touched:
                    self._give_up(space)
                space.touched = False

    def give_up_all(self) -> None:
        """Give up all spaces: the session closes, and no put takes a portion. Puts that wait for a
        request go on, even if an interrupt has left its put without an end."""
        self.end_request()
        with self._lock:
            for space in tuple(self._spaces.values()):
                self._give_up(space)

    def _give_up(self, space: PreallocatedSpace) -> None:
        """Let no further put use the space, and release it unless puts still write to it. Idempotent."""
        if space in self._open:
            self._open.remove(space)
        space.given_up = True
        if not space.portions and space.call_id in self._spaces:
            self.returned.append(space.call_id)
            del self._spaces[space.call_id]


def bytes_of(columns: Sequence[EncodedColumn]) -> int:
    """Return the arena bytes that the columns of a put need."""
    return sum(granules_up(column.nbytes) for column in columns)
