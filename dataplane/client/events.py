"""What a client tells of each operation: an event to a callback, and a span where OpenTelemetry is used."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

from dataplane.client.operations.steps import Operation, Send, Step, T
from dataplane.ledger import commands as c
from dataplane.ledger.state.arrays import total

log = logging.getLogger(__name__)

P = ParamSpec("P")

_NAMES = {"get_batch": "get", "consumed": "check_consumption", "register": "register_partition"}
_BY_COMMAND = frozenset({"ask", "about_claimed"})
"""Operations that are called by the one command that they send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpEvent:
    """One operation of a client, when it has ended.

    op: "put", "get", "claim" ("peek" if it only looks), "clear", "ack", "set_version", ... partition, task: "" where
    there is none. fields: put, read, or wanted by a claim. samples: put, read, claimed or cleared; of a put,
    `new_samples` did not live before.
    bytes: of all values put or read, objects as they are stored, a value that samples share once in a put. Of a put,
    `new_bytes` are those of values that are some sample's first of their field, `overwritten_bytes` the rest: the sum
    of `new_bytes` counts nothing twice. started: Unix time. took_s: in all; of it `waited_s` for samples or space.
    error: what it raised, "" if nothing; then it moved nothing.
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
"""Called in the thread, or the event loop, of the operation, which it holds up: it has to be quick."""


class EventEmitter:
    """Calls `on_event`, if there is one. One that raises is logged, the first time; no operation fails of it."""

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self.on_event = on_event
        self._complained = False

    def instrumented(
        self,
        operation: Callable[Concatenate[Any, P], Operation[T]],
        session_state: Any,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Operation[T]:
        """The operation, with an event at its end if a listener or a tracer is installed."""
        made = operation(session_state, *args, **kwargs)
        if self.on_event is None and tracer() is None:
            return made
        return self._told(made, operation.__name__)

    def _told(self, operation: Operation[T], name: str) -> Operation[T]:
        notes = _Notes(name)
        span = start_span(notes.op)
        try:
            result = yield from _seen(operation, notes)
        except BaseException as error:
            self._tell(notes.event(error), span, error)
            raise
        self._tell(notes.event(None), span, None)
        return result

    def _tell(self, event: OpEvent, span: TraceSpan | None, error: BaseException | None) -> None:
        if span is not None:
            span.end(f"dataplane {event.op}", _attributes(event), error)
        if self.on_event is None:
            return
        try:
            self.on_event(event)
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("on_event failed on %r; further failures are not logged", event)


def _seen(operation: Operation[T], notes: _Notes) -> Operation[T]:
    """The operation, with each step noted that went well."""
    try:
        step = next(operation)
        while True:
            began = time.perf_counter()
            try:
                outcome = yield step
            except BaseException as error:
                notes.ended(step, time.perf_counter() - began)
                step = operation.throw(error)
            else:
                notes.ended(step, time.perf_counter() - began)
                if isinstance(step, Send):
                    notes.answered(step.command, outcome.result)
                step = operation.send(outcome)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class _Notes:
    """What is known of an operation from the commands that it sent."""

    def __init__(self, name: str) -> None:
        self.op = _NAMES.get(name, name)
        self._by_command = name in _BY_COMMAND
        self._started = time.time()
        self._began = time.perf_counter()
        self._waited_s = 0.0
        self._partition = self._task = ""
        self._fields: tuple[str, ...] = ()
        self._samples = self._bytes = self._new_samples = self._overwritten_bytes = 0
        self._reads = self.op == "get"

    def ended(self, step: Step, took_s: float) -> None:
        if not isinstance(step, Send):
            return
        command = step.command
        if self._by_command:
            self.op = command.operation()
        self._partition = getattr(command, "partition", "") or self._partition
        self._task = getattr(command, "task", "") or self._task
        if isinstance(command, c.Claim | c.Allocate):
            self._waited_s += took_s
        if isinstance(command, c.Claim) and command.peek:
            self.op = "peek"
        if isinstance(command, c.Locate if self._reads else c.Claim):
            self._fields = command.fields
        elif isinstance(command, c.Commit):
            self._fields = tuple(column.name for column in command.columns)

    def answered(self, command: c.Command, result: Any) -> None:
        match command, result:
            case c.Commit(), c.Committed():
                self._samples += len(result.rows)
                self._new_samples += result.born
                self._bytes += sum(total(column.lengths) * column.spec.unit_bytes for column in command.columns)
                self._overwritten_bytes += result.overwritten_bytes
            case c.Locate(), c.Located() if self._reads:
                self._samples = len(result.rows)
                self._bytes = sum(total(found.lengths) * found.spec.unit_bytes for found in result.fields)
            case c.Claim(), c.Claimed():
                self._samples = len(result.rows)
            case c.Clear(), c.Cleared():
                self._samples = result.count
            case c.SetTags(), _:
                self._samples = len(command.samples)

    def event(self, error: BaseException | None) -> OpEvent:
        moved = error is None
        return OpEvent(
            op=self.op,
            partition=self._partition,
            task=self._task,
            fields=self._fields,
            samples=self._samples if moved else 0,
            bytes=self._bytes if moved else 0,
            new_samples=self._new_samples if moved else 0,
            new_bytes=self._bytes - self._overwritten_bytes if moved and not self._reads else 0,
            overwritten_bytes=self._overwritten_bytes if moved else 0,
            started=self._started,
            took_s=time.perf_counter() - self._began,
            waited_s=self._waited_s,
            error="" if error is None else type(error).__name__,
        )


def _attributes(event: OpEvent) -> dict[str, Any]:
    """Of a span; what says nothing is left out."""
    shown = {
        "partition": event.partition,
        "task": event.task,
        "fields": event.fields,
        "samples": event.samples,
        "bytes": event.bytes,
        "new_bytes": event.new_bytes,
        "waited_s": event.waited_s,
    }
    return {f"dataplane.{name}": value for name, value in shown.items() if value}


TRACER_NAME = "dataplane"


def tracer() -> Any | None:
    """The tracer of the application's provider; None if no provider is set. OpenTelemetry is not imported here: an
    application that set a provider has imported it."""
    trace = sys.modules.get("opentelemetry.trace")
    if not hasattr(trace, "get_tracer_provider"):  # another thread may be at importing it
        return None
    assert trace is not None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer(TRACER_NAME)


class TraceSpan:
    """A client's span under whatever span is current where it begins."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, name: str, attributes: Mapping[str, Any], error: BaseException | None) -> None:
        """End the span under this name; `error` is what the operation raised."""
        trace = sys.modules["opentelemetry.trace"]
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        self._span.end()


def start_span(op: str) -> TraceSpan | None:
    """Start a span; None if no provider is set."""
    made = tracer()
    if made is None:
        return None
    kind = sys.modules["opentelemetry.trace"].SpanKind.CLIENT
    return TraceSpan(made.start_span(f"{TRACER_NAME} {op}", kind=kind))
