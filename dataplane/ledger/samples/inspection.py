"""Detailed views of a partition, a sample, an arena and the waiting calls, for people and dashboards."""

from __future__ import annotations

import numpy as np

from dataplane.core.schema import WEIGHT_VERSION, field_of
from dataplane.errors import InvalidRequestError, SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.state.claim_terms import least_of
from dataplane.ledger.state.extents import LIVE, RESERVED, RETIRED, Extents
from dataplane.ledger.state.fields import Field
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedAllocate, ParkedClaim, Session
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tasks import ReadyIndex, Task

PARTS = 4096
"""An answer has at most this many parts."""
EXAMINED = 1 << 16
"""At most this many samples are examined for one answer."""
STALEST = 1024
"""The versions of this many of a task's oldest ready samples are examined."""
BEYOND = 1 << 62
"""Tag values of this magnitude or more are not versions."""


class Inspection:
    def __init__(self, state: State) -> None:
        self.state = state

    def matrix(self, session: Session, number: int, command: c.Inspect) -> c.Matrix:
        """Return the partition by age, in equal parts."""
        partition = self.state.partition(command.partition)
        rows = partition.rows.in_order()
        edges = _edges(len(rows), _parts("columns", command.columns))
        chosen, firsts = _spread(rows, edges)
        generations = partition.generations_of(rows[[0, -1]]).tolist() if len(rows) else (0, 0)

        def count(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> c.Int64s:
            return np.add.reduceat(flags, firsts, dtype=np.int64) if len(firsts) else np.zeros(0, np.int64)

        return c.Matrix(
            partition=partition.name,
            live=len(rows),
            first_generation=generations[0],
            last_generation=generations[1],
            samples=np.diff(edges),
            examined=np.diff(np.append(firsts, len(chosen))),
            produced={name: count(partition.has(name, chosen)) for name in partition.names()},
            tasks=tuple(
                c.TaskMatrix(
                    task=task.name, claimed=count(task.claim_ids[chosen] != 0), leased=count(task.owners_of(chosen) > 0)
                )
                for task in partition.tasks.values()
            ),
        )

    def show(self, session: Session, number: int, command: c.Show) -> c.Shown:
        """Return one sample: where its cells are, its tags, and its state for each task."""
        self.state.check_samples(command.samples)
        if len(command.samples) != 1:
            raise InvalidRequestError(f"expected exactly one sample, got {len(command.samples)}")
        partition = self.state.partition(command.partition) if command.partition else self._first_with(command.samples)
        row = int(partition.resolve(command.samples)[0])
        one = np.array([row])
        return c.Shown(
            partition=partition.name,
            sample=partition.rows.names_of(one)[0],
            row=row,
            generation=int(partition.generations_of(one)[0]),
            since=float(partition.rows.since[row]),
            now=self.state.now,
            cells=tuple(self._cell(name, field, row) for name, field in partition.fields.items() if field.extents[row]),
            missing=tuple(name for name in partition.names() if not partition.has(name, one).all()),
            tags={column.name: column.values[0] for column in partition.tags.of(one)},
            tasks=tuple(self._task_state(partition, task, row) for task in partition.tasks.values()),
        )

    def _first_with(self, samples: c.Samples) -> Partition:
        if samples.ids is None:
            raise InvalidRequestError("a handle requires the name of its partition")
        (sample,) = samples.ids
        for partition in self.state.partitions.values():
            if sample in partition.rows.ids:
                return partition
        raise SampleNotFoundError(partition="", samples=[sample])

    def _cell(self, name: str, field: Field, row: int) -> c.ShownCell:
        extents, number = self.state.extents, int(field.extents[row])
        same = (field.extents == number) & (field.offsets == field.offsets[row]) & (field.lengths > 0)
        return c.ShownCell(
            field=field_of(name),
            spec=field.spec,
            unit=int(extents.units[number]),
            offset=int(field.offsets[row]),
            length=int(field.lengths[row]),
            size_bytes=int(field.bytes_of(np.array([row]))[0]),
            pinned=bool(extents.pins[number]),
            shared=bool(np.count_nonzero(same) > 1),
        )

    def _task_state(self, partition: Partition, task: Task, row: int) -> c.ShownTask:
        wanted = wanted_by(partition, task)
        lacking = [name for name in wanted if not partition.has(name, np.array([row])).all()]
        owner = int(task.owners_of(np.array([row]))[0])
        state = c.TaskState.CLAIMED if task.claim_ids[row] else c.TaskState.UNCLAIMED
        if owner:
            state = c.TaskState.HELD if owner < 0 else c.TaskState.LEASED
        found = self.state.sessions.get(owner)
        return c.ShownTask(
            task=task.name,
            state=state,
            lacking=tuple(lacking),
            client="" if found is None else found.name,
            until=float(task.ends[row]) if owner and task.ends is not None else None,
        )

    def memory(self, session: Session, number: int, command: c.MapMemory) -> c.MemoryMap:
        """Return the arena by address, in equal parts."""
        unit = self.state.unit(command.unit)
        extents, space = self.state.extents, unit.space
        cell_bytes = max(-(-space.capacity_bytes // _parts("cells", command.cells)), 1)
        edges = np.arange(-(-space.capacity_bytes // cell_bytes) + 1, dtype=np.int64) * cell_bytes
        numbers = extents.of_unit(unit.number)
        states, pinned = extents.states[numbers], extents.pins[numbers] > 0
        return c.MemoryMap(
            unit=unit.number,
            capacity_bytes=space.capacity_bytes,
            backed_bytes=space.backed_bytes,
            cell_bytes=cell_bytes,
            live=_bytes_between(extents, numbers[states == LIVE], edges),
            reserved=_bytes_between(extents, numbers[states == RESERVED], edges),
            retired=_bytes_between(extents, numbers[states == RETIRED], edges),
            pinned=_bytes_between(extents, numbers[pinned], edges),
            free_bytes=space.free_bytes,
            largest_free_bytes=space.largest_bytes,
            fragments=space.fragments,
            extents=len(numbers),
        )

    def waits(self, session: Session, number: int, command: c.Waits) -> c.WaitList:
        """Return the claims and puts that wait."""
        state = self.state
        if command.limit < 0:
            raise InvalidRequestError(f"limit={command.limit}: must be 0 (for all) or more")
        asked = [state.partition(command.partition)] if command.partition else state.partitions.values()
        claims = (parked for partition in asked for parked in self.state.waiting_claims(partition))
        found: list[ParkedClaim | ParkedAllocate] = [
            parked for parked in claims if command.task in ("", parked.command.task)
        ]
        if not command.task:
            found += [parked for parked in state.all_puts() if command.partition in ("", parked.partition.name)]
        found.sort(key=lambda parked: parked.since)
        free_bytes = sum(unit.space.free_bytes for unit in state.units.values())
        waits = [
            _claim(parked) if isinstance(parked, ParkedClaim) else _put(parked, free_bytes)
            for parked in found[: command.limit or None]
        ]
        return c.WaitList(now=state.now, waits=tuple(waits), total=len(found))


def wanted_by(partition: Partition, task: Task) -> tuple[str, ...]:
    """Return the fields of the task's latest claim, () if it made none."""
    latest = _latest(partition, task)
    return () if latest is None else latest.fields


def task_stats(partition: Partition, task: Task) -> c.TaskStats:
    """Return the statistics of the task."""
    ready_index = _latest(partition, task)
    ready = partition.rows.live - task.claimed if ready_index is None else ready_index.count
    stalest = None if ready_index is None else _stalest(partition, ready_index)
    return c.TaskStats(
        task=task.name,
        fields=() if ready_index is None else ready_index.fields,
        ready=ready,
        leased=task.leased,
        held=task.held,
        claimed=task.claimed,
        waiting=sum(len(watch.waiters) for watch in partition.watches.values() if watch.ready_index.task is task),
        lag=None if stalest is None or partition.version is None else partition.version - stalest,
        stalest_version=stalest,
    )


def _latest(partition: Partition, task: Task) -> ReadyIndex | None:
    return next((kept for kept in reversed(partition.interests.values()) if kept.task is task), None)


def _stalest(partition: Partition, ready_index: ReadyIndex) -> int | None:
    """Return the lowest version of the oldest ready samples, or None if unknown."""
    rows = partition.rows.order[ready_index.ready()[:STALEST]]
    numbers = partition.tags.numbers(WEIGHT_VERSION, rows[partition.tags.present(WEIGHT_VERSION, rows)])
    known = numbers[np.abs(numbers) < BEYOND] if numbers is not None else np.zeros(0)
    return int(known.min()) if len(known) else None


def _parts(what: str, wanted: int) -> int:
    if not 1 <= wanted <= PARTS:
        raise InvalidRequestError(f"{what}={wanted}: must be in [1, {PARTS}]")
    return wanted


def _edges(count: int, parts: int) -> c.Int64s:
    """Divide `count` items into equal parts. Return where each begins, and the end of the last. No part is empty."""
    parts = min(parts, count)
    return np.arange(parts + 1, dtype=np.int64) * count // parts if parts else np.zeros(1, np.int64)


def _spread(rows: c.Int64s, edges: c.Int64s) -> tuple[c.Int64s, c.Int64s]:
    """Return some rows of each part, evenly spread, and where each part begins among them."""
    step = -(-len(rows) // EXAMINED)
    if step <= 1:
        return rows, edges[:-1]
    places = [np.arange(first, last, step) for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    firsts = np.cumsum([0, *(len(part) for part in places[:-1])])
    return rows[np.concatenate(places)], firsts


def _bytes_between(extents: Extents, numbers: c.Int32s, edges: c.Int64s) -> c.Int64s:
    """Return how many bytes of these extents lie between each two edges."""
    starts, sizes = extents.starts[numbers], extents.sizes[numbers]
    trimmed = numbers[extents.is_several[numbers]].tolist()
    pieces = [piece for number in trimmed for piece in extents.several[number].pieces or ()]
    if pieces:
        cut = np.isin(numbers, [number for number in trimmed if extents.several[number].pieces is not None])
        starts = np.concatenate([starts[~cut], [start for start, _ in pieces]])
        sizes = np.concatenate([sizes[~cut], [size for _, size in pieces]])
    order = starts.argsort(kind="stable")
    starts, sizes = starts[order], sizes[order]
    before = np.searchsorted(starts, edges)
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    last = np.maximum(before - 1, 0)
    held: c.Int64s = total[before]
    if len(starts):
        held = held - np.where(before > 0, np.maximum(starts[last] + sizes[last] - edges, 0), 0)
    return np.diff(held)


def _claim(parked: ParkedClaim) -> c.Wait:
    command, ready_index = parked.command, parked.ready_index
    return c.Wait(
        session=parked.session.number,
        client=parked.session.name,
        what=c.WaitKind.CLAIM,
        partition=parked.partition.name,
        task=command.task,
        fields=command.fields,
        wanted=least_of(command),
        ready=0 if ready_index is None else ready_index.count,
        since=parked.since,
        until=parked.deadline,
    )


def _put(parked: ParkedAllocate, free_bytes: int) -> c.Wait:
    return c.Wait(
        session=parked.session.number,
        client=parked.session.name,
        what=c.WaitKind.PUT,
        partition=parked.partition.name,
        task="",
        fields=tuple(column.name for column in parked.command.columns),
        wanted=parked.total,
        ready=free_bytes,
        since=parked.since,
        until=parked.deadline,
    )
