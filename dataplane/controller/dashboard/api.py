"""The service's state as JSON: what the page draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Protocol

from dataplane.controller.metrics.throughput import FlowReport
from dataplane.controller.metrics.timeline import TimelineReport
from dataplane.ledger import commands as c
from dataplane.protocol.http.messages import HttpRequest, Parameters, Response, as_json, plain
from dataplane.protocol.http.routes import Handler

PARTS = 256
"""Columns and cells of a picture, unless the request names another number."""
MOST_PARTS = 4096
WAITS = 1000
"""Calls that wait, unless the request names another number (0: all)."""
MOST_WAITS = 1 << 16


class Ask(Protocol):
    """Has the ledger answer a command; raises the error that it answers with."""

    def __call__(self, command: c.Command) -> c.Result: ...


class Recorded(Protocol):
    """What went through the service."""

    def flow(self) -> FlowReport: ...
    def timeline(self) -> TimelineReport: ...


def api(ask: Ask, recorded: Recorded) -> Mapping[str, Handler]:
    """Handlers by path."""

    def asked(command: Callable[[HttpRequest], c.Command]) -> Handler:
        return lambda request: as_json(ask(command(request)))

    def flow(request: HttpRequest) -> Response:
        Parameters(request)
        return as_json(recorded.flow())

    def timeline(request: HttpRequest) -> Response:
        Parameters(request)
        return as_json(recorded.timeline())

    return {
        "/api/stats": asked(_stats),
        "/api/matrix": asked(_matrix),
        "/api/memory": asked(_memory),
        "/api/waits": asked(_waits),
        "/api/why": lambda request: as_json(ask(_why(request, ask))),
        "/api/sample": asked(_sample),
        "/api/flow": flow,
        "/api/timeline": timeline,
    }


def health(why_not: Callable[[], str]) -> Handler:
    """Whether the service serves, as a load balancer or Kubernetes asks it. `why_not` says why not, "" if it does."""

    def healthz(request: HttpRequest) -> Response:
        why = why_not()
        return plain(f"{why}\n", HTTPStatus.SERVICE_UNAVAILABLE) if why else plain("ok\n")

    return healthz


def _stats(request: HttpRequest) -> c.Command:
    Parameters(request)
    return c.Stats()


def _waits(request: HttpRequest) -> c.Command:
    return c.Waits(limit=Parameters(request, "limit").number("limit", WAITS, most=MOST_WAITS))


def _matrix(request: HttpRequest) -> c.Command:
    asked = Parameters(request, "partition", "columns")
    return c.Inspect(partition=asked.text("partition"), columns=asked.number("columns", PARTS, most=MOST_PARTS))


def _memory(request: HttpRequest) -> c.Command:
    asked = Parameters(request, "unit", "cells")
    return c.MapMemory(unit=asked.number("unit"), cells=asked.number("cells", PARTS, most=MOST_PARTS))


def _sample(request: HttpRequest) -> c.Command:
    asked = Parameters(request, "partition", "id")
    return c.Show(partition=asked.text("partition"), samples=c.Samples(ids=(asked.text("id"),)))


def _why(request: HttpRequest, ask: Ask) -> c.Command:
    """With the fields that the task's latest claim wanted."""
    asked = Parameters(request, "partition", "task")
    partition, task = asked.text("partition"), asked.text("task")
    report = ask(c.Stats())
    assert isinstance(report, c.StatsReport)
    tasks = (found for part in report.partitions if part.partition == partition for found in part.tasks)
    fields = next((found.fields for found in tasks if found.task == task), ())
    return c.WhyBlocked(partition=partition, task=task, fields=fields)
