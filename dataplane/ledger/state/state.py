"""The root of the ledger's state, on which every part of the ledger works.

`WaitQueues` has the puts that wait for space: one line per partition, by account id, in order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

from dataplane.core.types import Checksums
from dataplane.errors import (
    DataPlaneError,
    InternalError,
    InvalidRequestError,
    PartitionDroppedError,
    PartitionNotFoundError,
)
from dataplane.ledger.commands import Answer, Int32s, Int64s, Notice, Output, Result, Samples
from dataplane.ledger.state.extents import Extents
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import (
    SPLIT,
    Limits,
    Parked,
    ParkedAllocate,
    ParkedClaim,
    ParkedFind,
    PutReservation,
    ReservedSpace,
    Session,
    check_limit,
)
from dataplane.ledger.state.tasks import Leases, Task, kind_of
from dataplane.ledger.state.units import Unit
from dataplane.ledger.state.watches import Watch

BIRTHS_APART_NS = 1000
"""Nanoseconds of epoch per generation. Epochs are times in nanoseconds, so a state can create a million generations per
second before its ids reach those of a later state."""


class State:
    """Root of all tables."""

    def __init__(
        self,
        epoch: int,
        limits: Limits,
        reserve_fraction: float,
        heartbeat_s: float,
        session_timeout_s: float,
        checksums: Checksums,
    ) -> None:
        # The epoch in which this state was created, and the current one. An epoch is one run of the
        # controller.
        self.created_epoch = epoch
        self.epoch = epoch
        self.limits = limits
        self.reserve_fraction = reserve_fraction
        self.heartbeat_s = heartbeat_s
        self.session_timeout_s = session_timeout_s
        self.checksums = checksums
        # Cached result of `spans_several_hosts`. None: it must be computed.
        self.several_hosts: bool | None = None
        # The parts of a limit at which `pressed` ends and begins.
        self.watermarks = (0.75, 0.9)
        self.now = 0.0
        # The last generation given out. It only grows, and begins above those of all earlier
        # states: a sample of a lost state is never confused with one of this state.
        self.generations = epoch // BIRTHS_APART_NS
        # The last serial given out. It only grows.
        self.serials = 0
        # The outputs of the current input.
        self.out: list[Output] = []
        self.units: dict[int, Unit] = {}
        self.extents = Extents(self.units)
        self.partitions: dict[str, Partition] = {}
        # The partitions with a budget, by account.
        self.budgeted: dict[int, Partition] = {}
        self.sessions: dict[int, Session] = {}
        # The number of all parked calls.
        self.parked = 0
        # Puts that wait for space, by `update`, then by account, but for those that move cells
        # (`moves`).
        self.space_waiters: dict[bool, Lines] = {True: {}, False: {}}
        self.moves: Line = {}
        # Accounts, by `update`, whose budget is exhausted: their first put can only be granted
        # after a change of the account. Each has a waiting put.
        self.resting: dict[bool, set[int]] = {True: set(), False: set()}
        # Parked claims, by session and call id.
        self.claim_waiters: dict[tuple[int, int], ParkedClaim] = {}
        # Parked `FindCells` calls.
        self.finders: tuple[ParkedFind, ...] = ()
        # Partitions whose parked claims must be evaluated again.
        self.touched: dict[str, Partition] = {}
        # Heap of (deadline, serial, session id, call id) of parked calls; with outdated
        # entries.
        self.alarms: list[tuple[float, int, int, int]] = []
        self.leases = Leases()
        # Heap of (time, serial, partition) at which parked claims are evaluated again because the
        # wait for a group ends; with outdated entries.
        self.wakes: list[tuple[float, int, str]] = []

    def serial(self) -> int:
        self.serials += 1
        return self.serials

    def partition(self, name: str) -> Partition:
        """Return the partition with this name, or raise `PartitionNotFoundError`."""
        partition = self.partitions.get(name)
        if partition is None:
            raise PartitionNotFoundError(partition=name, known=list(self.partitions))
        return partition

    def unit(self, unit_id: int) -> Unit:
        """Return the storage unit with this id, or raise `InvalidRequestError`."""
        unit = self.units.get(unit_id)
        if unit is None:
            known = ", ".join(map(str, list(self.units)[:8])) or "none"
            raise InvalidRequestError(f"no storage unit {unit_id}; registered units are: {known}")
        return unit

    def spans_several_hosts(self) -> bool:
        """Whether sessions and units are on more than one host."""
        if self.several_hosts is None:
            hosts = {unit.host for unit in self.units.values()} | {s.host for s in self.sessions.values()}
            self.several_hosts = len(hosts) > 1
        return self.several_hosts

    @property
    def puts_wait(self) -> bool:
        """Whether any put waits for space."""
        return bool(self.moves or self.space_waiters[True] or self.space_waiters[False])

    def all_puts(self) -> Iterator[ParkedAllocate]:
        """Return all puts that wait for space, including those that move cells."""
        lines = chain.from_iterable([by_account.values() for by_account in self.space_waiters.values()])
        return chain.from_iterable([line.values() for line in (*lines, self.moves)])

    def drop(self, partition: Partition) -> int:
        """Remove the partition with all its data, and fail the claims and puts that wait on it. Return the number of
        live samples removed."""
        count = partition.rows.live
        del self.partitions[partition.name]
        self.budgeted.pop(partition.account.account_id, None)
        partition.drop()
        for claim in self.waiting_claims(partition):
            waiting = f"a claim of task {claim.command.task!r}"
            self.unpark(claim, PartitionDroppedError(partition=partition.name, waiting=waiting))
        for put in self.waiting_puts(partition):
            self.unpark(put, PartitionDroppedError(partition=partition.name, waiting="a put"))
        return count

    def drop_staged(self, session: int) -> None:
        """Drop the partitions that this session staged and did not publish."""
        for partition in [each for each in self.partitions.values() if each.owner == session]:
            self.drop(partition)

    def waiting_claims(self, partition: Partition) -> list[ParkedClaim]:
        """Return the partition's parked claims, longest waiting first."""
        claims = [self.claim_waiters[key] for watch in partition.watches.values() for key in watch.waiters]
        return sorted(claims, key=lambda claim: claim.serial)

    def waiting_puts(self, partition: Partition) -> list[ParkedAllocate]:
        """Return the partition's puts that wait for space, moves included, longest waiting first."""
        account_id = partition.account.account_id
        lines = [
            by_account[account_id].values() for by_account in self.space_waiters.values() if account_id in by_account
        ]
        moves = [put for put in self.moves.values() if put.partition is partition]
        return sorted(chain(*lines, moves), key=lambda put: put.serial)

    def recheck_all_puts(self) -> None:
        """Mark all puts that wait for space for another evaluation."""
        self.extents.freed = True
        self.extents.loosened.update(*self.space_waiters.values())  # the ids of their accounts

    def has_waiting_put(self, account: int) -> bool:
        """Whether a put of the account's partition waits for space, other than moves."""
        return account in self.space_waiters[True] or account in self.space_waiters[False]

    def touch(self, partition: Partition) -> None:
        """Mark the partition's parked claims, if any, for another evaluation at the end of the current input."""
        if partition.watches:
            self.touched[partition.name] = partition

    def wake_at(self, partition: Partition, when: float) -> None:
        """Have `wake` touch the partition at time `when` at the latest."""
        if when < partition.wakes_at:
            partition.wakes_at = when
            heapq.heappush(self.wakes, (when, self.serial(), partition.name))  # the serial orders equal times

    def wake(self) -> None:
        """Touch the partitions whose wake time has been reached."""
        while self.wakes and self.wakes[0][0] <= self.now:
            partition = self.partitions.get(heapq.heappop(self.wakes)[2])
            # The entry is outdated if the partition was dropped, or evaluated and given a later time.
            if partition is not None and partition.wakes_at <= self.now:
                partition.wakes_at = float("inf")
                self.touch(partition)

    def recheck_puts(self, partition: Partition, rows: Int64s) -> None:
        """Mark the partition's waiting puts for another evaluation, because these samples may now be consumed or stored
        elsewhere, so that eviction can free more space."""
        account_id = partition.account.account_id
        if self.has_waiting_put(account_id):
            self.extents.loosened.add(account_id)
            if partition.outlook is not None:
                partition.outlook.note(rows)

    def unfinished_puts(self, partition: Partition) -> list[ParkedAllocate | PutReservation]:
        """Return the partition's puts that wait for space, and those that have reserved space and are not committed."""
        reservations = [
            reservation
            for session in self.sessions.values()
            if session.live
            for reservation in session.reservations.values()
        ]
        of_partition = [
            reservation
            for reservation in reservations
            if isinstance(reservation, PutReservation) and reservation.partition is partition
        ]
        return [*self.waiting_puts(partition), *of_partition]

    def protect_targets(self, put: ParkedAllocate | PutReservation) -> None:
        """Protect the samples that the put names from eviction until `unprotect_targets`. No effect if it names none,
        if they are protected already, or if the partition evicts no samples."""
        partition = put.partition
        samples = put.samples
        if samples is None or put.targets or not partition.evicts:
            return
        ids = samples.ids or partition.rows.names_of(partition.living(samples)[1])
        put.targets = tuple(dict.fromkeys(ids))  # without repeats
        for name in put.targets:
            partition.targets[name] = partition.targets.get(name, 0) + 1

    def unprotect_targets(self, put: ParkedAllocate | ReservedSpace) -> None:
        """End the protection of a finished put's samples. Samples named by no other put may be evicted again.
        Preallocated space names no samples."""
        if not isinstance(put, ParkedAllocate | PutReservation):
            return
        partition = put.partition
        ids = put.targets
        put_counts = put.partition.targets
        put.targets = ()
        for name in ids:
            put_counts[name] -= 1
        ended = [name for name in ids if not put_counts[name]]
        for name in ended:
            del put_counts[name]
        if ended and self.has_waiting_put(partition.account.account_id):
            rows = partition.rows.find(ended)
            self.recheck_puts(partition, rows[rows >= 0])

    # --- calls that wait

    def park(self, parked: Parked) -> None:
        """Register a call that waits, until `unpark`. Raises `LimitError` if too many calls wait."""
        check_limit("waiting calls", self.parked + 1, self.limits.parked, "Try again later, or with blocking=False.")
        self.parked += 1
        parked.session.parked[parked.call_id] = parked
        parked.serial = self.serial()
        heapq.heappush(self.alarms, (parked.deadline, parked.serial, parked.session.session_id, parked.call_id))
        if isinstance(parked, ParkedClaim):
            self._park_claim(parked)
        elif isinstance(parked, ParkedAllocate):
            self._queue_of(parked)[parked.key] = parked
        elif isinstance(parked, ParkedFind):
            self._set_finders((*self.finders, parked))

    def unpark(self, parked: Parked, result: Result | DataPlaneError) -> None:
        """Remove the parked call and answer it."""
        self.parked -= 1
        del parked.session.parked[parked.call_id]
        if isinstance(parked, ParkedClaim):
            self._unpark_claim(parked)
        elif isinstance(parked, ParkedAllocate):
            self._unpark_put(parked)
        elif isinstance(parked, ParkedFind):
            self._set_finders(tuple([other for other in self.finders if other is not parked]))
        self.answer(parked.session, parked.call_id, result)

    def _park_claim(self, parked: ParkedClaim) -> None:
        """Add the claim to the watch of its kind."""
        partition = parked.partition
        ready_index = parked.ready_index
        assert ready_index is not None, parked.key
        self.claim_waiters[parked.key] = parked
        ready_index.waiters += 1
        kind = kind_of(ready_index, parked.command)
        if kind not in partition.watches:
            partition.watches[kind] = Watch(kind, ready_index, parked.command)
        parked.watch = partition.watches[kind]
        parked.watch.join(parked.key, parked.command)

    def _unpark_claim(self, parked: ParkedClaim) -> None:
        """Remove the claim from its watch, and the watch with its last claim."""
        partition = parked.partition
        watch = parked.watch
        assert watch is not None, parked.key
        del self.claim_waiters[parked.key]
        watch.ready_index.waiters -= 1
        watch.leave(parked.key, parked.command)
        if not watch.waiters:
            del partition.watches[watch.kind]

    def _queue_of(self, parked: ParkedAllocate) -> Line:
        """Return the queue of the put, created if missing: one for all moves, else by account and kind (`update`)."""
        if parked.command.moving:
            return self.moves
        return self.space_waiters[parked.command.update].setdefault(parked.partition.account.account_id, {})

    def _unpark_put(self, parked: ParkedAllocate) -> None:
        """Remove the put from its queue. Puts behind it may now be granted."""
        self.unprotect_targets(parked)  # no effect if its reservation has taken over its `targets`
        queue = self._queue_of(parked)
        account_id = parked.partition.account.account_id
        del queue[parked.key]
        if not parked.command.moving:
            self.resting[parked.command.update].discard(account_id)  # the next put of the line may fit
            if not queue:
                del self.space_waiters[parked.command.update][account_id]
        if not self.has_waiting_put(account_id):
            parked.partition.outlook = None  # nothing updates it while no put waits
        self.extents.freed = True  # has the waiting puts evaluated again

    def fail(self, parked: Parked, error: Exception) -> None:
        """Fail a parked call whose evaluation raised an unexpected error. Other calls are not affected."""
        what = f"call {parked.call_id} of session {parked.session.session_id} failed while it waited: {error!r}"
        self.out.append(Notice(text=what))
        self.unpark(parked, InternalError(what=what))

    def _set_finders(self, finders: tuple[ParkedFind, ...]) -> None:
        """Set the `FindCells` calls that wait for a change on their units."""
        self.finders = finders
        self.extents.watched = frozenset([parked.command.unit for parked in finders])

    def answer(self, session: Session, call_id: int, result: Result | DataPlaneError) -> None:
        """Send the only answer to call `call_id`, and keep it while the client may repeat the call."""
        if not session.is_settled(call_id):  # a repetition of a settled call is rejected
            session.keep_answer(call_id, result, self.limits)
        self.out.append(Answer(session=session.session_id, call_id=call_id, result=result))

    # --- what a session holds

    def pin(self, session: Session, call_id: int, extents: Int32s, *, brief: bool = False) -> None:
        """Pin these extents (no repeats) for a call of the session: until its `Release`, or if `brief`
        until the client confirms its answer."""
        self.extents.pin(extents)
        session.pins[call_id] = extents
        if brief:
            session.brief_pins.add(call_id)

    def free_reservation(self, session: Session, call_id: int) -> None:
        """Free the space that call `call_id` of the session reserved."""
        reservation = session.reservations.pop(call_id)
        self.unprotect_targets(reservation)
        extents = reservation.extents()
        if len(extents):
            self.extents.free(extents)

    def return_claim(self, session: Session, call_id: int) -> None:
        """Give back the samples of the unconfirmed claim of call `call_id`, except those that were acknowledged, given
        back or cleared meanwhile."""
        claimed = session.unconfirmed.pop(call_id)
        claimed.settle()
        task = claimed.task
        self.return_rows(claimed.partition, task, claimed.rows[task.claim_ids[claimed.rows] == claimed.claim_id])

    def return_rows(self, partition: Partition, task: Task, rows: Int64s) -> None:
        """Make those of the rows that are claimed unclaimed again for the task, and have waiting puts and claims
        evaluated again."""
        returned = task.give_back(rows)
        self.recheck_puts(partition, rows)  # samples that are no longer claimed may be evicted
        # No claim waits any longer if the task was removed from its partition, or the partition dropped.
        if len(returned) and not partition.dropped and partition.tasks.get(task.name) is task:
            partition.update_after_claims(task, returned)
            self.touch(partition)

    # --- checks

    def check_samples(self, samples: Samples) -> None:
        """Raise `LimitError` for too many samples."""
        check_limit("samples in one command", len(samples), self.limits.samples, SPLIT)

    def check_name(self, what: str, name: str) -> None:
        """Raise `InvalidRequestError` for an empty name, and `LimitError` for a name that is too long."""
        if not name:
            raise InvalidRequestError(f"{what} '': the name must not be empty; pass at least one character")
        # A character takes at most four bytes, so most names need no encoding to be measured.
        limit = self.limits.id_bytes
        if 4 * len(name) > limit:
            size = len(name.encode("utf-8", "surrogatepass"))
            check_limit(f"bytes of {what} {name[:40]!r}...", size, limit, "Use a shorter name.")


Line = dict[tuple[int, int], ParkedAllocate]
"""Waiting puts by session and call id, longest waiting first."""
Lines = dict[int, Line]
"""Lines by account id. No line is empty."""


class WaitQueues:
    """Iterator over the puts of several lines in order of arrival. The current put may be removed from its line during
    its turn. The cost is proportional to the number of lines and of puts that have a turn. `_next`: heap with the next
    put of each line, as (serial, put, the line's iterator). `_last`: iterator of the current put's line, which is
    queued again before the next put is chosen."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._next: list[tuple[int, ParkedAllocate, Iterator[ParkedAllocate]]] = []
        self._last: Iterator[ParkedAllocate] | None = None
        for line in lines:
            self._queue(_iterate_line(line))

    def __iter__(self) -> WaitQueues:
        return self

    def __next__(self) -> ParkedAllocate:
        if self._last is not None:  # the line of the previous put, unless it was skipped
            self._queue(self._last)
        if not self._next:
            raise StopIteration
        _, parked, self._last = heapq.heappop(self._next)
        return parked

    def skip_line(self) -> None:
        """Skip the remaining puts in the line of the current put."""
        self._last = None

    def _queue(self, turns: Iterator[ParkedAllocate]) -> None:
        """Add the line's next put to the heap, if it has one."""
        parked = next(turns, None)
        if parked is not None:
            heapq.heappush(self._next, (parked.serial, parked, turns))


def _iterate_line(line: Line) -> Iterator[ParkedAllocate]:
    """Yield the puts of a line (at least one), longest waiting first."""
    first = next(iter(line.values()))
    yield first
    # A copy, because puts leave the line during their turns. Usually only the first put has a turn, and the generator
    # does not come here.
    for parked in list(line.values()):
        if parked is not first:
            yield parked
