"""Commands that change a whole partition, and reports of storage units about themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    LimitError,
    SchemaError,
    ServiceRestartedError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.allocation.placement import MAX_BYTES
from dataplane.ledger.allocation.reservations import RETRY_S, Reservations
from dataplane.ledger.liveness import Liveness
from dataplane.ledger.samples.commit import check_tags
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedClaim, Session, check_limit
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit


class Partitions:
    """Executes the commands that change a whole partition. `removed_task_error` creates the error for a parked claim
    whose task a `Register` removed. The methods that take (session, call_id, command) execute call `call_id` of that
    session."""

    def __init__(self, state: State, removed_task_error: Callable[[ParkedClaim], DataPlaneError]) -> None:
        self.state = state
        self.removed_task_error = removed_task_error

    def register(self, session: Session, call_id: int, command: c.Register) -> c.Done:
        """Create a partition, or replace the registration of an existing one; with `extend`, only add to that."""
        state = self.state
        self.check(command)
        partition = state.partitions.get(command.partition)
        if partition is not None and command.extend:
            return self._extend(partition, command)
        if partition is None:
            count = len(state.partitions) + 1
            check_limit("partitions", count, state.limits.partitions, "Clear partitions that are no longer needed.")
            partition = state.partitions[command.partition] = Partition(command.partition, state.extents, state.leases)
        _check_live_fields(partition, command)
        partition.register(command)
        # The new policy may evict samples: protect those that puts in progress name.
        for put in state.unfinished_puts(partition):
            state.protect_targets(put)
        # Budget and policy may have changed: evaluate waiting puts, and `pressed`, again.
        partition.outlook = None
        account_id = partition.account.account_id
        state.extents.freed = True
        state.extents.loosened.add(account_id)
        state.extents.moved.add(account_id)
        if partition.budget_bytes is None:
            state.budgeted.pop(account_id, None)
            partition.account.pressed = False
        else:
            state.budgeted[account_id] = partition
        for parked in state.waiting_claims(partition):
            if parked.command.task not in partition.tasks:
                state.unpark(parked, self.removed_task_error(parked))
        state.touch(partition)
        return c.Done()

    def _extend(self, partition: Partition, command: c.Register) -> c.Done:
        """Add all missing fields and tasks, or none. No call waits for them, so none is evaluated again."""
        limit = self.state.limits.columns
        of_partition = f"of partition {partition.name!r}"
        fields = partition.fields.keys() | command.fields.keys()
        tasks = partition.tasks.keys() | {*command.tasks}
        check_limit(f"fields {of_partition}", len(fields), limit, "Use several partitions.")
        check_limit(f"tasks {of_partition}", len(tasks), limit, "Use several partitions.")
        partition.extend(command)
        return c.Done()

    def check(self, command: c.Register) -> None:
        """Raise InvalidRequestError or LimitError for a name, count or size that no partition can have."""
        state = self.state
        state.check_name("partition", command.partition)
        for name in command.fields:
            state.check_name("field", name)
        for name in command.tasks:
            state.check_name("task", name)
        if len(set(command.tasks)) != len(command.tasks):
            raise InvalidRequestError(
                f"consumer_tasks names a task twice: {list(command.tasks)[:8]}; name each task once"
            )
        limit = state.limits.columns
        of_partition = f"of partition {command.partition!r}"
        check_limit(f"fields {of_partition}", len(command.fields), limit, "Declare fewer, or use several partitions.")
        check_limit(f"tasks {of_partition}", len(command.tasks), limit, "Declare fewer, or use several partitions.")
        check_limit(f"enumerations {of_partition}", len(command.enums or ()), limit, "Declare fewer.")
        if command.num_samples is not None and command.num_samples < 0:
            raise InvalidRequestError(f"num_samples={command.num_samples}: expected 0 or more, or None")
        if command.group_size is not None and command.group_size < 1:
            raise InvalidRequestError(f"grpo_group_size={command.group_size}: expected 1 or more, or None")
        if command.budget_bytes is not None and not 1 <= command.budget_bytes <= MAX_BYTES:
            raise InvalidRequestError(f"budget_bytes={command.budget_bytes}: expected 1 to {MAX_BYTES}, or None")

    def seal(self, session: Session, call_id: int, command: c.Seal) -> c.Done:
        partition = self.state.partition(command.partition)
        partition.sealed = True
        self.state.touch(partition)
        return c.Done()

    def clear(self, session: Session, call_id: int, command: c.Clear) -> c.Cleared:
        """Clear the named samples that still exist. With `samples=None`, drop the whole partition, if it exists."""
        state = self.state
        if command.samples is not None:
            partition = state.partition(command.partition)
            state.check_samples(command.samples)
            rows = partition.resolve_living(command.samples)
            partition.clear(rows)
            state.touch(partition)
            return c.Cleared(count=len(rows))
        dropped = state.partitions.get(command.partition)
        return c.Cleared(count=0 if dropped is None else state.drop(dropped))

    def set_tags(self, session: Session, call_id: int, command: c.SetTags) -> c.Done:
        """Set tags of the samples, all of which must exist."""
        state = self.state
        partition = state.partition(command.partition)
        state.check_samples(command.samples)
        rows = partition.resolve(command.samples)
        check_tags(state, partition, command.tags, len(rows))
        partition.tags.merge(rows, command.tags)
        if partition.watches:
            partition.notify_watches(rows)
        partition.record_write(session.session_id, session.name, state.now)
        state.touch(partition)
        return c.Done()

    def set_version(self, session: Session, call_id: int, command: c.SetVersion) -> c.Done:
        """Set the trainer's version, with which waiting claims with `max_lag` are evaluated again."""
        partition = self.state.partition(command.partition)
        partition.version = command.version
        # The conditions of claims with `max_lag` depend on the version: all samples must be counted again.
        for watch in partition.watches.values():
            if watch.command.max_lag is not None:
                watch.reset()
        self.state.touch(partition)
        return c.Done()


class UnitReports:
    """Handles what storage units report about themselves: offers of arenas, losses and growth; also drops units.
    `cookies`: unit ids by cookie, with which a unit names its arena; `added`: the last unit id given out.
    The other attributes are the parts of the ledger that
    reports concern: growth (`reservations`), sessions (`liveness`)."""

    def __init__(self, state: State, reservations: Reservations, liveness: Liveness) -> None:
        self.state = state
        self.reservations = reservations
        self.liveness = liveness
        self.cookies: dict[str, int] = {}
        self.added = 0

    def add(self, item: c.AddUnit) -> None:
        """Handle the offer of an arena by a new unit, or by one that comes back."""
        known = self.state.units.get(self.cookies.get(item.cookie, 0))  # no unit has id 0
        if known is not None:
            self._add_again(known, item)
            return
        # A unit that already has an id comes from an earlier state of this service.
        if item.unit:
            error = ServiceRestartedError(
                expected_epoch=item.epoch,
                got_epoch=self.state.epoch,
                what="the service",
                lost=f"storage unit {item.unit} ({item.name}) and its rows",
            )
            self.state.out.append(c.UnitAdded(cookie=item.cookie, error=error))
            return
        if not self._drop_previous(item):
            return
        try:
            self._check_limits(item)
        except LimitError as error:
            self.state.out.append(c.UnitAdded(cookie=item.cookie, error=error))
            return
        self.added += 1
        unit = Unit(self.added, item, self.state.reserve_fraction)
        self.state.units[unit.unit_id] = unit
        self.state.several_hosts = None
        self.cookies[item.cookie] = unit.unit_id
        self._announce(unit)

    def _check_limits(self, item: c.AddUnit) -> None:
        """Raise LimitError for one unit too many, or an offer with too long texts."""
        limits = self.state.limits
        what = "of one storage unit"
        check_limit("storage units", len(self.state.units) + 1, limits.units, "Start fewer units with larger arenas.")
        for name in (item.name, item.host, item.cookie):
            check_limit(f"characters of a name {what}", len(name), limits.id_bytes, "Give it a shorter name.")
        check_limit(f"endpoints {what}", len(item.endpoints), limits.columns, "Use fewer endpoints.")
        for path in (item.arena_path, *item.endpoints):
            check_limit(f"characters of a path {what}", len(path), limits.path_bytes, "Use a shorter --arena-dir.")

    def _add_again(self, unit: Unit, item: c.AddUnit) -> None:
        """Handle a unit that comes back with the arena that it had. A rejected offer changes nothing."""
        refused = None
        # An offer in the same epoch needs the loss of the connection before it, or the unit's id.
        is_back = not unit.connected or item.unit == unit.unit_id
        if item.epoch < unit.epoch or (item.epoch == unit.epoch and not is_back):
            refused = (
                f"its arena is already registered as that of storage unit {unit.unit_id}, in epoch {unit.epoch}; "
                "another process may run this unit"
            )
        elif item.capacity_bytes != unit.offer.capacity_bytes or item.backed_bytes < unit.space.backed_bytes:
            refused = (
                f"storage unit {unit.unit_id} returned with an arena of {item.capacity_bytes:,} bytes, "
                f"{item.backed_bytes:,} of them backed by memory; before, it had {unit.offer.capacity_bytes:,} and "
                f"{unit.space.backed_bytes:,}"
            )
        if refused:
            error = InvalidRequestError(f"storage unit {item.name!r} cannot be registered: {refused}")
            self.state.out.append(c.UnitAdded(cookie=item.cookie, error=error))
            return
        unit.offer = item
        unit.connected = True
        unit.awaited = False
        unit.record_backing(item.backed_bytes)
        self.state.extents.moved.add(0)  # the unit's limit may have changed
        self._announce(unit)
        self.liveness.unit_back(unit.unit_id)

    def _drop_previous(self, item: c.AddUnit) -> bool:
        """Drop the arena that this unit had before (named by `instead_of`, else see `_previous_units`), with its rows.
        If the named arena is connected, reject the offer and return False."""
        previous = self.state.units.get(self.cookies.get(item.instead_of, 0))
        if previous is not None and previous.connected:
            why = (
                f"storage unit {item.name!r} cannot be registered: the arena that it reports as lost is connected as "
                f"storage unit {previous.unit_id}"
            )
            self.state.out.append(c.UnitAdded(cookie=item.cookie, error=InvalidRequestError(why)))
            return False
        lost_units = self._previous_units(item) if previous is None else [previous]
        for lost in lost_units:
            self._drop(lost, self._rows_by_partition(lost.unit_id))
        return True

    def _previous_units(self, item: c.AddUnit) -> list[Unit]:
        """Return the lost units that the offering unit may have been, if it has lost its arena and cannot name it:
        those of its name, on its host if there are any."""
        if not item.anew:
            return []
        units = [unit for unit in self.state.units.values() if unit.offer.name == item.name and not unit.connected]
        on_host = [unit for unit in units if unit.host == item.host]
        return on_host or units

    def _rows_by_partition(self, unit: int) -> list[tuple[Partition, c.Int64s]]:
        return [(partition, self._rows_on(partition, unit)) for partition in self.state.partitions.values()]

    def _announce(self, unit: Unit) -> None:
        """Confirm the offer to the unit, and give its space to waiting puts."""
        self.state.out.append(c.UnitAdded(cookie=unit.offer.cookie, unit=unit.unit_id))
        self.reservations.grow_ahead(unit)
        self.state.recheck_all_puts()

    def lost(self, item: c.UnitLost) -> None:
        """Handle the loss of the connection to a unit. Its rows are kept. A pending order to grow is void."""
        unit = self.state.units.get(item.unit)
        if unit is not None:
            unit.connected = False
            unit.asked = 0
            self.state.recheck_all_puts()

    def grown(self, item: c.Grown) -> None:
        """Handle a unit's report about its backing after an order to grow."""
        unit = self.state.units.get(item.unit)
        if unit is not None:
            unit.record_backing(item.backed_bytes, item.error or "")
            unit.retry_at = self.state.now + RETRY_S  # of growth, if it failed
            self.reservations.grow_ahead(unit)
            self.state.extents.freed = True
            self.state.extents.moved.add(0)  # the unit's limit has changed

    def drop(self, item: c.DropUnit) -> None:
        """Handle the input `DropUnit`: drop the unit and output the result."""
        error = None
        try:
            self._drop_or_refuse(item.unit, force=item.force)
        except InvalidRequestError as refused:
            error = refused
        self.state.out.append(c.UnitDropped(unit=item.unit, error=error))

    def forget(self, session: Session, call_id: int, command: c.Forget) -> c.Done:
        self._drop_or_refuse(command.unit, force=command.force)
        return c.Done()

    def _drop_or_refuse(self, unit_id: int, *, force: bool) -> None:
        """Drop the unit. Raises InvalidRequestError if live rows lie on it and `force` is not set."""
        unit = self.state.unit(unit_id)
        rows_on_unit = self._rows_by_partition(unit_id)
        count = sum(len(rows) for _, rows in rows_on_unit)
        if count and not force:
            raise InvalidRequestError(
                f"storage unit {unit_id} holds values of {count} live samples; drain it, clear these samples, or drop "
                "it with force, which loses them"
            )
        self._drop(unit, rows_on_unit)

    def _drop(self, unit: Unit, rows_on_unit: list[tuple[Partition, c.Int64s]]) -> None:
        """Drop the unit with its rows, its orders, and everything that sessions hold there."""
        state = self.state
        for partition, rows in rows_on_unit:
            partition.clear_lost(rows, f"with storage unit {unit.unit_id} ({unit.offer.name})")
            state.touch(partition)
        self.liveness.unit_dropped(unit.unit_id)  # before the extents, which sessions refer to, are removed
        state.extents.drop_unit(unit.unit_id)
        del state.units[unit.unit_id]
        state.recheck_all_puts()
        state.several_hosts = None
        del self.cookies[unit.offer.cookie]

    def _rows_on(self, partition: Partition, unit: int) -> c.Int64s:
        """Return the partition's live rows that have a cell on the unit."""
        rows = partition.rows.in_order()
        on_unit = np.zeros(len(rows), np.bool_)
        for field in partition.fields.values():
            extents = field.extents[rows]
            on_unit |= (extents > 0) & (self.state.extents.units[extents] == unit)
        return rows[on_unit]


def _check_live_fields(partition: Partition, command: c.Register) -> None:
    """Raise SchemaError if a new spec does not accept what live rows have."""
    for name, spec in command.fields.items():
        field = partition.fields.get(name)
        if field is not None and field.live and not spec.accepts(field.spec):
            raise SchemaError(
                partition=partition.name,
                field=name,
                got=f"a declaration of {spec}",
                expected=f"{field.spec}, as its live rows are",
                hint="Clear the field's live rows first.",
            )
