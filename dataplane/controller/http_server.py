"""The HTTP server of the controller: dashboard page, JSON, metrics and health."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Protocol, Self

from prometheus_client import CollectorRegistry

from dataplane.config import DataPlaneConfig
from dataplane.controller.durable_ledger import DurableLedger
from dataplane.controller.event_loop import LedgerLike, LedgerThread
from dataplane.controller.metrics.collector import ServiceMetrics
from dataplane.controller.metrics.history import FlowReport, TimelineReport
from dataplane.controller.metrics.recorder import Recorder
from dataplane.errors import ServiceUnavailableError
from dataplane.ledger import commands as c
from dataplane.protocol.http import (
    HTML,
    Handler,
    HttpRequest,
    HttpServer,
    Parameters,
    Response,
    as_json,
    metrics,
    plain,
)
from dataplane.protocol.tls import server_context

SAMPLE_S = 1.0
"""Interval in seconds at which the live bytes are sampled for the throughput chart."""


class HttpInterface:
    """Serves the state of `ledger`, read by `LedgerThread.inspect`, and the counters of `recorder`
    over HTTP, at the host and port in `config`. why_not: health check of `/healthz`; returns why
    the service is unhealthy, or ""."""

    def __init__(
        self,
        config: DataPlaneConfig,
        ledger_thread: LedgerThread,
        ledger: LedgerLike,
        recorder: Recorder,
        why_not: Callable[[], str],
    ) -> None:
        assert config.http_port is not None
        self._ledger_thread = ledger_thread
        self._ledger = ledger
        self._recorder = recorder
        token = config.secret()
        journal = ledger if isinstance(ledger, DurableLedger) else None
        registry = CollectorRegistry()
        registry.register(ServiceMetrics(ledger_thread.inspect, recorder, journal))
        metrics_handler = {"/metrics": metrics(registry)}
        public = {"/healthz": health(why_not)}
        # Without a token the host name of each request must still be checked.
        if config.open_metrics and token is not None:
            public.update(metrics_handler)
        self.server = HttpServer(
            {**page(), **api(ledger_thread.inspect, recorder), **metrics_handler},
            config.host,
            config.http_port,
            token=token,
            public=public,
            context=None if config.tls is None else server_context(config.tls),
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tq-http-sample", daemon=True)

    def start(self) -> Self:
        """Start the server and return once it listens. Raises OSError if it cannot."""
        self.server.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        self._stopping.set()
        self.server.stop()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _sample(self) -> None:
        """Until `stop`, record the live bytes in the ledger thread."""
        while not self._stopping.wait(SAMPLE_S):
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.run(self._record_live_bytes)  # only that thread may read the ledger

    def _record_live_bytes(self) -> None:
        self._recorder.record_live_bytes(self._ledger.live_bytes)


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
    partition = parameters.text("partition")
    task = parameters.text("task")
    report = ask(c.Stats())
    assert isinstance(report, c.StatsReport)
    fields: tuple[str, ...] = ()
    for each in report.partitions:
        for known in each.tasks:
            if (each.partition, known.task) == (partition, task):
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
