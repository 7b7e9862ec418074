"""What the ledger remembers of a client: its numbers and what it holds."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dataplane.errors import DataPlaneError
from dataplane.ledger.commands import Allocate, Claim, FindCells, Int32s, Int64s, Result, Samples, UnitShrunk
from dataplane.ledger.commands.result_size import size_of
from dataplane.ledger.state.arrays import top
from dataplane.ledger.state.free_space import granules_up
from dataplane.ledger.state.limits import Limits
from dataplane.ledger.state.number_set import NumberSet
from dataplane.ledger.state.snapshot import Snapshot
from dataplane.ledger.state.units import Unit

if TYPE_CHECKING:
    from dataplane.ledger.state.partition import Partition
    from dataplane.ledger.state.tasks import ReadyIndex, Task
    from dataplane.ledger.state.watches import Watch


class SessionStatus(enum.StrEnum):
    LIVE = "live"
    ENDING = "ending"
    """It said Bye or was given up; its bytes wait for the proof of units that it cannot touch them."""


class ReservedSpace:
    """Reserved bytes. `pieces` lists them by column, each as (first value, last value, extent, offset).
    `epochs` are those of the units when it was made; `broken` says that a unit was dropped with its bytes."""

    def __init__(self, columns: int) -> None:
        self.pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(columns)]
        self.epochs: dict[int, int] = {}
        self.broken = False

    def extents(self) -> Int32s:
        return np.array([piece[2] for column in self.pieces for piece in column], np.int32)


class PutReservation(ReservedSpace):
    """Space for one put; `pieces` has its columns, their values in order. `moving`: for cells to be moved, no account's
    until they are. `samples` and `targets` as in `ParkedAllocate`."""

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
    """Space of one unit for small puts to come: what no commit has taken yet, as pieces of one column without
    values."""

    def __init__(self, unit: int, epoch: int, extent: int, offset: int) -> None:
        super().__init__(1)
        self.unit = unit
        self.epochs[unit] = epoch
        self.pieces[0].append((0, 0, extent, offset))


class Parked:
    """A call that waits. `since` and `deadline` are ledger time; `place` grows with each call that begins to wait."""

    place = 0

    def __init__(self, session: Session, number: int, since: float, timeout_s: float) -> None:
        self.session = session
        self.number = number
        self.since = since
        self.deadline = since + timeout_s

    @property
    def key(self) -> tuple[int, int]:
        return self.session.number, self.number


class ParkedClaim(Parked):
    def __init__(self, session: Session, number: int, since: float, command: Claim, partition: Partition) -> None:
        super().__init__(session, number, since, command.timeout_s)
        self.command = command
        self.partition = partition
        self.ready_index: ReadyIndex | None = None
        self.watch: Watch | None = None


class ParkedAllocate(Parked):
    """`evicted` are the ids of unconsumed samples that went for it.
    `holds_up`: when it was judged last, those behind it in line had to wait for it. `samples` are those that the put
    will name, `targets` the ids that are kept from eviction for it."""

    holds_up = False

    def __init__(
        self, session: Session, number: int, since: float, command: Allocate, partition: Partition, want: Want
    ) -> None:
        super().__init__(session, number, since, command.timeout_s)
        self.want = want
        self.samples = command.samples
        self.targets: tuple[str, ...] = ()
        self.evicted: tuple[str, ...] = ()
        self.command = command
        self.partition = partition

    @property
    def total(self) -> int:
        """The bytes it wants, in whole granules."""
        return self.want.total


class ParkedShrink(Parked):
    """`found` is what is known of each unit, `waits_for` the order that it has not carried out yet, by unit."""

    def __init__(self, session: Session, number: int, since: float, timeout_s: float) -> None:
        super().__init__(session, number, since, timeout_s)
        self.found: dict[int, UnitShrunk] = {}
        self.waits_for: dict[int, int] = {}


class ParkedFind(Parked):
    """Waits until there is something to move on a unit, or nothing is held there any more."""

    def __init__(self, session: Session, number: int, since: float, command: FindCells) -> None:
        super().__init__(session, number, since, command.timeout_s)
        self.command = command


class UnconfirmedClaim:
    """A claim that goes back if its session dies: the rows that still carry the claim_id. Its task lists it until
    `settle`."""

    def __init__(self, partition: Partition, task: Task, rows: Int64s, claim_id: int) -> None:
        self.partition = partition
        self.task = task
        self.rows = rows
        self.claim_id = claim_id
        task.unconfirmed.add(claim_id)

    def settle(self) -> None:
        """Its session has the answer, or the rows go back."""
        self.task.unconfirmed.discard(self.claim_id)


class Session:
    """`answers` keeps results until they are settled, `parked` the calls that wait; `reservations`, `pins`,
    `saves` (what a Save took, by partition) and `unconfirmed` claims are by the number of the call that made them.
    Numbers below `watermark` and those in `above` are settled: the client has their answers, or will get none.
    `large` has the bytes of the answers that are large, `large_bytes` their sum.

    `lock_path` is where it says its lock is: it may be local to a unit of its host whose report of that was lost.
    `attached` (in order of attachment) are the units that proved it local, with the path of its lock; `fencing` those
    whose proof is awaited once it is ending. `heard`, `probed` and `suspected` are ledger time.
    """

    def __init__(self, number: int, nonce: str, name: str, host: str, lock_path: str, now: float) -> None:
        self.number = number
        self.nonce = nonce
        self.name = name
        self.host = host
        self.lock_path = lock_path
        self.state = SessionStatus.LIVE
        self.why = ""
        self.watermark = 1
        self.above = NumberSet()
        self.answers: dict[int, Result | DataPlaneError] = {}
        self.large: dict[int, int] = {}
        self.large_bytes = 0
        self.parked: dict[int, Parked] = {}
        self.reservations: dict[int, ReservedSpace] = {}
        self.pins: dict[int, Int32s] = {}
        self.saves: dict[int, dict[str, Snapshot]] = {}
        self.unconfirmed: dict[int, UnconfirmedClaim] = {}
        self.attached: dict[int, str] = {}
        self.fencing: dict[int, str] = {}
        self.heard = now
        self.probed: float | None = None
        self.suspected: float | None = None
        self.silent = False

    @property
    def live(self) -> bool:
        return self.state is SessionStatus.LIVE

    def hear(self, now: float) -> None:
        self.heard = now
        self.silent = False
        self.suspected = None

    @property
    def unanswered(self) -> int:
        """Calls of which the client may have no answer yet."""
        return len(self.parked) + len(self.answers)

    def settled(self, number: int) -> bool:
        """Whether this number will not be executed, or not again."""
        return number < self.watermark or number in self.above

    def keep(self, number: int, result: Result | DataPlaneError, limits: Limits) -> None:
        """Keep an answer for repetitions of its call. One that there is no place for is not: then they are refused."""
        size = size_of(result)
        fits = not size or not self.large_bytes or self.large_bytes + size <= limits.answer_bytes
        if not fits or len(self.answers) >= 2 * limits.in_flight:
            self.above.add(number, number)
            return
        self.answers[number] = result
        if size:
            self.large[number] = size
            self.large_bytes += size

    def confirm(
        self, watermark: int, confirmed: tuple[int, ...], limits: Limits
    ) -> tuple[list[Parked], list[UnconfirmedClaim]]:
        """The client has the answers of all numbers below `watermark` and of those `confirmed`, or wants none. Gives
        parked calls it has thereby given up, and the claims that are final now. What was settled once stays so, in
        whatever order calls arrive."""
        given_up: list[Parked] = []
        final: list[UnconfirmedClaim] = []
        for number in self._settled_by(watermark, confirmed, limits):
            self.answers.pop(number, None)
            if number in self.unconfirmed:
                claimed = self.unconfirmed.pop(number)
                claimed.settle()
                final.append(claimed)
            if number in self.large:
                self.large_bytes -= self.large.pop(number)
            if number in self.parked:
                given_up.append(self.parked[number])
        return given_up, final

    def _settled_by(self, watermark: int, confirmed: tuple[int, ...], limits: Limits) -> Iterable[int]:
        """Note them as settled; those of which there may be anything."""
        settled: Iterable[int] = ()
        if watermark > self.watermark:
            settled = self._known(self.watermark, watermark - 1)
            self.watermark = watermark
            if self.above.bounds:
                self.above.drop_below(watermark)
        if not confirmed:
            return settled
        found = list(settled)
        for first, last in zip(confirmed[::2], confirmed[1::2], strict=False):
            first = max(first, self.watermark)
            # Between ranges is a call without an answer: more than these are not noted, and stay unconfirmed.
            if first <= last and self.above.ranges <= 2 * limits.in_flight:
                found += self._known(first, last)
                self.above.add(first, last)
        return found

    def _known(self, first: int, last: int) -> Iterable[int]:
        """The numbers from `first` to `last` of which there may be anything, ascending."""
        if last - first <= self.unanswered:
            return range(first, last + 1)
        known = {*self.answers, *self.unconfirmed, *self.parked}
        return sorted([number for number in known if first <= number <= last])


class Want:
    """What an Allocate asks for. `ends[c][k]` is the sum of the first k value sizes of column c; `whole[c]` the bytes
    the column takes in one piece."""

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
        return len(self.ends[column]) - 1

    def near(self, unit: Unit) -> bool:
        """Whether the unit is one that the put should rather wait for than go elsewhere."""
        session = self.session
        return unit.number == self.wish or unit.number in session.attached or unit.host == session.host

    def order(self, units: list[Unit]) -> list[Unit]:
        """Best unit first."""
        session = self.session

        def rank(unit: Unit) -> tuple[bool, bool, bool, int, int]:
            return (
                unit.number != self.wish,
                unit.number not in session.attached,
                unit.host != session.host,
                -unit.available_bytes(update=self.update),
                unit.number,
            )

        return sorted(units, key=rank) if len(units) > 1 else units
