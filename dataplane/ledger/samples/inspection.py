"""Detailed views of a partition, a sample, an arena and the waiting calls, for people and dashboards."""

from __future__ import annotations

import itertools

import numpy as np

from dataplane.core.schema import WEIGHT_VERSION, field_of
from dataplane.core.types import ceil_div
from dataplane.errors import InvalidRequestError, SampleNotFoundError
from dataplane.ledger import commands as c
from dataplane.ledger.state.extents import LIVE, RESERVED, RETIRED, Extents
from dataplane.ledger.state.fields import Field
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedAllocate, ParkedClaim
from dataplane.ledger.state.state import State
from dataplane.ledger.state.tasks import ReadyIndex, Task, least_of

PARTS = 4096
"""An answer has at most this many intervals."""
EXAMINED = 1 << 16
"""About this many samples are examined at most for one answer."""
STALEST = 1024
"""The versions of this many of a task's oldest ready samples are examined."""
BEYOND = 1 << 62
"""Tag values of this magnitude or more are not versions."""


class Inspection:
    """Executes the commands Inspect, Show, MapMemory and Waits, which change nothing."""

    def __init__(self, state: State) -> None:
        self.state = state

    def matrix(self, command: c.Inspect) -> c.Matrix:
        """Return how many samples have each field, and are claimed or leased by each task, for equal intervals of the
        partition by age. In a large partition only some samples of each part are examined."""
        partition = self.state.partition(command.partition)
        rows = partition.rows.in_order()
        edges = _interval_edges(len(rows), _check_intervals("columns", command.columns))
        chosen, firsts = _pick_rows(rows, edges)  # firsts: where each interval begins in `chosen`
        oldest, newest = partition.generations_of(rows[[0, -1]]).tolist() if len(rows) else (0, 0)

        def count(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> c.Int64s:
            """Return the number of set flags in each interval, none of which is empty."""
            return np.add.reduceat(flags, firsts, dtype=np.int64) if len(firsts) else np.zeros(0, np.int64)

        return c.Matrix(
            partition=partition.name,
            live=len(rows),
            first_generation=oldest,
            last_generation=newest,
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

    def show(self, command: c.Show) -> c.Shown:
        """Return one sample (of the first partition that has its id, if none is named): where its cells are, its tags,
        and its state for each task."""
        self.state.check_samples(command.samples)
        if len(command.samples) != 1:
            raise InvalidRequestError(f"expected exactly one sample, got {len(command.samples)}")
        partition = (
            self.state.partition(command.partition) if command.partition else self._find_partition(command.samples)
        )
        row = int(partition.resolve(command.samples)[0])
        one = np.array([row])
        return c.Shown(
            partition=partition.name,
            sample=partition.rows.names_of(one)[0],
            row=row,
            generation=int(partition.generations_of(one)[0]),
            since=float(partition.rows.since[row]),
            now=self.state.now,
            cells=tuple(
                self._show_cell(name, field, row) for name, field in partition.fields.items() if field.extents[row]
            ),
            missing=tuple(name for name in partition.names() if not partition.has(name, one).all()),
            tags={column.name: column.values[0] for column in partition.tags.of(one)},
            tasks=tuple(self._show_task(partition, task, row) for task in partition.tasks.values()),
        )

    def _find_partition(self, samples: c.Samples) -> Partition:
        """Return the first partition that has the sample, which must be named by id."""
        if samples.ids is None:
            raise InvalidRequestError("a handle requires the name of its partition")
        (sample,) = samples.ids
        for partition in self.state.partitions.values():
            if sample in partition.rows.ids:
                return partition
        raise SampleNotFoundError(partition="", samples=[sample])

    def _show_cell(self, name: str, field: Field, row: int) -> c.ShownCell:
        """Return where the row's cell is, and whether other rows share its value."""
        extents = self.state.extents
        extent_id = int(field.extents[row])
        # Empty values take no bytes that could be shared.
        same_value = (field.extents == extent_id) & (field.offsets == field.offsets[row]) & (field.lengths > 0)
        return c.ShownCell(
            field=field_of(name),
            spec=field.spec,
            unit=int(extents.units[extent_id]),
            offset=int(field.offsets[row]),
            length=int(field.lengths[row]),
            size_bytes=int(field.bytes_of(np.array([row]))[0]),
            pinned=bool(extents.pins[extent_id]),
            shared=bool(np.count_nonzero(same_value) > 1),
        )

    def _show_task(self, partition: Partition, task: Task, row: int) -> c.ShownTask:
        """Return the state of the sample for the task. `lacking`: fields of the task's latest claim that the sample
        does not have."""
        fields = latest_fields(partition, task)
        lacking = [name for name in fields if not partition.has(name, np.array([row])).all()]
        # The session that leases the sample; 0: no lease; negative: no session, the sample is held for a rank's share.
        owner = int(task.owners_of(np.array([row]))[0])
        if owner:
            state = c.TaskState.HELD if owner < 0 else c.TaskState.LEASED
        else:
            state = c.TaskState.CLAIMED if task.claim_ids[row] else c.TaskState.UNCLAIMED
        session = self.state.sessions.get(owner)
        return c.ShownTask(
            task=task.name,
            state=state,
            lacking=tuple(lacking),
            client="" if session is None else session.name,
            until=float(task.ends[row]) if owner and task.ends is not None else None,
        )

    def memory(self, command: c.MapMemory) -> c.MemoryMap:
        """Return how many bytes are live, reserved, retired and pinned in each of equal intervals of the arena ("cells"
        of the view), by address."""
        unit = self.state.unit(command.unit)
        extents = self.state.extents
        space = unit.space
        cell_bytes = max(ceil_div(space.capacity_bytes, _check_intervals("cells", command.cells)), 1)
        edges = np.arange(ceil_div(space.capacity_bytes, cell_bytes) + 1, dtype=np.int64) * cell_bytes
        extent_ids = extents.of_unit(unit.unit_id)
        states = extents.states[extent_ids]
        pinned = extents.pins[extent_ids] > 0
        return c.MemoryMap(
            unit=unit.unit_id,
            capacity_bytes=space.capacity_bytes,
            backed_bytes=space.backed_bytes,
            cell_bytes=cell_bytes,
            live=_bytes_between(extents, extent_ids[states == LIVE], edges),
            reserved=_bytes_between(extents, extent_ids[states == RESERVED], edges),
            retired=_bytes_between(extents, extent_ids[states == RETIRED], edges),
            pinned=_bytes_between(extents, extent_ids[pinned], edges),
            free_bytes=space.free_bytes,
            largest_free_bytes=space.largest_bytes,
            fragments=space.fragments,
            extents=len(extent_ids),
        )

    def waits(self, command: c.Waits) -> c.WaitList:
        """Return the claims and puts that wait, longest waiting first, up to the limit. The command may restrict them
        to a partition, and to the claims of a task (then without puts)."""
        state = self.state
        if command.limit < 0:
            raise InvalidRequestError(f"limit={command.limit}: must be 0 (for all) or more")
        partitions = [state.partition(command.partition)] if command.partition else state.partitions.values()
        claims = (parked for partition in partitions for parked in state.waiting_claims(partition))
        calls: list[ParkedClaim | ParkedAllocate] = [
            parked for parked in claims if command.task in ("", parked.command.task)
        ]
        if not command.task:
            calls += [parked for parked in state.all_puts() if command.partition in ("", parked.partition.name)]
        calls.sort(key=lambda parked: parked.since)
        free_bytes = sum(unit.space.free_bytes for unit in state.units.values())
        waits = [
            _claim_wait(parked) if isinstance(parked, ParkedClaim) else _put_wait(parked, free_bytes)
            for parked in calls[: command.limit or None]
        ]
        return c.WaitList(now=state.now, waits=tuple(waits), total=len(calls))


def latest_fields(partition: Partition, task: Task) -> tuple[str, ...]:
    """Return the fields of the task's latest claim, () if it made none."""
    latest = _latest_ready_index(partition, task)
    return () if latest is None else latest.fields


def task_stats(partition: Partition, task: Task) -> c.TaskStats:
    """Return the statistics of the task. `ready` counts the samples with the fields of its latest claim; if it made
    none, all unclaimed ones."""
    ready_index = _latest_ready_index(partition, task)
    ready = partition.rows.live - task.claimed if ready_index is None else ready_index.count
    stalest = None if ready_index is None else _lowest_version(partition, ready_index)
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


def _latest_ready_index(partition: Partition, task: Task) -> ReadyIndex | None:
    """Return the ready index that a claim of the task used last, or None."""
    return next((index for index in reversed(partition.interests.values()) if index.task is task), None)


def _lowest_version(partition: Partition, ready_index: ReadyIndex) -> int | None:
    """Return the lowest weight version of the oldest ready samples, or None if unknown."""
    rows = partition.rows.order[ready_index.ready()[:STALEST]]  # the index has positions in this order
    numbers = partition.tags.numbers(WEIGHT_VERSION, rows[partition.tags.present(WEIGHT_VERSION, rows)])
    known = numbers[np.abs(numbers) < BEYOND] if numbers is not None else np.zeros(0)
    return int(known.min()) if len(known) else None


def _check_intervals(what: str, wanted: int) -> int:
    if not 1 <= wanted <= PARTS:
        raise InvalidRequestError(f"{what}={wanted}: must be in [1, {PARTS}]")
    return wanted


def _interval_edges(count: int, intervals: int) -> c.Int64s:
    """Divide `count` items into equal intervals (at most `intervals`, none empty). Return where each begins, and
    the end of the last."""
    intervals = min(intervals, count)
    return np.arange(intervals + 1, dtype=np.int64) * count // intervals if intervals else np.zeros(1, np.int64)


def _pick_rows(rows: c.Int64s, edges: c.Int64s) -> tuple[c.Int64s, c.Int64s]:
    """Return about `EXAMINED` of the rows (all if there are no more), evenly spread over each interval, and where each
    interval begins among them. `edges`: as returned by `_interval_edges`."""
    step = ceil_div(len(rows), EXAMINED)  # every step-th row of an interval is picked
    if step <= 1:
        return rows, edges[:-1]
    positions = [np.arange(first, last, step) for first, last in itertools.pairwise(edges.tolist())]
    firsts = np.cumsum([0, *(len(each) for each in positions[:-1])])
    return rows[np.concatenate(positions)], firsts


def _bytes_between(extents: Extents, extent_ids: c.Int32s, edges: c.Int64s) -> c.Int64s:
    """Return how many bytes of these extents lie between each two successive edges, which are addresses."""
    starts = extents.starts[extent_ids]
    sizes = extents.sizes[extent_ids]
    partly_freed = extents.pieces.keys() & extent_ids.tolist()
    if partly_freed:  # they hold only their pieces
        pieces = [piece for extent_id in partly_freed for piece in extents.pieces[extent_id]]
        is_whole = ~np.isin(extent_ids, list(partly_freed))
        starts = np.concatenate([starts[is_whole], [start for start, _ in pieces]])
        sizes = np.concatenate([sizes[is_whole], [size for _, size in pieces]])
    order = starts.argsort(kind="stable")
    starts = starts[order]
    sizes = sizes[order]
    # Sum the ranges that start below each edge, and subtract the part of the last one that is beyond the edge.
    count_below = np.searchsorted(starts, edges)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    last = np.maximum(count_below - 1, 0)
    bytes_below: c.Int64s = sums[count_below]
    if len(starts):
        beyond = np.where(count_below > 0, np.maximum(starts[last] + sizes[last] - edges, 0), 0)
        bytes_below = bytes_below - beyond
    return np.diff(bytes_below)


def _claim_wait(parked: ParkedClaim) -> c.Wait:
    """Describe a waiting claim; `wanted` and `ready` count samples."""
    command = parked.command
    ready_index = parked.ready_index
    return c.Wait(
        session=parked.session.session_id,
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


def _put_wait(parked: ParkedAllocate, free_bytes: int) -> c.Wait:
    """Describe a waiting put; `wanted` and `ready` are bytes."""
    return c.Wait(
        session=parked.session.session_id,
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
