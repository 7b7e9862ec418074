"""Which rows get checksums, and which of them a reader is to compare with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int32s, Int64s, UInt32s
from dataplane.ledger.fields import Field
from dataplane.ledger.sessions import Session
from dataplane.ledger.state import State
from dataplane.ledger.units import Unit
from dataplane.types import Checksums


def are_wanted(state: State, session: Session, units: Iterable[Unit]) -> bool:
    """Whether what the session writes to these units is to have checksums."""
    match state.checksums:
        case Checksums.ALWAYS:
            return True
        case Checksums.NEVER:
            return False
    return state.spread() or any(not _near(session, unit) for unit in units)


def _near(session: Session, unit: Unit) -> bool:
    """Whether the session maps the unit's arena, or may: it says so before its first copy only."""
    return unit.number in session.attached or (bool(session.lock_path) and session.host == unit.host)


def to_compare(state: State, session: Session, checksums: UInt32s, units: Int32s) -> UInt32s | None:
    """Those of the checksums of rows on these units that their reader is to compare with: all, unless what it maps
    needs none."""
    if state.checksums is Checksums.NEVER:
        return None
    if state.checksums is Checksums.ACROSS_HOSTS and session.attached.keys() >= set(np.unique(units).tolist()):
        return None
    return checksums


def checksums_of(field: Field | None, rows: Int64s) -> UInt32s | None:
    """The checksum of each row's cell (0: none); None if none of them has one. Row -1 has none."""
    if field is None or field.checksums is None:
        return None
    found = np.where((rows >= 0) & (field.extents[rows] > 0), field.checksums[rows], 0).astype(np.uint32)
    return found if found.any() else None
