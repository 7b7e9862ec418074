"""What a controller counts of the calls it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from dataplane.ledger.arrays import total
from dataplane.metrics.counts import Histogram, Op, Waited
from dataplane.metrics.flow import Flow, FlowReport
from dataplane.metrics.timeline import Timeline, TimelineReport, bounded

Follow = Callable[[c.Call, Any, Any, float, float], None]
"""(call, its command, its result, when it came, when it was answered): what more is kept of a call that went well."""


class Moved:
    """Samples and bytes of one partition, or of all, since the service began."""

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


class Recorder:
    """The ledger's thread adds, one call for each answer; everybody else reads. Memory is bounded.

    `clock` must be the one that the times of `answered` are of.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._unix_s = time.time() - clock()
        self.ops: dict[type[c.Value], Op] = {}
        self.moved = Moved()
        self.by_partition: dict[str, Moved] = {}
        self.by_task: dict[tuple[str, str], Waited] = {}
        self.syncs = Histogram()
        self.busy_s = 0.0
        self._flow = Flow()
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
        """`output` is the answer to `item`, which came at `began`."""
        now = self.clock()
        if type(item) is c.Call:
            assert type(output) is c.Answer
            command, result = item.command, output.result
            kind = type(command)
            op = self.ops.get(kind)
            if op is None:
                op = self.ops[kind] = Op()
            op.took.add(now - began)
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
        """The journal was forced to the disk."""
        self.syncs.add(took_s)

    def lives(self, nbytes: int) -> None:
        """So many bytes are live now."""
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

    def _of(self, partition: str) -> Moved:
        moved = self.by_partition.get(partition)
        if moved is None:
            moved = Moved()
            bounded(self.by_partition, partition, moved)
        return moved

    def _allocated(self, call: c.Call, command: c.Allocate, result: c.Allocated, began: float, now: float) -> None:
        bounded(self._reserved, (call.session, call.number), began)

    def _aborted(self, call: c.Call, command: c.Abort, result: c.Done, began: float, now: float) -> None:
        self._reserved.pop((call.session, command.reservation), None)

    def _committed(self, call: c.Call, command: c.Commit, result: c.Committed, began: float, now: float) -> None:
        samples = len(result.rows)
        nbytes, names = 0, []
        for column in command.columns:
            nbytes += total(column.lengths) * column.spec.unit_bytes
            names.append(column.name)
        for moved in (self.moved, self._of(command.partition)):
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
        samples = len(result.rows)
        nbytes = 0
        for found in result.fields:
            lengths = found.lengths.clip(0) if command.missing_ok else found.lengths
            if found.spec.settled:
                nbytes += total(lengths) * found.spec.unit_bytes
        for moved in (self.moved, self._of(command.partition)):
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
        samples = len(result.rows)
        self.moved.claimed_samples += samples
        self._of(command.partition).claimed_samples += samples
        key = command.partition, command.task
        waited = self.by_task.get(key)
        if waited is None:
            waited = Waited()
            bounded(self.by_task, key, waited)
        waited.add(now - began)
        self._flow.at(now + self._unix_s).claims += samples
        self._timeline.add((call.session, "claim", command.partition, (command.task,), samples, 0, began, now))

    def _cleared(self, call: c.Call, command: c.Clear, result: c.Cleared, began: float, now: float) -> None:
        self.moved.cleared_samples += result.count
        if command.samples is None:
            self.forget([command.partition])
        else:
            self._of(command.partition).cleared_samples += result.count
        self._flow.at(now + self._unix_s).clears += result.count
        self._timeline.add((call.session, "clear", command.partition, (), result.count, 0, began, now))

    def _version_set(self, call: c.Call, command: c.SetVersion, result: c.Done, began: float, now: float) -> None:
        name = (f"version {command.version}",)
        self._timeline.add((call.session, "version", command.partition, name, 0, 0, began, now))

    # --- any thread

    def forget(self, partitions: Iterable[str]) -> None:
        """These are gone."""
        gone = set(partitions)
        for name in gone:
            self.by_partition.pop(name, None)
        for key in [key for key in list(self.by_task) if key[0] in gone]:
            self.by_task.pop(key, None)

    def flow(self) -> FlowReport:
        return self._flow.report(self.clock() + self._unix_s)

    def timeline(self) -> TimelineReport:
        return self._timeline.report(self._unix_s)
