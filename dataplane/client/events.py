"""Events of client operations: each operation ends with a call of `on_event`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.client.operations.steps import Operation, Send, Step, T
from dataplane.ledger import commands as c
from dataplane.ledger.commands.short import decode_plan
from dataplane.ledger.state.arrays import total

log = logging.getLogger(__name__)

_NAMES = {"get_batch": "get", "consumed": "check_consumption", "register": "register_partition"}
_BY_COMMAND = frozenset({"ask", "settle_claims"})
"""Operations that are named after the one command that they send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpEvent:
    """A finished operation of a client.

    op: "put", "get", "claim" ("peek" if it claims nothing), "clear", "ack", "set_version", ... partition, task: ""
    if not applicable. fields: fields put, read, or required by a claim. samples: number of samples put, read,
    claimed or cleared; `new_samples` are those that a put created. bytes: size of all values put or read; objects
    count as stored, a value shared by samples counts once per put. Of a put, `new_bytes` are the values that are
    the first of their field for a sample, and `overwritten_bytes` the rest: the sum of `new_bytes` counts nothing
    twice. started: Unix time. took_s: total duration in seconds; `waited_s` of it was spent waiting for samples or
    space. error: name of the exception type, "" if none; on an error all counts are 0.
    """

    op: str
    partition: str
    task: str
    fields: tuple[str, ...]
    samples: int
    bytes: int
    new_samples: int
    new_bytes: int
    overwritten_bytes: int
    started: float
    took_s: float
    waited_s: float
    error: str


OnEvent = Callable[[OpEvent], None]
"""Called in the thread, or the event loop, of the operation. It delays the operation and must return quickly."""


class EventEmitter:
    """Calls `on_event` if it is set. Its first exception is logged; exceptions never fail an operation."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self.on_event = on_event
        self._failure_logged = False

    def observed(self, operation: Operation[T], name: str) -> Operation[T]:
        """Return an operation with the same steps and result that emits an event at its end. name: of its function."""
        record = _OperationRecord(name)
        try:
            result = yield from _record_steps(operation, record)
        except BaseException as error:
            self._emit(record.event(error))
            raise
        self._emit(record.event(error=None))
        return result

    def _emit(self, event: OpEvent) -> None:
        """Call `on_event`, unless it was removed while the operation ran."""
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            if not self._failure_logged:
                self._failure_logged = True
                log.exception("on_event failed for %r; further failures are not logged", event)


def _record_steps(operation: Operation[T], record: _OperationRecord) -> Operation[T]:
    """Yield the steps of the operation, record each of them in `record`, and return the operation's result."""
    try:
        step = next(operation)
        while True:
            began = time.perf_counter()
            try:
                outcome = yield step
            except BaseException as error:
                record.add_step(step, time.perf_counter() - began)
                step = operation.throw(error)
            else:
                record.add_step(step, time.perf_counter() - began)
                if isinstance(step, Send):
                    record.add_result(step.command, outcome.result)
                step = operation.send(outcome)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _OperationRecord:
    """Facts about an operation, collected from the commands that it sends. `_by_command`: the operation is named after
    its command. `_started` is the time of its start (Unix time), `_began` the same as `time.perf_counter`."""

    def __init__(self, name: str) -> None:
        self.op = _NAMES.get(name, name)
        self._by_command = name in _BY_COMMAND
        self._started = time.time()
        self._began = time.perf_counter()
        self._waited_s = 0.0
        self._partition = self._task = ""
        self._fields: tuple[str, ...] = ()
        self._samples = self._bytes = self._new_samples = self._overwritten_bytes = 0
        self._reads = self.op == "get"  # a put may read, too: what it reads is not counted

    def add_step(self, step: Step, took_s: float) -> None:
        """Record a step that has ended, successfully or not. The last command that names a partition or a task sets
        it."""
        if not isinstance(step, Send):
            return
        command = _general(step.command)
        if self._by_command:
            self.op = command.operation()
        self._partition = getattr(command, "partition", "") or self._partition
        self._task = getattr(command, "task", "") or self._task
        if isinstance(command, c.Claim | c.Allocate):  # the commands that wait for samples or space
            self._waited_s += took_s
        if isinstance(command, c.Claim) and command.peek:
            self.op = "peek"
        # Fields: of a get those of its `Locate`, of a claim those of its `Claim`, of a put those of its `Commit`.
        if isinstance(command, c.Locate if self._reads else c.Claim):
            self._fields = command.fields
        elif isinstance(command, c.Commit):
            self._fields = tuple(column.name for column in command.columns)

    def add_result(self, command: c.Command, result: Any) -> None:
        """Record the counts in the result of a command; other commands than these have none."""
        match _general(command), result:
            case c.Locate(), c.RowsLocated() if self._reads and isinstance(command, c.LocateRows):
                self._samples = len(result.rows)
                self._bytes = decode_plan(command.plan).nbytes(result.lengths)
            case c.Commit() as commit, c.Committed():  # added up: a restore sends many commits
                self._samples += len(result.rows)
                self._new_samples += result.born
                self._bytes += sum(total(column.lengths) * column.spec.unit_bytes for column in commit.columns)
                self._overwritten_bytes += result.overwritten_bytes
            case c.Locate(), c.Located() if self._reads:
                self._samples = len(result.rows)
                self._bytes = sum(total(field.lengths) * field.spec.unit_bytes for field in result.fields)
            case c.Claim(), c.Claimed():
                self._samples = len(result.rows)
            case c.Clear(), c.Cleared():
                self._samples = result.count
            case c.SetTags() as set_tags, _:
                self._samples = len(set_tags.samples)

    def event(self, error: BaseException | None) -> OpEvent:
        """Return the event of the operation, which raised `error` if it is not None."""
        succeeded = error is None
        return OpEvent(
            op=self.op,
            partition=self._partition,
            task=self._task,
            fields=self._fields,
            samples=self._samples if succeeded else 0,
            bytes=self._bytes if succeeded else 0,
            new_samples=self._new_samples if succeeded else 0,
            new_bytes=self._bytes - self._overwritten_bytes if succeeded and not self._reads else 0,
            overwritten_bytes=self._overwritten_bytes if succeeded else 0,
            started=self._started,
            took_s=time.perf_counter() - self._began,
            waited_s=self._waited_s,
            error="" if error is None else type(error).__name__,
        )


def _general(command: c.Command) -> c.Command:
    """Return the general form of a command."""
    return command.expand() if isinstance(command, c.SHORT) else command
