"""The HTTP server of the controller: dashboard page, JSON, metrics and health."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Self

from prometheus_client import CollectorRegistry

from dataplane.config import DataPlaneConfig
from dataplane.controller.dashboard.api import api, health, page
from dataplane.controller.durable_ledger import DurableLedger
from dataplane.controller.event_loop import LedgerLike, LedgerThread
from dataplane.controller.metrics.collector import ServiceMetrics
from dataplane.controller.metrics.recorder import Recorder
from dataplane.errors import ServiceUnavailableError
from dataplane.protocol.http import HttpServer, metrics
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
