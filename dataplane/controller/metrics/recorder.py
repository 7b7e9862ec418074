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
from dataplane.controller.metrics.timeline import Timeline, TimelineReport, bounded
from dataplane.core.metrics.histograms import BOUNDS_S, Histogram, Op, Waited
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
        self._gone = MovedTotals()
        self.by_partition: dict[str, MovedTotals] = {}
        self.by_task: dict[tuple[str, str], Waited] = {}
        self.syncs = Histogram()
        self.busy_s = 0.0
        self._pending: deque[tuple[c.Input, c.Output, float, float]] = deque()
        self._samples = 0
        self._counting = threading.RLock()  # held to count, sum or drop counters
        self._flow = Throughput()
        self._timeline = Timeline()
        self._reserved: dict[tuple[int, int], float] = {}
        self._reading: dict[tuple[int, int], tuple[str, Sequence[str], int, int, float]] = {}
        self._follow: dict[type[c.Value], Follow] = {
            c.Allocate: self._allocated,
            c.Abort: self._aborted,
            c.Commit: self._committed,
            c.Locate: self._located,
            c.Release: self._released,
            c.Claim: self._claimed,
            c.Clear: self._cleared,
            c.SetVersion: self._version_set,
        }

    # --- the ledger's thread

    def answered(self, item: c.Input, output: c.Output, began: float) -> None:
        """Record that `output` answers `item`, which arrived at `began`."""
        pending = self._pending
        pending.append((item, output, began, self.clock()))
        if type(output) is c.Answer:
            result = output.result
            if isinstance(result, _OF_SAMPLES):
                self._samples += len(result.rows)
        if len(pending) >= TOGETHER or self._samples >= HEAVY:
            self.count()

    def count(self) -> None:
        """Count all pending answers. Any thread."""
        with self._counting:
            self._samples = 0
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
            took = op.took
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
            self._reported(item, output, now - began)

    def synced(self, took_s: float) -> None:
        """Record an fsync of the journal that took `took_s` seconds."""
        self.syncs.add(took_s)

    def lives(self, nbytes: int) -> None:
        """Record the current number of live bytes."""
        with self._counting:
            self.count()
            self._flow.at(self.clock() + self._unix_s).live_bytes = nbytes

    def _reported(self, item: c.Input, output: c.Output, took_s: float) -> None:
        op = self.ops.setdefault(type(item), Op())
        op.took.add(took_s)
        error = getattr(output, "error", None)
        if error is not None:
            op.failed(error)
            return
        op.ok += 1
        if isinstance(item, c.OpenSession) and isinstance(output, c.Opened):
            self._timeline.opened(output.session, item.name)

    def _begin(self, partition: str) -> MovedTotals:
        moved = MovedTotals()
        given_up = bounded(self.by_partition, partition, moved)
        if given_up is not None:
            self._gone.add(given_up)
        return moved

    def _allocated(self, call: c.Call, command: c.Allocate, result: c.Allocated, began: float, now: float) -> None:
        bounded(self._reserved, (call.session, call.number), began)

    def _aborted(self, call: c.Call, command: c.Abort, result: c.Done, began: float, now: float) -> None:
        self._reserved.pop((call.session, command.reservation), None)

    def _committed(self, call: c.Call, command: c.Commit, result: c.Committed, began: float, now: float) -> None:
        samples, nbytes, names = len(result.rows), 0, []
        for column in command.columns:
            lengths = column.lengths
            nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * column.spec.unit_bytes
            names.append(field_of(column.name))
        moved = self.by_partition.get(command.partition) or self._begin(command.partition)
        moved.put_samples += samples
        moved.put_bytes += nbytes
        moved.new_samples += result.born
        moved.overwritten_bytes += result.overwritten_bytes
        second = self._flow.at(now + self._unix_s)
        second.puts += samples
        second.put_bytes += nbytes
        if command.reservation is not None and command.offset is None:
            began = self._reserved.pop((call.session, command.reservation), began)
        self._timeline.add((call.session, "put", command.partition, names, samples, nbytes, began, now))

    def _located(self, call: c.Call, command: c.Locate, result: c.Located, began: float, now: float) -> None:
        if command.unpinned:
            return
        samples, nbytes = len(result.rows), 0
        for found in result.fields:
            lengths = found.lengths.clip(0) if command.missing_ok else found.lengths
            if found.spec.settled:
                nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * found.spec.unit_bytes
        moved = self.by_partition.get(command.partition) or self._begin(command.partition)
        moved.got_samples += samples
        moved.got_bytes += nbytes
        second = self._flow.at(now + self._unix_s)
        second.gets += samples
        second.get_bytes += nbytes
        key = call.session, call.number
        bounded(self._reading, key, (command.partition, command.fields, samples, nbytes, began))

    def _released(self, call: c.Call, command: c.Release, result: c.Done, began: float, now: float) -> None:
        reading = self._reading.pop((call.session, command.located), None)
        if reading is not None:
            partition, fields, samples, nbytes, began = reading
            self._timeline.add((call.session, "get", partition, fields, samples, nbytes, began, now))

    def _claimed(self, call: c.Call, command: c.Claim, result: c.Claimed, began: float, now: float) -> None:
        if command.peek:
            return
        samples = len(result.rows)
        moved = self.by_partition.get(command.partition) or self._begin(command.partition)
        moved.claimed_samples += samples
        key = command.partition, command.task
        waited = self.by_task.get(key)
        if waited is None:
            waited = Waited()
            bounded(self.by_task, key, waited)
        waited.add(now - began)
        self._flow.at(now + self._unix_s).claims += samples
        self._timeline.add((call.session, "claim", command.partition, (command.task,), samples, 0, began, now))

    def _cleared(self, call: c.Call, command: c.Clear, result: c.Cleared, began: float, now: float) -> None:
        moved = self.by_partition.get(command.partition) or self._begin(command.partition)
        moved.cleared_samples += result.count
        if command.samples is None:
            self.forget([command.partition])
        self._flow.at(now + self._unix_s).clears += result.count
        self._timeline.add((call.session, "clear", command.partition, (), result.count, 0, began, now))

    def _version_set(self, call: c.Call, command: c.SetVersion, result: c.Done, began: float, now: float) -> None:
        name = (f"version {command.version}",)
        self._timeline.add((call.session, "version", command.partition, name, 0, 0, began, now))

    # --- any thread

    @property
    def moved(self) -> MovedTotals:
        """Totals of all partitions, including dropped ones."""
        with self._counting:
            self.count()
            everything = MovedTotals()
            for moved in (self._gone, *self.by_partition.values()):
                everything.add(moved)
            return everything

    @property
    def partitions(self) -> set[str]:
        """Names of the partitions that have counters."""
        with self._counting:
            self.count()
            return set(self.by_partition)

    def forget(self, partitions: Iterable[str]) -> None:
        """Drop the counters of these partitions. Their totals are kept in `moved`."""
        gone = set(partitions)
        with self._counting:
            for name in gone & self.by_partition.keys():
                self._gone.add(self.by_partition.pop(name))
            for key in [key for key in self.by_task if key[0] in gone]:
                del self.by_task[key]

    def flow(self) -> FlowReport:
        self.count()
        return self._flow.report(self.clock() + self._unix_s, self._set_by_s())

    def timeline(self) -> TimelineReport:
        self.count()
        return self._timeline.report(self._unix_s + self._set_by_s())

    def _set_by_s(self) -> int:
        """Return by how many seconds the machine's clock was adjusted since the start."""
        return round(self._wall() - self.clock() - self._unix_s)
