"""JSON interface of the dashboard: the state of the service.

Also the static files of the dashboard and their HTTP paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from dataplane.controller.metrics.throughput import FlowReport
from dataplane.controller.metrics.timeline import TimelineReport
from dataplane.ledger import commands as c
from dataplane.protocol.http import HTML, Handler, HttpRequest, Parameters, Response, as_json, plain

PARTS = 256
"""Default number of columns or cells of a chart."""
MOST_PARTS = 4096  # the most that a request may set
WAITS = 1000
"""Default number of waiting calls in a response (0: all)."""
MOST_WAITS = 1 << 16  # the most that a request may set


class Ask(Protocol):
    """Executes a command on the ledger. Raises the error that the ledger answers."""

    def __call__(self, command: c.Command) -> c.Result: ...


class Recorded(Protocol):
    """Reports on past operations of the service."""

    def flow(self) -> FlowReport: ...
    def timeline(self) -> TimelineReport: ...


def api(ask: Ask, recorded: Recorded) -> Mapping[str, Handler]:
    """Return the handlers by path. Each one converts the request to a command, executes it with `ask`, and returns the
    result as JSON. Those of /api/flow and /api/timeline return a report of `recorded`."""

    def handler_of(command: Callable[[HttpRequest], c.Command]) -> Handler:
        return lambda request: as_json(ask(command(request)))

    def flow(request: HttpRequest) -> Response:
        Parameters(request)  # raises if the request has any
        return as_json(recorded.flow())

    def timeline(request: HttpRequest) -> Response:
        Parameters(request)  # raises if the request has any
        return as_json(recorded.timeline())

    return {
        "/api/stats": handler_of(_stats),
        "/api/matrix": handler_of(_matrix),
        "/api/memory": handler_of(_memory),
        "/api/waits": handler_of(_waits),
        "/api/why": lambda request: as_json(ask(_why(request, ask))),
        "/api/sample": handler_of(_sample),
        "/api/flow": flow,
        "/api/timeline": timeline,
    }


def health(why_not: Callable[[], str]) -> Handler:
    """Return the health handler for load balancers and Kubernetes. `why_not` returns why the service is unhealthy, or
    ""."""

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
    parameters = Parameters(request, "partition", "columns")
    return c.Inspect(
        partition=parameters.text("partition"), columns=parameters.number("columns", PARTS, most=MOST_PARTS)
    )


def _memory(request: HttpRequest) -> c.Command:
    parameters = Parameters(request, "unit", "cells")
    return c.MapMemory(unit=parameters.number("unit"), cells=parameters.number("cells", PARTS, most=MOST_PARTS))


def _sample(request: HttpRequest) -> c.Command:
    parameters = Parameters(request, "partition", "id")
    return c.Show(partition=parameters.text("partition"), samples=c.Samples(ids=(parameters.text("id"),)))


def _why(request: HttpRequest, ask: Ask) -> c.Command:
    """Return the command WhyBlocked with the fields of the task's latest claim (from Stats; none for unknown tasks)."""
    parameters = Parameters(request, "partition", "task")
    partition, task = parameters.text("partition"), parameters.text("task")
    report = ask(c.Stats())
    assert isinstance(report, c.StatsReport)
    fields: tuple[str, ...] = ()
    for part in report.partitions:
        for known in part.tasks:
            if (part.partition, known.task) == (partition, task):
                fields = known.fields
    return c.WhyBlocked(partition=partition, task=task, fields=fields)


PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": HTML,
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".woff2": "font/woff2",
}


def page(folder: Path = PAGE) -> dict[str, Handler]:
    """Read the files in `folder` with a suffix of `_TYPES` and return their handlers by path; index.html is at /."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _TYPES]
    return {"/" if path.name == "index.html" else f"/{path.name}": _file(path) for path in files}


def _file(path: Path) -> Handler:
    response = Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], headers={"Cache-Control": "no-cache"})
    return lambda request: response
