"""Counters of the calls that a controller answers."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataplane.controller.metrics.throughput import FlowReport, Throughput
from dataplane.controller.metrics.timeline import Timeline, TimelineReport, store_bounded
from dataplane.core.metrics.histograms import BOUNDS_S, Op, Waited
from dataplane.core.schema import field_of
from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from dataplane.ledger.state.arrays import total

log = logging.getLogger(__name__)

TOGETHER = 64
"""Number of answers that are counted together, which is faster than one by one."""
HEAVY = 4_096
"""Pending answers are counted earlier if they hold this many samples, to release their memory."""
_OF_SAMPLES = (c.Committed, c.Located, c.Claimed)

Follow = Callable[[c.Call, Any, Any, float, float], None]
"""Called as (call, command, result, arrival time, answer time) to count details of a successful call."""


class MovedTotals:
    """Numbers of samples and bytes of one partition, or of all, since the service started."""

    __slots__ = (
        "claimed_samples",
        "cleared_samples",
        "got_bytes",
        "got_samples",
        "new_samples",
        "overwritten_bytes",
        "put_bytes",
        "put_samples",
    )

    def __init__(self) -> None:
        self.put_samples = self.new_samples = self.put_bytes = self.overwritten_bytes = 0
        self.got_samples = self.got_bytes = self.claimed_samples = self.cleared_samples = 0

    def add(self, other: MovedTotals) -> None:
        for name in MovedTotals.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Recorder:
    """Counts the answers that the ledger thread reports, in batches, but always before a counter is read. Memory is
    bounded.

    `_unix_s`: the difference between Unix time and `clock` at the start. `_dropped`: totals of partitions without
    counters. `_reserved`: when the Allocate of an uncommitted put arrived, by (session, number). `_reading`: gets whose
    Release was not answered yet, as (partition, fields, samples, bytes, arrival of the Locate) by (session, number).
    `ops`: durations and outcomes by the type of the command or report. `_follow`: counts the details of a command.
    `_flow`, `_timeline`: what `flow` and `timeline` report.

    `clock` must be the clock of the times passed to `answered`. `wall` is the machine's clock, which may be adjusted:
    reports use its current setting.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, wall: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._wall = wall
        self._unix_s = wall() - clock()
        self.ops: dict[type[c.Value], Op] = {}
        self._dropped = MovedTotals()
        self.by_partition: dict[str, MovedTotals] = {}
        self.by_task: dict[tuple[str, str], Waited] = {}  # waiting times of claims, by (partition, task)
        self.busy_s = 0.0  # of the ledger thread, which adds to it
        # The answers that are not counted yet, with their times of arrival and answer.
        self._pending: deque[tuple[c.Input, c.Output, float, float]] = deque()
        self._pending_samples = 0  # in the results of `_pending`
        self._counting = threading.RLock()  # held to count, sum or drop counters; `moved` calls `count` with it
        self._flow = Throughput()
        self._timeline = Timeline()
        self._reserved: dict[tuple[int, int], float] = {}
        self._reading: dict[tuple[int, int], tuple[str, Sequence[str], int, int, float]] = {}
        self._follow: dict[type[c.Value], Follow] = {
            c.Allocate: self._count_allocate,
            c.Abort: self._count_abort,
            c.Commit: self._count_commit,
            c.Locate: self._count_locate,
            c.Release: self._count_release,
            c.Claim: self._count_claim,
            c.Clear: self._count_clear,
            c.SetVersion: self._count_set_version,
        }

    # --- the ledger's thread

    def answered(self, item: c.Input, output: c.Output, began: float) -> None:
        """Record that `output` answers `item`, which arrived at `began`. It is counted later, together with others."""
        pending = self._pending
        pending.append((item, output, began, self.clock()))
        if type(output) is c.Answer:
            result = output.result
            if isinstance(result, _OF_SAMPLES):
                self._pending_samples += len(result.rows)
        if len(pending) >= TOGETHER or self._pending_samples >= HEAVY:
            self.count()

    def count(self) -> None:
        """Count all pending answers. Any thread."""
        with self._counting:
            self._pending_samples = 0  # first, because the ledger's thread may add answers meanwhile
            while self._pending:
                item, output, began, now = self._pending.popleft()
                try:
                    self._count(item, output, began, now)
                except Exception:
                    log.exception("Could not count the answer to %r", item)

    def _count(self, item: c.Input, output: c.Output, began: float, now: float) -> None:
        """Count one answer: its duration, its outcome, and the details of its command."""
        if type(item) is c.Call:
            if not item.session:
                return  # a call without a session is a health check
            assert type(output) is c.Answer
            command, result = item.command, output.result
            kind = type(command)
            op = self.ops.get(kind)
            if op is None:
                op = self.ops[kind] = Op()
            took = op.took  # `Histogram.add`, inlined because this runs for every call
            took.sum_s += now - began
            took.buckets[bisect_left(BOUNDS_S, now - began)] += 1
            if isinstance(result, DataPlaneError):
                op.failed(result)
                return
            op.ok += 1
            follow = self._follow.get(kind)
            if follow is not None:
                follow(item, command, result, began, now)
        else:
            self._count_report(item, output, now - began)

    def record_live_bytes(self, nbytes: int) -> None:
        """Record the current number of live bytes."""
        with self._counting:
            self.count()
            self._flow.second_at(self.clock() + self._unix_s).live_bytes = nbytes

    def _count_report(self, item: c.Input, output: c.Output, took_s: float) -> None:
        """Count the answer to an input other than a call, such as OpenSession."""
        op = self.ops.setdefault(type(item), Op())
        op.took.add(took_s)
        error = getattr(output, "error", None)
        if error is not None:
            op.failed(error)
            return
        op.ok += 1
        if isinstance(item, c.OpenSession) and isinstance(output, c.Opened):
            self._timeline.opened(output.session, item.name)

    def _add_partition(self, partition: str) -> MovedTotals:
        """Return new counters for a partition. If there are too many, the oldest one's are added to `_dropped`."""
        moved = MovedTotals()
        removed = store_bounded(self.by_partition, partition, moved)
        if removed is not None:
            self._dropped.add(removed)
        return moved

    def _count_allocate(self, call: c.Call, command: c.Allocate, result: c.Allocated, began: float, now: float) -> None:
        store_bounded(self._reserved, (call.session, call.number), began)

    def _count_abort(self, call: c.Call, command: c.Abort, result: c.Done, began: float, now: float) -> None:
        self._reserved.pop((call.session, command.reservation), None)

    def _count_commit(self, call: c.Call, command: c.Commit, result: c.Committed, began: float, now: float) -> None:
        """Count a put. Its span begins with its Allocate if it had a reservation of its own, otherwise at `began`, the
        arrival of the Commit."""
        samples, nbytes, names = len(result.rows), 0, []
        for column in command.columns:
            lengths = column.lengths  # often one, whose sum costs more than `item`
            nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * column.spec.unit_bytes
            names.append(field_of(column.name))
        moved = self.by_partition.get(command.partition) or self._add_partition(command.partition)
        moved.put_samples += samples
        moved.put_bytes += nbytes
        moved.new_samples += result.born
        moved.overwritten_bytes += result.overwritten_bytes
        second = self._flow.second_at(now + self._unix_s)
        second.puts += samples
        second.put_bytes += nbytes
        if command.reservation is not None and command.offset is None:  # offset: a part of a Preallocate
            began = self._reserved.pop((call.session, command.reservation), began)
        self._timeline.add((call.session, "put", command.partition, names, samples, nbytes, began, now))

    def _count_locate(self, call: c.Call, command: c.Locate, result: c.Located, began: float, now: float) -> None:
        """Count a get. Its span is added when its Release is answered."""
        samples, nbytes = len(result.rows), 0
        for field in result.fields:
            lengths = field.lengths.clip(0) if command.missing_ok else field.lengths  # negative: the value is missing
            if field.spec.settled:  # the size of a value is known
                nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * field.spec.unit_bytes
        moved = self.by_partition.get(command.partition) or self._add_partition(command.partition)
        moved.got_samples += samples
        moved.got_bytes += nbytes
        second = self._flow.second_at(now + self._unix_s)
        second.gets += samples
        second.get_bytes += nbytes
        key = call.session, call.number
        store_bounded(self._reading, key, (command.partition, command.fields, samples, nbytes, began))

    def _count_release(self, call: c.Call, command: c.Release, result: c.Done, began: float, now: float) -> None:
        """Add the span of a get, which has read its bytes between its Locate and this Release."""
        reading = self._reading.pop((call.session, command.located), None)
        if reading is not None:
            partition, fields, samples, nbytes, locate_began = reading
            self._timeline.add((call.session, "get", partition, fields, samples, nbytes, locate_began, now))

    def _count_claim(self, call: c.Call, command: c.Claim, result: c.Claimed, began: float, now: float) -> None:
        """Count a claim and its waiting time. A peek claims nothing and is not counted."""
        if command.peek:
            return
        samples = len(result.rows)
        moved = self.by_partition.get(command.partition) or self._add_partition(command.partition)
        moved.claimed_samples += samples
        key = command.partition, command.task
        waited = self.by_task.get(key)
        if waited is None:
            waited = Waited()
            store_bounded(self.by_task, key, waited)
        waited.add(now - began)
        self._flow.second_at(now + self._unix_s).claims += samples
        self._timeline.add((call.session, "claim", command.partition, (command.task,), samples, 0, began, now))

    def _count_clear(self, call: c.Call, command: c.Clear, result: c.Cleared, began: float, now: float) -> None:
        """Count cleared samples. A command without samples clears a whole partition: its counters are dropped after the
        samples are added, so that they count in `moved`."""
        moved = self.by_partition.get(command.partition) or self._add_partition(command.partition)
        moved.cleared_samples += result.count
        if command.samples is None:
            self.forget([command.partition])
        self._flow.second_at(now + self._unix_s).clears += result.count
        self._timeline.add((call.session, "clear", command.partition, (), result.count, 0, began, now))

    def _count_set_version(self, call: c.Call, command: c.SetVersion, result: c.Done, began: float, now: float) -> None:
        name = (f"version {command.version}",)
        self._timeline.add((call.session, "version", command.partition, name, 0, 0, began, now))

    # --- any thread

    @property
    def moved(self) -> MovedTotals:
        """Totals of all partitions, including dropped ones."""
        with self._counting:
            self.count()
            totals = MovedTotals()
            for moved in (self._dropped, *self.by_partition.values()):
                totals.add(moved)
            return totals

    @property
    def partitions(self) -> set[str]:
        """Names of the partitions that have counters."""
        with self._counting:
            self.count()
            return set(self.by_partition)

    def forget(self, partitions: Iterable[str]) -> None:
        """Drop the counters of these partitions. Their totals are kept in `moved`."""
        dropped = set(partitions)
        with self._counting:
            for name in dropped & self.by_partition.keys():
                self._dropped.add(self.by_partition.pop(name))
            for key in [key for key in self.by_task if key[0] in dropped]:
                del self.by_task[key]

    def flow(self) -> FlowReport:
        self.count()
        return self._flow.report(self.clock() + self._unix_s, self._clock_adjustment_s())

    def timeline(self) -> TimelineReport:
        self.count()
        return self._timeline.report(self._unix_s + self._clock_adjustment_s())

    def _clock_adjustment_s(self) -> int:
        """Return by how many seconds the machine's clock was adjusted since the start."""
        return round(self._wall() - self.clock() - self._unix_s)
