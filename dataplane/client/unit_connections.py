"""A session's connections to storage units, and the transfer of row bytes. All functions block, inside `Work` steps."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataplane.config import DataPlaneConfig
from dataplane.core import devices
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.cuda_memory import DeviceBuffer, copying
from dataplane.core.devices import CPU
from dataplane.core.failpoints import failpoint
from dataplane.core.helpers import Helpers
from dataplane.core.row_copy import CopyRuns, Run, copy_runs
from dataplane.data.columns import EncodedColumn, InnerPart, RowSource
from dataplane.errors import ClientClosedError, ServiceRestartedError, SessionExpiredError, StorageUnitError
from dataplane.ledger import commands as c
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for
from dataplane.storage.arena import HEADER_BYTES
from dataplane.storage.client import UnitConnection
from dataplane.storage.mapped_arena import MappedArena
from dataplane.storage.session_lock import SessionLock
from dataplane.storage.transport.read_plans import Received
from dataplane.storage.transport.registry import client_transport

log = logging.getLogger(__name__)

UNITS_AT_ONCE = 16
"""Number of remote units that a session reads from or writes to in parallel, besides one for each call."""

NO_PARTS: Mapping[str, InnerPart] = {}

Bytes = npt.NDArray[np.uint8]


class UnitConnections:
    """Connections of one session to storage units, created on first use. Thread-safe: `_guard` protects the dicts and
    sets for a moment, and `_handshake` is held during a handshake, so that each unit gets one connection.

    session: the session's id. lock: the file lock that proves to units on this host that the client runs (None:
    all connections are remote). memory: buffers for remote reads. copier: copies long runs into local arenas.

    `_infos`: the units as last listed by the service. `_replaced`: the earlier epoch, whose connection was closed after
    a restart.
    """

    def __init__(
        self,
        config: DataPlaneConfig,
        *,
        session: int,
        lock: SessionLock | None,
        memory: BufferPool,
        copier: CopyRuns = copy_runs,
    ) -> None:
        self._config = config
        self._session = session
        self._lock = lock
        self._memory = memory
        self._copier = copier
        self._transport = client_transport(config)
        self._infos: dict[int, c.UnitInfo] = {}
        self._connections: dict[int, UnitConnection] = {}
        self._replaced: dict[int, int] = {}
        self._suspects: set[int] = set()  # units of a read or write that failed since they were last listed
        # Reservation -> unit -> epoch (0: unknown), for units that have not confirmed that they reject its writes.
        self.unstopped: dict[int, dict[int, int]] = {}
        self._stopping_again = False  # whether the thread of `_stop_again` runs
        self._guard = threading.Lock()
        self._handshake = threading.Lock()
        self._closed = False
        self.together = Helpers(UNITS_AT_ONCE)
        self.timeout_s = config.call_timeout_s

    def learn(self, units: Iterable[c.UnitInfo]) -> None:
        """Apply the service's list of units. Connections to an earlier epoch of a unit and to removed units are
        closed. Block until calls on such a connection have ended."""
        listed = {info.unit: info for info in units}
        # Unit ids only grow. A unit above the highest listed id is newer than the list, so it is kept.
        newest = max(listed, default=0)
        with self._guard:
            if self._closed:
                return
            removed = [unit for unit in self._infos if unit < newest and unit not in listed]
            stale = [self._connections.pop(unit) for unit in removed if unit in self._connections]
            for unit in removed:
                del self._infos[unit]
                self._replaced.pop(unit, None)
                self._suspects.discard(unit)
            for info in listed.values():
                known = self._infos.get(info.unit)
                if known is not None and known.epoch != info.epoch and info.unit in self._connections:  # it restarted
                    stale.append(self._connections.pop(info.unit))
                    self._replaced[info.unit] = known.epoch
                self._infos[info.unit] = info
                self._suspects.discard(info.unit)
        for connection in stale:  # without `_guard`, because this waits for calls
            connection.close()

    def unknown(self, units: Iterable[int]) -> bool:
        """Return whether any of `units` is unknown, or has failed since it was learned: its epoch may have changed."""
        return any(unit not in self._infos or unit in self._suspects for unit in units)

    def epochs(self, units: Iterable[int]) -> dict[int, int]:
        """Return the last known epochs of these units."""
        return {unit: self._infos[unit].epoch for unit in units if unit in self._infos}

    def host_of(self, unit: int) -> str | None:
        """Return the host of the unit, as `UnitInfo.host`; None if the unit is not known."""
        info = self._infos.get(unit)
        return None if info is None else info.host

    def _is_current(self, unit: int, epoch: int) -> bool:
        """Return whether this is the last known epoch of the unit."""
        info = self._infos.get(unit)
        return info is not None and info.epoch == epoch

    def connection(self, unit: int) -> UnitConnection:
        """Return the connection to `unit`. The first call performs the handshake, after those of other threads, and
        blocks up to the connect timeout."""
        connection = self._connections.get(unit)
        if connection is not None:
            return connection
        with self._handshake:
            # Repeated, because `_connect` stores nothing if the unit restarted during the handshake.
            while (connection := self._connections.get(unit)) is None:
                self._connect(unit)
            return connection

    def _connect(self, unit: int) -> None:
        """Perform the handshake and store the connection. Discard it if another epoch of the unit was learned in the
        meantime. Raise `StorageUnitError` for an unknown unit, `ClientClosedError` after `close`."""
        if self._closed:
            raise ClientClosedError()
        info = self._infos.get(unit)
        if info is None:
            raise _unlisted(unit)
        with enough_for(info.name, least=OF_A_CONTEXT):  # files that this process may open
            connection = UnitConnection(
                info,
                session=self._session,
                lock=self._lock,
                token=self._config.secret(),
                force_remote=self._config.force_remote,
                timeout_s=self._config.connect_timeout_s,
                memory=self._memory,
                transport=self._transport,
            )
        with self._guard:
            usable = not self._closed and self._is_current(unit, info.epoch)
            if usable:
                self._connections[unit] = connection
        if not usable:
            connection.close()
        if self._closed:  # closed during the handshake
            raise ClientClosedError()

    def local_unit(self) -> int | None:
        """Return a unit whose arena is mapped by this process; None before the first read or write of such a unit."""
        return next((unit for unit, connection in list(self._connections.items()) if connection.local), None)

    def mapped(self, units: Iterable[int]) -> bool:
        """Return whether the arenas of these units are mapped, so that copies do not block."""
        connections = [self._connections.get(unit) for unit in units]
        return all(each is not None and each.local for each in connections)

    def capacity_of(self, unit: int) -> int:
        """Return the bytes of a known unit's arena."""
        return self._infos[unit].capacity_bytes

    def readable_memory(self, unit: int) -> Bytes | None:
        """Return the bytes of the unit's arena, read-only, if it is mapped, else None. The array keeps the mapping
        alive."""
        connection = self._connections.get(unit)
        arena = None if connection is None or not connection.local else connection.arena
        return None if arena is None else arena.readable_memory

    def mapped_memory(self, unit: int, end: int) -> Bytes | None:
        """Return the bytes of the unit's arena if it is mapped and has at least `end` bytes, else None. The array keeps
        the mapping alive. Write to it only where the session holds a reservation."""
        connection = self._connections.get(unit)
        arena = None if connection is None or not connection.local else connection.arena
        if arena is None:
            return None
        memory = arena.writable_memory
        return None if memory is None or end > len(memory) else memory

    def write(
        self,
        placements: Sequence[c.Placement],
        columns: Sequence[EncodedColumn],
        reservation: int,
        unfinished: set[int],
    ) -> None:
        """Copy the columns' values to their placements: with a single copy into shared memory, or in ZMQ frames.

        reservation: id of the Allocate call that reserved the space. unfinished: receives the units that, on
        return or error, may still execute writes of the reservation; `stop` ends these.

        Return when every byte is in its arena. Raise `StorageUnitError`, `ServiceRestartedError` (a unit has
        another epoch), `SessionExpiredError`, `CallTimeoutError`.
        """
        with self._handling_errors({placement.unit for placement in placements}):
            self._write(placements, columns, reservation, unfinished)

    def _write(
        self,
        placements: Sequence[c.Placement],
        columns: Sequence[EncodedColumn],
        reservation: int,
        unfinished: set[int],
    ) -> None:
        """Copy the values for mapped arenas directly and send all others."""
        # remote: unit -> offsets and, for each offset, the buffers to send.
        remote: dict[int, tuple[list[int], list[list[Any]]]] = {}
        # Long runs, which `column.write` does not copy itself: the copier may copy them in parallel.
        later: list[Run] = []
        on_device = [column.values.device for column in columns]
        for placement in placements:
            column = columns[placement.column]
            arena = self.arena(placement.unit)
            if arena is not None:
                size = column.bytes_of(placement.first, placement.last)
                failpoint("put.mid_copy")
                target = arena.writable(placement.offset, size)
                device = on_device[placement.column]
                with contextlib.nullcontext() if device == CPU else _access(arena, placement.offset + size, device):
                    column.write(placement.first, placement.last, target, later)
            else:
                offsets, buffers = remote.setdefault(placement.unit, ([], []))
                offsets.append(placement.offset)
                buffers.append(column.buffers(placement.first, placement.last))
        self._copier(later)
        if remote:
            self._send(remote, reservation, unfinished)

    def _send(
        self, remote: dict[int, tuple[list[int], list[list[Any]]]], reservation: int, unfinished: set[int]
    ) -> None:
        """Write to all of these units in parallel. remote: unit -> offsets and, for each offset, its buffers."""

        def send(unit: int) -> None:
            offsets, buffers = remote[unit]
            connection = self.connection(unit)
            unfinished.add(unit)  # it stays if the write fails: the unit may execute it later
            connection.write(offsets, buffers, reservation=reservation, timeout_s=self.timeout_s)
            unfinished.discard(unit)

        self.together.run([partial(send, unit) for unit in remote])

    def stop(self, reservation: int, unfinished: set[int]) -> None:
        """Make the `unfinished` units reject every write of the reservation. Units that confirm are removed from
        the set.

        Block up to the connect timeout for each unit. A unit that does not confirm stays in the set and a warning
        is logged: the space must then stay reserved until `take_settled` returns the reservation.
        """
        epochs = self.epochs(unfinished)  # read first: a unit that restarts during the stop counts as settled
        try:
            self._stop(reservation, unfinished)
        finally:  # also after an interrupt
            if unfinished:
                with self._guard:
                    self.unstopped[reservation] = {unit: epochs.get(unit, 0) for unit in unfinished}

    def take_settled(self) -> list[int]:
        """Remove and return the reservations that `stop` could not stop but that no put can write to now: every
        unit has since confirmed, or has another epoch and thus rejects frames for an earlier one. A background
        thread retries the stop at the remaining units."""
        if not self.unstopped:  # the usual case, without the lock
            return []
        with self._guard:
            settled = [
                reservation
                for reservation, epochs in self.unstopped.items()
                if not any(self._is_current(unit, epoch) for unit, epoch in epochs.items())  # the unconfirmed units
            ]
            for reservation in settled:
                del self.unstopped[reservation]
            start_thread = bool(self.unstopped) and not self._stopping_again and not self._closed
            if start_thread:
                self._stopping_again = True
        if start_thread:
            threading.Thread(target=self._stop_again, name="tq-stop-again", daemon=True).start()
        return settled

    def _stop_again(self) -> None:
        """Retry the stops of `unstopped` and remove the units that confirm. A unit that does not
        respond is retried after the next call of `take_settled`."""
        silent: set[int] = set()
        try:
            with self._guard:
                unstopped = self.unstopped.items()
                unconfirmed = [(call_id, unit) for call_id, epochs in unstopped for unit in epochs]
            for reservation, unit in unconfirmed:
                if unit in silent:  # waiting for it again would only take another timeout
                    continue
                if self._confirms_stop(unit, reservation):
                    with self._guard:  # `take_settled` may have removed the reservation
                        self.unstopped.get(reservation, {}).pop(unit, None)
                else:
                    silent.add(unit)
        finally:
            with self._guard:
                self._stopping_again = False

    def _confirms_stop(self, unit: int, reservation: int) -> bool:
        """Ask the unit to stop the put. Return whether it confirms that it rejects writes of the reservation."""
        try:
            self.connection(unit).stop_put(reservation, self._config.connect_timeout_s)
        except (SessionExpiredError, ServiceRestartedError):
            return True  # it rejects all writes of this session
        except Exception as error:
            log.debug("Storage unit %d has not confirmed yet that put %d is stopped: %s", unit, reservation, error)
            return False
        return True

    def _stop(self, reservation: int, unfinished: set[int]) -> None:
        """Ask each unit to stop the put. Remove it from `unfinished` if it confirms, or rejects all writes of the
        session. Log the others."""
        for unit in sorted(unfinished):
            try:
                self.connection(unit).stop_put(reservation, self._config.connect_timeout_s)
            except (SessionExpiredError, ServiceRestartedError) as error:
                log.info("Storage unit %d rejects all writes of this session: %s", unit, error)
            except BaseException as error:
                log.warning(
                    "Storage unit %d did not confirm the stop of a failed put (call %d of session %d): "
                    "%s. The put's space stays reserved until the unit confirms or restarts, or this client closes",
                    unit,
                    reservation,
                    self._session,
                    str(error) or type(error).__name__,
                )
                if not isinstance(error, Exception):
                    raise  # KeyboardInterrupt and the like
                continue
            unfinished.discard(unit)

    def gather(
        self,
        located: Sequence[c.FieldLocations],
        units: set[int],
        *,
        guard: object | None = None,
        parts: Mapping[str, InnerPart] = NO_PARTS,
        on_device: bool = False,
    ) -> dict[str, RowSource]:
        """Return the location of each field's rows in this process's memory: mapped arenas or received buffers.

        units: `units_of(located)`. With `guard`, local buffers keep it alive while any view of them exists. parts: by
        field, the part of each element to read, for fields that are not read whole. on_device: local buffers are
        `DeviceBuffer`s where possible. Raise as `write`.
        """
        with self._handling_errors(units):
            return self._gather(located, units, guard, parts, on_device)

    def _gather(
        self,
        located: Sequence[c.FieldLocations],
        units: set[int],
        guard: object | None,
        parts: Mapping[str, InnerPart],
        on_device: bool,
    ) -> dict[str, RowSource]:
        """See `gather`."""
        readable = _device_buffer if on_device else partial(_readable, guard=guard)
        arena = self.arena(min(units)) if len(units) == 1 else None  # `min`: the only unit
        if arena is not None:  # one arena holds all rows (`which` is None): their offsets are valid as they are
            whole = [readable(arena)]
            return {
                field.name: _source(field, whole, None, field.offsets, parts.get(field.name), whole_buffers=1)
                for field in located
            }
        # All fields share `buffers`. For each field: the buffer index and offset of each row (`which`, `offsets`), and
        # whether its buffer holds nothing else (`owned`).
        buffers: list[Bytes] = []
        which = [np.zeros(len(field.units), np.int32) for field in located]
        owned = [False] * len(located)
        offsets = [field.offsets.copy() for field in located]  # `_add_received` changes them
        remote: list[int] = []
        for unit in sorted(units):
            arena = self.arena(unit)
            if arena is not None:
                for field, field_which in zip(located, which, strict=True):
                    field_which[field.units == unit] = len(buffers)
                buffers.append(readable(arena))
            else:
                remote.append(unit)
        whole_buffers = len(buffers)
        if remote:
            reads = [partial(self._fetch, unit, located, parts) for unit in remote]
            for fetched in self.together.run(reads):
                for columns, rows, received in fetched:
                    _add_received(columns, rows, received, buffers, which, offsets, owned)
        return {
            field.name: _source(
                field,
                buffers,
                field_which,
                field_offsets,
                parts.get(field.name),
                whole_buffers=whole_buffers,
                ours=field_owned,
            )
            for field, field_which, field_offsets, field_owned in zip(located, which, offsets, owned, strict=True)
        }

    def _fetch(
        self, unit: int, located: Sequence[c.FieldLocations], parts: Mapping[str, InnerPart]
    ) -> list[tuple[list[int], list[npt.NDArray[np.intp]], Received]]:
        """Read all values that `unit` holds: in one call, each field into its own buffer, and in one call for each
        field that is read in parts. Return for each call the positions of its fields in `located`, for each of these
        the rows that were read, and the result: the rows of the first field, then those of the second, ..."""
        connection = self.connection(unit)
        timeout_s = self.timeout_s
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

    @contextlib.contextmanager
    def _handling_errors(self, units: set[int]) -> Iterator[None]:
        """Mark all of `units` as suspect if one of them fails. Convert the loss of a connection that `learn` closed
        to an error that names the restarted or removed unit."""
        try:
            yield
        except (StorageUnitError, ServiceRestartedError):
            self._suspects.update(units)
            raise
        except ClientClosedError:
            # Either `learn` closed the connection of a unit, of which the first one is named, or the client was closed.
            for unit in units & self._replaced.keys():
                raise ServiceRestartedError(
                    expected_epoch=self._replaced[unit], got_epoch=self._infos[unit].epoch, what=f"storage unit {unit}"
                ) from None
            for unit in units - self._infos.keys():
                raise _unlisted(unit) from None
            raise

    def arena(self, unit: int) -> MappedArena | None:
        """Return the mapped arena of a unit on this host; None if the connection, opened if needed, is remote."""
        connection = self.connection(unit)
        return connection.arena if connection.local else None

    def close(self) -> None:
        """Close every connection. Mappings that views need stay until the last view is deleted. It can be repeated
        after an interrupt."""
        with self._guard:
            self._closed = True
            self._replaced.clear()
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self._connections.clear()
        self.together.close()
        if self._transport is not None:
            self._transport.close()


@contextlib.contextmanager
def _access(arena: MappedArena, end: int, device: torch.device) -> Iterator[None]:
    """In the body, copies from a CUDA device to the first `end` bytes of the arena need no staging, if CUDA can
    register these. They run on a stream of their own, after the current stream, and are complete after the body."""
    gpu = devices.gpu(device)
    if gpu is None:
        yield
        return
    with copying(gpu, after_current=True):
        registration = arena.registration()
        if registration is not None:
            registration.cover(HEADER_BYTES + end)
        yield


def _unlisted(unit: int) -> StorageUnitError:
    """Return the error for a unit that is missing in the service's list."""
    why = "the service has no storage unit with this id; it may have been dropped"
    return StorageUnitError(unit=unit, endpoint="?", why=why)


class Pinned(np.ndarray[Any, np.dtype[np.uint8]]):
    """Read-only arena bytes that a user may keep. Views of it keep it alive, and it keeps the pin alive."""

    guard: object | None = None


def _source(
    field: c.FieldLocations,
    buffers: Sequence[Bytes],
    which: npt.NDArray[np.int32] | None,
    offsets: c.Int64s,
    part: InnerPart | None,
    *,
    whole_buffers: int,
    ours: bool = False,
) -> RowSource:
    """Return the source of a field whose values, or parts of them, are in these buffers. The first
    `whole_buffers` of them are arenas."""
    if part is None:
        return RowSource(field.spec, buffers, which, offsets, field.lengths, ours)
    return RowSource(part.spec, buffers, which, offsets, field.lengths, ours, part=part, whole_buffers=whole_buffers)


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
    buffer.registration = registration
    buffer.before_bytes = HEADER_BYTES
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
