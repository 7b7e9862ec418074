"""Reads of rows: where they are in mapped arenas, and transfers of the others into buffers of this process.

Also selections of the locations of the samples' values, and their storage units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.core.cuda_memory import DeviceBuffer
from dataplane.core.fan_out import Together
from dataplane.data.columns import InnerPart, RowSource
from dataplane.ledger import commands as c
from dataplane.storage.arena import HEADER_BYTES
from dataplane.storage.client import UnitConnection
from dataplane.storage.mapped_arena import MappedArena
from dataplane.storage.transport.read_plans import Received

Bytes = npt.NDArray[np.uint8]


class Pinned(np.ndarray[Any, np.dtype[np.uint8]]):
    """Read-only arena bytes that a user may keep. Views of it keep it alive, and it keeps the pin alive."""

    guard: object | None = None


class Connections(Protocol):
    """The connections of a session to storage units. Both methods open the connection if needed; their errors are
    raised. together: runs the calls to several units in parallel. timeout_s: of a call."""

    @property
    def together(self) -> Together: ...
    @property
    def timeout_s(self) -> float: ...
    def arena(self, unit: int) -> MappedArena | None: ...
    def connection(self, unit: int) -> UnitConnection: ...


def gather(
    connections: Connections,
    located: Sequence[c.FieldLocations],
    units: set[int],
    guard: object | None,
    parts: Mapping[str, InnerPart],
    on_device: bool,
) -> dict[str, RowSource]:
    """See `UnitConnections.gather`."""
    readable = _device_buffer if on_device else partial(_readable, guard=guard)
    arena = connections.arena(min(units)) if len(units) == 1 else None  # `min`: the only unit
    if arena is not None:  # one arena holds all rows (`which` is None): their offsets are valid as they are
        whole = [readable(arena)]
        return {
            field.name: _source(field, whole, None, field.offsets, parts.get(field.name), arenas=1) for field in located
        }
    # All fields share `buffers`. For each field: the buffer index and offset of each row (`which`, `offsets`), and
    # whether its buffer holds nothing else (`owned`).
    buffers: list[Bytes] = []
    which = [np.zeros(len(field.units), np.int32) for field in located]
    owned = [False] * len(located)
    offsets = [field.offsets.copy() for field in located]  # `_add_received` changes them
    remote: list[int] = []
    for unit in sorted(units):
        arena = connections.arena(unit)
        if arena is not None:
            for field, field_which in zip(located, which, strict=True):
                field_which[field.units == unit] = len(buffers)
            buffers.append(readable(arena))
        else:
            remote.append(unit)
    arenas = len(buffers)
    if remote:
        reads = [partial(_fetch, connections, unit, located, parts) for unit in remote]
        for fetched in connections.together.run(reads):
            for columns, rows, received in fetched:
                _add_received(columns, rows, received, buffers, which, offsets, owned)
    return {
        field.name: _source(
            field, buffers, field_which, field_offsets, parts.get(field.name), arenas=arenas, ours=field_owned
        )
        for field, field_which, field_offsets, field_owned in zip(located, which, offsets, owned, strict=True)
    }


def _fetch(
    connections: Connections, unit: int, located: Sequence[c.FieldLocations], parts: Mapping[str, InnerPart]
) -> list[tuple[list[int], list[npt.NDArray[np.intp]], Received]]:
    """Read all values that `unit` holds: in one call, each field into its own buffer, and in one call for each
    field that is read in parts. Return for each call the positions of its fields in `located`, for each of these
    the rows that were read, and the result: the rows of the first field, then those of the second, ..."""
    connection, timeout_s = connections.connection(unit), connections.timeout_s
    rows = [np.flatnonzero(field.units == unit) for field in located]
    whole = [column for column, field in enumerate(located) if field.name not in parts]
    fetched = []
    if whole:
        sizes = [located[column].lengths[rows[column]] * located[column].spec.unit_bytes for column in whole]
        received = connection.read(
            np.concatenate([located[column].offsets[rows[column]] for column in whole]),
            np.concatenate(sizes),
            columns=[len(rows[column]) for column in whole],
            timeout_s=timeout_s,
        )
        fetched.append((whole, [rows[column] for column in whole], received))
    for column, (field, field_rows) in enumerate(zip(located, rows, strict=True)):
        if field.name in parts:
            inner = parts[field.name].bytes
            received = connection.read_slices(
                field.offsets[field_rows], field.lengths[field_rows], inner, timeout_s=timeout_s
            )
            fetched.append(([column], [field_rows], received))
    return fetched


def _source(
    field: c.FieldLocations,
    buffers: Sequence[Bytes],
    which: npt.NDArray[np.int32] | None,
    offsets: c.Int64s,
    part: InnerPart | None,
    *,
    arenas: int,
    ours: bool = False,
) -> RowSource:
    """Return the source of a field whose values, or parts of them, are in these buffers. arenas: number of arenas; they
    are the first buffers."""
    if part is None:
        return RowSource(field.spec, buffers, which, offsets, field.lengths, ours)
    return RowSource(part.spec, buffers, which, offsets, field.lengths, ours, part=part, arenas=arenas)


def _add_received(
    columns: Sequence[int],
    rows: Sequence[npt.NDArray[np.intp]],
    received: Received,
    buffers: list[Bytes],
    which: list[npt.NDArray[np.int32]],
    offsets: list[c.Int64s],
    owned: list[bool],
) -> None:
    """Append the received buffers to `buffers`. Enter the location of each received row in `which` and `offsets`, and
    in `owned` whether the field has its buffer for itself. `_fetch` returns `columns` and `rows` with `received`."""
    first = 0
    for column, column_rows in zip(columns, rows, strict=True):
        last = first + len(column_rows)
        which[column][column_rows] = received.which[first:last] + len(buffers)
        offsets[column][column_rows] = received.offsets[first:last]
        # True only if this one unit sent every row of the field, in a buffer that is not a slice of a common frame.
        owned[column] = not received.shared and len(column_rows) == len(which[column])
        first = last
    buffers.extend(received.buffers)


def _device_buffer(arena: MappedArena) -> Bytes:
    """Return the whole arena for reads of a GPU."""
    registration = arena.registration()
    if registration is None:
        return arena.readonly(0, arena.capacity_bytes)
    buffer = arena.writable(0, arena.capacity_bytes).view(DeviceBuffer)
    buffer.registration, buffer.before_bytes = registration, HEADER_BYTES
    return buffer


def _readable(arena: MappedArena, guard: object | None) -> Bytes:
    """Return the whole arena, read-only; with `guard`, as an array that keeps `guard` alive."""
    whole = arena.readonly(0, arena.capacity_bytes)
    if guard is None:
        return whole
    pinned = whole.view(Pinned)
    pinned.guard = guard
    return pinned


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
