"""The ledger: all decisions of the service, as a pure state machine.

It takes one input at a time and returns answers and orders; it has no other effects. The same inputs give the
same outputs and the same state, so that a log of inputs is a backup.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import UnionType
from typing import Any

from dataplane.core.types import Checksums
from dataplane.errors import (
    CallCancelledError,
    DataPlaneError,
    InvalidRequestError,
    SessionExpiredError,
    StaleCallError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import Pressure
from dataplane.ledger.allocation.reservations import Reservations
from dataplane.ledger.claims.claims import Claims
from dataplane.ledger.encoding.image import ImageError, dump, load
from dataplane.ledger.liveness import Liveness
from dataplane.ledger.samples.commit import Commits
from dataplane.ledger.samples.drain import Drains
from dataplane.ledger.samples.inspection import Inspection
from dataplane.ledger.samples.locate import Reads
from dataplane.ledger.samples.locate_rows import locate_rows
from dataplane.ledger.samples.partitions import Partitions, UnitReports
from dataplane.ledger.samples.put_rows import put_rows
from dataplane.ledger.samples.snapshots import Saves
from dataplane.ledger.state.sessions import (
    Limits,
    Parked,
    ParkedAllocate,
    ParkedClaim,
    ParkedFind,
    Session,
    SessionStatus,
    check_limit,
)
from dataplane.ledger.state.state import State

_EXEMPT_FROM_LIMIT = (c.Abort, c.Release, c.Unclaim, c.Bye)
"""Commands that release something. They are exempt from the limit, because a client at its limit must be able to
release."""

Handler = Callable[[Session, int, Any], c.Result | None]
"""(session, call_id, command) -> the result, or None if the call was parked."""


class Ledger:
    """The controller's state machine. `apply` processes the next input. `Tick` is the only clock: the shell (the part
    of the controller that owns the sockets and the journal) applies one at short intervals while inputs arrive, and at
    `next_deadline` at the latest.

    epoch: the current epoch of the service. reserve_fraction: the fraction of every arena that only updates may
    use. heartbeat_s: when a silent session is probed. session_timeout_s: when a silent session ends that no unit
    can prove alive. checksums: which rows get a checksum. low_watermark, high_watermark: see `Pressure`.

    All parts (`_claims`, `_reservations`, ...) work on the same `_state`. `_handlers`: by type of command, the method
    that executes it; `_reports`: by type, the method for each other input.
    """

    def __init__(
        self,
        epoch: int,
        *,
        limits: Limits | None = None,
        reserve_fraction: float = 0.15,
        heartbeat_s: float = 2.0,
        session_timeout_s: float = 20.0,
        checksums: Checksums = Checksums.ACROSS_HOSTS,
        low_watermark: float = 0.75,
        high_watermark: float = 0.9,
    ) -> None:
        state = State(epoch, limits or Limits(), reserve_fraction, heartbeat_s, session_timeout_s, checksums)
        state.watermarks = low_watermark, high_watermark
        self._use_state(state)

    def _use_state(self, state: State) -> None:
        """Set up all components to work on this state."""
        self._state = state
        self._liveness = Liveness(self._state)
        self._reservations = Reservations(self._state, self._liveness)
        self._claims = Claims(self._state)
        self._commits = Commits(self._state)
        self._reads = Reads(self._state)
        self._inspection = Inspection(self._state)
        self._partitions = Partitions(self._state, self._claims.removed_task_error)
        self._saves = Saves(self._state, self._partitions)
        self._drains = Drains(self._state, self._commits)
        self._pressure = Pressure(self._state)
        self._units = UnitReports(self._state, self._reservations, self._liveness)
        self._inspections = self._inspection_table()
        self._handlers = self._command_table()
        self._reports = self._report_table()

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def now(self) -> float:
        """The time of the last `Tick`."""
        return self._state.now

    @property
    def min_heartbeat_s(self) -> float:
        """The shortest time in seconds between two heartbeats of a session."""
        return self._liveness.min_heartbeat_s

    @property
    def live_bytes(self) -> int:
        """Bytes of all extents with live cells."""
        return sum(partition.account.live_bytes for partition in self._state.partitions.values())

    def units_on(self, host: str) -> list[int]:
        """Return the ids of a host's storage units, connected or lost."""
        return [unit.unit_id for unit in self._state.units.values() if unit.host == host]

    def apply(self, item: c.Input) -> list[c.Output]:
        """Process one input and return its outputs, in the order in which they must leave. If an input raises (a
        defect), its outputs leave with those of the next input."""
        if isinstance(item, c.Call):
            self._handle_call(item)
        else:
            self._reports[type(item)](item)
        state = self._state
        extents = state.extents
        # Without these, nothing changed that parked calls wait for, or that `_pressure` watches.
        changed = state.touched or extents.freed or extents.loosened or extents.moved
        if changed or (state.finders and extents.stirred):
            self._serve_parked_calls()
        if state.alarms:
            self._drop_idle_alarms()
        out = state.out
        state.out = []
        return out

    def next_deadline(self) -> float | None:
        """Return the ledger time at which the next `Tick` is due at the latest, or None if nothing can time out."""
        state = self._state
        times = [self._liveness.next_look, self._reservations.retry_at()]
        times += [heap[0][0] for heap in (state.alarms, state.wakes, state.leases.ends) if heap]
        if state.sessions:  # a longer gap between ticks means that the ledger was paused (`Liveness.check_sessions`)
            times.append(state.now + state.heartbeat_s)
        first = min(times)
        return None if first == float("inf") else first

    def inspect(self, command: c.Command) -> c.Result:
        """Return the result of a command that changes nothing, or raise its error."""
        return self._inspections[type(command)](command)

    def image(self) -> bytes:
        """Serialize the whole state for `restored`. Call it only between two inputs."""
        return dump(self._roots())

    @classmethod
    def restored(cls, image: bytes) -> Ledger:
        """Create a ledger from an image. Raises `ImageError` if the bytes are not an image, or one of another
        version."""
        ledger = cls(0)  # its state is replaced below
        roots = load(image)
        if len(roots) != len(ledger._roots()) or not isinstance(roots[0], State):
            raise ImageError(f"the image does not contain a ledger (it has {len(roots)} roots)")
        ledger._use_roots(*roots)
        return ledger

    def _roots(self) -> list[Any]:
        """Return all objects on which future outputs depend, as `_use_roots` takes them."""
        live = self._liveness
        units = self._units
        return [self._state, live.nonces, live.opened, live.next_look, units.cookies, units.added]

    def _use_roots(
        self,
        state: State,
        nonces: dict[str, int],
        opened: int,
        next_look: float,
        cookies: dict[str, int],
        added: int,
    ) -> None:
        """Continue with these roots, which an image contained."""
        self._use_state(state)
        self._liveness.nonces = nonces
        self._liveness.opened = opened
        self._liveness.next_look = next_look
        self._units.cookies = cookies
        self._units.added = added

    def free_ranges(self, unit: int) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of every free range of a unit's arena, by address. For tests."""
        return list(self._state.units[unit].space.ranges())

    def held_ranges(self) -> list[tuple[int, int, int]]:
        """Return (unit, offset, nbytes) of every range in use. For tests."""
        return self._state.extents.ranges()

    # --- inputs

    def _report_table(self) -> dict[type[c.Input], Callable[[Any], None]]:
        """Return the handler of every input except calls."""
        return {
            c.OpenSession: self._liveness.open,
            c.Heartbeat: self._liveness.heartbeat,
            c.SessionSilent: self._liveness.silent,
            c.SessionAttached: self._liveness.attached,
            c.SessionGone: self._liveness.gone,
            c.SessionAlive: self._liveness.alive,
            c.AddUnit: self._units.add,
            c.UnitLost: self._units.lost,
            c.DropUnit: self._units.drop,
            c.Grown: self._units.grown,
            c.Restarted: self._restart,
            c.Tick: self._tick,
        }

    def _command_table(self) -> dict[type[c.Command], Handler]:
        """Return the handler of every command of a call."""
        return {
            c.Bye: self._liveness.bye,
            c.Units: self._reads.units,
            c.Register: self._partitions.register,
            c.Seal: self._partitions.seal,
            c.Describe: self._reads.describe,
            c.Allocate: self._reservations.allocate,
            c.Preallocate: self._reservations.preallocate,
            c.Abort: self._abort,
            c.Commit: self._commits.commit,
            c.PutRows: self._put_rows,
            c.Locate: self._reads.locate,
            c.LocateRows: self._locate_rows,
            c.Release: self._release,
            c.Claim: self._claims.claim,
            c.Unclaim: self._unclaim,
            c.Ack: self._claims.ack,
            c.Nack: self._claims.nack,
            c.Extend: self._claims.extend,
            c.CheckConsumption: self._claims.consumption,
            c.Clear: self._partitions.clear,
            c.SetTags: self._partitions.set_tags,
            c.SetVersion: self._partitions.set_version,
            c.List: self._reads.list_samples,
            c.Save: self._saves.save,
            c.ReadSaved: self._saves.read_saved,
            c.Stage: self._saves.stage,
            c.Publish: self._saves.publish,
            c.Drain: self._drains.drain,
            c.FindCells: self._drains.find,
            c.Move: self._drains.move,
            c.Forget: self._units.forget,
            **{kind: _of_any_session(execute) for kind, execute in self._inspections.items()},
        }

    def _inspection_table(self) -> dict[type[c.Command], Callable[[Any], c.Result]]:
        """Return the handler of every command that changes nothing and needs no session."""
        return {
            c.Stats: self._reads.stats,
            c.Inspect: self._inspection.matrix,
            c.Show: self._inspection.show,
            c.MapMemory: self._inspection.memory,
            c.Waits: self._inspection.waits,
            c.WhyBlocked: self._claims.why_blocked,
        }

    def _serve_parked_calls(self) -> None:
        """Serve all parked calls that can be served now, then update `pressed`. Repeats, because claims that drop
        groups free space for puts, and evictions for puts change what claims wait for."""
        state = self._state
        extents = state.extents
        while state.touched or extents.freed or extents.loosened:
            if state.puts_wait:
                self._reservations.serve_waiting()
            else:
                extents.freed = False
                extents.loosened = set()
            if state.touched:
                self._claims.serve_waiting()
        if state.finders and extents.stirred:
            extents.stirred = False
            self._drains.serve_waiting()
        if extents.moved:
            self._pressure.update()

    # --- calls

    def _handle_call(self, call: c.Call) -> None:
        """Execute a call once. For a repeated call: send its answer again if it is kept, reject it if it is settled, do
        nothing while it is parked."""
        state = self._state
        call_id = call.call_id
        session = state.sessions.get(call.session)
        if session is None or session.state is not SessionStatus.LIVE:
            self._refuse_expired(call, session)
            return
        session.record_contact(state.now)
        # A watermark above the call's own id is malformed: it settles nothing, and the call is rejected below.
        if call.watermark <= call_id and (call.watermark > session.watermark or call.confirmed):
            self._confirm(session, call)
        if call_id in session.parked:
            return
        answered = session.answers.get(call_id)  # the answer that the call has got, if it is kept
        if answered is not None:
            state.out.append(c.Answer(session=session.session_id, call_id=call_id, result=answered))
        elif session.is_settled(call_id) or call_id < call.watermark:
            error = StaleCallError(session=session.session_id, call_id=call_id, watermark=session.watermark)
            state.out.append(c.Answer(session=session.session_id, call_id=call_id, result=error))
        else:
            self._execute(session, call_id, call.command)

    def _confirm(self, session: Session, call: c.Call) -> None:
        """Settle the calls that the watermark and the confirmations of this call cover: the client
        has their answers, or no longer needs them. Their claims become final, so that the samples
        may be evicted, and the pins of brief reads end."""
        state = self._state
        cancelled, final_claims, unpinned = session.confirm(call.watermark, call.confirmed, state.limits)
        for pinned in unpinned:
            state.extents.unpin(pinned)
        for parked in cancelled:
            state.unpark(parked, CallCancelledError(session=session.session_id, call_id=parked.call_id))
        if state.parked:  # perhaps a put, which waits until samples are consumed
            for claim in final_claims:
                state.recheck_puts(claim.partition, claim.rows)

    def _execute(self, session: Session, call_id: int, command: c.Command) -> None:
        """Run a command, and answer it unless it was parked."""
        result: c.Result | DataPlaneError | None
        try:
            calls = len(session.parked) + len(session.answers) + 1
            limit = self._state.limits.in_flight
            if calls > limit and not isinstance(command, _EXEMPT_FROM_LIMIT):
                check_limit("calls in flight", calls, limit, "Wait for answers to earlier calls.")
            result = self._handlers[type(command)](session, call_id, command)
        except DataPlaneError as error:
            result = error
        if result is not None:
            session.keep_answer(call_id, result, self._state.limits)
            answer = c.Answer(session=session.session_id, call_id=call_id, result=result)
            self._state.out.append(answer)

    def _refuse_expired(self, call: c.Call, session: Session | None) -> None:
        """Answer a call of a session that is not live: with an error, or `Done` for a `Bye`."""
        result: c.Result | DataPlaneError = c.Done()
        if type(call.command) is not c.Bye:
            why = (
                "it was closed or expired, or the service restarted without its state"
                if session is None
                else session.why
            )
            result = SessionExpiredError(session=call.session, why=why)
        self._state.out.append(c.Answer(session=call.session, call_id=call.call_id, result=result))

    # --- withdrawing calls

    def _put_rows(self, session: Session, call_id: int, command: c.PutRows) -> c.Committed:
        """Commit a small put: the short way, or if anything is unusual the general one."""
        return put_rows(self._state, session, command) or self._commits.commit(session, call_id, command.expand())

    def _locate_rows(self, session: Session, call_id: int, command: c.LocateRows) -> c.RowsLocated:
        """Locate a few samples: the short way, or if that is not possible the general one."""
        located = locate_rows(self._state, session, call_id, command)
        return located or c.RowsLocated(general=self._reads.locate(session, call_id, command.expand()))

    def _abort(self, session: Session, call_id: int, command: c.Abort) -> c.Done:
        """Withdraw an earlier call, and free the space that it reserved."""
        self._withdraw(session, call_id, command.reservation, c.Allocated | c.Preallocated)
        if command.reservation in session.reservations:
            self._state.free_reservation(session, command.reservation)
        return c.Done()

    def _release(self, session: Session, call_id: int, command: c.Release) -> c.Done:
        """Withdraw an earlier call, forget what it saved, and unpin what it pinned."""
        self._withdraw(session, call_id, command.located, c.Located | c.RowsLocated | c.Saved | c.FoundCells)
        session.saves.pop(command.located, None)
        pinned = session.pins.pop(command.located, None)
        if pinned is not None:
            self._state.extents.unpin(pinned)
        return c.Done()

    def _unclaim(self, session: Session, call_id: int, command: c.Unclaim) -> c.Done:
        """Withdraw an earlier claim, and return its samples unless the client has confirmed its answer."""
        self._withdraw(session, call_id, command.claimed, c.Claimed)
        if command.claimed in session.unconfirmed:
            self._state.return_claim(session, command.claimed)
        return c.Done()

    def _withdraw(self, session: Session, call_id: int, target: int, kind: type[c.Result] | UnionType) -> None:
        """Cancel call `target`, whose result is of type `kind`: end it if it is parked. If it was executed or has not
        arrived yet, never execute it (again); the caller undoes what it did. Does nothing if it failed or is settled
        (repetitions are rejected anyway). Raises InvalidRequestError if it is not an earlier call, or had another type
        of result."""
        if not 1 <= target < call_id:
            raise InvalidRequestError(f"call {call_id} cannot withdraw call {target}, only earlier calls")
        answer = session.answers.get(target)
        if target in session.parked:
            self._state.unpark(session.parked[target], CallCancelledError(session=session.session_id, call_id=target))
        elif isinstance(answer, c.Result) and not isinstance(answer, kind):
            expected = getattr(kind, "__name__", kind)
            raise InvalidRequestError(f"call {target} was answered {type(answer).__name__}, expected {expected}")
        elif not session.is_settled(target) and not isinstance(answer, DataPlaneError):
            # Executed, or not arrived yet: if the call arrives or is repeated later, it gets this error.
            cancelled = CallCancelledError(session=session.session_id, call_id=target)
            session.keep_answer(target, cancelled, self._state.limits)

    # --- time

    def _restart(self, item: c.Restarted) -> None:
        """Continue with this state in a new epoch of the service. Units and sessions must reconnect, and timeouts and
        leases start again in full. Raises ValueError unless its epoch is greater."""
        state = self._state
        if item.epoch <= state.epoch:
            raise ValueError(f"new epoch {item.epoch} must be greater than the current epoch {state.epoch}")
        state.epoch = item.epoch
        state.reserve_fraction = item.reserve_fraction
        state.heartbeat_s = item.heartbeat_s
        state.session_timeout_s = item.session_timeout_s
        state.checksums = item.checksums
        state.watermarks = item.low_watermark, item.high_watermark
        state.extents.moved.update([0, *state.budgeted])  # has all gauges updated
        for unit in state.units.values():
            unit.reserve_fraction = item.reserve_fraction
            unit.awaited = unit.awaited or unit.connected  # before `lost`, which clears `connected`
            self._units.lost(c.UnitLost(unit=unit.unit_id))  # until it offers its arena again
        self._liveness.restarted()
        state.leases.renew(state.now)
        self._recount_everything()

    def _recount_everything(self) -> None:
        """Discard the cached counts for parked calls: all of them are evaluated from the beginning."""
        for partition in self._state.partitions.values():
            partition.outlook = None
            self._state.extents.loosened.add(partition.account.account_id)  # evaluates its puts again
            for watch in partition.watches.values():
                watch.reset()
            self._state.touch(partition)  # and its claims

    def _tick(self, item: c.Tick) -> None:
        """Advance the clock. Expires leases and overdue groups, checks sessions, serves parked calls, and ends
        those that reached their deadline."""
        state = self._state
        gap = item.now - state.now
        state.now = max(state.now, item.now)
        if state.leases.ends:
            self._claims.expire_leases()
        if state.wakes:
            state.wake()
        if self._liveness.next_look <= state.now:
            self._liveness.check_sessions(gap)
        if not state.alarms:  # no call waits
            return
        if self._reservations.retry_at() <= state.now:
            state.extents.freed = True  # evaluates the waiting puts, which orders the growth again
        # Calls that can be served now must not time out.
        self._serve_parked_calls()
        while state.alarms and state.alarms[0][0] <= state.now:  # an alarm begins with its deadline
            _, _, session_id, call_id = heapq.heappop(state.alarms)
            session = state.sessions.get(session_id)
            parked = None if session is None else session.parked.get(call_id)
            if parked is not None:
                self._time_out(parked)

    def _time_out(self, parked: Parked) -> None:
        """End a call that reached its deadline."""
        try:
            result = self._timeout_result(parked)
        except Exception as error:  # one call must not stop the timeouts of later ones
            self._state.fail(parked, error)
        else:
            self._state.unpark(parked, result)

    def _timeout_result(self, parked: Parked) -> c.Result | DataPlaneError:
        """Return the result or error of a call that reached its deadline."""
        if isinstance(parked, ParkedClaim):
            return self._claims.timeout_error(parked)
        if isinstance(parked, ParkedFind):
            return self._drains.timeout_result(parked)
        assert isinstance(parked, ParkedAllocate)
        return self._reservations.out_of_space(parked)

    def _drop_idle_alarms(self) -> None:
        """Remove alarms of answered calls from the top of the heap, so that `next_deadline` does not count them."""
        state = self._state
        while state.alarms:
            _, _, session_id, call_id = state.alarms[0]
            session = state.sessions.get(session_id)
            if session is not None and call_id in session.parked:
                return
            heapq.heappop(state.alarms)


def _of_any_session(execute: Callable[[Any], c.Result]) -> Handler:
    """Return the handler of calls with a command that needs no session."""
    return lambda session, call_id, command: execute(command)
