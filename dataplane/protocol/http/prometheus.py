"""The Prometheus endpoint of a service or a storage unit."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dataplane.protocol.http.messages import HttpRequest, Response
from dataplane.protocol.http.routes import Handler


def metrics(collector: Collector) -> Handler:
    """Return a handler that serves the metrics of `collector` and of this process, from a separate registry."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    def serve(request: HttpRequest) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(body=encode(registry), content_type=content_type)

    return serve
