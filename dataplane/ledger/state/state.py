"""What every part of the ledger works on."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from dataplane.core.types import Checksums
from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    PartitionDroppedError,
    PartitionNotFoundError,
)
from dataplane.ledger.commands import Answer, Int64s, Notice, Output, Result, Samples
from dataplane.ledger.state.claim_terms import kind_of
from dataplane.ledger.state.extents import Extents
from dataplane.ledger.state.limits import SPLIT, Limits, check_limit
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.relocations import Compaction
from dataplane.ledger.state.sessions import (
    Parked,
    ParkedAllocate,
    ParkedClaim,
    ParkedFind,
    ParkedShrink,
    PutReservation,
    ReservedSpace,
    Session,
)
from dataplane.ledger.state.tasks import Leases, Task
from dataplane.ledger.state.units import Unit
from dataplane.ledger.state.wait_queues import Line, Lines
from dataplane.ledger.state.watches import Watch

BIRTHS_APART_NS = 1000
"""Epochs are times in nanoseconds: a state has a million generations per second before it comes to a later one's."""


class State:
    """`born` is the epoch in which this state began, `epoch` the one it is in. `generations` and `serials` only grow;
    generations begin where no state that began earlier can have come to, so that a sample of a lost state is never
    taken for one of this. `touched` are the partitions whose parked claims must be judged again. `claim_waiters` are
    the parked claims, by session and number. `space_waiters` are the puts that wait, updates apart; those that move
    cells are in `moves`. `resting` are the accounts of lines whose first put only a change of its account can help: its
    budget is used up. `compactions` are those under way, by unit; for puts that wait since, one is looked for at
    `compact_at` at the earliest. `alarms` and `wakes` are heaps by time; entries that no longer matter are passed over
    when they come up. `checksums` says which rows get one; `several_hosts` is what `spread` found, None when that may
    be over."""

    checksums = Checksums.ACROSS_HOSTS
    several_hosts: bool | None = None
    finders: tuple[ParkedFind, ...] = ()

    def __init__(
        self,
        epoch: int,
        limits: Limits,
        reserve_fraction: float,
        heartbeat_s: float,
        session_timeout_s: float,
        checksums: Checksums,
    ) -> None:
        self.born = epoch
        self.epoch = epoch
        self.limits = limits
        self.reserve_fraction = reserve_fraction
        self.heartbeat_s = heartbeat_s
        self.session_timeout_s = session_timeout_s
        self.checksums = checksums
        self.several_hosts = None
        self.watermarks = (0.75, 0.9)
        self.now = 0.0
        self.generations = epoch // BIRTHS_APART_NS
        self.serials = 0
        self.out: list[Output] = []
        self.units: dict[int, Unit] = {}
        self.extents = Extents(self.units)
        self.partitions: dict[str, Partition] = {}
        self.budgeted: dict[int, Partition] = {}
        self.sessions: dict[int, Session] = {}
        self.parked = 0
        self.space_waiters: dict[bool, Lines] = {True: {}, False: {}}
        self.claim_waiters: dict[tuple[int, int], ParkedClaim] = {}
        self.resting: dict[bool, set[int]] = {True: set(), False: set()}
        self.moves: Line = {}
        self.compactions: dict[int, Compaction] = {}
        self.compact_at = 0.0
        self.shrinkers: dict[tuple[int, int], ParkedShrink] = {}
        self.touched: dict[str, Partition] = {}
        self.alarms: list[tuple[float, int, int, int]] = []
        self.leases = Leases()
        self.wakes: list[tuple[float, int, str]] = []

    def serial(self) -> int:
        self.serials += 1
        return self.serials

    def partition(self, name: str) -> Partition:
        found = self.partitions.get(name)
        if found is None:
            raise PartitionNotFoundError(partition=name, known=list(self.partitions))
        return found

    def unit(self, number: int) -> Unit:
        found = self.units.get(number)
        if found is None:
            known = ", ".join(map(str, list(self.units)[:8])) or "none"
            raise InvalidRequestError(f"there is no storage unit {number}; there are: {known}")
        return found

    def compacting_bytes(self, unit: Unit) -> int:
        """What is free in the unit but for the compaction under way there."""
        compaction = self.compactions.get(unit.number)
        return 0 if compaction is None else compaction.taken_bytes

    def spread(self) -> bool:
        """Whether sessions and units are on more than one host."""
        if self.several_hosts is None:
            hosts = {unit.host for unit in self.units.values()} | {s.host for s in self.sessions.values()}
            self.several_hosts = len(hosts) > 1
        return self.several_hosts

    @property
    def puts_wait(self) -> bool:
        """Whether any put waits for space."""
        return bool(self.moves) or any(self.space_waiters.values())

    def all_puts(self) -> Iterator[ParkedAllocate]:
        """All puts that wait for space, those that move cells too."""
        lines = chain.from_iterable([lines.values() for lines in self.space_waiters.values()])
        return chain.from_iterable([line.values() for line in (*lines, self.moves)])

    def drop(self, partition: Partition) -> int:
        """The partition goes with all it holds, and calls that wait on it fail; how many samples lived."""
        count = partition.rows.live
        del self.partitions[partition.name]
        self.budgeted.pop(partition.account.number, None)
        partition.drop()
        for claim in self.waiting_claims(partition):
            waiting = f"a claim of task {claim.command.task!r}"
            self.unpark(claim, PartitionDroppedError(partition=partition.name, waiting=waiting))
        for put in self.waiting_puts(partition):
            self.unpark(put, PartitionDroppedError(partition=partition.name, waiting="a put"))
        return count

    def drop_staged(self, session: int) -> None:
        """The partitions that this session staged and did not publish go."""
        for partition in [found for found in self.partitions.values() if found.owner == session]:
            self.drop(partition)

    def waiting_claims(self, partition: Partition) -> list[ParkedClaim]:
        """The partition's parked claims, longest first."""
        found = [self.claim_waiters[key] for watch in partition.watches.values() for key in watch.waiters]
        return sorted(found, key=lambda claim: claim.place)

    def waiting_puts(self, partition: Partition) -> list[ParkedAllocate]:
        """The partition's puts that wait for space, longest first."""
        number = partition.account.number
        lines = [lines[number].values() for lines in self.space_waiters.values() if number in lines]
        moves = [put for put in self.moves.values() if put.partition is partition]
        return sorted(chain(*lines, moves), key=lambda put: put.place)

    def look_at_puts(self) -> None:
        """All that wait for space are judged again."""
        self.extents.freed = True
        self.extents.loosened.update(*self.space_waiters.values())

    def wants_space(self, account: int) -> bool:
        """Whether a put of its partition waits that is no move."""
        return any(account in lines for lines in self.space_waiters.values())

    def touch(self, partition: Partition) -> None:
        if partition.watches:
            self.touched[partition.name] = partition

    def wake_at(self, partition: Partition, when: float) -> None:
        """Its parked claims are judged again then at the latest."""
        if when < partition.wakes_at:
            partition.wakes_at = when
            heapq.heappush(self.wakes, (when, self.serial(), partition.name))

    def wake(self) -> None:
        """Partitions whose time has come are touched."""
        while self.wakes and self.wakes[0][0] <= self.now:
            partition = self.partitions.get(heapq.heappop(self.wakes)[2])
            if partition is not None and partition.wakes_at <= self.now:
                partition.wakes_at = float("inf")
                self.touch(partition)

    def loosen(self, partition: Partition, rows: Int64s) -> None:
        """These samples may have come to be consumed, or lie elsewhere: puts of the partition that wait for eviction
        are judged again."""
        number = partition.account.number
        if self.wants_space(number):
            self.extents.loosened.add(number)
            if partition.outlook is not None:
                partition.outlook.note(rows)

    def puts_under_way(self, partition: Partition) -> list[ParkedAllocate | PutReservation]:
        """Puts of the partition that wait for space, and those that have it and are not committed."""
        held = [
            reservation
            for session in self.sessions.values()
            if session.live
            for reservation in session.reservations.values()
        ]
        mine = [
            reservation
            for reservation in held
            if isinstance(reservation, PutReservation) and reservation.partition is partition
        ]
        return [*self.waiting_puts(partition), *mine]

    def keep_targets(self, put: ParkedAllocate | PutReservation) -> None:
        """While the put is under way, no sample that it names is evicted."""
        partition, samples = put.partition, put.samples
        if samples is None or put.targets or not partition.evicts:
            return
        named = samples.ids or partition.rows.names_of(partition.living(samples)[1])
        put.targets = tuple(dict.fromkeys(named))
        for name in put.targets:
            partition.targets[name] = partition.targets.get(name, 0) + 1

    def let_targets_go(self, put: ParkedAllocate | ReservedSpace) -> None:
        """The put is over: what no other names may be evicted. Preallocated space names nothing."""
        if not isinstance(put, ParkedAllocate | PutReservation):
            return
        partition, ids, put.targets = put.partition, put.targets, ()
        targets = partition.targets
        for name in ids:
            targets[name] -= 1
        ended = [name for name in ids if not targets[name]]
        for name in ended:
            del targets[name]
        if ended and self.wants_space(partition.account.number):
            rows = partition.rows.find(ended)
            self.loosen(partition, rows[rows >= 0])

    # --- calls that wait

    def park(self, parked: Parked) -> None:
        check_limit("waiting calls", self.parked + 1, self.limits.parked, "Try again later, or with blocking=False.")
        self.parked += 1
        parked.session.parked[parked.number] = parked
        parked.place = self.serial()
        heapq.heappush(self.alarms, (parked.deadline, parked.place, parked.session.number, parked.number))
        if isinstance(parked, ParkedClaim):
            self._park_claim(parked)
        elif isinstance(parked, ParkedAllocate):
            self._line_of(parked)[parked.key] = parked
        elif isinstance(parked, ParkedFind):
            self._watch((*self.finders, parked))

    def unpark(self, parked: Parked, result: Result | DataPlaneError) -> None:
        """The parked call gets its answer."""
        self.parked -= 1
        del parked.session.parked[parked.number]
        if isinstance(parked, ParkedClaim):
            self._unpark_claim(parked)
        elif isinstance(parked, ParkedAllocate):
            self._unpark_put(parked)
        elif isinstance(parked, ParkedShrink):
            self.shrinkers.pop(parked.key, None)
        elif isinstance(parked, ParkedFind):
            self._watch(tuple([other for other in self.finders if other is not parked]))
        self.answer(parked.session, parked.number, result)

    def _park_claim(self, parked: ParkedClaim) -> None:
        partition, ready_index = parked.partition, parked.ready_index
        assert ready_index is not None, parked.key
        self.claim_waiters[parked.key] = parked
        ready_index.waiters += 1
        kind = kind_of(ready_index, parked.command)
        if kind not in partition.watches:
            partition.watches[kind] = Watch(kind, ready_index, parked.command)
        parked.watch = partition.watches[kind]
        parked.watch.join(parked.key, parked.command)

    def _unpark_claim(self, parked: ParkedClaim) -> None:
        partition, watch = parked.partition, parked.watch
        assert watch is not None, parked.key
        del self.claim_waiters[parked.key]
        watch.ready_index.waiters -= 1
        watch.leave(parked.key, parked.command)
        if not watch.waiters:
            del partition.watches[watch.kind]

    def _line_of(self, parked: ParkedAllocate) -> Line:
        if parked.command.moving:
            return self.moves
        return self.space_waiters[parked.command.update].setdefault(parked.partition.account.number, {})

    def _unpark_put(self, parked: ParkedAllocate) -> None:
        """Whoever stood behind it may be served."""
        self.let_targets_go(parked)
        line, number = self._line_of(parked), parked.partition.account.number
        del line[parked.key]
        if not parked.command.moving:
            self.resting[parked.command.update].discard(number)
            if not line:
                del self.space_waiters[parked.command.update][number]
        if not self.wants_space(number):
            parked.partition.outlook = None
        self.extents.freed = True

    def fail(self, parked: Parked, error: Exception) -> None:
        """Judging a parked call raised what nothing should: the call ends with that, and nobody else is told."""
        what = f"call {parked.number} of session {parked.session.number} could not be judged while it waited: {error!r}"
        self.out.append(Notice(text=what))
        self.unpark(parked, InternalError(what=what))

    def _watch(self, finders: tuple[ParkedFind, ...]) -> None:
        """These calls wait for something to happen on their units."""
        self.finders = finders
        self.extents.watched = frozenset([parked.command.unit for parked in finders])

    def answer(self, session: Session, number: int, result: Result | DataPlaneError) -> None:
        """Send the one answer of this number, and keep it while it may be asked for again."""
        if not session.settled(number):
            session.keep(number, result, self.limits)
        self.out.append(Answer(session=session.number, number=number, result=result))

    # --- what a session holds

    def free_reservation(self, session: Session, number: int) -> None:
        reservation = session.reservations.pop(number)
        self.let_targets_go(reservation)
        extents = reservation.extents()
        if len(extents):
            self.extents.free(extents)

    def return_claim(self, session: Session, number: int) -> None:
        """The samples of an unconfirmed claim go back, unless they were given back or cleared since."""
        claimed = session.unconfirmed.pop(number)
        claimed.settle()
        task = claimed.task
        self.return_rows(claimed.partition, task, claimed.rows[task.claim_ids[claimed.rows] == claimed.claim_id])

    def return_rows(self, partition: Partition, task: Task, rows: Int64s) -> None:
        """These rows of a task are unclaimed again."""
        back = task.give_back(rows)
        self.loosen(partition, rows)
        if len(back) and not partition.dropped and partition.tasks.get(task.name) is task:
            partition.reclaimed(task, back)
            self.touch(partition)

    # --- checks

    def check_samples(self, samples: Samples) -> None:
        """InvalidRequestError unless the names are well formed and not too many."""
        if samples.ids is not None:
            well = samples.rows is None and samples.generations is None
        else:
            well = (
                samples.rows is not None
                and samples.generations is not None
                and len(samples.rows) == len(samples.generations)
            )
        if not well:
            raise InvalidRequestError("samples are named by ids, or by rows and generations of equal number")
        check_limit("samples in one command", len(samples), self.limits.samples, SPLIT)

    def check_name(self, what: str, name: str) -> None:
        if not name:
            raise InvalidRequestError(f"a {what} cannot be the empty string")
        # A character takes four bytes at most: few names need be written out to be measured.
        limit = self.limits.id_bytes
        if 4 * len(name) > limit:
            size = len(name.encode("utf-8", "surrogatepass"))
            check_limit(f"bytes of {what} {name[:40]!r}...", size, limit, "Give it a shorter name.")
