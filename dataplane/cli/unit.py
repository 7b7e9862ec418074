"""`tq unit`."""

from __future__ import annotations

from typing import Annotated

import typer

from dataplane.cli.flags import Json, MemoryFlags, Security
from dataplane.cli.formatting import duration, shown
from dataplane.cli.output import print_either, print_notice
from dataplane.config import DataPlaneConfig
from dataplane.core.stopping import Stop


def unit(
    *,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="host:port of the controller.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the unit in reports; needed with --state-dir.")
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port for clients on other hosts (default: any free one)."),
    ] = 0,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Serve Prometheus metrics at this port (0: any free one, printed)."
        ),
    ] = None,
    reconnect: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="SECONDS", help="How long to wait for a controller that is down (seconds)."
        ),
    ] = DataPlaneConfig.reconnect_s,
    memory: MemoryFlags,
    security: Security,
    json: Json = False,
) -> int:
    """Run an additional storage unit for a running controller, until SIGTERM or SIGINT.

    The first line of output has its name and says that it is ready. Exit code 1 if the controller stops first and does
    not restart in time.
    """
    config = DataPlaneConfig(
        port=port, http_port=http_port, reconnect_s=reconnect, **memory.settings(), **security.settings()
    ).with_environment()
    return _run_unit(config, address, name, json=json)


def _run_unit(config: DataPlaneConfig, address: str, name: str | None, json: bool) -> int:
    """Run a storage unit until it is stopped or has lost its controller. Return the exit code."""
    stop = Stop()  # before the slow imports: from here on, a signal stops the unit
    from dataplane.protocol.fd_limits import allow_more
    from dataplane.storage.unit import StorageUnit
    from dataplane.storage.unit_process import UnitStatus, run_unit

    def print_ready(status: UnitStatus) -> None:
        metrics = f", metrics at {status.http}/metrics" if status.http else ""
        facts = {"unit": status.unit, "http": status.http}
        print_either(facts, f"storage unit {shown(status.unit)} ready{metrics}", json=json)

    allow_more()  # open files
    storage_unit = StorageUnit(config, address, name=name)
    lost_controller = run_unit(storage_unit, stop, print_ready)
    if lost_controller:
        print_notice(f"tq: storage unit {storage_unit.name} lost its controller at {address}")
        return 1
    return 0
