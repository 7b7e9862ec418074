"""Claims and the commands that follow them: acknowledge, return, extend a lease, check consumption."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
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
from dataplane.ledger.claims import selection, shares, waiting
from dataplane.ledger.claims.samplers import SAMPLERS
from dataplane.ledger.claims.why_blocked import blocked
from dataplane.ledger.state.claim_terms import check_terms, least_of
from dataplane.ledger.state.limits import check_limit
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedClaim, Session, UnconfirmedClaim
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tags import OPERATORS
from dataplane.ledger.state.tasks import HELD, HELD_ON_LEASE, REPORTED, Lease, ReadyIndex, Selection, Task

if TYPE_CHECKING:
    from dataplane.ledger.commands import Int64s
    from dataplane.ledger.state.arrays import Bools
    from dataplane.ledger.state.watches import Watch


class _Named(NamedTuple):
    """The samples that a command after a claim names: which of them live (`live`), the rows of the live ones,
    and the claim id that the command gives for each row."""

    partition: Partition
    task: Task
    live: Bools
    rows: Int64s
    claims: Int64s

    @property
    def own(self) -> Bools:
        """Which of the rows belong to that claim and are not acknowledged."""
        found: Bools = (self.task.claim_ids[self.rows] == self.claims) & (self.claims > 0)
        return found

    @property
    def leased(self) -> Bools:
        """Which of the rows are on lease to that claim."""
        return self.own & self.task.on_lease(self.rows)

    def settled(self, command: c.Ack | c.Nack | c.Extend, done: Bools) -> c.ClaimsSettled:
        """Return the answer if the command took effect on rows `done`. StaleSampleError names the others."""
        places = np.flatnonzero(self.live)[~done].tolist()
        if places:
            ids = command.samples.ids
            names = [ids[i] if ids is not None else f"sample {i} of the call" for i in places]
            raise StaleSampleError(partition=command.partition, task=command.task, samples=names, positions=places)
        return c.ClaimsSettled(cleared=np.flatnonzero(~self.live))


class Claims:
    def __init__(self, state: State) -> None:
        self.state = state

    # --- claiming

    def claim(self, session: Session, number: int, command: c.Claim) -> c.Claimed | None:
        """Return the claimed samples, or None if the call was parked."""
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        self._check(partition, command)
        if command.samples is not None:
            return self._named(ParkedClaim(session, number, self.state.now, command, partition), task, command.samples)
        parked = ParkedClaim(session, number, self.state.now, command, partition)
        parked.ready_index = partition.ready_index(task, command.fields, self.state.limits.interests)
        result = self._attempt(parked, parked.ready_index)
        if result is None:
            self.state.park(parked)
        return result

    def _named(self, asked: ParkedClaim, task: Task, samples: c.Samples) -> c.Claimed:
        """Claim all of the named samples, or none."""
        partition, command = asked.partition, asked.command
        self.state.check_samples(samples)
        rows = partition.resolve_living(samples)
        if len(rows) < len(samples) or not partition.ready(task, command.fields, rows).all():
            rows = rows[:0]
        return self._take(asked, task, rows)

    def judge(self) -> None:
        """Serve parked claims of partitions that changed. Claims whose client was heard from within a heartbeat
        go first, and among these the oldest."""
        state = self.state
        while state.touched:
            partition = state.touched.pop(next(iter(state.touched)))
            watches = list(partition.watches.values())
            hopeful = self._hopeful(partition, watches)
            dealt, partition.dealt = partition.dealt, False
            for parked in self._in_turn(watches if dealt else hopeful):
                watch = parked.watch
                assert watch is not None, parked.key
                over = parked.key not in watch.waiters
                if over or (watch not in hopeful and parked.command.step is None):
                    continue
                if self._judge(parked) and watch in hopeful and not self._hopeful(partition, [watch]):
                    del hopeful[watch]
                if not hopeful and not dealt:
                    break

    def _in_turn(self, watches: Iterable[Watch]) -> Iterator[ParkedClaim]:
        """Yield the claims that wait when the iteration begins: those whose client was heard from within a
        heartbeat first, and among these the oldest."""
        recent = self.state.now - self.state.heartbeat_s
        parked = [[self.state.claim_waiters[key] for key in watch.waiters] for watch in watches]
        for late in (False, True):
            lines = [[each for each in line if (each.session.heard < recent) is late] for line in parked]
            yield from heapq.merge(*lines, key=operator.attrgetter("place"))

    def _hopeful(self, partition: Partition, watches: list[Watch]) -> dict[Watch, None]:
        """Return the watches with a claim that may be served now. The others are judged again at their `next_at`."""
        found: dict[Watch, None] = {}
        for watch in watches:
            if not watch.waiters:
                continue
            try:
                waiting.refresh(watch, partition)
            except Exception as error:  # a bad sample or claim must not fail the command that changed the sample
                for key in list(watch.waiters):
                    self.state.fail(self.state.claim_waiters[key], error)
                continue
            if waiting.hopeful(watch, partition, self.state.now):
                found[watch] = None
            else:
                self.state.wake_at(partition, watch.next_at)
        return found

    def _judge(self, parked: ParkedClaim) -> bool:
        """Serve the parked claim if possible. Return whether its wait is over."""
        ready_index, partition = parked.ready_index, parked.partition
        assert ready_index is not None
        watch = parked.watch
        assert watch is not None, parked.key
        result: c.Claimed | DataPlaneError | None
        try:
            waiting.refresh(watch, partition)
            dealt = parked.command.step is not None
            if not dealt and not waiting.may_serve(watch, partition, parked.command, self.state.now):
                self.state.wake_at(partition, watch.next_at)
                return False
            result = self._attempt(parked, ready_index)
        except DataPlaneError as error:
            result = error
        except Exception as error:  # a waiting claim must not fail the command of another client
            self._recompute_ready(partition, ready_index.task)
            self.state.fail(parked, error)
            return True
        if result is not None:
            self.state.unpark(parked, result)
        return result is not None

    def _recompute_ready(self, partition: Partition, task: Task) -> None:
        """Recompute the task's ready samples. A claim that failed may have stopped anywhere."""
        partition.update_after_claims(task, partition.rows.in_order())
        self.state.touch(partition)

    def _attempt(self, parked: ParkedClaim, ready_index: ReadyIndex) -> c.Claimed | None:
        """Return the result of the claim, or None if it must wait."""
        partition, command, task = parked.partition, parked.command, ready_index.task
        fixed = None if command.step is None else shares.find(task, command)
        if fixed is None:
            late = self._overdue(partition, ready_index, command)
            waits = late.next_at < float("inf")
            if parked.watch is not None:
                parked.watch.next_at = self.state.now if len(late.rows) else late.next_at
            chosen = selection.select(partition, ready_index, command, late.rows, pending=waits)
            if chosen is None:
                if not command.blocking:
                    return self._take(parked, task, np.zeros(0, np.int64))
                self.state.wake_at(partition, late.next_at)
                return None
            if command.step is None:
                return self._take(parked, task, chosen.rows)
            fixed = self._fix(partition, task, command, chosen)
        rows = shares.share(fixed, partition, task, command)
        task.give_back(rows)
        result = self._take(parked, task, rows)
        if len(rows):
            assert command.dp_rank is not None
            fixed.given.setdefault(command.dp_rank, []).append(int(task.claim_ids[rows[0]]))
        return result

    def _overdue(self, partition: Partition, ready_index: ReadyIndex, command: c.Claim) -> selection.Overdue:
        """Return the overdue partial groups, and when the next group is overdue. With policy DROP, clear their
        rows instead."""
        found = selection.overdue(partition, ready_index, command, self.state.now)
        if command.partial is c.Partial.RELEASE or not len(found.rows):
            return found
        names = partition.rows.names_of(found.rows)
        ready_index.task.dropped = [*ready_index.task.dropped, *names][-REPORTED:]
        partition.dropped_partial += len(names)
        partition.clear(found.rows)
        self.state.touch(partition)
        return selection.Overdue(found.rows[:0], found.next_at)

    def _fix(self, partition: Partition, task: Task, command: c.Claim, chosen: selection.Chosen) -> Selection:
        """Fix the shares of a step, and hold them for its ranks."""
        state = self.state
        assert command.step is not None
        fixed = shares.fix(partition, command, chosen, state.serial())
        task.take(fixed.rows, fixed.claim_id)
        hold_s, owner = (shares.HOLD_S, HELD) if command.lease_s is None else (command.lease_s, HELD_ON_LEASE)
        self._lease(partition, task, fixed.rows, fixed.claim_id, owner, hold_s)
        shares.remember(task, command.step, fixed, state.limits.steps)
        partition.update_after_claims(task, fixed.rows)
        partition.dealt = True
        state.touch(partition)
        return fixed

    def _take(self, parked: ParkedClaim, task: Task, rows: Int64s) -> c.Claimed:
        """Claim the rows for the task and return the answer. A peek only returns the answer."""
        state, partition, command, session = self.state, parked.partition, parked.command, parked.session
        claim_id = state.serial() if len(rows) and not command.peek else 0
        result = c.Claimed(
            ids=partition.rows.names_of(rows),
            rows=rows.copy(),
            generations=partition.generations_of(rows),
            fields=partition.common_fields(rows) if len(rows) else command.fields,
            tags=partition.tags.of(rows),
            dropped=tuple(task.dropped),
            claim=claim_id,
        )
        if command.peek:
            return result
        task.dropped = []
        if len(rows):
            task.take(rows, claim_id)
            partition.update_after_claims(task, rows)
            # Other claims may now take the last, smaller batch, or find a group incomplete.
            state.touch(partition)
            session.unconfirmed[parked.number] = UnconfirmedClaim(partition, task, rows.copy(), claim_id)
            if command.lease_s is not None:
                self._lease(partition, task, rows, claim_id, session.number, command.lease_s)
        return result

    def _lease(self, partition: Partition, task: Task, rows: Int64s, claim_id: int, owner: int, lease_s: float) -> None:
        """Begin the lease of a claim that took these rows."""
        if len(rows):
            end = self.state.now + lease_s
            task.lease(rows, end)
            task.count_leased(owner, len(rows))
            self.state.leases.begin(Lease(partition.name, task, rows.copy(), claim_id, owner, lease_s), end)

    def _check(self, partition: Partition, command: c.Claim) -> None:
        """Validate the claim. Raises InvalidRequestError, LimitError or FieldNotFoundError."""
        least, batch, group = command.min_batch_size, command.batch_size, command.group_size
        if batch < 1:
            raise InvalidRequestError(f"batch_size={batch}: must be at least 1")
        if least is not None and not 1 <= least <= batch:
            raise InvalidRequestError(f"min_batch_size={least}: must be in [1, batch_size={batch}]")
        check_terms(command)
        if group is not None and group > (batch if least is None else least):
            raise InvalidRequestError(
                f"group_size={group}: larger than the claim, which may take only {least or batch} samples"
            )
        if command.partial_after_s is not None and not (group is not None and command.partial_after_s >= 0):
            raise InvalidRequestError(
                f"partial_after_s={command.partial_after_s}: must not be negative, and requires group_size"
            )
        if not command.timeout_s >= 0:
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")
        _check_lease(command.lease_s)
        _check_shares(command)
        _check_plain(command)
        limits = self.state.limits
        check_limit("fields of one claim", len(command.fields), limits.columns, "Require fewer.")
        check_limit("conditions of one claim", len(command.where), limits.columns, "Ask for fewer.")
        check_limit("samples of one claim", batch, limits.samples, "Claim fewer at a time.")
        for predicate in command.where:
            _check_predicate(predicate)
        if partition.strict:
            for name in command.fields:
                field = partition.fields.get(name)
                if field is None or (field.declared is None and not field.live):
                    raise FieldNotFoundError(partition=partition.name, field=name, known=list(partition.fields))

    # --- after a claim

    def ack(self, session: Session, number: int, command: c.Ack) -> c.ClaimsSettled:
        named = self._named_claimed(command, command.claims)
        mine = named.leased
        named.task.acknowledge(named.rows[mine])
        self.state.recheck_puts(named.partition, named.rows[mine])
        if named.partition.complete:
            # Other claims may now take the last, smaller batch.
            self.state.touch(named.partition)
        return named.settled(command, mine)

    def nack(self, session: Session, number: int, command: c.Nack) -> c.ClaimsSettled:
        named = self._named_claimed(command, command.claims)
        free = named.task.claim_ids[named.rows] == 0
        mine = ~named.task.on_lease(named.rows) if command.claims is None else named.own
        self.state.return_rows(named.partition, named.task, named.rows[mine & ~free])
        return named.settled(command, mine | free)

    def extend(self, session: Session, number: int, command: c.Extend) -> c.ClaimsSettled:
        _check_lease(command.lease_s)
        named = self._named_claimed(command, command.claims)
        mine, end = named.leased, self.state.now + command.lease_s
        rows = named.rows[mine]
        if len(rows):
            named.task.lease(rows, end)
            self.state.leases.prolong(named.task.claim_ids[rows], command.lease_s, end)
        return named.settled(command, mine)

    def consumption(self, session: Session, number: int, command: c.CheckConsumption) -> c.Consumption:
        partition = self.state.partition(command.partition)
        tasks = [partition.task(name) for name in command.tasks]
        live = partition.rows.live
        return c.Consumption(
            consumed=partition.complete and all(task.claimed - task.unsettled == live for task in tasks)
        )

    def why_blocked(self, session: Session, number: int, command: c.WhyBlocked) -> c.Blocked:
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        for predicate in command.where:
            _check_predicate(predicate)
        ready_index = ReadyIndex(task, tuple(sorted(set(command.fields))), 0)
        return blocked(self.state, partition, ready_index, command)

    def _named_claimed(self, command: c.Ack | c.Nack | c.Extend, claims: Int64s | None) -> _Named:
        """Resolve the samples and claim ids of a command that follows a claim."""
        self.state.check_samples(command.samples)
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        if claims is not None and len(claims) != len(command.samples):
            raise InvalidRequestError(
                f"{len(claims)} claims for {len(command.samples)} samples: expected one claim for each sample"
            )
        live, rows = partition.living(command.samples)
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise InvalidRequestError("a sample is named twice")
        return _Named(partition, task, live, rows, np.zeros(len(rows), np.int64) if claims is None else claims[live])

    # --- time

    def expire_leases(self) -> None:
        """Return samples whose lease has expired to the pool."""
        state = self.state
        for lease in state.leases.pop_ended(state.now):
            state.return_rows(state.partitions[lease.partition], lease.task, lease.ended_rows(state.now))

    def timed_out(self, parked: ParkedClaim) -> DataPlaneError:
        """Return the error of a claim that reached its deadline, with the facts about why it waited."""
        ready_index, command = parked.ready_index, parked.command
        assert ready_index is not None
        facts = blocked(self.state, parked.partition, ready_index, command)
        more = {name: getattr(facts, name) for name in facts.__struct_fields__ if name not in ("ready", "writers")}
        return ClaimTimeoutError(
            partition=command.partition,
            task=command.task,
            wanted=least_of(command),
            ready=facts.matching,
            waited_s=self.state.now - parked.since,
            writers=[msgspec.structs.asdict(writer) for writer in facts.writers],
            **more,
        )

    def task_gone(self, parked: ParkedClaim) -> DataPlaneError:
        command = parked.command
        return TaskNotFoundError(partition=command.partition, task=command.task, known=list(parked.partition.tasks))


def _check_lease(lease_s: float | None) -> None:
    if lease_s is not None and not lease_s > 0:
        raise InvalidRequestError(f"lease_s={lease_s}: must be positive")


def _check_plain(command: c.Claim) -> None:
    """Check a claim of named samples, which must not select or wait, and a peek, which must not hold anything."""
    if command.samples is not None and (
        command.blocking or command.where or command.group_size or command.step is not None or command.max_lag
    ):
        raise InvalidRequestError(
            "a claim of named samples must be non-blocking, without where, group_size, step or max_lag"
        )
    if command.peek and (command.step is not None or command.lease_s or command.partial is not c.Partial.RELEASE):
        raise InvalidRequestError("a claim with peek must not have lease_s or step, and must not drop partial groups")


def _check_shares(command: c.Claim) -> None:
    """Check that sampler, groups and ranks of a claim agree."""
    group, world, rank, step = command.group_size, command.dp_world, command.dp_rank, command.step
    sampler = SAMPLERS.get(selection.sampler_of(command))
    if sampler is None:
        raise InvalidRequestError(f"sampler={command.sampler!r}: expected one of {', '.join(SAMPLERS)}")
    if sampler.grouped and group is None:
        raise InvalidRequestError(f"sampler={command.sampler!r} requires group_size")
    if sampler.alone and group is not None:
        raise InvalidRequestError(f"sampler={command.sampler!r} does not support groups; omit group_size={group}")
    if world is None and step is None:
        if sampler.shared:
            raise InvalidRequestError(f"sampler={command.sampler!r} requires dp_rank, dp_world and step")
        return
    if world is None or step is None or rank is None:
        raise InvalidRequestError(
            f"dp_rank={rank}, dp_world={world}, step={step}: pass all three to claim a rank's share of a step, or "
            "neither dp_world nor step"
        )
    if not 0 <= rank < world or step < 0:
        raise InvalidRequestError(
            f"dp_rank={rank}, dp_world={world}, step={step}: rank must be in [0, dp_world), step at least 0"
        )
    unit, least = world * (group or 1), command.min_batch_size
    if command.batch_size % unit or not unit <= (command.batch_size if least is None else least):
        per = f"dp_world={world}" + (f" times group_size={group}" if group else "")
        raise InvalidRequestError(
            f"batch_size={command.batch_size}, min_batch_size={least}: both count the whole step; batch_size must be a "
            f"multiple of {per}, and min_batch_size at least that"
        )


def _check_predicate(predicate: c.Predicate) -> None:
    if predicate.op not in OPERATORS:
        raise InvalidRequestError(f"predicate on {predicate.tag!r}: {predicate.op!r} is not one of {OPERATORS}")
    if isinstance(predicate.value, tuple) is not (predicate.op == "in"):
        raise InvalidRequestError(f"predicate on {predicate.tag!r}: `in` takes a tuple of values, other operators one")
