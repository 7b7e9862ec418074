"""Throughput of a service, read from its HTTP port (`tq serve --metrics`)."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from dataplane.config import DataPlaneConfig
from dataplane.core.addresses import split_address
from dataplane.errors import ServiceUnavailableError

if TYPE_CHECKING:
    from dataplane.controller.metrics.throughput import FlowReport

_WAIT_S = 5.0
"""Time limit of the connection and of each read."""
_PATH = "/api/flow"
_LONGEST_S = 60
"""Maximum time in seconds over which rates are averaged."""


@dataclass(frozen=True, kw_only=True)
class FlowRates:
    """Samples and bytes per second."""

    puts: float
    put_bytes: float
    gets: float
    get_bytes: float
    claims: float
    clears: float


def parse_http_address(text: str, address: str) -> tuple[str, int]:
    """Parse a URL, host:port, or a port on the host of `address` to (host, port). Raises ValueError for anything
    else."""
    # `urlsplit` finds a host only after "//".
    if text.isascii() and text.isdigit():
        text = f"//{address.rpartition(':')[0]}:{text}"
    elif "//" not in text:
        text = f"//{text}"
    return split_address(urlsplit(text).netloc)


def fetch_rates(host_port: tuple[str, int], config: DataPlaneConfig, seconds: float) -> FlowRates:
    """Return the mean rates of the last `seconds`. Raises `ServiceUnavailableError`, with the reason, on failure."""
    from dataplane.controller.metrics.throughput import FlowReport

    try:
        body = _fetch(host_port, config)
        report = msgspec.json.decode(body, type=FlowReport)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        why = (
            f"GET {_PATH} from its HTTP port failed: {error}; pass the port that `tq serve --metrics` printed, and the "
            "service's token if it has one (--token-file or TQ_TOKEN)"
        )
        raise ServiceUnavailableError(address=f"{host_port[0]}:{host_port[1]}", why=why) from error
    return _mean_rates(report, max(1, min(round(seconds), _LONGEST_S)))  # the report has one value per second


def _fetch(host_port: tuple[str, int], config: DataPlaneConfig) -> bytes:
    """Return the body of the service's answer. OSError or HTTPException if there is none, or if its status is not
    200."""
    token = config.secret()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection = http.client.HTTPConnection(*host_port, timeout=_WAIT_S)
    connection.sock = _connect(host_port, config)  # instead of the connection's own socket, which has no TLS
    try:
        connection.request("GET", _PATH, headers=headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"the answer is {response.status} {response.reason}")
    return body


def _connect(host_port: tuple[str, int], config: DataPlaneConfig) -> socket.socket:
    """Connect to the HTTP port, with TLS if it is configured."""
    plain = socket.create_connection(host_port, timeout=_WAIT_S)
    if config.tls is None:
        return plain
    from dataplane.protocol.tls import client_context

    context = client_context(config.tls)
    context.set_alpn_protocols(["http/1.1"])  # instead of HTTP/2
    try:
        return context.wrap_socket(plain, server_hostname=config.tls.server_name or host_port[0])
    except BaseException:
        plain.close()
        raise


def _mean_rates(report: FlowReport, seconds: int) -> FlowRates:
    """Return the mean of the last `seconds` values of each series; `FlowReport` has them under the same names."""
    names = FlowRates.__dataclass_fields__
    return FlowRates(**{name: sum(getattr(report, name)[-seconds:]) / seconds for name in names})
