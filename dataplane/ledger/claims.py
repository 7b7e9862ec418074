"""Claims and what follows them: acknowledging, giving back, leases, consumption."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from dataplane.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    FieldNotFoundError,
    InvalidRequestError,
    StaleSampleError,
    TaskNotFoundError,
)
from dataplane.ledger import commands as c
from dataplane.ledger import selection
from dataplane.ledger.partition import Partition
from dataplane.ledger.sessions import Claimed, ParkedClaim, Session
from dataplane.ledger.state import Lease, State
from dataplane.ledger.tags import OPERATORS
from dataplane.ledger.tasks import Interest, Task

if TYPE_CHECKING:
    from dataplane.ledger.commands import Int64s


class Claims:
    def __init__(self, state: State) -> None:
        self.state = state

    # --- claiming

    def claim(self, session: Session, number: int, command: c.Claim) -> c.Claimed | None:
        """The samples, or None when the call was parked."""
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        self._check(partition, command)
        interest = partition.interest(task, command.fields, self.state.limits.interests)
        rows = selection.select(partition, interest, command)
        parked = ParkedClaim(session, number, self.state.now, command, partition)
        if rows is not None:
            return self._take(parked, task, rows)
        parked.interest = interest
        self.state.park(parked)
        return None

    def judge(self) -> None:
        """Serve parked claims of partitions that changed: those whose client was heard within a heartbeat first, and
        of these the oldest first."""
        state = self.state
        while state.touched:
            partition = state.touched.pop(next(iter(state.touched)))
            waiting = list(partition.waiters.values())
            recent = state.now - state.heartbeat_s
            for parked in [w for w in waiting if w.session.heard >= recent]:
                self._judge(parked)
            for parked in [w for w in waiting if w.session.heard < recent]:
                self._judge(parked)

    def _judge(self, parked: ParkedClaim) -> None:
        interest = parked.interest
        assert interest is not None
        rows = selection.select(parked.partition, interest, parked.command)
        if rows is not None:
            self.state.unpark(parked, self._take(parked, interest.task, rows))

    def _take(self, parked: ParkedClaim, task: Task, rows: Int64s) -> c.Claimed:
        state, partition, command, session = self.state, parked.partition, parked.command, parked.session
        result = c.Claimed(
            ids=partition.rows.names_of(rows),
            rows=rows.copy(),
            births=partition.births_of(rows),
            fields=partition.common_fields(rows) if len(rows) else command.fields,
            tags=partition.tags.of(rows),
        )
        if len(rows):
            stamp = state.serial()
            task.take(rows, stamp)
            partition.reclaimed(task, rows)
            if partition.complete:
                # What it took without being ready for others may have been all that kept them from the tail.
                state.touch(partition)
            session.unconfirmed[parked.number] = Claimed(partition, task, rows.copy(), stamp)
            if command.lease_s is not None:
                self._lease(partition, task, rows, session, command.lease_s)
        return result

    def _lease(self, partition: Partition, task: Task, rows: Int64s, session: Session, lease_s: float) -> None:
        state = self.state
        end = state.now + lease_s
        task.lease(rows, session.number, end)
        heapq.heappush(state.leases, (end, state.serial(), Lease(partition, task, rows.copy(), session.number)))

    def _check(self, partition: Partition, command: c.Claim) -> None:
        least, batch, group = command.min_batch_size, command.batch_size, command.group_size
        if batch < 1:
            raise InvalidRequestError(f"batch_size={batch}: must be at least 1")
        if least is not None and not 1 <= least <= batch:
            raise InvalidRequestError(f"min_batch_size={least}: must be in [1, batch_size={batch}]")
        if group is not None and not 1 <= group <= (batch if least is None else least):
            raise InvalidRequestError(f"group_size={group}: a claim of {least or batch} cannot hold a whole group")
        if not command.timeout_s >= 0:
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")
        _check_lease(command.lease_s)
        if len(command.fields) > self.state.limits.columns:
            raise InvalidRequestError(f"{len(command.fields)} fields; the most is {self.state.limits.columns}")
        for predicate in command.where:
            _check_predicate(predicate)
        if partition.strict:
            for name in command.fields:
                field = partition.fields.get(name)
                if field is None or (field.declared is None and not field.live):
                    raise FieldNotFoundError(partition=partition.name, field=name, known=list(partition.fields))

    # --- after a claim

    def ack(self, session: Session, number: int, command: c.Ack) -> c.Done:
        _, task, rows = self._resolve(command.partition, command.task, command.samples)
        self._check_leased(command, task, rows, session)
        task.end_leases(rows)
        # A stamp of their own: the claim may still be unconfirmed, and must not take them back if the session dies.
        task.stamps[rows] = self.state.serial()
        return c.Done()

    def nack(self, session: Session, number: int, command: c.Nack) -> c.Done:
        partition, task, rows = self._resolve(command.partition, command.task, command.samples)
        owners = task.owners_of(rows)
        self._refuse(command, (owners != 0) & (owners != session.number))
        self.state.return_rows(partition, task, rows)
        return c.Done()

    def extend(self, session: Session, number: int, command: c.Extend) -> c.Done:
        _check_lease(command.lease_s)
        partition, task, rows = self._resolve(command.partition, command.task, command.samples)
        self._check_leased(command, task, rows, session)
        self._lease(partition, task, rows, session, command.lease_s)
        return c.Done()

    def consumption(self, session: Session, number: int, command: c.CheckConsumption) -> c.Consumption:
        partition = self.state.partition(command.partition)
        tasks = [partition.task(name) for name in command.tasks]
        return c.Consumption(consumed=partition.complete and all(task.claimed == partition.rows.live for task in tasks))

    def why_blocked(self, session: Session, number: int, command: c.WhyBlocked) -> c.Blocked:
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        interest = Interest(task, tuple(sorted(set(command.fields))), partition.rows.end)
        partition.refresh(interest, partition.rows.in_order())
        unclaimed, missing = selection.lacking(partition, task, interest.fields)
        return c.Blocked(
            unclaimed=unclaimed,
            ready=interest.count,
            leased=task.leased(),
            lacking=missing,
            why=selection.why(partition, interest, None),
        )

    def _resolve(self, name: str, task: str, samples: c.Samples) -> tuple[Partition, Task, Int64s]:
        partition = self.state.partition(name)
        found = partition.task(task)
        self.state.check_samples(samples)
        rows = partition.resolve(samples)
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise InvalidRequestError("a sample is named twice")
        return partition, found, rows

    def _check_leased(self, command: c.Ack | c.Extend, task: Task, rows: Int64s, session: Session) -> None:
        self._refuse(command, task.owners_of(rows) != session.number)

    def _refuse(self, command: c.Ack | c.Nack | c.Extend, wrong: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """StaleSampleError for samples whose lease is another's, or over."""
        if wrong.any():
            places = np.flatnonzero(wrong).tolist()
            ids = command.samples.ids
            names = [ids[i] if ids is not None else f"sample {i} of the call" for i in places[:5]]
            raise StaleSampleError(partition=command.partition, samples=names, total=len(places), positions=places[:5])

    # --- time

    def expire_leases(self) -> None:
        """Samples whose lease is over go back."""
        state = self.state
        while state.leases and state.leases[0][0] <= state.now:
            lease = heapq.heappop(state.leases)[2]
            task = lease.task
            if lease.partition.dropped or task.owners is None or task.ends is None:
                continue
            over = (task.owners[lease.rows] == lease.owner) & (task.ends[lease.rows] <= state.now)
            state.return_rows(lease.partition, task, lease.rows[over])

    def timed_out(self, parked: ParkedClaim) -> DataPlaneError:
        interest, command = parked.interest, parked.command
        assert interest is not None
        ready = parked.partition.rows.order[interest.ready()]
        return ClaimTimeoutError(
            partition=command.partition,
            task=command.task,
            wanted=selection.least_of(command),
            ready=int(np.count_nonzero(parked.partition.tags.matches(command.where, ready))),
            waited_s=self.state.now - parked.since,
            why=selection.why(parked.partition, interest, command),
        )

    def task_gone(self, parked: ParkedClaim) -> DataPlaneError:
        command = parked.command
        return TaskNotFoundError(partition=command.partition, task=command.task, known=list(parked.partition.tasks))


def _check_lease(lease_s: float | None) -> None:
    if lease_s is not None and not lease_s > 0:
        raise InvalidRequestError(f"lease_s={lease_s}: must be positive")


def _check_predicate(predicate: c.Predicate) -> None:
    if predicate.op not in OPERATORS:
        raise InvalidRequestError(f"predicate on {predicate.tag!r}: {predicate.op!r} is not one of {OPERATORS}")
    if isinstance(predicate.value, tuple) is not (predicate.op == "in"):
        raise InvalidRequestError(f"predicate on {predicate.tag!r}: `in` takes a tuple of values, the others take one")
