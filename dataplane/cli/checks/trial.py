"""Checks of a running service: the one at an address, or a temporary local one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dataplane.cli.checks.finding import Finding, run_check
from dataplane.cli.formatting import counted, readable
from dataplane.cli.local_service import temporary_partition, temporary_service
from dataplane.config import MIB, DataPlaneConfig
from dataplane.core.addresses import boot_id, split_address

if TYPE_CHECKING:
    from dataplane import DataPlaneClient

_CAPACITY_BYTES = 16 * MIB
"""Capacity of the temporary service."""
_ROW_BYTES = 64 << 10
"""Size of the row of a round trip."""
_REACH_S = 5.0
"""Time limit of a connection to a port."""
_PUT_S = 10.0
"""Time limit of a put that waits for space."""


def trial(config: DataPlaneConfig, arena_dir: str) -> Iterator[Finding]:
    """Check the service at `config.address`; without an address, a service that is started here and stopped again."""
    if config.address is None:
        mend = "fix the problems above, and check the output of `tq serve`"
        yield from run_check("a service here", lambda: _check_local_service(config, arena_dir), mend)
        return
    port_findings = list(_check_ports(config.address))
    yield from port_findings
    if all(finding.ok for finding in port_findings):
        mend = "check that the service has this version, and pass its token (--token-file) or certificates"
        yield from run_check("session", lambda: _check_session(config), mend)


def _check_local_service(config: DataPlaneConfig, arena_dir: str) -> Iterator[Finding]:
    """Start a service on this machine, check a round trip through it, and stop it."""
    with temporary_service(capacity_bytes=_CAPACITY_BYTES, arena_dir=arena_dir) as address:
        yield Finding(what="a service here", found=f"started, at {address}")
        # Without the other settings of `config`: its credentials are for another service.
        local_config = DataPlaneConfig(address=address, client_name=config.client_name)
        yield from run_check("round trip", lambda: _check_round_trip(local_config), "fix the problems above")


def _check_ports(address: str) -> Iterator[Finding]:
    """Check that both ports of the service accept connections."""
    host, port = split_address(address)
    for number, name in ((port, "gRPC"), (port + 1, "ZMQ")):
        began = time.monotonic()
        what = f"port {number} ({name})"
        try:
            socket.create_connection((host, number), timeout=_REACH_S).close()
        except OSError as error:
            mend = "check that `tq serve` runs there and listens beyond loopback (--host), and check firewalls"
            yield Finding(what=what, found=f"{host}: {error.strerror or error}", mend=mend)
        else:
            yield Finding(what=what, found=f"{host} answers in {(time.monotonic() - began) * 1000:.1f} ms")


def _check_session(config: DataPlaneConfig) -> Iterator[Finding]:
    """Check that a client can connect, then the storage units and a round trip."""
    from dataplane import DataPlaneClient
    from dataplane.errors import ServiceUnavailableError

    try:
        client = DataPlaneClient(config).connect()
    except ServiceUnavailableError as error:
        mend = "check its log and, on its host, the state of its process: `ps` shows T for a stopped process"
        yield Finding(what="session", found=str(error), mend=mend)
        return
    with client:
        if config.tls:
            security = "TLS"
        else:
            security = "a token" if config.secret() else "neither token nor TLS"
        yield Finding(what="session", found=f"open, with {security}")
        yield from _check_units(client)
    yield from run_check("round trip", lambda: _check_round_trip(config), "check in `tq status` that a unit has space")


def _check_units(client: DataPlaneClient) -> Iterator[Finding]:
    """Check that there are storage units, and that each is connected, can grow and is not filling up."""
    units = client.stats().units
    on_this_host = sum(unit.host == boot_id() for unit in units)
    found = f"{counted(len(units), 'storage unit')}, {on_this_host} on this host"
    if not units:
        yield Finding(what="units", found="no storage unit: puts cannot succeed", mend="start one: `tq unit ADDRESS`")
    for unit in units:
        name = f"unit {unit.unit}"
        if not unit.connected:
            yield Finding(what=name, found=f"{unit.name} is not connected", mend="check its log and restart it")
        elif unit.problem:
            mend = "check its process and the free memory on its host"
            yield Finding(what=name, found=f"{unit.name} cannot grow: {unit.problem}", mend=mend)
        elif unit.pressed:
            mend = "clear consumed samples, or add a unit (`tq unit`)"
            yield Finding(what=name, found=f"{unit.name} is filling up: {readable(unit.used_bytes)} used", mend=mend)
    if units:
        yield Finding(what="units", found=found)


def _check_round_trip(config: DataPlaneConfig) -> Iterator[Finding]:
    """Put a row and get it back, over the best connection (shared memory if possible) and over ZMQ."""
    import torch

    from dataplane import DataPlaneClient

    row = torch.randint(0, 256, (_ROW_BYTES,), dtype=torch.uint8)
    for remote, connection_kind in ((False, "the best connection"), (True, "ZMQ")):
        settings = replace(config, force_remote=remote, put_timeout_s=_PUT_S)
        with DataPlaneClient(settings).connect() as client, temporary_partition(client, "doctor", ["bytes"]) as name:
            began = time.monotonic()
            client.put_samples(["row"], name, {"bytes": [row]})
            back = client.get_samples(["row"], name, ["bytes"])["bytes"].values()  # of a nested tensor with one row
            took_ms = (time.monotonic() - began) * 1000
            if not torch.equal(back, row):
                raise ValueError(
                    f"the {readable(_ROW_BYTES)} read over {connection_kind} differ from those that were put: check "
                    "the memory, disk and network of both machines"
                )
        yield Finding(
            what="round trip", found=f"{readable(_ROW_BYTES)} put and read over {connection_kind} in {took_ms:.1f} ms"
        )
