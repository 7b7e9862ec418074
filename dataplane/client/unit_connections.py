"""The connections of one session to the storage units: which unit by shared memory, which by ZMQ, and the bytes over
them.

Everything here blocks and runs inside a `Work` step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.config import DataPlaneConfig
from dataplane.core import failpoints
from dataplane.core.buffer_pool import BufferPool
from dataplane.core.fan_out import Together
from dataplane.core.row_copy import CopyRuns, Run, copy_runs
from dataplane.data.columns import EncodedColumn, RowSource
from dataplane.errors import ClientClosedError, ServiceRestartedError, SessionExpiredError, StorageUnitError
from dataplane.ledger import commands as c
from dataplane.protocol.fd_limits import OF_A_CONTEXT, enough_for
from dataplane.storage.arena import MappedArena
from dataplane.storage.client import Received, UnitConnection
from dataplane.storage.session_lock import SessionLock
from dataplane.storage.transport.registry import client_transport

log = logging.getLogger(__name__)

UNITS_AT_ONCE = 16
"""A session reads from, or writes to, so many remote units at the same time, besides one for each call."""

Bytes = npt.NDArray[np.uint8]


class Pinned(np.ndarray[Any, np.dtype[np.uint8]]):
    """Read-only arena bytes that a user may hold on to. Views of it keep it alive, and it keeps the pin alive."""

    guard: object | None = None


class UnitConnections:
    """Connections of one session to storage units, made when first needed. Thread-safe.

    session: the session's number; lock: the file lock that proves to units that it is alive, on this host (None: never
    local); memory: where remote reads are received. copier: copies long runs into local arenas.
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
        self._left: dict[int, int] = {}
        self._doubted: set[int] = set()
        self._unstopped: dict[int, dict[int, int]] = {}
        self._asking_again = False
        self._guard = threading.Lock()
        self._shaking_hands = threading.Lock()
        self._closed = False
        self._together = Together(UNITS_AT_ONCE)

    def learn(self, units: Iterable[c.UnitInfo]) -> None:
        """Take in the service's list of units; a connection to an earlier epoch of one is dropped, and so is one to a
        unit that the service has no more. Blocks while calls under way on such a one end."""
        listed = {info.unit: info for info in units}
        # Numbers grow: a list from before a unit joined ends below it.
        newest = max(listed, default=0)
        with self._guard:
            gone = [unit for unit in self._infos if unit < newest and unit not in listed]
            stale = [self._connections.pop(unit) for unit in gone if unit in self._connections]
            for unit in gone:
                del self._infos[unit]
                self._left.pop(unit, None)
                self._doubted.discard(unit)
            for info in listed.values():
                known = self._infos.get(info.unit)
                if known is not None and known.epoch != info.epoch and info.unit in self._connections:
                    stale.append(self._connections.pop(info.unit))
                    self._left[info.unit] = known.epoch
                self._infos[info.unit] = info
                self._doubted.discard(info.unit)
        for connection in stale:
            connection.close()

    def unknown(self, units: Iterable[int]) -> bool:
        """Whether one of `units` has not been learned yet, or failed since: it may have another epoch by now."""
        return any(unit not in self._infos or unit in self._doubted for unit in units)

    def backed(self, located: Sequence[c.FieldLocations]) -> bool:
        """Whether these places are in memory that their units have now, as far as this process can see: to touch what a
        unit has given back would take memory again, and where there is none it would kill the process."""
        for unit in units_of(located):
            arena = self._arena(unit)
            if arena is None:
                continue  # the unit looks itself
            for field in located:
                here = field.units == unit
                ends = field.offsets[here] + field.lengths[here] * field.spec.unit_bytes
                if len(ends) and int(ends.max()) > arena.backed_bytes:
                    return False
        return True

    def epochs(self, units: Iterable[int]) -> dict[int, int]:
        """The lives of these units, as they were learned last."""
        return {unit: self._infos[unit].epoch for unit in units if unit in self._infos}

    def lives(self, epochs: Mapping[int, int]) -> bool:
        """Whether each of these units is in that epoch, connected, and has not failed since."""
        return all(
            unit in self._connections and unit not in self._doubted and self._lives(unit, epoch)
            for unit, epoch in epochs.items()
        )

    def _lives(self, unit: int, epoch: int) -> bool:
        """Whether the unit is in that epoch, as far as is known."""
        info = self._infos.get(unit)
        return info is not None and info.epoch == epoch

    def connection(self, unit: int) -> UnitConnection:
        """The connection to `unit`; the first call shakes hands. Blocks up to the connect timeout."""
        found = self._connections.get(unit)
        if found is not None:
            return found
        with self._shaking_hands:
            while (found := self._connections.get(unit)) is None:
                self._connect(unit)
            return found

    def _connect(self, unit: int) -> None:
        """Shake hands; the outcome is kept unless another epoch of the unit was learned of meanwhile."""
        if self._closed:
            raise ClientClosedError()
        info = self._infos.get(unit)
        if info is None:
            raise _unlisted(unit)
        with enough_for(info.name, least=OF_A_CONTEXT):
            made = UnitConnection(
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
            wanted = not self._closed and self._lives(unit, info.epoch)
            if wanted:
                self._connections[unit] = made
        if not wanted:
            made.close()
        if self._closed:
            raise ClientClosedError()

    def local_unit(self) -> int | None:
        """A unit whose arena is mapped here; None before anything was written or read there."""
        return next((unit for unit, found in list(self._connections.items()) if found.local), None)

    def mapped(self, units: Iterable[int]) -> bool:
        """Whether the arenas of these units are mapped here, not to be fsynced: copies wait for nobody."""
        found = [self._connections.get(unit) for unit in units]
        return all(each is not None and each.local and not each.info.fsynced for each in found)

    def write(
        self,
        placements: Sequence[c.Placement],
        columns: Sequence[EncodedColumn],
        reservation: int,
        unfinished: set[int],
    ) -> None:
        """Copy the columns' values to where they were placed: one copy each by shared memory, frames otherwise.

        reservation: the number of the Allocate call that reserved the places. unfinished: however this ends, holds the
        units that may still carry out writes of it, which `stop` ends.

        Returns when every byte is in its arena. Raises `StorageUnitError`, `ServiceRestartedError` (a unit has another
        epoch), `SessionExpiredError`, `CallTimeoutError`.
        """
        with self._watching({placement.unit for placement in placements}):
            self._write(placements, columns, reservation, unfinished)

    def _write(
        self,
        placements: Sequence[c.Placement],
        columns: Sequence[EncodedColumn],
        reservation: int,
        unfinished: set[int],
    ) -> None:
        remote: dict[int, tuple[list[int], list[list[Any]]]] = {}
        written: dict[int, list[tuple[int, int]]] = {}
        later: list[Run] = []
        for placement in placements:
            column = columns[placement.column]
            arena = self._arena(placement.unit)
            if arena is not None:
                size = column.bytes_of(placement.first, placement.last)
                failpoints.hit("put.mid_copy")
                column.write(placement.first, placement.last, arena.writable(placement.offset, size), later)
                written.setdefault(placement.unit, []).append((placement.offset, size))
            else:
                offsets, buffers = remote.setdefault(placement.unit, ([], []))
                offsets.append(placement.offset)
                buffers.append(column.buffers(placement.first, placement.last))
        self._copier(later)
        for unit, ranges in written.items():
            self._force(unit, ranges)
        if remote:
            self._send(remote, reservation, unfinished)

    def _send(
        self, remote: dict[int, tuple[list[int], list[list[Any]]]], reservation: int, unfinished: set[int]
    ) -> None:
        """Write to all of these units at the same time."""

        def send(unit: int) -> None:
            offsets, buffers = remote[unit]
            connection = self.connection(unit)
            unfinished.add(unit)
            connection.write(offsets, buffers, reservation=reservation, timeout_s=self._config.call_timeout_s)
            unfinished.discard(unit)

        self._together.run([partial(send, unit) for unit in remote])

    def _force(self, unit: int, ranges: list[tuple[int, int]]) -> None:
        """Where rows are to outlive their machine, force those written into the mapped arena to the disk."""
        connection = self.connection(unit)
        if not connection.info.fsynced or connection.arena is None:
            return
        failpoints.hit("put.before_force")
        try:
            connection.arena.force(*zip(*ranges, strict=True))
        except OSError as error:
            raise StorageUnitError(unit=unit, endpoint=str(connection.arena.path), why=str(error)) from error

    def stop(self, reservation: int, unfinished: set[int]) -> None:
        """Make the `unfinished` units refuse every write of the reservation; those that will are taken from the set.

        Blocks up to the connect timeout for each unit. A unit that does not acknowledge stays in the set, with a
        warning in the log: the space must then stay reserved until it is among `settled`.
        """
        epochs = self.epochs(unfinished)
        try:
            self._stop(reservation, unfinished)
        finally:
            if unfinished:
                with self._guard:
                    self._unstopped[reservation] = {unit: epochs.get(unit, 0) for unit in unfinished}

    def settled(self) -> list[int]:
        """Reservations that `stop` could not stop and that nobody can write to any more, each once: every unit in
        question has confirmed it since, or has another epoch by now, which takes no frame meant for an earlier one.
        Those that did neither are asked again meanwhile, in a thread of its own."""
        if not self._unstopped:
            return []
        with self._guard:
            over = [
                reservation
                for reservation, epochs in self._unstopped.items()
                if not any(self._lives(unit, epoch) for unit, epoch in epochs.items())
            ]
            for reservation in over:
                del self._unstopped[reservation]
            ask = bool(self._unstopped) and not self._asking_again and not self._closed
            self._asking_again = self._asking_again or ask
        if ask:
            threading.Thread(target=self._stop_again, name="tq-stop-again", daemon=True).start()
        return over

    def _stop_again(self) -> None:
        """Ask once more; a unit that does not answer is left for the next time."""
        silent: set[int] = set()
        try:
            with self._guard:
                waiting = [(number, unit) for number, epochs in self._unstopped.items() for unit in epochs]
            for reservation, unit in waiting:
                if unit not in silent and not self._confirms(unit, reservation):
                    silent.add(unit)
                elif unit not in silent:
                    with self._guard:
                        self._unstopped.get(reservation, {}).pop(unit, None)
        finally:
            with self._guard:
                self._asking_again = False

    def _confirms(self, unit: int, reservation: int) -> bool:
        try:
            self.connection(unit).stop_put(reservation, self._config.connect_timeout_s)
        except (SessionExpiredError, ServiceRestartedError):
            return True
        except Exception as error:
            log.debug("storage unit %d does not confirm yet that put %d is stopped: %s", unit, reservation, error)
            return False
        return True

    def _stop(self, reservation: int, unfinished: set[int]) -> None:
        for unit in sorted(unfinished):
            try:
                self.connection(unit).stop_put(reservation, self._config.connect_timeout_s)
            except (SessionExpiredError, ServiceRestartedError) as error:
                log.info("unit %d takes no write of this session any more: %s", unit, error)
            except BaseException as error:
                log.warning(
                    "storage unit %d did not confirm that it dropped what is left of a failed put (call %d of session "
                    "%d): %s; the put's space stays reserved until it does, has another epoch, or this client closes",
                    unit,
                    reservation,
                    self._session,
                    str(error) or type(error).__name__,
                )
                if not isinstance(error, Exception):
                    raise
                continue
            unfinished.discard(unit)

    def gather(
        self, located: Sequence[c.FieldLocations], units: set[int], *, guard: object | None = None
    ) -> dict[str, RowSource]:
        """Where each field's rows are in this process's memory: the mapped arenas themselves, or received buffers.

        units: `units_of(located)`. With `guard`, local buffers keep it alive for as long as anything views them. Raises
        as `write`.
        """
        with self._watching(units):
            return self._gather(located, units, guard)

    def _gather(
        self, located: Sequence[c.FieldLocations], units: set[int], guard: object | None
    ) -> dict[str, RowSource]:
        arena = self._arena(min(units)) if len(units) == 1 else None
        if arena is not None:
            whole = [_readable(arena, guard)]
            return {field.name: RowSource(field.spec, whole, None, field.offsets, field.lengths) for field in located}
        buffers: list[Bytes] = []
        which = [np.zeros(len(field.units), np.int32) for field in located]
        ours = [False] * len(located)
        offsets = [field.offsets.copy() for field in located]
        remote: list[int] = []
        for unit in sorted(units):
            arena = self._arena(unit)
            if arena is not None:
                for field, places in zip(located, which, strict=True):
                    places[field.units == unit] = len(buffers)
                buffers.append(_readable(arena, guard))
            else:
                remote.append(unit)
        if remote:
            fetched = self._together.run([partial(self._fetch, unit, located) for unit in remote])
            for rows, received in fetched:
                _enter(rows, received, buffers, which, offsets, ours)
        return {
            field.name: RowSource(field.spec, buffers, places, starts, field.lengths, received)
            for field, places, starts, received in zip(located, which, offsets, ours, strict=True)
        }

    @contextlib.contextmanager
    def _watching(self, units: set[int]) -> Iterator[None]:
        """Whichever of the units fails is asked about before it is used again; the loss of a connection to an earlier
        epoch of one is told as what it is."""
        try:
            yield
        except (StorageUnitError, ServiceRestartedError):
            self._doubted.update(units)
            raise
        except ClientClosedError:
            for unit in units & self._left.keys():
                raise ServiceRestartedError(
                    expected_epoch=self._left[unit], got_epoch=self._infos[unit].epoch, what=f"storage unit {unit}"
                ) from None
            for unit in units - self._infos.keys():
                raise _unlisted(unit) from None
            raise

    def _arena(self, unit: int) -> MappedArena | None:
        """The mapped arena of a unit on this host; None where the connection is remote."""
        connection = self.connection(unit)
        return connection.arena if connection.local else None

    def _fetch(self, unit: int, located: Sequence[c.FieldLocations]) -> tuple[list[npt.NDArray[np.intp]], Received]:
        """Which rows of each field `unit` holds, and all of them, received in one read, each field into a buffer of its
        own."""
        rows = [np.flatnonzero(field.units == unit) for field in located]
        received = self.connection(unit).read(
            np.concatenate([field.offsets[chosen] for field, chosen in zip(located, rows, strict=True)]),
            np.concatenate([field.lengths[r] * field.spec.unit_bytes for field, r in zip(located, rows, strict=True)]),
            columns=[len(chosen) for chosen in rows],
            timeout_s=self._config.call_timeout_s,
        )
        return rows, received

    def close(self) -> None:
        """Close every connection; mappings that living views need stay until those are gone."""
        with self._guard:
            self._closed = True
            connections, self._connections = list(self._connections.values()), {}
            self._left.clear()
        for connection in connections:
            connection.close()
        self._together.close()
        if self._transport is not None:
            self._transport.close()


def _unlisted(unit: int) -> StorageUnitError:
    return StorageUnitError(unit=unit, endpoint="?", why="the service does not list it (any more)")


def _enter(
    rows: Sequence[npt.NDArray[np.intp]],
    received: Received,
    buffers: list[Bytes],
    which: list[npt.NDArray[np.int32]],
    offsets: list[c.Int64s],
    ours: list[bool],
) -> None:
    """Enter the buffers that were received and where in them each row is, and which fields may keep theirs."""
    first = 0
    for column, chosen in enumerate(rows):
        last = first + len(chosen)
        which[column][chosen] = received.which[first:last] + len(buffers)
        offsets[column][chosen] = received.offsets[first:last]
        ours[column] = not received.shared and len(chosen) == len(which[column])
        first = last
    buffers.extend(received.buffers)


def chosen(located: c.FieldLocations, which: npt.NDArray[Any] | slice) -> c.FieldLocations:
    """Some of the values."""
    return c.FieldLocations(
        name=located.name,
        spec=located.spec,
        units=located.units[which],
        offsets=located.offsets[which],
        lengths=located.lengths[which],
        checksums=None if located.checksums is None else located.checksums[which],
    )


def units_of(located: Sequence[c.FieldLocations]) -> set[int]:
    """The units that hold any of the rows."""
    # Columns of one put lie in the same units, row by row: their bytes are compared instead of looked through.
    distinct = {field.units.tobytes(): field.units for field in located}
    return {unit for units in distinct.values() for unit in set(units.tolist())}


def _readable(arena: MappedArena, guard: object | None) -> Bytes:
    """The whole arena, read-only; with `guard`, an array that keeps it alive."""
    whole = arena.readonly(0, arena.capacity_bytes)
    if guard is None:
        return whole
    pinned = whole.view(Pinned)
    pinned.guard = guard
    return pinned
