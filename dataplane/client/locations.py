"""Locations of the samples' values: selections of them, and their storage units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from dataplane.ledger import commands as c


def select_values(located: c.FieldLocations, selection: npt.NDArray[Any] | slice) -> c.FieldLocations:
    """Return the locations at these positions (indexes, booleans or a slice)."""
    return c.FieldLocations(
        name=located.name,
        spec=located.spec,
        units=located.units[selection],
        offsets=located.offsets[selection],
        lengths=located.lengths[selection],
        checksums=None if located.checksums is None else located.checksums[selection],
    )


def units_of(located: Sequence[c.FieldLocations]) -> set[int]:
    """Return the units that hold any of the rows."""
    # Columns of one put have equal unit arrays: comparing their bytes is faster than scanning each of them.
    distinct = {field.units.tobytes(): field.units for field in located}
    return {unit for units in distinct.values() for unit in set(units.tolist())}
