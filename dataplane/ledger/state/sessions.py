"""Sessions of clients: their calls and answers, and the space, pins and claims that they hold.

Also the limits on what one client can cause (`Limits`), the estimated size of an answer
(`size_of`), and the snapshot of a partition, taken for a checkpoint.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from dataplane.core.durations import UNLIMITED_S
from dataplane.core.number_set import NumberSet
from dataplane.core.types import FieldSpec, granules_up
from dataplane.errors import DataPlaneError, LimitError
from dataplane.ledger import commands as c
from dataplane.ledger.commands import (
    Allocate,
    Allocated,
    Claim,
    Claimed,
    Committed,
    FindCells,
    Int32s,
    Int64s,
    Listed,
    Located,
    Result,
    Samples,
)
from dataplane.ledger.state.arrays import top
from dataplane.ledger.state.tags import Tags
from dataplane.ledger.state.units import Unit

if TYPE_CHECKING:
    from dataplane.ledger.state.partition import Partition
    from dataplane.ledger.state.tasks import ReadyIndex, Task
    from dataplane.ledger.state.watches import Watch


SPLIT = "Split it into several smaller ones."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the ledger. Every limit is inclusive. A request beyond a limit fails with a
    `LimitError`.

    in_flight: calls of a session whose answers are not confirmed; calls that undo another call are
    always accepted. answer_bytes: approximate size of large answers kept per session until
    confirmed; one answer is always kept. parked: waiting commands of all sessions.
    samples: samples or values in one command, and samples of one claim. columns: columns, fields or
    conditions in one command, and fields, tasks, tags or enumerations of a partition.
    id_bytes: UTF-8 bytes of a sample id or the name of a partition, task, field, tag, client or
    unit. tag_bytes: characters of one string tag. path_bytes: characters of a path or endpoint sent
    by a client or unit. preallocated_divisor: one request for preallocated space may take at most
    1/preallocated_divisor of the space for new rows in a unit. steps: steps of a task whose shares are
    remembered. saves: `Save` calls of one session that are not released; each holds 20 bytes per
    cell. interests: (task, fields) combinations per partition whose ready samples are tracked;
    beyond the limit, the least recently used one without waiting claims is replaced.
    """

    in_flight: int = 4096
    answer_bytes: int = 64 << 20
    parked: int = 65536
    sessions: int = 65536
    partitions: int = 65536
    units: int = 4096
    samples: int = 1 << 20
    columns: int = 4096
    id_bytes: int = 1024
    tag_bytes: int = 1 << 16
    path_bytes: int = 4096
    preallocated_divisor: int = 64
    steps: int = 256
    saves: int = 4
    interests: int = 64


def check_limit(what: str, got: int, limit: int, hint: str) -> None:
    """Raise `LimitError` if `got` exceeds `limit`."""
    if got > limit:
        raise LimitError(what=what, got=got, limit=limit, hint=hint)


class SessionStatus(enum.StrEnum):
    LIVE = "live"
    ENDING = "ending"
    """The session sent Bye or was ended by the service. Its bytes are freed once their units have proof that the
    session can no longer access them."""


class ReservedPiece(NamedTuple):
    """Values [first, last) of a column, back to back from `offset` of an arena on, in one extent.
    Space without values yet is values [0, 0)."""

    first: int
    last: int
    extent: int
    offset: int


class ReservedSpace:
    """Reserved bytes."""

    def __init__(self, columns: int) -> None:
        # By column.
        self.pieces: list[list[ReservedPiece]] = [[] for _ in range(columns)]
        # Epochs of the units at the time of the reservation.
        self.epochs: dict[int, int] = {}
        # Some of the bytes were lost with a unit.
        self.broken = False

    def extents(self) -> Int32s:
        return np.array([piece.extent for column in self.pieces for piece in column], np.int32)


class PutReservation(ReservedSpace):
    """Space for one put; `pieces` has the put's columns, with values in order. `names` and `sizes`: name of each
    column, and the bytes of its values. `update`: no new samples may be put into it. `moving`: space for moved cells,
    which has no account until the move. `samples` and `targets`: as in `ParkedAllocate`."""

    def __init__(
        self, partition: Partition, names: list[str], sizes: list[Int64s], *, update: bool, moving: bool = False
    ) -> None:
        super().__init__(len(names))
        self.samples: Samples | None = None
        self.targets: tuple[str, ...] = ()
        self.moving = moving
        self.partition = partition
        self.names = names
        self.sizes = sizes
        self.update = update


class Preallocation(ReservedSpace):
    """Space in one unit for later small puts: the part that no commit has used yet, as pieces of one column without
    values."""

    def __init__(self, unit: int, epoch: int, extent: int, offset: int) -> None:
        super().__init__(1)
        self.unit = unit
        self.epochs[unit] = epoch
        self.pieces[0].append(ReservedPiece(0, 0, extent, offset))


class Parked:
    """A call of a client that waits in the ledger. `call_id`: its id in the session. `since` and `deadline` are
    ledger times. `serial` increases with each call that starts to wait."""

    serial = 0

    def __init__(self, session: Session, call_id: int, since: float, timeout_s: float) -> None:
        self.session = session
        self.call_id = call_id
        self.since = since
        # Infinite for a call without a timeout.
        self.deadline = since + timeout_s if timeout_s < UNLIMITED_S else math.inf

    @property
    def key(self) -> tuple[int, int]:
        return self.session.session_id, self.call_id


class ParkedClaim(Parked):
    """A claim that waits for samples. `ready_index`: the ready samples of its task and fields. `watch`: the counts of
    all claims that wait for the same samples. Both are set after the creation."""

    def __init__(self, session: Session, call_id: int, since: float, command: Claim, partition: Partition) -> None:
        super().__init__(session, call_id, since, command.timeout_s)
        self.command = command
        self.partition = partition
        self.ready_index: ReadyIndex | None = None
        self.watch: Watch | None = None


class ParkedAllocate(Parked):
    """A put that waits for space, or is tried for the first time. `want`: the space. `evicted`: ids of unconsumed
    samples evicted for it. `holds_up`: puts behind it in line had to wait for it at its last evaluation. `samples`: the
    samples that the put will name. `targets`: the ids protected from eviction for it."""

    holds_up = False

    def __init__(
        self, session: Session, call_id: int, since: float, command: Allocate, partition: Partition, want: Want
    ) -> None:
        super().__init__(session, call_id, since, command.timeout_s)
        self.want = want
        self.samples = command.samples
        self.targets: tuple[str, ...] = ()
        self.evicted: tuple[str, ...] = ()
        self.command = command
        self.partition = partition

    @property
    def total(self) -> int:
        """The requested bytes, in whole granules."""
        return self.want.total


class ParkedFind(Parked):
    """A call that waits until a unit has cells to move, or holds no more data."""

    def __init__(self, session: Session, call_id: int, since: float, command: FindCells) -> None:
        super().__init__(session, call_id, since, command.timeout_s)
        self.command = command


class UnconfirmedClaim:
    """A claim whose answer the client has not confirmed. If its session ends, the rows that still have `claim_id` are
    given back. The claim is in `task.unconfirmed` until `settle`."""

    def __init__(self, partition: Partition, task: Task, rows: Int64s, claim_id: int) -> None:
        self.partition = partition
        self.task = task
        self.rows = rows
        self.claim_id = claim_id
        task.unconfirmed.add(claim_id)

    def settle(self) -> None:
        """Mark the claim as settled: the client confirmed the answer, or the rows are being given back."""
        self.task.unconfirmed.discard(self.claim_id)


class Session:
    """State of one client session."""

    def __init__(self, session_id: int, nonce: str, name: str, host: str, lock_path: str, now: float) -> None:
        self.session_id = session_id
        # Chosen by the client, the same in repetitions of its request to open the session.
        self.nonce = nonce
        self.name = name
        self.host = host
        # Path of the lock that the client holds while it runs, as reported by the client: needed if
        # a unit's report of the attachment was lost.
        self.lock_path = lock_path
        self.state = SessionStatus.LIVE
        # Why the session ended.
        self.why = ""
        # Call ids below `watermark`, and those in `above`, are settled: the client has their
        # answers, or will get none.
        self.watermark = 1
        self.above = NumberSet()
        # Results by call id, until they are settled.
        self.answers: dict[int, Result | DataPlaneError] = {}
        # Sizes of large answers in bytes, and their sum.
        self.large: dict[int, int] = {}
        self.large_bytes = 0
        # The waiting calls.
        self.parked: dict[int, Parked] = {}
        # What calls created that the session holds, by the id of the call.
        self.reservations: dict[int, ReservedSpace] = {}
        self.pins: dict[int, Int32s] = {}
        # The calls whose pins end when the client confirms their answers.
        self.brief_pins: set[int] = set()
        # The snapshots of a Save, by partition.
        self.saves: dict[int, dict[str, Snapshot]] = {}
        self.unconfirmed: dict[int, UnconfirmedClaim] = {}
        # Units that the session has attached to, in order, with the path of its lock.
        self.attached: dict[int, str] = {}
        # Units that still have to prove that the ending session cannot access them, with the same
        # path.
        self.fencing: dict[int, str] = {}
        # Ledger time of the last contact, or later if heartbeats may be late.
        self.heard = now
        # Ledger time of the last order to units to prove the session's state.
        self.probed: float | None = None
        # Ledger time when a session that timed out during a pause of the ledger got one more
        # heartbeat.
        self.suspected: float | None = None
        # The connection with its heartbeats has ended, without a contact since.
        self.silent = False

    @property
    def live(self) -> bool:
        return self.state is SessionStatus.LIVE

    @property
    def label(self) -> str:
        """Number, client name and state of the session, for messages."""
        return f"session {self.session_id} ({self.name or 'unnamed'}, {self.state})"

    def record_contact(self, now: float) -> None:
        """Record that the client was heard from, which clears every suspicion."""
        self.heard = max(self.heard, now)
        self.silent = False
        self.suspected = None

    def is_settled(self, call_id: int) -> bool:
        """Whether a call with this id will not be executed (again)."""
        return call_id < self.watermark or (bool(self.above.bounds) and call_id in self.above)

    def keep_answer(self, call_id: int, result: Result | DataPlaneError, limits: Limits) -> None:
        """Keep an answer for repetitions of its call. An answer beyond the limits is not kept, and repetitions of its
        call are rejected."""
        size = 0 if type(result) in _FIXED_SIZE else size_of(result)
        # The first large answer is kept whatever its size. A small answer has size 0 (see `size_of`).
        fits = not size or not self.large_bytes or self.large_bytes + size <= limits.answer_bytes
        # Twice `in_flight`, because calls that release something are exempt from that limit.
        if not fits or len(self.answers) >= 2 * limits.in_flight:
            self.above.add(call_id, call_id)  # settled
            return
        self.answers[call_id] = result
        if size:
            self.large[call_id] = size
            self.large_bytes += size

    def confirm(
        self, watermark: int, confirmed: tuple[int, ...], limits: Limits
    ) -> tuple[list[Parked], list[UnconfirmedClaim], list[Int32s]]:
        """Settle all calls below `watermark` and in `confirmed` (pairs of first and last id): the
        client has their answers or no longer needs them. Return the parked calls among them, which
        the caller cancels, the claims that are now final, and the pins that end, which the caller
        undoes. Settled ids remain settled, in whatever order calls arrive."""
        settled: Iterable[int] = ()
        if watermark > self.watermark:
            settled = (self.watermark,)
            if watermark > self.watermark + 1:
                settled = self._unsettled_between(self.watermark, watermark - 1)
            self.watermark = watermark
            if self.above.bounds:
                self.above.drop_below(watermark)  # `watermark` covers them
        if confirmed:
            settled = [*settled, *self._settle_above(confirmed, limits)]
        cancelled: list[Parked] = []
        final: list[UnconfirmedClaim] = []
        unpinned: list[Int32s] = []
        for call_id in settled:
            self.answers.pop(call_id, None)
            if call_id in self.unconfirmed:
                claimed = self.unconfirmed.pop(call_id)
                claimed.settle()
                final.append(claimed)
            if call_id in self.brief_pins:
                self.brief_pins.remove(call_id)
                if call_id in self.pins:
                    unpinned.append(self.pins.pop(call_id))
            if call_id in self.large:
                self.large_bytes -= self.large.pop(call_id)
            if call_id in self.parked:
                cancelled.append(self.parked[call_id])
        return cancelled, final, unpinned

    def _settle_above(self, confirmed: tuple[int, ...], limits: Limits) -> list[int]:
        """Record the confirmed ids above the watermark as settled (see `confirm`). Return those
        among them that may have an answer, a claim, a pin or a parked call."""
        call_ids: list[int] = []
        # An unpaired id at the end is ignored.
        for first, last in zip(confirmed[::2], confirmed[1::2], strict=False):
            first = max(first, self.watermark)
            # Between two ranges is an unanswered call, and their number is limited. A client that confirms more ranges
            # is faulty: the ranges beyond the limit stay unconfirmed.
            if first <= last and self.above.ranges <= 2 * limits.in_flight:
                call_ids += self._unsettled_between(first, last)
                self.above.add(first, last)
        return call_ids

    def _unsettled_between(self, first: int, last: int) -> Iterable[int]:
        """Return the ids from `first` to `last`, ascending: all of them, or of a range that is longer than the list
        of unanswered calls only those with an answer, a claim, a pin or a parked call. A client may
        send any ids, so a long range is not gone through."""
        if last - first <= len(self.parked) + len(self.answers):
            return range(first, last + 1)
        candidates = {*self.answers, *self.unconfirmed, *self.brief_pins, *self.parked}
        return sorted([call_id for call_id in candidates if first <= call_id <= last])


class Want:
    """Space requested by an Allocate of `session`. `ends[c][k]`: sum of the first k value sizes of column c.
    `whole[c]`: bytes of column c in one piece, in whole granules; `total`: their sum. `largest`: the largest value, in
    whole granules. `update`: the put only rewrites existing samples. `moving`: it is a copy of cells that a unit moves
    elsewhere. `wish`: id of the unit that the client prefers."""

    def __init__(self, session: Session, command: Allocate) -> None:
        self.session = session
        self.update = command.update
        self.moving = command.moving
        self.wish = command.unit_wish
        self.ends: list[Int64s] = []
        self.whole: list[int] = []
        self.largest = 0
        for column in command.columns:
            ends = np.zeros(len(column.sizes) + 1, np.int64)
            column.sizes.cumsum(out=ends[1:])
            self.ends.append(ends)
            self.whole.append(granules_up(int(ends[-1])))
            self.largest = max(self.largest, granules_up(top(column.sizes)))
        self.total = sum(self.whole)

    def values(self, column: int) -> int:
        """The number of values in the column."""
        return len(self.ends[column]) - 1

    def prefers(self, unit: Unit) -> bool:
        """Whether the put should wait for space in this unit instead of using another unit."""
        session = self.session
        return unit.unit_id == self.wish or unit.unit_id in session.attached or unit.host == session.host

    def by_preference(self, units: list[Unit]) -> list[Unit]:
        """Return the units in order of preference, best first."""
        session = self.session

        # False sorts before True: the wished unit first, then units that the session has mapped, then its own host,
        # then those with the most space.
        def rank(unit: Unit) -> tuple[bool, bool, bool, int, int]:
            return (
                unit.unit_id != self.wish,
                unit.unit_id not in session.attached,
                unit.host != session.host,
                -unit.available_bytes(update=self.update),
                unit.unit_id,
            )

        return sorted(units, key=rank) if len(units) > 1 else units


_FIXED_SIZE = frozenset({c.Done, c.Cleared, c.Preallocated, c.Consumption, c.Moved})
"""The results without strings, arrays and tuples, which are small."""
SMALL_BYTES = 4096
"""Smaller answers count as 0 bytes, because the number of answers is bounded, too."""
_ITEM_BYTES = 64
"""Assumed size of a string, number or tag in a tuple."""
_HANDLE_BYTES = 16
"""Row and generation of a sample."""
_LOCATION_BYTES = 24
"""Unit, offset, length and checksum of a cell."""
_PLACEMENT_BYTES = 40
"""The five integers of a `Placement`."""


def size_of(result: Result | DataPlaneError) -> int:
    """Return the approximate size of a result in bytes, or 0 for an error or a small result."""
    if isinstance(result, DataPlaneError):
        return 0
    if isinstance(result, Located):
        size = len(result.rows) * (_HANDLE_BYTES + _LOCATION_BYTES * len(result.fields))
    elif isinstance(result, Claimed | Listed | Committed):
        size = len(result.rows) * (_HANDLE_BYTES + _ITEM_BYTES * (1 + len(result.tags)))
    elif isinstance(result, Allocated):
        size = _PLACEMENT_BYTES * len(result.placements)
    else:
        size = _approximate_bytes(result)
    return size if size >= SMALL_BYTES else 0


def _approximate_bytes(value: Any) -> int:
    """Return about how many bytes the value takes. Of a tuple, the first item decides whether its items are examined
    one by one."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, msgspec.Struct):
        return sum([_approximate_bytes(getattr(value, name)) for name in value.__struct_fields__])
    if isinstance(value, tuple):
        if value and isinstance(value[0], msgspec.Struct | tuple):
            return sum(map(_approximate_bytes, value))
        return _ITEM_BYTES * len(value)
    if isinstance(value, dict):
        return _ITEM_BYTES * len(value)
    return 8  # a number, or None


class SavedCells:
    """Locations of the cells of one field, by age of their samples. A length of -1 means "no cell"."""

    checksums: c.UInt32s | None = None

    def __init__(
        self, spec: FieldSpec, units: c.Int32s, offsets: c.Int64s, lengths: c.Int64s, checksums: c.UInt32s | None
    ) -> None:
        self.spec = spec
        self.checksums = checksums
        self.units = units
        self.offsets = offsets
        self.lengths = lengths


class Snapshot:
    """The samples of one partition at the time of the snapshot, oldest first."""

    def __init__(self, ids: tuple[str, ...], tags: Tags, fields: dict[str, SavedCells]) -> None:
        self.ids = ids
        self.tags = tags
        self.fields = fields
