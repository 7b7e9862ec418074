"""Policy for checksums: which rows get one from their writer, and which ones a reader compares."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from dataplane.core.types import Checksums
from dataplane.ledger.commands import Int32s, Int64s, UInt32s
from dataplane.ledger.state.arrays import every, some
from dataplane.ledger.state.fields import Field
from dataplane.ledger.state.sessions import Session
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit


def checksums_are_wanted(state: State, session: Session, units: Iterable[Unit]) -> bool:
    """Whether rows that the session writes to these units get checksums."""
    match state.checksums:
        case Checksums.ALWAYS:
            return True
        case Checksums.NEVER:
            return False
    # ACROSS_HOSTS
    return state.spans_several_hosts() or any(not _near(session, unit) for unit in units)


def _near(session: Session, unit: Unit) -> bool:
    """Whether the session has mapped the unit's arena or can map it: it is on the same host and uses shared memory (it
    has a `lock_path`). The mapping is only reported just before the session's first copy."""
    return unit.number in session.attached or (bool(session.lock_path) and session.host == unit.host)


def checksums_to_compare(state: State, session: Session, checksums: UInt32s, units: Int32s) -> UInt32s | None:
    """Return the checksums that the session must compare when it reads rows on these units: all of them, or None.
    None with policy NEVER, and with ACROSS_HOSTS if the session has attached to (mapped) all of the units."""
    if state.checksums is Checksums.NEVER:
        return None
    if state.checksums is Checksums.ACROSS_HOSTS and _all_in(units, session.attached):
        return None
    return checksums


def _all_in(units: Int32s, attached: Collection[int]) -> bool:
    """Whether all of the units are attached. If all are the same unit, as usual, one lookup decides."""
    if len(units) and int(units[0]) in attached and every(units == units[0]):
        return True
    return all(unit in attached for unit in np.unique(units).tolist())


def checksums_of(field: Field | None, rows: Int64s) -> UInt32s | None:
    """Return the checksum of each row's cell (0: none), or None if no cell has one. Row -1 has no cell."""
    if field is None or field.checksums is None:
        return None
    # Row -1 reads the last entry; the condition replaces that by 0.
    found = np.where((rows >= 0) & (field.extents[rows] > 0), field.checksums[rows], 0).astype(np.uint32)
    return found if some(found) else None
