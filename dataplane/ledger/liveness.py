"""Liveness of sessions: open, probe and end them, and free their resources once units prove that this is safe."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from dataplane.core.types import PROTOCOL_VERSION
from dataplane.errors import (
    DataPlaneError,
    ProtocolVersionError,
    ServiceRestartedError,
    SessionExpiredError,
)
from dataplane.ledger.commands import (
    Bye,
    Done,
    FenceSession,
    Heartbeat,
    Opened,
    OpenSession,
    SessionAlive,
    SessionAttached,
    SessionGone,
    SessionSilent,
)
from dataplane.ledger.state.sessions import Session, SessionStatus, check_limit
from dataplane.ledger.state.state import State

HEARTBEATS_PER_S = 500
"""Maximum rate of the heartbeats of all sessions. More sessions send them less often."""
SESSIONS_APART_NS = 100_000
"""Epochs are times in nanoseconds. A state can open ten thousand sessions per second before it reaches the
ids of a later state."""


class Liveness:
    """Opens sessions, ends them when their clients are gone, and frees what ended sessions held.

    `nonces`: session ids by nonce, the random text by which a client's repeated `OpenSession` finds its session.
    `opened` is the id of the last session. Ids begin above all that an earlier state can have used, so
    that a call of a session of a lost state is never taken for one of this state.

    A client process keeps a lock file locked while it runs. A session attached to a connected unit (local to it)
    stays live while its lock is held, however long it is silent. A session without attachment ends after
    `session_timeout_s` of silence, plus `2 * min_heartbeat_s` if many sessions send heartbeats less often. A unit that
    fences a session ends its access to the unit's bytes and reports `SessionGone`; if it finds the lock of a local
    session held, it reports `SessionAlive` instead.
    To probe a session is to order its units to fence it. `Session` explains its times `heard`, `probed` and
    `suspected`. `next_look` is when sessions must be checked.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.nonces: dict[str, int] = {}
        self.opened = state.epoch // SESSIONS_APART_NS
        self.next_look = float("inf")

    @property
    def min_heartbeat_s(self) -> float:
        """The shortest time in seconds between two heartbeats of a session."""
        return len(self.state.sessions) / HEARTBEATS_PER_S

    def _record_heartbeat(self, session: Session) -> None:
        """Record a heartbeat. If the next ones may be late, silence counts from a later time: two heartbeats are at
        most `2 * (state.heartbeat_s + min_heartbeat_s)` apart."""
        may_be_late = self.min_heartbeat_s > self.state.heartbeat_s
        session.record_contact(self.state.now + (2 * self.min_heartbeat_s if may_be_late else 0.0))

    # --- inputs

    def open(self, item: OpenSession) -> None:
        """Open or continue a session, and output `Opened` with the session or the error."""
        session = None
        error = None
        try:
            session = self._open(item)
        except DataPlaneError as refused:
            error = refused
        units = tuple(unit.info() for unit in self.state.units.values()) if session else ()
        session_id = session.session_id if session else 0
        self.state.out.append(
            Opened(nonce=item.nonce, session=session_id, epoch=self.state.epoch, units=units, error=error)
        )

    def _open(self, item: OpenSession) -> Session:
        """Return the session with the client's nonce, or a new one. Raises the error of a rejected client."""
        state = self.state
        if item.epoch > state.epoch:  # the client has seen a later epoch, which this state does not contain
            lost = f"the latest changes of session {item.session}"
            raise ServiceRestartedError(expected_epoch=item.epoch, got_epoch=state.epoch, what="the service", lost=lost)
        known = state.sessions.get(self.nonces.get(item.nonce, 0))  # no session has id 0
        if known is not None and known.live:
            self._record_heartbeat(known)
            return known
        if item.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(client_version=item.protocol_version, service_version=PROTOCOL_VERSION)
        if known is not None:
            raise SessionExpiredError(session=known.session_id, why=known.why)
        if item.session:  # the client wants to continue a session
            raise self._unknown_session_error(item)
        limits = state.limits
        check_limit("open sessions", len(state.sessions) + 1, limits.sessions, "Close unused clients.")
        for name in (item.nonce, item.host, item.name):
            check_limit("characters of a client's name", len(name), limits.id_bytes, "Set a shorter client_name.")
        check_limit("characters of a lock's path", len(item.lock_path), limits.path_bytes, "Use a shorter path.")
        self.opened += 1
        session = Session(self.opened, item.nonce, item.name, item.host, item.lock_path, state.now)
        state.sessions[session.session_id] = session
        state.several_hosts = None
        self.nonces[item.nonce] = session.session_id
        self._schedule_check(state.now + 2 * state.heartbeat_s)
        return session

    def _unknown_session_error(self, item: OpenSession) -> DataPlaneError:
        """Return the error for a client that wants to continue an unknown session: it ended, or an earlier state of the
        service was lost with it."""
        state = self.state
        if item.epoch >= state.created_epoch:
            return SessionExpiredError(session=item.session, why="it expired while its client was disconnected")
        lost = f"session {item.session}, and every partition, sample and claim of that epoch"
        return ServiceRestartedError(expected_epoch=item.epoch, got_epoch=state.epoch, what="the service", lost=lost)

    def heartbeat(self, item: Heartbeat) -> None:
        session = self.state.sessions.get(item.session)
        if session is not None and session.live:
            self._record_heartbeat(session)

    def silent(self, item: SessionSilent) -> None:
        """Handle the end of the connection with a client's heartbeats: probe the session at once."""
        session = self.state.sessions.get(item.session)
        if session is not None and session.live:
            session.silent = True
            self._probe(session)
            self._schedule_check(self.state.now + self.state.heartbeat_s)

    def attached(self, item: SessionAttached) -> None:
        """Record that the session is local to the unit. If it has ended (and may be removed already), fence it
        there."""
        session = self.state.sessions.get(item.session)
        unit = self.state.units.get(item.unit)
        if unit is None:
            return
        if session is None or not session.live:
            if session is not None:  # it remains until the unit proves its end
                session.fencing[item.unit] = item.lock_path
            self._order_fence(item.session, item.unit, item.lock_path)
            return
        session.attached[item.unit] = item.lock_path

    def gone(self, item: SessionGone) -> None:
        """Handle a unit's proof that a session cannot access its bytes: end the session if it is live, and free
        what it held in this unit."""
        session = self.state.sessions.get(item.session)
        if session is None:
            return
        session.attached.pop(item.unit, None)
        self._free_held_on(session, item.unit)
        session.fencing.pop(item.unit, None)
        if session.live:
            self.end(session, f"its client process exited (proof by storage unit {item.unit})")
        else:
            self._remove_if_done(session)

    def alive(self, item: SessionAlive) -> None:
        """Handle a lock that is still held: check the session again one heartbeat after its last probe, or from now if
        there was none."""
        session = self.state.sessions.get(item.session)
        if session is not None:
            self._schedule_check(
                (self.state.now if session.probed is None else session.probed) + self.state.heartbeat_s
            )

    def bye(self, session: Session, call_id: int, command: Bye) -> Done:
        """End the session: parked calls end, unconfirmed claims are returned, and held bytes wait for proof from
        units."""
        self.end(session, "its client closed it")
        return Done()

    # --- the end of a session

    def end(self, session: Session, why: str) -> None:
        """End a session: answer its parked calls, return its unconfirmed and leased claims, drop what it staged, and
        fence it on all units where it may hold bytes."""
        state = self.state
        session.state = SessionStatus.ENDING
        session.why = why
        for parked in list(session.parked.values()):
            state.unpark(parked, SessionExpiredError(session=session.session_id, why=why))
        session.answers.clear()
        session.saves.clear()
        state.drop_staged(session.session_id)
        for call_id in list(session.unconfirmed):
            state.return_claim(session, call_id)
        for reservation in session.reservations.values():
            state.unprotect_targets(reservation)
        for lease in state.leases.owned_by(session.session_id):
            state.return_rows(state.partitions[lease.partition], lease.task, lease.rows_on_lease())
        # These units must report `SessionGone` before the session's bytes there are freed. The lock path that a unit
        # reported replaces the one from the client.
        session.fencing = {**self._units_in_use(session), **session.attached}
        session.attached = {}
        session.probed = None  # probes of the live session do not count
        self._forget_empty(session)
        self._probe(session)  # fences it on the connected ones of these units
        self._remove_if_done(session)
        self._schedule_check(state.now + state.heartbeat_s)

    def _units_in_use(self, session: Session) -> dict[int, str]:
        """Return the units where the session has reservations or pins, each with the session's lock path ("" if it
        cannot be local there)."""
        unit_of = self.state.extents.units
        units: set[int] = set()
        for reservation in session.reservations.values():
            units.update(unit_of[reservation.extents()].tolist())
        for pinned in session.pins.values():
            units.update(unit_of[pinned].tolist())
        return {unit: self._lock_path_for(session, unit) for unit in sorted(units)}

    def _lock_path_for(self, session: Session, unit: int) -> str:
        """Return the lock path of a session that may have attached to this unit, "" if it cannot have."""
        return session.lock_path if self.state.units[unit].host == session.host else ""

    def _free_held_on(self, session: Session, unit: int) -> None:
        """Free what the session holds on this unit, which it can no longer access. A piece of a reservation is (first,
        last, extent, offset)."""
        extents = self.state.extents
        for reservation in session.reservations.values():
            on_unit = [
                [piece for piece in column if extents.units[piece.extent] == unit] for column in reservation.pieces
            ]
            if not any(on_unit):
                continue
            others = [
                [piece for piece in column if extents.units[piece.extent] != unit] for column in reservation.pieces
            ]
            extents.free(np.array([piece.extent for column in on_unit for piece in column], np.int32))
            reservation.pieces = others
            reservation.broken = True
        for call_id, pinned in list(session.pins.items()):
            is_on_unit = extents.units[pinned] == unit
            extents.unpin(pinned[is_on_unit])
            session.pins[call_id] = pinned[~is_on_unit]
        if not session.live:
            self._forget_empty(session)

    def _forget_empty(self, session: Session) -> None:
        """Remove the reservations and pins of an ending session that hold no bytes."""
        session.reservations = {n: reserved for n, reserved in session.reservations.items() if any(reserved.pieces)}
        session.pins = {n: pinned for n, pinned in session.pins.items() if len(pinned)}

    def _remove_if_done(self, session: Session) -> None:
        """Remove an ended session that no unit has to fence any longer."""
        if session.live or session.fencing:
            return
        assert not session.reservations, session.reservations
        assert not session.pins, session.pins
        del self.state.sessions[session.session_id]
        self.state.several_hosts = None
        self.nonces.pop(session.nonce, None)

    def restarted(self) -> None:
        """Begin a new epoch of the service, in which no session is overdue. If the end of the log was lost, the
        ids of sessions opened there are not used again."""
        self.opened = max(self.opened, self.state.epoch // SESSIONS_APART_NS)
        for session in self.state.sessions.values():
            self._record_heartbeat(session)
            session.probed = None
        self._schedule_check(self.state.now + self.state.heartbeat_s)

    # --- units

    def unit_back(self, unit: int) -> None:
        """Order a unit that came back to fence ended sessions again, and probe silent ones. Sessions, local or not,
        keep their bytes there until they release them or a unit proves their end, also in a new epoch of the unit: a
        client may have learned that epoch after it received the location of its bytes and before it used them."""
        for session in list(self.state.sessions.values()):
            if unit in session.fencing:
                self._fence(session, unit, session.fencing[unit])
            elif session.silent and unit in session.attached:
                self._probe(session)

    def unit_dropped(self, unit: int) -> None:
        """Forget what sessions held on a unit whose extents are about to be removed. A piece of a reservation is
        (first, last, extent, offset)."""
        extents = self.state.extents
        for session in list(self.state.sessions.values()):
            session.attached.pop(unit, None)
            for reservation in session.reservations.values():
                kept = [
                    [piece for piece in column if extents.units[piece.extent] != unit] for column in reservation.pieces
                ]
                if kept != reservation.pieces:
                    reservation.pieces = kept
                    reservation.broken = True
            for call_id, pinned in list(session.pins.items()):
                session.pins[call_id] = pinned[extents.units[pinned] != unit]
            session.fencing.pop(unit, None)
            if not session.live:
                self._forget_empty(session)
                self._remove_if_done(session)

    # --- checking sessions

    def probe_silent(self) -> None:
        """Probe every session that missed a heartbeat or is ending, because a put needs space."""
        state = self.state
        for session in state.sessions.values():
            is_silent = session.silent or state.now - session.heard > state.heartbeat_s
            if (is_silent or not session.live) and self._probe_due(session):
                self._probe(session)

    def check_sessions(self, gap: float) -> None:
        """Probe silent and ending sessions, and end those that timed out. Called when `next_look`
        is reached, which it sets again. `gap` is the time between the last two ticks."""
        state = self.state
        self.next_look = float("inf")
        for session in list(state.sessions.values()):
            if not session.live:
                if self._probe_due(session):
                    self._probe(session)
                if session.probed is not None:
                    self._schedule_check(session.probed + state.heartbeat_s)
            elif session.silent or state.now - session.heard >= 2 * state.heartbeat_s:
                self._check_silent(session, gap)
            else:
                self._schedule_check(session.heard + 2 * state.heartbeat_s)
        if self.next_look <= state.now:  # in the past: an ended session could not be probed now
            self.next_look = state.now + state.heartbeat_s

    def _check_silent(self, session: Session, gap: float) -> None:
        """Probe a silent session. End it if no unit can prove it alive and its timeout is over. If the ledger was
        paused (`gap` between ticks longer than a heartbeat), the session gets one more heartbeat first."""
        state = self.state
        if self._reachable_units(session):
            if self._probe_due(session):
                self._probe(session)
            assert session.probed is not None
            self._schedule_check(session.probed + state.heartbeat_s)
            return
        overdue = session.heard + state.session_timeout_s
        if state.now < overdue:
            self._schedule_check(overdue)
        elif gap > state.heartbeat_s and session.suspected is None:
            # The ledger was paused too, and messages of the client may still be in transit.
            session.suspected = state.now
            self._schedule_check(state.now + state.heartbeat_s)
        # Without a pause of the ledger, or after the one more heartbeat.
        elif session.suspected is None or state.now >= session.suspected + state.heartbeat_s:
            self.end(session, f"its client was silent for {state.now - session.heard:.1f} s")
        else:
            self._schedule_check(session.suspected + state.heartbeat_s)

    def _reachable_units(self, session: Session) -> dict[int, str]:
        """Return the connected units that can check the session (if it is live) or owe proof of its end, each with the
        session's lock path."""
        units = self.state.units
        where = session.attached if session.live else session.fencing  # unit -> lock path
        return {unit: path for unit, path in where.items() if unit in units and units[unit].connected}

    def _probe_due(self, session: Session) -> bool:
        return session.probed is None or self.state.now >= session.probed + self.state.heartbeat_s

    def _probe(self, session: Session) -> None:
        """Order the connected units that can prove the session's state to fence it. A unit does not fence a live
        session, whose lock is held."""
        reachable = self._reachable_units(session)
        if reachable:
            session.probed = self.state.now
        for unit, path in reachable.items():
            self._fence(session, unit, path)

    def _fence(self, session: Session, unit: int, lock_path: str) -> None:
        self._order_fence(session.session_id, unit, lock_path)

    def _order_fence(self, session: int, unit: int, lock_path: str) -> None:
        """Order the unit to fence the session, together with all ended sessions with ids between its neighbours
        that still exist. The unit then remembers no more ranges of ids than there are sessions."""
        existing = sorted(self.state.sessions)
        before = bisect_left(existing, session)
        after = bisect_right(existing, session)
        first = existing[before - 1] + 1 if before else 1
        last = existing[after] - 1 if after < len(existing) else max(self.opened, session)
        self.state.out.append(FenceSession(unit=unit, session=session, lock_path=lock_path, first=first, last=last))

    def _schedule_check(self, when: float) -> None:
        self.next_look = min(self.next_look, when)
