"""Spans of OpenTelemetry, where the process uses it: the extra `otel`, and a tracer provider that somebody has set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

NAME = "dataplane"


def tracer() -> Any | None:
    """What makes spans; None where no provider is set. Nothing is imported: who sets one has done so."""
    trace = sys.modules.get("opentelemetry.trace")
    if not hasattr(trace, "get_tracer_provider"):  # another thread may be at importing it
        return None
    assert trace is not None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer(NAME)


class TraceSpan:
    """A client's span under whatever span is current where it begins."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, name: str, attributes: Mapping[str, Any], error: BaseException | None) -> None:
        """It ends now, under this name, with the error that ended the operation."""
        trace = sys.modules["opentelemetry.trace"]
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        self._span.end()


def started(op: str) -> TraceSpan | None:
    """A span that begins now; None where nobody wants one."""
    made = tracer()
    if made is None:
        return None
    kind = sys.modules["opentelemetry.trace"].SpanKind.CLIENT
    return TraceSpan(made.start_span(f"{NAME} {op}", kind=kind))
