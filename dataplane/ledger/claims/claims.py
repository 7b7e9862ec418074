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
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedClaim, Session, UnconfirmedClaim, check_limit
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tags import OPERATORS
from dataplane.ledger.state.tasks import (
    HELD,
    HELD_ON_LEASE,
    REPORTED,
    Lease,
    ReadyIndex,
    Selection,
    Task,
    check_terms,
    least_of,
)

if TYPE_CHECKING:
    from dataplane.ledger.commands import Int64s
    from dataplane.ledger.state.arrays import Bools
    from dataplane.ledger.state.watches import Watch


class _Named(NamedTuple):
    """The samples that an ack, nack or extend names: which of them live (`live`), the rows of the live ones, and
    `claims`, the claim id that the command gives for each row (0: none given)."""

    partition: Partition
    task: Task
    live: Bools
    rows: Int64s
    claims: Int64s

    @property
    def held_by_claim(self) -> Bools:
        """Which of the rows are held by the claim that the command gives, and are not acknowledged."""
        held: Bools = (self.task.claim_ids[self.rows] == self.claims) & (self.claims > 0)
        return held

    @property
    def leased(self) -> Bools:
        """Which of the rows are on lease to the claim that the command gives."""
        return self.held_by_claim & self.task.on_lease(self.rows)

    def result(self, command: c.Ack | c.Nack | c.Extend, affected: Bools) -> c.ClaimsSettled:
        """Return the result of the command, which took effect on the `affected` rows: the positions of cleared samples
        in the command. Raises StaleSampleError if some live samples were not affected; it names them."""
        unaffected = np.flatnonzero(self.live)[~affected].tolist()
        if unaffected:
            ids = command.samples.ids
            names = [ids[i] if ids is not None else f"sample {i} of the call" for i in unaffected]
            raise StaleSampleError(partition=command.partition, task=command.task, samples=names, positions=unaffected)
        return c.ClaimsSettled(cleared=np.flatnonzero(~self.live))


class Claims:
    """The ledger's part for claims: executes the commands Claim, Ack, Nack, Extend, CheckConsumption and WhyBlocked,
    serves parked claims, and ends leases.

    Parked claims that wait for the same samples share a watch (`state.watches`), which counts for them. A claim with a
    `step` gets its rank's share of the step's selection, which the first such claim deals to all ranks (`shares`).

    The methods that take (session, call_id, command) execute call `call_id` of that session. A method that returns None
    has parked the call, which is answered later. `ack`, `nack` and `extend` first do what they can, then raise
    StaleSampleError for the other samples (`_Named.result`)."""

    def __init__(self, state: State) -> None:
        self.state = state

    # --- claiming

    def claim(self, session: Session, call_id: int, command: c.Claim) -> c.Claimed | None:
        """Return the claimed samples, or None if the call was parked."""
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        self._check_claim(partition, command)
        parked = ParkedClaim(session, call_id, self.state.now, command, partition)
        if command.samples is not None:
            return self._claim_named(parked, task, command.samples)
        parked.ready_index = partition.ready_index(task, command.fields, limit=self.state.limits.interests)
        result = self._attempt(parked, parked.ready_index)
        if result is None:
            self.state.park(parked)
        return result

    def _claim_named(self, parked: ParkedClaim, task: Task, samples: c.Samples) -> c.Claimed:
        """Claim all of the named samples, or none if one does not exist, is not ready or is named twice. Does not wait:
        `parked` only describes the call."""
        partition = parked.partition
        command = parked.command
        self.state.check_samples(samples)
        rows = partition.resolve_living(samples)
        if len(rows) < len(samples) or not partition.ready(task, command.fields, rows).all():
            rows = rows[:0]
        return self._take_rows(parked, task, rows)

    def serve_waiting(self) -> None:
        """Serve parked claims of partitions that changed (`State.touched`). Claims whose client was heard from within a
        heartbeat go first, and among these the oldest. Called at the end of each input of the ledger."""
        state = self.state
        while state.touched:
            partition = state.touched.pop(next(iter(state.touched)))
            watches = list(partition.watches.values())
            servable = self._servable_watches(partition, watches)
            # A step was dealt: claims of its other ranks can be served whatever their watches have counted.
            dealt = partition.dealt
            partition.dealt = False
            if not servable and not dealt:
                continue
            for parked in self._in_service_order(watches if dealt else servable):
                watch = parked.watch
                assert watch is not None, parked.key
                answered = parked.key not in watch.waiters
                if answered or (watch not in servable and parked.command.step is None):
                    continue
                served = self._try_to_serve(parked)
                if served and watch in servable and not self._servable_watches(partition, [watch]):
                    del servable[watch]  # none of its other claims can be served now
                if not servable and not dealt:
                    break

    def _in_service_order(self, watches: Iterable[Watch]) -> Iterator[ParkedClaim]:
        """Yield the claims that wait when the iteration begins: those whose client was heard from
        within a heartbeat first, and among these the oldest. Claims that the caller does not reach
        are not examined."""
        queues = [list(watch.waiters) for watch in watches]
        for silent in (False, True):
            chosen = [self._claims_of(keys, silent=silent) for keys in queues]
            yield from heapq.merge(*chosen, key=operator.attrgetter("serial"))

    def _claims_of(self, keys: list[tuple[int, int]], *, silent: bool) -> Iterator[ParkedClaim]:
        """Yield the parked claims whose client was heard from within a heartbeat; with `silent`,
        the others."""
        heard_limit = self.state.now - self.state.heartbeat_s
        for key in keys:
            claim = self.state.claim_waiters.get(key)  # None: it has its answer
            if claim is not None and (claim.session.heard < heard_limit) is silent:
                yield claim

    def _servable_watches(self, partition: Partition, watches: list[Watch]) -> dict[Watch, None]:
        """Update the watches. Return those with a claim that may be served now, as an ordered set. The others are
        evaluated again at their `next_at`. If the update of a watch raises, all of its claims fail."""
        servable: dict[Watch, None] = {}
        for watch in watches:
            if not watch.waiters:
                continue
            try:
                waiting.refresh(watch, partition)
            except Exception as error:  # a bad sample or claim must not fail the command that changed the sample
                for key in list(watch.waiters):
                    self.state.fail(self.state.claim_waiters[key], error)
                continue
            if waiting.any_may_be_served(watch, partition, self.state.now):
                servable[watch] = None
            else:
                self.state.wake_at(partition, watch.next_at)
        return servable

    def _try_to_serve(self, parked: ParkedClaim) -> bool:
        """Serve the parked claim if possible. Return whether its wait is over."""
        ready_index = parked.ready_index
        partition = parked.partition
        assert ready_index is not None
        watch = parked.watch
        assert watch is not None, parked.key
        result: c.Claimed | DataPlaneError | None
        try:
            waiting.refresh(watch, partition)
            of_step = parked.command.step is not None  # such a claim may get a share that is already dealt
            if not of_step and not waiting.may_serve(watch, partition, parked.command, self.state.now):
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
        """Return the result of the claim, or None if it must wait. A claim of a step gets its rank's share of the
        step's selection, which the first such claim makes."""
        partition = parked.partition
        command = parked.command
        task = ready_index.task
        dealt = None if command.step is None else shares.find_selection(task, command)
        if dealt is None:
            overdue = selection.NONE_OVERDUE
            if command.partial_after_s is not None:
                overdue = self._process_overdue_groups(partition, ready_index, command)
            more_later = overdue.next_at < float("inf")
            if parked.watch is not None:  # it is parked: try again at once while samples are overdue
                parked.watch.next_at = self.state.now if len(overdue.rows) else overdue.next_at
            chosen = selection.select(partition, ready_index, command, overdue.rows, pending=more_later)
            if chosen is None:
                if not command.blocking:  # it gets nothing, and does not wait
                    return self._take_rows(parked, task, np.zeros(0, np.int64))
                self.state.wake_at(partition, overdue.next_at)
                return None
            if command.step is None:
                return self._take_rows(parked, task, chosen.rows)
            dealt = self._fix_shares(partition, task, command, chosen)
        rows = shares.claimable_share(dealt, partition, task, command)
        task.give_back(rows)  # they were held for this rank
        result = self._take_rows(parked, task, rows)
        if len(rows):
            assert command.dp_rank is not None
            dealt.given.setdefault(command.dp_rank, []).append(int(task.claim_ids[rows[0]]))
        return result

    def _process_overdue_groups(
        self, partition: Partition, ready_index: ReadyIndex, command: c.Claim
    ) -> selection.Overdue:
        """Return the samples of the partial groups that have been partial for too long, and when the next group will
        be. With policy RELEASE, the claim may take these samples; with DROP, clear them and return none."""
        overdue = selection.overdue(partition, ready_index, command, self.state.now)
        if command.partial is c.Partial.RELEASE or not len(overdue.rows):
            return overdue
        names = partition.rows.names_of(overdue.rows)
        ready_index.task.dropped = [*ready_index.task.dropped, *names][-REPORTED:]  # reported to the next claim
        partition.dropped_partial += len(names)
        partition.clear(overdue.rows)
        self.state.touch(partition)
        return selection.Overdue(overdue.rows[:0], overdue.next_at)

    def _fix_shares(self, partition: Partition, task: Task, command: c.Claim, chosen: selection.Chosen) -> Selection:
        """Deal the chosen samples to the ranks of the command's step, and hold each share for its rank: the samples are
        claimed, on a lease whose owner is not a session. Return the selection, which is stored for the other ranks."""
        state = self.state
        assert command.step is not None
        dealt = shares.deal_selection(partition, command, chosen, state.serial())
        partition.take(task, dealt.rows, dealt.claim_id)
        hold_s, owner = (shares.HOLD_S, HELD) if command.lease_s is None else (command.lease_s, HELD_ON_LEASE)
        self._begin_lease(partition, task, dealt.rows, dealt.claim_id, owner, hold_s)
        shares.store_selection(task, command.step, dealt, state.limits.steps)
        partition.dealt = True  # tells `serve_waiting` that other ranks can be served
        state.touch(partition)
        return dealt

    def _take_rows(self, parked: ParkedClaim, task: Task, rows: Int64s) -> c.Claimed:
        """Claim the rows (possibly none) for the task and return the result. A peek only returns the result."""
        state = self.state
        partition = parked.partition
        command = parked.command
        session = parked.session
        claim_id = state.serial() if len(rows) and not command.peek else 0
        result = c.Claimed(
            ids=partition.rows.names_of(rows),
            rows=rows.copy(),
            generations=partition.generations_of(rows),
            fields=partition.common_fields(rows) if len(rows) else command.fields,  # without samples, as requested
            tags=partition.tags.of(rows),
            dropped=tuple(task.dropped),
            claim=claim_id,
        )
        if command.peek:
            return result
        task.dropped = []  # the result reports them, once
        if len(rows):
            partition.take(task, rows, claim_id)
            # Other claims may now take the last, smaller batch, or find a group incomplete.
            state.touch(partition)
            session.unconfirmed[parked.call_id] = UnconfirmedClaim(partition, task, rows.copy(), claim_id)
            if command.lease_s is not None:
                self._begin_lease(partition, task, rows, claim_id, session.session_id, command.lease_s)
        return result

    def _begin_lease(
        self, partition: Partition, task: Task, rows: Int64s, claim_id: int, owner: int, lease_s: float
    ) -> None:
        """Begin the lease of a claim that took these rows. owner: a session, `HELD` or `HELD_ON_LEASE`."""
        if len(rows):
            end = self.state.now + lease_s
            task.lease(rows, end)
            task.count_leased(owner, len(rows))
            self.state.leases.begin(Lease(partition.name, task, rows.copy(), claim_id, owner, lease_s), end)

    def _check_claim(self, partition: Partition, command: c.Claim) -> None:
        """Validate the claim. Raises InvalidRequestError, LimitError or FieldNotFoundError."""
        batch = command.batch_size
        group_size = command.group_size
        if batch < 1:
            raise InvalidRequestError(f"batch_size={batch}: must be at least 1")
        least = batch if command.min_batch_size is None else command.min_batch_size
        if not 1 <= least <= batch:
            raise InvalidRequestError(f"min_batch_size={least}: expected a number from 1 to batch_size={batch}")
        if group_size is not None or command.max_lag is not None:
            check_terms(command)
        if group_size is not None and group_size > least:
            raise InvalidRequestError(
                f"group_size={group_size}: expected at most {least}, which is min_batch_size, or batch_size without it"
            )
        if command.partial_after_s is not None and (group_size is None or not command.partial_after_s >= 0):
            raise InvalidRequestError(
                f"partial_after_s={command.partial_after_s}: must not be negative, and requires group_size, which is "
                f"{group_size}"
            )
        if not command.timeout_s >= 0:  # this form also rejects NaN
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")
        if command.lease_s is not None:
            _check_lease(command.lease_s)
        if command.sampler or command.dp_world is not None or command.step is not None:
            _check_shares(command)
        if command.samples is not None or command.peek:
            _check_named_and_peek(command)
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

    def ack(self, session: Session, call_id: int, command: c.Ack) -> c.ClaimsSettled:
        """Acknowledge leased samples: end their leases and keep them claimed."""
        named = self._resolve_named(command, command.claims)
        leased = named.leased
        named.task.acknowledge(named.rows[leased])
        self.state.recheck_puts(named.partition, named.rows[leased])  # these samples may be evicted now
        if named.partition.complete:
            # Other claims may now take the last, smaller batch.
            self.state.touch(named.partition)
        return named.result(command, leased)

    def nack(self, session: Session, call_id: int, command: c.Nack) -> c.ClaimsSettled:
        """Make the samples that the command's claims hold unclaimed again; without claim ids, all named samples except
        those on lease. Samples that are unclaimed already count as returned."""
        named = self._resolve_named(command, command.claims)
        unclaimed = named.task.claim_ids[named.rows] == 0
        returnable = ~named.task.on_lease(named.rows) if command.claims is None else named.held_by_claim
        self.state.return_rows(named.partition, named.task, named.rows[returnable & ~unclaimed])
        return named.result(command, returnable | unclaimed)

    def extend(self, session: Session, call_id: int, command: c.Extend) -> c.ClaimsSettled:
        """Set the end of the samples' leases to `lease_s` from now."""
        _check_lease(command.lease_s)
        named = self._resolve_named(command, command.claims)
        leased = named.leased
        end = self.state.now + command.lease_s
        rows = named.rows[leased]
        if len(rows):
            named.task.lease(rows, end)
            self.state.leases.prolong(named.task.claim_ids[rows], command.lease_s, end)
        return named.result(command, leased)

    def consumption(self, session: Session, call_id: int, command: c.CheckConsumption) -> c.Consumption:
        """Return whether the partition is complete and all of the tasks have consumed every live sample."""
        partition = self.state.partition(command.partition)
        tasks = [partition.task(name) for name in command.tasks]
        live = partition.rows.live
        # unsettled: claimed samples that count as consumed only after acknowledgement.
        return c.Consumption(
            consumed=partition.complete and all(task.claimed - task.unsettled == live for task in tasks)
        )

    def why_blocked(self, command: c.WhyBlocked) -> c.Blocked:
        """Return the facts about why a claim with the command's terms would wait."""
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        for predicate in command.where:
            _check_predicate(predicate)
        # It only carries the task and the fields: `blocked` counts the ready samples itself.
        ready_index = ReadyIndex(task, tuple(sorted(set(command.fields))), positions=0)
        return blocked(self.state, partition, ready_index, command)

    def _resolve_named(self, command: c.Ack | c.Nack | c.Extend, claims: Int64s | None) -> _Named:
        """Resolve the samples and claim ids of a command that follows a claim. Raises InvalidRequestError if a sample
        is named twice, or if there is not one claim id for each sample."""
        self.state.check_samples(command.samples)
        partition = self.state.partition(command.partition)
        task = partition.task(command.task)
        if claims is not None and len(claims) != len(command.samples):
            raise InvalidRequestError(
                f"got {len(claims)} claim ids for {len(command.samples)} samples; pass one per sample"
            )
        live, rows = partition.living(command.samples)
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise InvalidRequestError("a sample is named twice in one call; name each sample once")
        return _Named(partition, task, live, rows, np.zeros(len(rows), np.int64) if claims is None else claims[live])

    # --- time

    def expire_leases(self) -> None:
        """Make the samples whose lease has expired unclaimed again."""
        state = self.state
        for lease in state.leases.pop_ended(state.now):
            state.return_rows(state.partitions[lease.partition], lease.task, lease.ended_rows(state.now))

    def timeout_error(self, parked: ParkedClaim) -> DataPlaneError:
        """Return the error of a claim that reached its deadline, with the facts about why it waited."""
        ready_index = parked.ready_index
        command = parked.command
        assert ready_index is not None
        facts = blocked(self.state, parked.partition, ready_index, command)
        # These two are converted below: the error's `ready` counts the samples that also satisfy the conditions.
        unchanged = {name: getattr(facts, name) for name in facts.__struct_fields__ if name not in ("ready", "writers")}
        return ClaimTimeoutError(
            partition=command.partition,
            task=command.task,
            wanted=least_of(command),
            ready=facts.matching,
            waited_s=self.state.now - parked.since,
            writers=[msgspec.structs.asdict(writer) for writer in facts.writers],
            **unchanged,
        )

    def removed_task_error(self, parked: ParkedClaim) -> DataPlaneError:
        command = parked.command
        return TaskNotFoundError(partition=command.partition, task=command.task, known=list(parked.partition.tasks))


def _check_lease(lease_s: float | None) -> None:
    if lease_s is not None and not lease_s > 0:
        raise InvalidRequestError(f"lease_s={lease_s}: expected a positive number of seconds")


def _check_named_and_peek(command: c.Claim) -> None:
    """Check a claim of named samples, which must not select or wait, and a peek, which must not hold anything. Raises
    InvalidRequestError."""
    if command.samples is not None and (
        command.blocking or command.where or command.group_size or command.step is not None or command.max_lag
    ):
        raise InvalidRequestError(
            "a claim of named samples must be non-blocking, without where, group_size, step or max_lag"
        )
    if command.peek and (command.step is not None or command.lease_s or command.partial is not c.Partial.RELEASE):
        raise InvalidRequestError("a claim with peek must not have lease_s or step, and must not drop partial groups")


def _check_shares(command: c.Claim) -> None:
    """Check that sampler, groups and ranks of a claim agree. Raises InvalidRequestError."""
    group_size = command.group_size
    world = command.dp_world
    rank = command.dp_rank
    step = command.step
    sampler = SAMPLERS.get(selection.sampler_of(command))
    if sampler is None:
        raise InvalidRequestError(f"sampler={command.sampler!r}: expected one of {', '.join(SAMPLERS)}")
    if sampler.grouped and group_size is None:
        raise InvalidRequestError(f"sampler={command.sampler!r} requires group_size")
    if sampler.alone and group_size is not None:
        raise InvalidRequestError(f"sampler={command.sampler!r} does not support groups; omit group_size={group_size}")
    if world is None and step is None:
        if sampler.shared:
            raise InvalidRequestError(f"sampler={command.sampler!r} requires dp_rank, dp_world and step")
        return  # no shares; `dp_rank` alone has no effect
    if world is None or step is None or rank is None:
        raise InvalidRequestError(
            f"dp_rank={rank}, dp_world={world}, step={step}: pass all three to claim a rank's share of a step, or "
            "neither dp_world nor step"
        )
    if not 0 <= rank < world or step < 0:
        raise InvalidRequestError(
            f"dp_rank={rank}, dp_world={world}, step={step}: dp_rank must be from 0 to dp_world - 1, step at least 0"
        )
    per_round = world * (group_size or 1)  # one sample, or one group, for each rank
    least = command.batch_size if command.min_batch_size is None else command.min_batch_size
    if command.batch_size % per_round or least < per_round:
        unit = f"dp_world={world}" + (f" times group_size={group_size}" if group_size else "")
        raise InvalidRequestError(
            f"batch_size={command.batch_size}, min_batch_size={command.min_batch_size}: both count the whole step; "
            f"batch_size must be a multiple of {unit}, and min_batch_size at least that"
        )


def _check_predicate(predicate: c.Predicate) -> None:
    """Raise InvalidRequestError for an unknown operator, or a value that does not fit the operator."""
    if predicate.op not in OPERATORS:
        raise InvalidRequestError(
            f"condition on tag {predicate.tag!r}: operator {predicate.op!r} is not one of {', '.join(OPERATORS)}"
        )
    if isinstance(predicate.value, tuple) is not (predicate.op == "in"):
        raise InvalidRequestError(
            f"condition on tag {predicate.tag!r}: `in` needs a tuple of values, other operators one value, got "
            f"{predicate.op} {str(predicate.value)[:40]}"
        )
