"""One partition: its samples, fields, tags and tasks, and the samples that are ready for each
task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from dataplane.core.schema import HIDDEN, columns_of, earlier_columns, field_of
from dataplane.core.types import FieldSpec
from dataplane.errors import FieldNotFoundError, SampleNotFoundError, StaleSampleError, TaskNotFoundError
from dataplane.ledger.commands import Int64s, Register, Samples, WhenFull
from dataplane.ledger.state.arrays import Bools, as_slice, first_true, some
from dataplane.ledger.state.extents import DeadCells, Extents
from dataplane.ledger.state.fields import Field, erase, erase_row
from dataplane.ledger.state.rows import Rows
from dataplane.ledger.state.tags import Tags
from dataplane.ledger.state.tasks import ReadyIndex, Task
from dataplane.ledger.state.tombstones import Evicted, Lost

if TYPE_CHECKING:
    from dataplane.ledger.state.tasks import Leases
    from dataplane.ledger.state.watches import Watch


class Outlook:
    """What eviction could free for waiting puts when an attempt for one of them failed, so that it
    is not attempted again in vain (see `allocation.budgets`)."""

    def __init__(self, at_most: int, gain: tuple[int, int]) -> None:
        # Upper bound of the bytes that evictions can free once no reader pins samples. The rows in
        # `noted` are not counted yet.
        self.at_most = at_most
        # The bytes of the partition, and those in open units, that the eviction of unconsumed samples
        # certainly frees, if the policy allows it; no others can be evicted. None: the partition has
        # changed.
        self.gain: tuple[int, int] | None = gain
        # Rows whose samples may have become evictable, or moved to other extents.
        self.noted: list[Int64s] = []

    def note(self, rows: Int64s) -> None:
        """Note rows whose samples may have become evictable or moved to other extents."""
        self.gain = None
        if len(rows):
            self.noted.append(rows.copy())  # `rows` may be an array of a command

    def take_noted(self) -> Int64s:
        """Remove and return the noted rows, at least one, without repeats."""
        rows = np.unique(np.concatenate(self.noted))
        self.noted = []
        return rows


WRITERS = 16
"""Number of most recent writing sessions that are remembered."""


class Partition:
    """State of one partition. A row is the slot number of a sample in all its tables (see
    `Rows`)."""

    def __init__(self, name: str, extents: Extents, leases: Leases) -> None:
        self.name = name
        # Shared by all partitions.
        self.extents = extents
        self.leases = leases
        # Counts the bytes of the partition's extents.
        self.account = extents.open_account()
        self.rows = Rows()
        self.fields: dict[str, Field] = {}
        self.tags = Tags(0)
        self.tasks: dict[str, Task] = {}
        # The ready samples by task and fields, the most recently used last.
        self.interests: dict[tuple[str, tuple[str, ...]], ReadyIndex] = {}
        # Parked claims by kind.
        self.watches: dict[str, Watch] = {}
        # A step was dealt since the last evaluation of claims that wait for their share.
        self.dealt = False
        # What eviction can free, if an attempt failed and puts wait since.
        self.outlook: Outlook | None = None
        self.num_samples: int | None = None
        self.group_size: int | None = None
        self.enums: dict[str, tuple[str, ...]] = {}
        self.strict = False
        self.budget_bytes: int | None = None
        self.when_full = WhenFull.WAIT
        self.evicted = Evicted()
        # Samples lost with storage units, if any.
        self.lost: Lost | None = None
        # By sample id, the number of active puts that name the sample and so protect it from
        # eviction.
        self.targets: dict[str, int] = {}
        self.sealed = False
        # The whole partition was dropped.
        self.dropped = False
        # The samples that were live at the last Register, and those created since.
        self.born = 0
        # The trainer's version. None: it was never set.
        self.version: int | None = None
        # The number of samples cleared as members of partial groups.
        self.dropped_partial = 0
        # Name and time of the last writing sessions, latest last.
        self.writers: dict[int, tuple[str, float]] = {}
        # Time at which parked claims are evaluated again because the wait for a group ends.
        self.wakes_at = float("inf")
        # The session that staged the partition and has not published it.
        self.owner: int | None = None

    # --- schema and tasks

    @property
    def complete(self) -> bool:
        """Whether all expected samples have been put, or the partition is sealed."""
        return self.sealed or (self.num_samples is not None and self.born >= self.num_samples)

    @property
    def evicts(self) -> bool:
        """Whether samples are evicted when a put finds no space."""
        return self.when_full in (WhenFull.EVICT, WhenFull.EVICT_OLDEST)

    def register(self, command: Register) -> None:
        """Replace schema, size, tasks and budget. Live rows, their tags and the claims of remaining tasks are kept.
        Fields that the command drops are kept, undeclared, while live rows have them. The count of samples (`born`)
        begins again with the live rows, and a seal is lifted."""
        fields: dict[str, Field] = {}
        for name, spec in command.fields.items():
            field = fields[name] = self.fields.get(name) or Field(spec, self.rows.capacity)
            field.declared = spec
            if not field.live:  # else the field keeps the spec by which its rows are stored
                field.settle(spec)
        for name, field in self.fields.items():
            if field.live and name not in fields:
                field.declared = None
                fields[name] = field
        self.fields = fields
        for name, task in self.tasks.items():
            if name not in command.tasks:  # removed below, but `leases` would keep its leases
                task.end_all_leases()
        self.tasks = {name: self.tasks.get(name) or self._new_task(name) for name in command.tasks}
        self.interests = {key: kept for key, kept in self.interests.items() if key[0] in self.tasks}
        self.num_samples = command.num_samples
        self.group_size = command.group_size
        self.strict = command.strict
        self.enums = dict(command.enums or {})
        self.budget_bytes = command.budget_bytes
        self.when_full = command.when_full
        self.sealed = False
        self.born = self.rows.live

    def extend(self, command: Register) -> None:
        """Add the fields and tasks of the command that do not exist yet."""
        for name, spec in command.fields.items():
            if name not in self.fields:
                self.fields[name] = Field(spec, self.rows.capacity)
        for name in command.tasks:
            if name not in self.tasks:
                self.tasks[name] = self._new_task(name)

    def _new_task(self, name: str) -> Task:
        return Task(name, self.rows.capacity, self.leases)

    def task(self, name: str) -> Task:
        """Return the task with this name, or raise `TaskNotFoundError`."""
        task = self.tasks.get(name)
        if task is None:
            raise TaskNotFoundError(partition=self.name, task=name, known=list(self.tasks))
        return task

    def field(self, name: str) -> Field:
        """Return the field with this name, or raise `FieldNotFoundError`."""
        field = self.fields.get(name)
        if field is None:
            raise FieldNotFoundError(partition=self.name, field=name, known=list(self.fields))
        return field

    def determines_kind(self, name: str) -> bool:
        """Whether the schema or a live row determines the field's kind, so that a writer's kind can be compared."""
        field = self.fields.get(name)
        return field is not None and field.spec.kind is not None

    # --- fields of several columns
    # Some rows of a field may be in hidden columns (`schema.columns_of`): variants of its values, and rows that were
    # put before its kind widened. A sample has a cell in at most one column of a field. While a field has live rows of
    # an earlier kind, the column of its name has live rows, too.

    @property
    def is_plain(self) -> bool:
        """Whether there are no hidden columns, as usual."""
        return HIDDEN not in "".join(self.fields)

    def names(self) -> list[str]:
        """Return the names of the fields, without hidden columns."""
        return list(self.fields) if self.is_plain else list(dict.fromkeys(map(field_of, self.fields)))

    def columns_of(self, name: str) -> list[Field]:
        """Return the columns of the field that have live cells."""
        found = map(self.fields.get, columns_of(name))
        return [field for field in found if field is not None and field.live]

    def has(self, name: str, rows: Int64s) -> Bools:
        """Return which of the rows have the field, in any of its columns."""
        own = self.fields.get(name)
        if own is not None and self.is_plain:
            return own.extents[rows] > 0
        has_field = np.zeros(len(rows), np.bool_)
        for field in self.columns_of(name):
            has_field |= field.extents[rows] > 0
        return has_field

    def erase_other_columns(self, column: str, rows: Int64s) -> list[DeadCells]:
        """Erase and return the cells of the rows in the field's other columns, because `column` was
        written for them."""
        name = field_of(column)
        others = [field for field in self.columns_of(name) if field is not self.fields[column]]
        if not others:
            return []
        dead = erase(others, rows)
        self._restore_kind(name)
        return dead

    def widen(self, name: str) -> Field:
        """Begin a new column for the field, whose next rows do not fit its kind, and return it. The present rows stay
        in a hidden column as they are."""
        narrow = self.fields[name]
        wide = Field(narrow.declared, self.rows.capacity)
        wide.widened = True
        wide.writer = narrow.writer
        narrow.declared = None
        self.fields[_earlier_column(name, narrow)] = narrow
        self.fields[name] = wide
        return wide

    def can_widen(self, name: str, spec: FieldSpec) -> bool:
        """Whether a put of values of `spec`, which the field does not accept, widens it."""
        field = self.fields[name]
        if not field.widens_to(spec):
            return False
        hidden = self.fields.get(_earlier_column(name, field))
        return hidden is None or not hidden.live

    def _remove_empty_columns(self) -> None:
        """Remove the columns without cells that the schema does not have, after cells were
        removed."""
        if not self.is_plain:
            for name in self.names():
                self._restore_kind(name)
        self.fields = {name: field for name, field in self.fields.items() if field.live or field.declared is not None}

    def _restore_kind(self, name: str) -> None:
        """If the field's last rows of its present kind are gone, return it to the kind of the remaining ones."""
        wide = self.fields.get(name)
        if wide is None or wide.live:
            return
        for column in earlier_columns(name):
            narrow = self.fields.get(column)
            if narrow is not None and narrow.live:
                del self.fields[column]
                narrow.declared = wide.declared
                self.fields[name] = narrow
                return

    # --- names

    def resolve(self, samples: Samples) -> Int64s:
        """Return the rows of the samples. If some do not exist, raises SampleNotFoundError for samples named by id, and
        StaleSampleError for samples named by row and generation. The error names the first few and tells how many of
        the missing samples were evicted or lost."""
        if samples.ids is not None:
            rows = self.rows.find(samples.ids)
            missing = rows < 0
            if some(missing):
                positions = first_true(missing)
                names = [samples.ids[i] for i in np.flatnonzero(missing).tolist()]
                lost = self.lost or Lost()  # an empty record if no sample was ever lost
                lost_ids = lost.among_ids(names)
                raise SampleNotFoundError(
                    partition=self.name,
                    samples=[samples.ids[i] for i in positions],
                    total=len(names),
                    positions=positions,
                    evicted=len(self.evicted.among_ids(names)),
                    lost=len(lost_ids),
                    causes=lost.causes_of(lost_ids),
                )
            return rows
        assert samples.rows is not None
        assert samples.generations is not None
        stale = ~self.rows.holds(samples.rows, samples.generations)
        if some(stale):
            positions = first_true(stale)
            generations = samples.generations[stale]
            lost = self.lost or Lost()
            lost_ids = lost.among_generations(generations)
            raise StaleSampleError(
                partition=self.name,
                samples=[f"row {samples.rows[i]}, generation {samples.generations[i]}" for i in positions],
                total=int(stale.sum()),
                positions=positions,
                evicted=len(self.evicted.among_generations(generations)),
                lost=len(lost_ids),
                causes=lost.causes_of(lost_ids),
            )
        return samples.rows

    def living(self, samples: Samples) -> tuple[Bools, Int64s]:
        """Return which of the samples exist, and the rows of the existing ones."""
        if samples.ids is not None:
            rows = self.rows.find(samples.ids)
            exists = rows >= 0
        else:
            assert samples.rows is not None
            assert samples.generations is not None
            rows = samples.rows
            exists = self.rows.holds(samples.rows, samples.generations)
        return exists, rows[exists]

    def resolve_living(self, samples: Samples) -> Int64s:
        """Return the rows of the existing samples without repeats, in the command's order."""
        rows = self.living(samples)[1]
        distinct = dict.fromkeys(rows.tolist())
        return rows if len(distinct) == len(rows) else np.array(list(distinct), np.int64)

    def targeted(self, rows: Int64s) -> Bools:
        """Return which of these live rows are named by active puts. Searches the shorter of the two lists."""
        targets = self.targets
        if len(rows) < len(targets):
            return np.array([name in targets for name in self.rows.names_of(rows)], np.bool_)
        return np.isin(rows, self.rows.find(list(targets)))  # -1, for targets that do not exist, equals no row

    def generations_of(self, rows: Int64s) -> Int64s:
        generations: Int64s = self.rows.generations[rows]
        return generations

    # --- lifetime of samples

    def create_samples(self, ids: list[str], first_generation: int, now: float) -> Int64s:
        """Create samples, unclaimed by every task, with generations from `first_generation` on. Return their rows. The
        caller updates the ready indexes (`update_after_write`)."""
        old_capacity = self.rows.capacity
        kept_positions = self.rows.compact()
        if kept_positions is not None:  # the age order was compacted: rows have other positions
            for ready_index in self.interests.values():
                ready_index.compact(kept_positions)
        rows = self.rows.create(ids, first_generation, now)
        if self.rows.capacity != old_capacity:
            stores: list[Field | Tags | Task] = [*self.fields.values(), self.tags, *self.tasks.values()]
            for store in stores:
                store.grow(self.rows.capacity)
        self.born += len(ids)
        self.evicted.forget_all(ids)
        if self.lost is not None:
            self.lost.forget_all(ids)
        return rows

    def clear(self, rows: Int64s) -> None:
        """Remove these live samples (no repeats) with their cells, tags and claims."""
        if not len(rows):
            return
        self._unset_ready(rows)
        for task in self.tasks.values():
            task.give_back(rows)
        self.tags.drop(rows)
        if self.watches:
            self.notify_watches(rows)
        fields = self.fields.values()
        dead = erase_row(fields, int(rows[0])) if len(rows) == 1 else erase(fields, as_slice(rows))
        self.extents.release_cells(dead, self.account)
        for field in self.fields.values():
            if not field.live:
                self._remove_empty_columns()
                break
        self.rows.remove(rows)

    def clear_lost(self, rows: Int64s, cause: str) -> None:
        """Remove these live samples (no repeats) because their data was lost. Later errors about them name `cause`."""
        if len(rows):
            self.lost = self.lost or Lost()
            self.lost.note(self.rows.names_of(rows), self.generations_of(rows), cause)
            self.clear(rows)

    def drop(self) -> None:
        """Remove all samples and close the account."""
        self.clear(self.rows.in_order())
        self.dropped = True
        self.extents.close_account(self.account)

    def record_write(self, session: int, name: str, now: float, fields: Iterable[str] = ()) -> None:
        """Record that the session with this id and name wrote to the partition, and to these of its fields."""
        self.writers.pop(session, None)  # so that it becomes the latest one
        self.writers[session] = (name, now)
        if len(self.writers) > WRITERS:
            del self.writers[next(iter(self.writers))]
        for field in fields:
            self.fields[field].writer = (session, name, now)

    # --- readiness

    def ready_index(self, task: Task, fields: tuple[str, ...], limit: int) -> ReadyIndex:
        """Return the cached or newly built index of samples ready for `task` with `fields`. Beyond `limit` indexes, the
        least recently used one without waiters is removed."""
        key = (task.name, tuple(sorted(set(fields))))
        index = self.interests.pop(key, None)
        if index is None:
            idle = [other for other, kept in self.interests.items() if not kept.waiters]
            for other in idle[: max(len(self.interests) + 1 - limit, 0)]:
                del self.interests[other]
            index = ReadyIndex(task, key[1], self.rows.end)
            self.refresh(index, self.rows.in_order())
        self.interests[key] = index  # inserted again, as the most recently used one
        return index

    def refresh(self, ready_index: ReadyIndex, rows: Int64s) -> None:
        """Update the index for these live rows (no repeats)."""
        ready_index.set(self.rows.positions[rows], self.ready(ready_index.task, ready_index.fields, rows))

    def ready(self, task: Task, fields: tuple[str, ...], rows: Int64s) -> Bools:
        """Return which of the rows the task may claim: unclaimed by it, with all of the fields."""
        ready: Bools = task.claim_ids[rows] == 0
        for name in fields:
            ready &= self.has(name, rows)
        return ready

    def update_after_write(self, rows: Int64s, names: set[str], *, newborn: bool) -> None:
        """Update the ready indexes after a put of these rows. names: fields that some of the rows did not have before;
        newborn: whether some of the rows are new samples."""
        for ready_index in self.interests.values():
            # In an index without fields, a sample is ready as soon as it exists.
            affected = newborn if not ready_index.fields else not names.isdisjoint(ready_index.fields)
            if affected:
                self.refresh(ready_index, rows)

    def take(self, task: Task, rows: Int64s, claim_id: int) -> None:
        """Claim these rows, which the task has not claimed."""
        task.take(rows, claim_id)
        self._unset_ready(rows, task)
        if self.watches:
            self.notify_watches(rows, task)

    def _unset_ready(self, rows: Int64s, task: Task | None = None) -> None:
        """Remove the rows from the ready indexes, or from those of this task."""
        positions = self.rows.positions[rows]
        for ready_index in self.interests.values():
            if task is None or ready_index.task is task:
                ready_index.unset(positions)

    def update_after_claims(self, task: Task, rows: Int64s) -> None:
        """Update the ready indexes of the task, and notify its watches, after the claims of the rows changed."""
        for ready_index in self.interests.values():
            if ready_index.task is task:
                self.refresh(ready_index, rows)
        self.notify_watches(rows, task)

    def notify_watches(self, rows: Int64s, task: Task | None = None) -> None:
        """Notify the watches of waiting claims (see `Watch`) that cells, tags or claims of these rows changed. With
        `task`, only that task's claims changed."""
        for watch in self.watches.values():
            if task is None or watch.ready_index.task is task:
                watch.note(rows)

    def common_fields(self, rows: Int64s) -> tuple[str, ...]:
        """Return the fields that are produced for all of the rows; empty without rows."""
        if not len(rows):
            return ()
        if self.is_plain:
            if len(rows) == 1:
                row = int(rows[0])
                return tuple([name for name, field in self.fields.items() if field.extents.item(row)])
            count = len(rows)
            cells = {name: np.count_nonzero(field.extents[rows]) for name, field in self.fields.items()}
            return tuple([name for name in cells if cells[name] == count])
        return tuple([name for name in self.names() if self.has(name, rows).all()])


def _earlier_column(name: str, field: Field) -> str:
    """Return the name of the column for the field's present rows after its kind has widened."""
    return f"{name}{HIDDEN}{field.spec.kind}"
