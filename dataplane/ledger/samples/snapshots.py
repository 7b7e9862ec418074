"""Checkpoints: snapshots of partitions at one instant, and how saved partitions are restored."""

from __future__ import annotations

import numpy as np

from dataplane.core.types import ceil_div
from dataplane.errors import (
    FieldNotFoundError,
    InvalidRequestError,
    PartitionExistsError,
    PartitionNotFoundError,
    SchemaError,
)
from dataplane.ledger import commands as c
from dataplane.ledger.samples.partitions import Partitions
from dataplane.ledger.state.fields import cells_of, checksums_of
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import SavedCells, Session, Snapshot, check_limit
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tags import Tag, Tags


class Saves:
    """Save partitions, and restore them: `stage`, ordinary puts, `publish`.

    A `Save` copies the location of every cell (20 bytes each, 24 with checksums). The session keeps the copy and the
    pins until `Release`, or until the session ends. The methods that take (session, call_id, command) execute call
    `call_id` of that session.
    """

    def __init__(self, state: State, partitions: Partitions) -> None:
        self.state = state
        self.partitions = partitions

    # --- saving

    def save(self, session: Session, call_id: int, command: c.Save) -> c.Saved:
        """Save these partitions (none named: all that are not staged), all or none: after an error, nothing is
        pinned."""
        check_limit(
            "saves held by one session", len(session.saves) + 1, self.state.limits.saves, "Release a save first."
        )
        published = [name for name, partition in self.state.partitions.items() if partition.owner is None]
        names = command.partitions or tuple(published)
        if len(set(names)) != len(names):
            raise InvalidRequestError(
                f"partitions names a partition twice: {list(names[:8])}; name each partition once"
            )
        partitions = [self.state.partition(name) for name in names]
        snapshots = {partition.name: self._snapshot(partition) for partition in partitions}
        saved = [self._saved_partition(partition) for partition in partitions]
        in_use = np.zeros(self.state.extents.high, np.bool_)  # by extent id
        for partition in partitions:
            for field in partition.fields.values():
                in_use[field.extents] = True
        in_use[0] = False  # extent 0 means "no extent"
        pinned = np.flatnonzero(in_use).astype(np.int32)
        self.state.pin(session, call_id, pinned)
        session.saves[call_id] = snapshots
        return c.Saved(partitions=tuple(saved))

    def _snapshot(self, partition: Partition) -> Snapshot:
        """Copy the tags and the locations of the cells of all live samples, oldest first."""
        rows = partition.rows.in_order()
        tags = Tags(len(rows))
        for name, tag in partition.tags.columns.items():
            tag_copy = Tag(tag.values.dtype, capacity=0)
            tag_copy.values = tag.values[rows]
            tag_copy.present = tag.present[rows]
            tags.columns[name] = tag_copy
        fields = {}
        for name, field in partition.fields.items():
            extents, offsets, lengths = cells_of(field, rows)
            fields[name] = SavedCells(
                field.spec, self.state.extents.units[extents], offsets, lengths, checksums_of(field, rows)
            )
        return Snapshot(partition.rows.names_of(rows), tags, fields)

    def _saved_partition(self, partition: Partition) -> c.SavedPartition:
        """Return the state of the partition besides its samples, which `publish` restores. A task's claims are one bit
        for each sample, oldest first; claims that are not permanent are not saved."""
        rows = partition.rows.in_order()
        tasks = [
            c.SavedTask(name=name, claimed=np.packbits(task.claimed_permanently(rows)).tobytes())
            for name, task in partition.tasks.items()
        ]
        return c.SavedPartition(
            partition=partition.name,
            live=partition.rows.live,
            born=partition.born,
            fields=tuple(c.SavedField(name=name, declared=f.declared) for name, f in partition.fields.items()),
            tasks=tuple(tasks),
            num_samples=partition.num_samples,
            group_size=partition.group_size,
            enums=dict(partition.enums) or None,
            strict=partition.strict,
            sealed=partition.sealed,
            version=partition.version,
            budget_bytes=partition.budget_bytes,
            when_full=partition.when_full,
        )

    def read_saved(self, session: Session, call_id: int, command: c.ReadSaved) -> c.SavedRows:
        """Return the saved samples [first, last) of a partition: the locations of their cells, and with `names` their
        ids and tags."""
        snapshots = session.saves.get(command.saved)
        if snapshots is None:
            raise InvalidRequestError(
                f"call {command.saved} of session {session.session_id} holds no saved partitions "
                "(released or never made)"
            )
        snapshot = snapshots.get(command.partition)
        if snapshot is None:
            raise PartitionNotFoundError(partition=command.partition, known=list(snapshots))
        first = command.first
        last = command.last
        if not 0 <= first <= last <= len(snapshot.ids):
            raise InvalidRequestError(
                f"partition {command.partition!r}: samples [{first}, {last}) were requested, but {len(snapshot.ids)} "
                f"were saved; expected 0 <= first <= last <= {len(snapshot.ids)}"
            )
        unknown = [name for name in command.fields if name not in snapshot.fields]
        if unknown:
            raise FieldNotFoundError(partition=command.partition, field=unknown[0], known=list(snapshot.fields))
        fields = []
        for name in command.fields:
            cells = snapshot.fields[name]
            # Copies, because views would keep the whole snapshot as long as the answer.
            fields.append(
                c.FieldLocations(
                    name=name,
                    spec=cells.spec,
                    units=cells.units[first:last].copy(),
                    offsets=cells.offsets[first:last].copy(),
                    lengths=cells.lengths[first:last].copy(),
                    checksums=None if cells.checksums is None else cells.checksums[first:last].copy(),
                )
            )
        return c.SavedRows(
            ids=snapshot.ids[first:last] if command.names else (),
            tags=snapshot.tags.of(np.arange(first, last)) if command.names else (),
            fields=tuple(fields),
        )

    # --- restoring

    def stage(self, session: Session, call_id: int, command: c.Stage) -> c.Done:
        """Create an empty partition for a restore. The session owns it until `publish`; if the session ends first,
        `Liveness.end` drops it."""
        state = self.state
        if command.partition in state.partitions:
            raise PartitionExistsError(partition=command.partition)
        register = c.Register(partition=command.partition, fields={}, num_samples=None, tasks=())
        self.partitions.register(session, call_id, register)
        state.partitions[command.partition].owner = session.session_id
        return c.Done()

    def publish(self, session: Session, call_id: int, command: c.Publish) -> c.Done:
        """Rename staged partitions to the names of the saved ones, dropping existing partitions of these names, and
        restore the saved state. Everything is checked before the first change."""
        state = self.state
        staged = command.staged
        targets = command.partitions
        names = [saved.partition for saved in targets]
        if len(staged) != len(targets) or len(set(staged)) != len(staged) or len(set(names)) != len(names):
            raise InvalidRequestError(
                f"{len(staged)} staged partitions for {len(targets)} names: expected as many, without repeats"
            )
        partitions = [state.partition(name) for name in staged]
        for partition, saved in zip(partitions, targets, strict=True):
            self._check_staged(session, partition, saved)
            existing = state.partitions.get(saved.partition)
            # A staged partition may have the name of another one's target: all are renamed at once.
            if existing is not None and existing not in partitions and not command.replace:
                raise PartitionExistsError(partition=saved.partition)
        # By the old names, before partitions are renamed.
        leases = [[lease for lease in state.leases.open.values() if lease.partition == name] for name in staged]
        for name in staged:
            del state.partitions[name]
        for partition, saved, leased in zip(partitions, targets, leases, strict=True):
            existing = state.partitions.get(saved.partition)
            if existing is not None:
                state.drop(existing)
            # Wake times and leases refer to the partition by its name.
            partition.name = saved.partition
            partition.owner = None
            partition.wakes_at = float("inf")
            state.partitions[saved.partition] = partition
            for lease in leased:
                lease.partition = saved.partition
            self.partitions.register(session, call_id, _registration(saved))
            # After `register`, which resets the count and the seal.
            partition.born = saved.born
            partition.sealed = saved.sealed
            partition.version = saved.version
            self._restore_claims(partition, saved)
            partition.outlook = None
            for watch in partition.watches.values():
                watch.reset()
            state.touch(partition)
        return c.Done()

    def _check_staged(self, session: Session, partition: Partition, saved: c.SavedPartition) -> None:
        """Check that the session staged the partition, and that it matches the saved one."""
        if partition.owner != session.session_id:
            raise InvalidRequestError(f"partition {partition.name!r} was not staged by session {session.session_id}")
        self.partitions.check(_registration(saved))
        live = partition.rows.live
        if saved.live != live:
            raise InvalidRequestError(
                f"partition {saved.partition!r}: {live} samples were staged, expected {saved.live}"
            )
        if saved.born < live:
            raise InvalidRequestError(
                f"partition {saved.partition!r}: born={saved.born} must be at least the staged samples, {live}"
            )
        for task in saved.tasks:
            expected = ceil_div(live, 8)
            if len(task.claimed) != expected:
                raise InvalidRequestError(
                    f"partition {saved.partition!r}, task {task.name!r}: {len(task.claimed)} bytes of claim bits, "
                    f"expected {expected} (one bit for each of the {live} staged samples)"
                )
        for declared in saved.fields:
            field = partition.fields.get(declared.name)
            spec = declared.declared
            if field is not None and field.live and spec is not None and not spec.accepts(field.spec):
                raise SchemaError(
                    partition=saved.partition,
                    field=declared.name,
                    got=f"a declaration of {spec}",
                    expected=f"{field.spec}, as its staged rows are",
                )

    def _restore_claims(self, partition: Partition, saved: c.SavedPartition) -> None:
        """Restore the claims of the saved tasks. Samples that a task claimed while they were staged keep that claim."""
        rows = partition.rows.in_order()
        for saved_task in saved.tasks:
            task = partition.tasks[saved_task.name]
            claimed = np.unpackbits(np.frombuffer(saved_task.claimed, np.uint8), count=len(rows)).astype(np.bool_)
            to_claim = rows[claimed & (task.claim_ids[rows] == 0)]
            task.take(to_claim, claim_id=self.state.serial())
            partition.update_after_claims(task, to_claim)


def _registration(saved: c.SavedPartition) -> c.Register:
    """Return the command that registers the partition as it was saved."""
    return c.Register(
        partition=saved.partition,
        fields={field.name: field.declared for field in saved.fields if field.declared is not None},
        num_samples=saved.num_samples,
        tasks=tuple(task.name for task in saved.tasks),
        group_size=saved.group_size,
        enums=saved.enums,
        strict=saved.strict,
        budget_bytes=saved.budget_bytes,
        when_full=saved.when_full,
    )
