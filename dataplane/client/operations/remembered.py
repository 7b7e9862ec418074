"""Locations in a meta: which of them a read may copy from before the service confirms them, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.client.operations.sample_names import Names
from dataplane.client.session_state import SessionState
from dataplane.core.types import FieldKind
from dataplane.data.meta import KVBatchMeta
from dataplane.ledger import commands as c


def remembered_locations(
    session_state: SessionState, names: Names, select_fields: Sequence[str]
) -> tuple[c.FieldLocations, ...] | None:
    """Return the locations in the meta, if the fields may be copied from there before the service validates them; else
    None. This requires that the client is connected to these units in the epochs recorded in the meta. Object fields
    are excluded, because their decoder cannot handle bytes that change."""
    if not isinstance(names, KVBatchMeta) or isinstance(select_fields, str) or not names.size:  # `_locate` rejects str
        return None
    if not select_fields or not all(name in names.places for name in select_fields):
        return None
    places = {name: names.places[name] for name in select_fields}
    if any(
        cells.spec.kind is FieldKind.OBJECT or not session_state.connections.connected(cells.epochs)
        for cells in places.values()
    ):
        return None
    return tuple(
        c.FieldLocations(
            name=name,
            spec=cells.spec,
            units=cells.units,
            offsets=cells.offsets,
            lengths=cells.lengths,
            checksums=cells.checksums,
            serials=cells.serials,
        )
        for name, cells in places.items()
    )


def unchanged(remembered: Sequence[c.FieldLocations], found: Sequence[c.FieldLocations]) -> bool:
    """Return whether the remembered locations are still valid, and therefore were valid all the time. Their checksums
    are compared if the service returns some."""
    return all(map(_is_same_location, remembered, found))


def _is_same_location(before: c.FieldLocations, now: c.FieldLocations) -> bool:
    """Return whether two lookups of a field found the same values at the same places. A lookup without serials is
    never the same: only serials show that no value was replaced in between."""
    pairs: list[tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None]] = [
        (before.serials, now.serials),
        (before.offsets, now.offsets),
        (before.units, now.units),
        (before.lengths, now.lengths),
    ]
    if now.checksums is not None:
        pairs.append((before.checksums, now.checksums))
    equal = all(one is not None and other is not None and np.array_equal(one, other) for one, other in pairs)
    return equal and before.spec == now.spec
