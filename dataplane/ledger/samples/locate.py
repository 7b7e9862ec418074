"""Read-only commands: locations of samples, contents of partitions, statistics of the service."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import numpy as np

from dataplane.core.schema import columns_of, earlier_columns
from dataplane.core.types import Checksums, FieldSpec
from dataplane.errors import FieldNotProducedError, InvalidRequestError
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.budgets import budget_limit
from dataplane.ledger.samples.inspection import task_stats
from dataplane.ledger.state.arrays import every, first_true, some
from dataplane.ledger.state.extents import LIVE, RESERVED, RETIRED
from dataplane.ledger.state.fields import Field, cells_of, checksums_of
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import SPLIT, Session, check_limit
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

Cells = tuple[c.Int32s, c.Int64s, c.Int64s]
"""A result of `cells_of`: extents, offsets and lengths."""


class Reads:
    """Executes the read-only commands: Locate, List, Describe, Units and Stats. `Locate` pins the
    extents of the cells, so that their bytes stay in place until the session releases the call, or
    if it is brief confirms it. The methods that take (session, call_id, command) execute call
    `call_id` of that session."""

    def __init__(self, state: State) -> None:
        self.state = state

    def locate(self, session: Session, call_id: int, command: c.Locate) -> c.Located:
        """Locate and pin every cell of the samples and fields. If anything is missing, nothing is pinned. With
        `missing_ok`, missing cells are not an error."""
        partition = self.state.partition(command.partition)
        self.state.check_samples(command.samples)
        check_limit("fields in one command", len(command.fields), self.state.limits.columns, SPLIT)
        if command.missing_ok:
            return self._locate_existing(session, call_id, command, partition)
        # Samples before fields: a field that only cleared samples had is unknown, which would hide the cause.
        rows = partition.resolve(command.samples)
        for name in command.fields:
            partition.field(name)
        located: list[c.FieldLocations] = []
        hidden: list[c.FieldLocations] = []
        to_pin: set[int] = set()
        for name in command.fields:
            for column, field, cells in self._present_cells(partition, name, rows):
                locations = self._locations(session, column, field, rows, cells)
                (located if column == name else hidden).append(locations)
                to_pin |= _distinct(cells[0])
        if len(rows) and located:
            to_pin.discard(0)  # of rows without a cell in a hidden column
            pinned = np.array(sorted(to_pin), np.int32)
            self.state.pin(session, call_id, pinned, brief=command.brief)
        return c.Located(
            fields=(*located, *hidden),
            rows=rows.copy(),
            generations=partition.generations_of(rows),
            widened=tuple(name for name in command.fields if partition.fields[name].widened),
        )

    def _locate_existing(self, session: Session, call_id: int, command: c.Locate, partition: Partition) -> c.Located:
        """Locate and pin the cells that exist: those of the fields, then those of their hidden columns (`columns_of`)
        that some of the rows have. An id without a sample has row -1; a stale handle is an error."""
        ids = command.samples.ids
        rows = partition.resolve(command.samples).copy() if ids is None else partition.rows.find(ids)
        located: list[c.FieldLocations] = []
        to_pin: list[c.Int32s] = []
        hidden = [column for name in command.fields for column in columns_of(name)[1:] if column in partition.fields]
        for name in (*command.fields, *hidden):
            field = partition.fields.get(name)
            extents, offsets, lengths = cells_of(field, rows)
            if name in hidden and not extents.any():
                continue
            spec = FieldSpec() if field is None else field.spec
            units = self.state.extents.units[extents]
            # The caller derives rows with new checksums from these, so it must verify the old ones.
            checksums = checksums_of(field, rows)
            located.append(
                c.FieldLocations(
                    name=name, spec=spec, units=units, offsets=offsets, lengths=lengths, checksums=checksums
                )
            )
            to_pin.append(extents[extents > 0])
        pinned = np.unique(np.concatenate(to_pin)) if to_pin else np.zeros(0, np.int32)
        self.state.pin(session, call_id, pinned, brief=command.brief)
        # Generation 0 for samples that do not exist. A partition without rows has no table of generations.
        generations = (
            np.where(rows >= 0, partition.generations_of(rows), 0) if partition.rows.capacity else np.zeros_like(rows)
        )
        return c.Located(
            fields=tuple(located),
            rows=rows,
            generations=generations,
            widened=tuple(
                name for name in command.fields if name in partition.fields and partition.fields[name].widened
            ),
        )

    def _present_cells(self, partition: Partition, name: str, rows: c.Int64s) -> list[tuple[str, Field, Cells]]:
        """Return (column, its state, cells of the rows) of the field's own column and of those columns of its earlier
        kinds that some of the rows have. Raises FieldNotProducedError if a row has a cell in none of them."""
        own = partition.fields[name]
        present = [(name, own, cells_of(own, rows))]
        missing = present[0][2][0] == 0
        if not some(missing):
            return present
        for column in earlier_columns(name):
            field = partition.fields.get(column)
            if field is not None and field.live and some(field.extents[rows]):
                present.append((column, field, cells_of(field, rows)))
                missing &= field.extents[rows] == 0
        if some(missing):
            positions = first_true(missing)
            names = partition.rows.names_of(rows[positions])
            raise FieldNotProducedError(
                field=name, partition=partition.name, samples=names, total=int(missing.sum()), positions=positions
            )
        return present

    def _locations(self, session: Session, name: str, field: Field, rows: c.Int64s, cells: Cells) -> c.FieldLocations:
        """Return the locations of the rows' cells in one column; a row without a cell has length -1."""
        extents, offsets, lengths = cells
        units = self.state.extents.units[extents]
        checksums = checksums_of(field, rows)
        return c.FieldLocations(
            name=name,
            spec=field.spec,
            units=units,
            offsets=offsets,
            lengths=lengths,
            checksums=None if checksums is None else _checksums_to_compare(self.state, session, checksums, units),
        )

    def list_samples(self, session: Session, call_id: int, command: c.List) -> c.Listed:
        """List the named samples, or the partition's oldest ones up to the limit (None: all), with their tags and the
        fields that all of them have."""
        partition = self.state.partition(command.partition)
        if command.limit is not None and (command.samples is not None or command.limit < 0):
            raise InvalidRequestError(f"limit={command.limit}: must be 0 or more, and cannot be combined with samples")
        if command.samples is None:
            rows = partition.rows.in_order()[: command.limit]
            ids = partition.rows.oldest(command.limit)
        else:
            self.state.check_samples(command.samples)
            rows = partition.resolve(command.samples).copy()
            ids = command.samples.ids or partition.rows.names_of(rows)
        return c.Listed(
            ids=ids,
            rows=rows,
            generations=partition.generations_of(rows),
            fields=partition.common_fields(rows),
            tags=partition.tags.of(rows, shared=True),
        )

    def describe(self, session: Session, call_id: int, command: c.Describe) -> c.Described:
        """Return the schema, the tasks and the size of a partition."""
        partition = self.state.partition(command.partition)
        # A field may exist only in its hidden column: then an empty field stands for the missing one.
        known = {name: partition.fields.get(name) or Field(declared=None, capacity=0) for name in partition.names()}
        return c.Described(
            partition=partition.name,
            fields={
                name: field.spec
                for name, field in known.items()
                if field.declared is not None or partition.columns_of(name)
            },
            strict=partition.strict,
            tasks=tuple(partition.tasks),
            num_samples=partition.num_samples,
            group_size=partition.group_size,
            sealed=partition.sealed,
            live=partition.rows.live,
            undeclared=tuple(name for name, field in known.items() if field.declared is None),
            open=tuple(name for name, field in known.items() if field.open),
            widened=tuple(name for name, field in known.items() if field.widened),
        )

    def units(self, session: Session, call_id: int, command: c.Units) -> c.UnitList:
        return c.UnitList(units=tuple(unit.info() for unit in self.state.units.values()))

    def stats(self, command: c.Stats) -> c.StatsReport:
        """Return the statistics of the units, the sessions, and the named partitions (none named: of all), up to the
        limit on partitions."""
        state = self.state
        if command.limit < 0:
            raise InvalidRequestError(f"limit={command.limit}: must be 0 (for all) or more")
        partitions = map(state.partition, command.partitions) if command.partitions else state.partitions.values()
        return c.StatsReport(
            epoch=state.epoch,
            now=state.now,
            units=tuple(self._unit_stats(unit) for unit in state.units.values()),
            partitions=tuple(map(self._partition_stats, itertools.islice(partitions, command.limit or None))),
            sessions=tuple(self._session_stats(each) for each in state.sessions.values()),
            waiting_allocations=sum(1 for _ in state.all_puts()),
            low_watermark=state.watermarks[0],
            high_watermark=state.watermarks[1],
            partition_count=len(state.partitions),
        )

    def _unit_stats(self, unit: Unit) -> c.UnitStats:
        extents = self.state.extents
        extent_ids = extents.of_unit(unit.unit_id)
        states = extents.states[extent_ids]
        sizes = extents.sizes[extent_ids]
        return c.UnitStats(
            unit=unit.unit_id,
            name=unit.offer.name,
            host=unit.host,
            connected=unit.connected,
            capacity_bytes=unit.space.capacity_bytes,
            unbacked_bytes=unit.space.capacity_bytes - unit.space.backed_bytes,
            free_bytes=unit.space.free_bytes,
            reserved_bytes=int(sizes[states == RESERVED].sum()),
            live_bytes=int(sizes[states == LIVE].sum()),
            retired_bytes=int(sizes[states == RETIRED].sum()),
            pinned_bytes=int(sizes[extents.pins[extent_ids] > 0].sum()),
            used_bytes=unit.used_bytes,
            peak_used_bytes=unit.peak_bytes,
            limit_bytes=unit.limit(update=False),
            pressed=unit.pressed,
            problem=unit.growth_problem(self.state.now),
            extents=len(extent_ids),
            fragments=unit.space.fragments,
            largest_free_bytes=unit.space.largest_bytes,
            draining=unit.draining,
        )

    def _session_stats(self, session: Session) -> c.SessionStats:
        # Silent: the connection with its heartbeats ended, or no contact for two heartbeats, after which
        # `Liveness` probes it.
        silent_s = max(0.0, self.state.now - session.heard)
        is_silent = session.live and (session.silent or silent_s >= 2 * self.state.heartbeat_s)
        return c.SessionStats(
            session=session.session_id,
            name=session.name,
            host=session.host,
            state="silent" if is_silent else str(session.state),
            silent_s=silent_s,
            parked=len(session.parked),
            reservations=len(session.reservations),
            pins=len(session.pins),
        )

    def _partition_stats(self, partition: Partition) -> c.PartitionStats:
        account = partition.account
        evicted = partition.evicted
        return c.PartitionStats(
            partition=partition.name,
            live=partition.rows.live,
            born=partition.born,
            num_samples=partition.num_samples,
            sealed=partition.sealed,
            live_bytes=account.live_bytes,
            produced={name: sum(each.live for each in partition.columns_of(name)) for name in partition.names()},
            claimed={name: task.claimed for name, task in partition.tasks.items()},
            waiting_claims=sum(len(watch.waiters) for watch in partition.watches.values()),
            version=partition.version,
            dropped=partition.dropped_partial,
            used_bytes=account.used_bytes,
            peak_used_bytes=account.peak_bytes,
            budget_bytes=partition.budget_bytes,
            limit_bytes=budget_limit(self.state, partition, update=False),
            when_full=partition.when_full,
            evicted=evicted.consumed,
            evicted_unconsumed=evicted.unconsumed,
            waiting_puts=len(self.state.waiting_puts(partition)),
            pressed=account.pressed,
            tasks=tuple(task_stats(partition, task) for task in partition.tasks.values()),
        )


def _distinct(extents: c.Int32s) -> set[int]:
    """Return the distinct extents. Those of a column are often all the same, as values of one
    put."""
    if len(extents) and every(extents == extents[0]):
        return {int(extents[0])}
    return set(extents.tolist())


def _checksums_to_compare(state: State, session: Session, checksums: c.UInt32s, units: c.Int32s) -> c.UInt32s | None:
    """Return the checksums, or None if the session need not compare those of rows on these
    units."""
    return checksums if compares_checksums(state, session, units) else None


def compares_checksums(state: State, session: Session, units: c.Int32s) -> bool:
    """Whether the session must compare checksums when it reads rows on these units: with policy
    ALWAYS, and with ACROSS_HOSTS unless it has attached to (mapped) all of the units."""
    if state.checksums is Checksums.ACROSS_HOSTS:
        return not _all_in(units, session.attached)
    return state.checksums is Checksums.ALWAYS


def _all_in(units: c.Int32s, attached: Collection[int]) -> bool:
    """Whether all of the units are attached. If all are the same unit, as usual, one lookup
    decides."""
    if len(units) and int(units[0]) in attached and every(units == units[0]):
        return True
    return all(unit in attached for unit in np.unique(units).tolist())
