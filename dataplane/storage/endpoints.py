"""The endpoints of bulk servers: binding them, and selecting the ones that a client should try."""

from __future__ import annotations

import logging
import os
import secrets
import socket

import zmq

from dataplane.core.addresses import bracketed, require_guard_beyond_loopback, resolve_host
from dataplane.core.ports import cannot_listen
from dataplane.core.zmq_io import bind_tcp
from dataplane.errors import ServiceUnavailableError

log = logging.getLogger(__name__)

BACKLOG = 1024
KEEPALIVE_IDLE_S = 60
"""Idle time before TCP keepalive probes. A few minutes later an unreachable peer is dropped and its queue freed."""


def bind(
    router: zmq.Socket[bytes],
    tcp_host: str | None,
    *,
    tcp_port: int = 0,
    advertise_host: str | None = None,
    guarded: bool,
) -> tuple[str, ...]:
    """Bind to ipc, for this user only, and to `tcp_port` (0: any free port) of `tcp_host` if given. Return the
    endpoints for clients, ipc first. Raises ValueError for a host other than loopback unless `guarded`,
    `PortTakenError` if the port is in use, ServiceUnavailableError if the host or, without a host, ipc fails."""
    router.set(zmq.BACKLOG, BACKLOG)
    endpoints = _bind_ipc(router)
    if tcp_host is not None:
        endpoints += _bind_tcp(router, tcp_host, tcp_port, advertise_host, guarded)
    if not endpoints:
        raise ServiceUnavailableError(
            address="ipc", why="the installed libzmq cannot check the user of an ipc peer; set a TCP host"
        )
    return endpoints


def _bind_ipc(router: zmq.Socket[bytes]) -> tuple[str, ...]:
    """Bind in the abstract namespace, which never leaves a file behind; the kernel reports the peer's user to ZMQ. If
    this ZMQ cannot check the user, log a warning and return ()."""
    try:
        router.set(zmq.IPC_FILTER_UID, os.geteuid())
    except zmq.ZMQError:
        log.warning("Storage unit listens on TCP only: this ZMQ cannot check the user of an ipc peer")
        return ()
    endpoint = f"ipc://@tq-bulk-{secrets.token_hex(16)}"
    router.bind(endpoint)
    return (endpoint,)


def _bind_tcp(router: zmq.Socket[bytes], host: str, port: int, advertise: str | None, guarded: bool) -> tuple[str, ...]:
    """Bind to `port` (0: any free port) of `host`. Return the endpoint with the host `advertise`, by default its IP."""
    require_guard_beyond_loopback(host, guarded=guarded)
    ip = resolve_host(host)
    router.set(zmq.TCP_KEEPALIVE, 1)
    router.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    try:
        bound = bind_tcp(router, ip, port)
    except zmq.ZMQError as error:
        if port:  # a configured port, which may be in use
            raise cannot_listen(host, port, error.errno) from error
        raise ServiceUnavailableError(
            address=f"tcp://{host}", why=f"the storage unit cannot listen there: {error}"
        ) from error
    return (f"tcp://{bracketed(advertise or ip)}:{bound}",)


def candidates(endpoints: tuple[str, ...], *, same_host: bool) -> list[str]:
    """Return the endpoints that this process may reach, best first. Ipc names without a listener in this network
    namespace (the unit runs in another container) are omitted."""
    return [name for name in endpoints if not name.startswith("ipc://") or (same_host and _listens(name))]


def _listens(endpoint: str) -> bool:
    """Return whether a process listens at this ipc endpoint in the network namespace of this process."""
    path = endpoint.removeprefix("ipc://")  # "@" begins a name in the abstract namespace
    name = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except BlockingIOError:
            return True  # a listener with a full backlog
        except OSError:
            return False
    return True
