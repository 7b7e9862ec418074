"""Counters of the calls that a controller answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataplane.controller.metrics.history import (
    OPEN,
    FlowReport,
    Throughput,
    Timeline,
    TimelineReport,
)
from dataplane.core.bounded import Bounded
from dataplane.core.metrics import Op
from dataplane.core.schema import field_of
from dataplane.errors import DataPlaneError
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import decode_plan
from dataplane.ledger.state.arrays import total

log = logging.getLogger(__name__)

TOGETHER = 64
"""Number of answers that are counted together, which is faster than one by one."""
HEAVY = 4_096
"""Pending answers are counted earlier if they hold this many samples, to release their memory."""
_OF_SAMPLES = (c.Committed, c.Located, c.RowsLocated, c.Claimed)
_GENERAL: dict[type[c.Value], type[c.Value]] = {c.PutRows: c.Commit, c.LocateRows: c.Locate}
"""The commands as which their short forms are counted."""

Follow = Callable[[Any, Any, Any, float, float], None]
"""Called as (call, command, result, arrival time, answer time) to count details of a successful
call. A report, such as OpenSession, is its own call and command."""
_Reading = tuple[str, Sequence[str], int, int, float]
"""Partition, fields, samples, bytes and arrival of the Locate."""
Moved = Counter[str]
"""Numbers of samples and bytes since the service started, of one partition or of all, by name."""
MOVED = (  # the names in `Moved`
    "claimed_samples",
    "cleared_samples",
    "got_bytes",
    "got_samples",
    "new_samples",
    "overwritten_bytes",
    "put_bytes",
    "put_samples",
)


class Recorder:
    """Counts the answers that the ledger thread reports, in batches, but always before a counter is read. Memory is
    bounded.

    `_unix_s`: the difference between Unix time and `clock` at the start. `_dropped`: totals of partitions without
    counters. `_reserved`: when the Allocate of an uncommitted put arrived, by (session, call id). `_reading`: gets
    whose Release was not answered yet, by (session, call id).
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
        self._dropped: Moved = Counter()
        self.by_partition: Bounded[str, Moved] = Bounded(OPEN)
        # Successful claims, by (partition, task).
        self.by_task: Bounded[tuple[str, str], Op] = Bounded(OPEN)
        self.busy_s = 0.0  # of the ledger thread, which adds to it
        # The answers that are not counted yet, with their times of arrival and answer.
        self._pending: deque[tuple[c.Input, c.Output, float, float]] = deque()
        self._pending_samples = 0  # in the results of `_pending`
        self._counting = threading.RLock()  # held to count, sum or drop counters; `moved` calls `count` with it
        self._flow = Throughput()
        self._timeline = Timeline()
        self._reserved: Bounded[tuple[int, int], float] = Bounded(OPEN)
        self._reading: Bounded[tuple[int, int], _Reading] = Bounded(OPEN)
        self._follow: dict[type[c.Value], Follow] = {
            c.Allocate: self._count_allocate,
            c.Abort: self._count_abort,
            c.Commit: self._count_commit,
            c.PutRows: self._count_put_rows,
            c.Locate: self._count_locate,
            c.LocateRows: self._count_locate_rows,
            c.Release: self._count_release,
            c.Claim: self._count_claim,
            c.Clear: self._count_clear,
            c.SetVersion: self._count_set_version,
            c.OpenSession: self._count_open_session,
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
        command: c.Value = item
        result: object = output
        if type(item) is c.Call:
            if not item.session:
                return  # a call without a session is a health check
            assert type(output) is c.Answer
            command = item.command
            result = output.result
        elif error := getattr(output, "error", None):
            result = error
        kind = type(command)
        counted_as = _GENERAL.get(kind, kind)
        op = self.ops.get(counted_as) or self.ops.setdefault(counted_as, Op())
        if isinstance(result, DataPlaneError):
            op.add(now - began, result)
            return
        op.add(now - began)
        follow = self._follow.get(kind)
        if follow is not None:
            follow(item, command, result, began, now)

    def record_live_bytes(self, nbytes: int) -> None:
        """Record the current number of live bytes."""
        with self._counting:
            self.count()
            self._flow.second_at(self.clock() + self._unix_s).live_bytes = nbytes

    def _moved(self, partition: str) -> Moved:
        """Return the counters of a partition. If there are too many, the oldest one's are added to
        `_dropped`."""
        moved = self.by_partition.get(partition)
        if moved is None:
            moved = Counter()
            self._dropped.update(self.by_partition.store(partition, moved))
        return moved

    def _count_allocate(self, call: c.Call, command: c.Allocate, result: c.Allocated, began: float, now: float) -> None:
        self._reserved.store((call.session, call.call_id), began)

    def _count_abort(self, call: c.Call, command: c.Abort, result: c.Done, began: float, now: float) -> None:
        self._reserved.pop((call.session, command.reservation), None)

    def _count_commit(self, call: c.Call, command: c.Commit, result: c.Committed, began: float, now: float) -> None:
        """Count a put. Its span begins with its Allocate if it had a reservation of its own, otherwise at `began`, the
        arrival of the Commit."""
        nbytes = 0
        names = []
        for column in command.columns:
            lengths = column.lengths  # often one, whose sum costs more than `item`
            nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * column.spec.unit_bytes
            names.append(field_of(column.name))
        if command.reservation is not None and command.offset is None:  # offset: a part of a Preallocate
            began = self._reserved.pop((call.session, command.reservation), began)
        self._count_put(call.session, command.partition, names, nbytes, result, began, now)

    def _count_put_rows(self, call: c.Call, command: c.PutRows, result: c.Committed, began: float, now: float) -> None:
        plan = decode_plan(command.plan)
        nbytes = plan.nbytes(command.lengths)
        self._count_put(call.session, command.partition, list(plan.names), nbytes, result, began, now)

    def _count_put(
        self,
        session: int,
        partition: str,
        names: list[str],
        nbytes: int,
        result: c.Committed,
        began: float,
        now: float,
    ) -> None:
        """Count a put of these fields, which took from `began` to `now`."""
        samples = len(result.rows)
        moved = self._moved(partition)
        moved["put_samples"] += samples
        moved["put_bytes"] += nbytes
        moved["new_samples"] += result.born
        moved["overwritten_bytes"] += result.overwritten_bytes
        second = self._flow.second_at(now + self._unix_s)
        second.puts += samples
        second.put_bytes += nbytes
        self._timeline.add((session, "put", partition, names, samples, nbytes, began, now))

    def _count_locate(self, call: c.Call, command: c.Locate, result: c.Located, began: float, now: float) -> None:
        """Count a get."""
        samples = len(result.rows)
        nbytes = 0
        for field in result.fields:
            lengths = field.lengths.clip(0) if command.missing_ok else field.lengths  # negative: the value is missing
            if field.spec.settled:  # the size of a value is known
                nbytes += (lengths.item() if lengths.size == 1 else total(lengths)) * field.spec.unit_bytes
        self._count_get(call, command.partition, command.fields, samples, nbytes, began, now, brief=command.brief)

    def _count_locate_rows(
        self, call: c.Call, command: c.LocateRows, result: c.RowsLocated, began: float, now: float
    ) -> None:
        """Count a get. After a general answer, the client repeats it."""
        if result.general is None:
            plan = decode_plan(command.plan)
            nbytes = plan.nbytes(result.lengths)
            self._count_get(call, command.partition, plan.names, len(result.rows), nbytes, began, now, brief=True)

    def _count_get(
        self,
        call: c.Call,
        partition: str,
        fields: tuple[str, ...],
        samples: int,
        nbytes: int,
        began: float,
        now: float,
        *,
        brief: bool,
    ) -> None:
        """Count a get, whose call to locate the rows took from `began` to `now`. The span of a brief one (see `Locate`)
        is that call. The span of another one is added when its Release is answered."""
        moved = self._moved(partition)
        moved["got_samples"] += samples
        moved["got_bytes"] += nbytes
        second = self._flow.second_at(now + self._unix_s)
        second.gets += samples
        second.get_bytes += nbytes
        if brief:
            self._timeline.add((call.session, "get", partition, fields, samples, nbytes, began, now))
        else:
            self._reading.store((call.session, call.call_id), (partition, fields, samples, nbytes, began))

    def _count_release(self, call: c.Call, command: c.Release, result: c.Done, began: float, now: float) -> None:
        """Add the span of a get that is not brief: it has read its bytes between its Locate and this Release."""
        reading = self._reading.pop((call.session, command.located), None)
        if reading is not None:
            partition, fields, samples, nbytes, locate_began = reading
            self._timeline.add((call.session, "get", partition, fields, samples, nbytes, locate_began, now))

    def _count_claim(self, call: c.Call, command: c.Claim, result: c.Claimed, began: float, now: float) -> None:
        """Count a claim and its waiting time. A peek claims nothing and is not counted."""
        if command.peek:
            return
        samples = len(result.rows)
        moved = self._moved(command.partition)
        moved["claimed_samples"] += samples
        key = command.partition, command.task
        if key not in self.by_task:
            self.by_task.store(key, Op())
        self.by_task[key].add(now - began)
        self._flow.second_at(now + self._unix_s).claims += samples
        self._timeline.add((call.session, "claim", command.partition, (command.task,), samples, 0, began, now))

    def _count_clear(self, call: c.Call, command: c.Clear, result: c.Cleared, began: float, now: float) -> None:
        """Count cleared samples. A command without samples clears a whole partition: its counters are dropped after the
        samples are added, so that they count in `moved`."""
        moved = self._moved(command.partition)
        moved["cleared_samples"] += result.count
        if command.samples is None:
            self.forget([command.partition])
        self._flow.second_at(now + self._unix_s).clears += result.count
        self._timeline.add((call.session, "clear", command.partition, (), result.count, 0, began, now))

    def _count_set_version(self, call: c.Call, command: c.SetVersion, result: c.Done, began: float, now: float) -> None:
        name = (f"version {command.version}",)
        self._timeline.add((call.session, "version", command.partition, name, 0, 0, began, now))

    def _count_open_session(
        self, call: c.Input, command: c.OpenSession, result: c.Opened, began: float, now: float
    ) -> None:
        self._timeline.opened(result.session, command.name)

    # --- any thread

    @property
    def moved(self) -> Moved:
        """Totals of all partitions, including dropped ones."""
        with self._counting:
            self.count()
            return sum(self.by_partition.values(), self._dropped)

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
                self._dropped.update(self.by_partition.pop(name))
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
